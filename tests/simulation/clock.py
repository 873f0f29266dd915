"""A virtual clock, and processes that stall and die: time passes from one event to the next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Act = Callable[[], None]


class Process:
    """Something that runs, stalls (SIGSTOP) and dies (SIGKILL).

    Attributes:
        alive: What a dead one was about to do does not happen.
        stalled_until_ms: What a stalled one was about to do happens after that.
        woke_ms: When it last went on after a stall.
    """

    def __init__(self) -> None:
        self.alive = True
        self.stalled_until_ms = 0.0
        self.woke_ms = 0.0


class Clock:
    """Events by time; those of equal time in the order in which they were set.

    Attributes:
        now_ms: The time.
        foreground: How many events wait that may lead anywhere: all but ticks and retries.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.foreground = 0
        self._heap: list[tuple[float, int, Process | None, Act, bool]] = []
        self._number = 0

    def after(
        self, delay_ms: float, act: Act, process: Process | None = None, *, background: bool = False
    ) -> None:
        """Let a process do something later."""
        self._push(self.now_ms + delay_ms, process, act, background=background)

    def _push(self, time_ms: float, process: Process | None, act: Act, *, background: bool) -> None:
        self._number += 1
        if not background:
            self.foreground += 1
        heappush(self._heap, (time_ms, self._number, process, act, background))

    def step(self) -> None:
        """The next event."""
        time_ms, _, process, act, background = heappop(self._heap)
        if not background:
            self.foreground -= 1
        self.now_ms = time_ms
        if process is not None:
            if not process.alive:
                return
            if time_ms < process.stalled_until_ms:
                process.woke_ms = process.stalled_until_ms
                self._push(process.stalled_until_ms, process, act, background=background)
                return
        act()
