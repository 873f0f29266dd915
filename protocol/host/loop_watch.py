"""How long an event loop is held: by how much it comes too late to what is due, and why.

While a callback runs nothing else of the process is heard: no heartbeat, no halt. The watch asks
to be called at short intervals. What counts as held is the part of its delay that the loop's own
thread has spent on the processor: a machine that is busy with others, or a thread that waits for
the interpreter, delays a loop too, and says nothing about its callbacks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from protocol.base import limits


class LoopWatch:
    """Watches the loop that `run` is awaited in.

    Attributes:
        longest_hold_ms: Processor time that the loop's thread has taken at most while something
            else was due.
        longest_delay_ms: By how much something came too late at most, whatever the reason.

    Args:
        tell: Called with the milliseconds of a hold over the limit, the longest of an interval.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self.longest_hold_ms = 0.0
        self.longest_delay_ms = 0.0
        self._tell = tell
        self._untold_ms = 0.0
        self._told_s = -limits.LOOP_HOLD_TOLD_EVERY_S

    async def run(self) -> None:
        """Watch until cancelled."""
        interval_s = limits.LOOP_WATCH_INTERVAL_MS / 1000
        while True:
            since_s, busy_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(interval_s)
            delay_s = time.monotonic() - since_s - interval_s
            self._seen(delay_s * 1000, (time.thread_time() - busy_s) * 1000)

    def _seen(self, delay_ms: float, busy_ms: float) -> None:
        hold_ms = min(delay_ms, busy_ms)
        self.longest_delay_ms = max(self.longest_delay_ms, delay_ms)
        self.longest_hold_ms = max(self.longest_hold_ms, hold_ms)
        if hold_ms > limits.LOOP_HOLD_MS:
            self._untold_ms = max(self._untold_ms, hold_ms)
        now_s = time.monotonic()
        if self._untold_ms and now_s - self._told_s >= limits.LOOP_HOLD_TOLD_EVERY_S:
            self._told_s, told_ms, self._untold_ms = now_s, self._untold_ms, 0.0
            self._tell(told_ms)
