"""Create a daemon's event loop, and measure how long callbacks block it.

While a callback runs, the process receives nothing, not even a heartbeat or a halt. The watch wakes
at short intervals. Only the part of its delay counts that the loop's own thread has spent on the
processor: a busy machine, or a thread that waits for the GIL, delays the loop too, but through no
fault of its callbacks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from protocol.base import limits


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create uvloop's event loop, or asyncio's where uvloop is missing, as on Windows."""
    try:
        import uvloop  # noqa: PLC0415 -- not for every system
    except ImportError:
        return asyncio.SelectorEventLoop()  # on Windows not the default, which watches no sockets
    return uvloop.new_event_loop()


class LoopWatch:
    """Watches the event loop in which `run` is awaited.

    Attributes:
        longest_hold_ms: Longest processor time of the loop's thread while a wake-up was due.
        longest_delay_ms: Longest delay of a wake-up, for whatever reason.

    Args:
        tell: Called with the longest hold above the limit of an interval, in milliseconds.
    """

    def __init__(self, tell: Callable[[float], None]) -> None:
        self.longest_hold_ms = 0.0
        self.longest_delay_ms = 0.0
        self._tell = tell
        self._untold_ms = 0.0
        self._told_s = -limits.LOOP_HOLD_REPORT_INTERVAL_S

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
        if self._untold_ms and now_s - self._told_s >= limits.LOOP_HOLD_REPORT_INTERVAL_S:
            self._told_s, told_ms, self._untold_ms = now_s, self._untold_ms, 0.0
            self._tell(told_ms)
