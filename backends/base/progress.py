"""Report the progress of preparing a model: bytes read and quantized, with the time left.

Code that prepares a model calls `report` and `Meter`; code that waits for it enters `report_to`, in
the same thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from protocol.base.limits import byte_size

_LISTENER: Final[ContextVar[Callable[[str], None] | None]] = ContextVar("listener", default=None)
_REPORT_INTERVAL_S: Final = 1.0


@contextmanager
def report_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Context in which `listener` receives each reported line; it receives "" at the end."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
        listener("")


def report(text: str) -> None:
    """Pass a line to the listener, if there is one."""
    if (listener := _LISTENER.get()) is not None:
        listener(text)


class Meter:
    """Reports the number of processed bytes, at most once a second.

    Args:
        activity: First word of a reported line, such as `read`.
        total: Number of bytes to process.
    """

    def __init__(self, activity: str, total: int) -> None:
        self._activity, self._total, self._count = activity, total, 0
        self._start_s = self._reported_s = time.monotonic()

    def add(self, count: int) -> None:
        """Count further processed bytes."""
        self._count += count
        now_s = time.monotonic()
        if now_s - self._reported_s < _REPORT_INTERVAL_S:
            return
        self._reported_s = now_s
        left_s = (now_s - self._start_s) / self._count * max(0, self._total - self._count)
        sizes = f"{byte_size(self._count)} of {byte_size(self._total)}"
        report(f"{self._activity} {sizes}, {left_s:.0f} s left")
