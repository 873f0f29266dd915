"""Create a daemon's event loop, and measure how long callbacks block it.

While a callback runs, the process receives no data, not even a heartbeat or a halt. The watch wakes
at short intervals. Of the delay of a wake-up, only the processor time of the loop's own thread
counts: a busy machine, or another thread that holds the GIL, delays the loop too, but is not the
fault of a callback.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from protocol.base import limits


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create uvloop's event loop, or asyncio's where uvloop is missing, as on Windows."""
    try:
        import uvloop  # noqa: PLC0415 -- Windows lacks this module
    except ImportError:
        return asyncio.SelectorEventLoop()  # the default on Windows cannot watch sockets
    return uvloop.new_event_loop()


class LoopWatch:
    """Watches the event loop in which `run` is awaited.

    Attributes:
        longest_hold_ms: Longest processor time of the loop's thread while a wake-up was due.
        longest_delay_ms: Longest delay of a wake-up, for any reason.

    Args:
        report: Called at intervals with the longest hold above the limit, in milliseconds.
    """

    def __init__(self, report: Callable[[float], None]) -> None:
        self.longest_hold_ms = 0.0
        self.longest_delay_ms = 0.0
        self._report = report
        self._unreported_ms = 0.0
        self._reported_s = -limits.LOOP_HOLD_REPORT_INTERVAL_S

    async def run(self) -> None:
        """Watch until cancelled."""
        interval_s = limits.LOOP_WATCH_INTERVAL_MS / 1000
        while True:
            start_s, busy_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(interval_s)
            delay_s = time.monotonic() - start_s - interval_s
            self._record(delay_s * 1000, (time.thread_time() - busy_s) * 1000)

    def _record(self, delay_ms: float, busy_ms: float) -> None:
        hold_ms = min(delay_ms, busy_ms)
        self.longest_delay_ms = max(self.longest_delay_ms, delay_ms)
        self.longest_hold_ms = max(self.longest_hold_ms, hold_ms)
        if hold_ms > limits.LOOP_HOLD_MS:
            self._unreported_ms = max(self._unreported_ms, hold_ms)
        now_s = time.monotonic()
        if self._unreported_ms and now_s - self._reported_s >= limits.LOOP_HOLD_REPORT_INTERVAL_S:
            self._reported_s, reported_ms, self._unreported_ms = now_s, self._unreported_ms, 0.0
            self._report(reported_ms)
