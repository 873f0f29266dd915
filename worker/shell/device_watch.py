"""Notice a device that no longer answers, by how long its answers took before.

While a device is opened or a task is prepared for it, every line of progress counts as an answer.
A driver may hang for ever in a call that nothing interrupts. Time in which this process was stopped
does not count. The CPU is not watched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

T = TypeVar("T")

_LEAST_S: Final = 60.0
"""A device may be silent for this long, however fast it was."""
_LEAST_WITH_DATA_S: Final = 600.0
"""Likewise, where code of the task reads samples before the device computes."""
_TIMES_SLOWEST: Final = 30
_UNMEASURED_S: Final = 1800.0
"""Before the first answer."""
_PREPARATION_S: Final = 1800.0
"""A device may be opened, or prepare a task, for this long without a line of progress."""
_LOOKS: Final = 60
"""How often the watch looks within `_LEAST_S`."""


class DeviceWatch:
    """Measures the answers of one device, and reports once if one does not come.

    Args:
        hangs: Called with the reason, in the watch's own thread.
    """

    def __init__(self, hangs: Callable[[str], None]) -> None:
        self._hangs = hangs
        self._awaited = 0
        """Number of the answer that is awaited; 0 if none is."""
        self._answers = 0
        self._least_s = 0.0
        self._slowest_s: float | None = None
        self._activity = ""
        """What is prepared; empty if nothing is."""
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self.is_hanging = False

    def start(self) -> None:
        """Begin to watch; once is enough."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="device watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()

    @contextmanager
    def awaiting(self, *, with_data: bool = False) -> Iterator[None]:
        """Enter while the device owes an answer.

        Args:
            with_data: Whether code of the task reads samples meanwhile.
        """
        start_s = time.monotonic()
        self._answers += 1
        self._least_s = _LEAST_WITH_DATA_S if with_data else _LEAST_S
        self._awaited = self._answers
        try:
            yield
        finally:
            self._awaited = 0
            self._slowest_s = max(self._slowest_s or 0.0, time.monotonic() - start_s)

    @contextmanager
    def preparing(self, activity: str) -> Iterator[None]:
        """Enter while the device prepares; how long it takes says nothing about later answers.

        Args:
            activity: What is done, for the report.
        """
        self._activity = activity
        self.progressed()
        try:
            yield
        finally:
            self._awaited = 0
            self._activity = ""

    def progressed(self) -> None:
        """Give a device that prepares its full time again; otherwise do nothing."""
        if self._activity:
            self._answers += 1
            self._awaited = self._answers

    def each(self, answers: Iterable[T], *, with_data: bool = False) -> Iterator[T]:
        """Yield answers of the device, each of which is awaited."""
        iterator = iter(answers)
        while True:
            with self.awaiting(with_data=with_data):
                answer = next(iterator, None)
            if answer is None:
                return
            yield answer

    def overdue(self, waited_s: float) -> str:
        """Why an answer that was awaited for so long will not come; empty if it may."""
        if activity := self._activity:
            limit_s, usual = _PREPARATION_S, f"or a line of progress, while {activity}"
        elif self._slowest_s is None:
            limit_s, usual = max(_UNMEASURED_S, self._least_s), "there was none before"
        else:
            limit_s = max(self._least_s, _TIMES_SLOWEST * self._slowest_s)
            usual = f"the slowest before took {self._slowest_s:.1f} s"
        if waited_s <= limit_s:
            return ""
        return (
            f"expected an answer within {limit_s:.0f} s ({usual}), got none: it hangs; check the "
            "system's log (dmesg) and the driver, then restart the worker"
        )

    def _watch(self) -> None:
        tick_s = _LEAST_S / _LOOKS
        awaited, waited_s, last_s = 0, 0.0, time.monotonic()
        while not self._end.wait(tick_s):
            now_s = time.monotonic()
            # A process that was stopped, or had no processor, is no device that hangs.
            since_s, last_s = min(now_s - last_s, 2 * tick_s), now_s
            waited_s = waited_s + since_s if self._awaited == awaited else 0.0
            awaited = self._awaited
            if awaited and (reason := self.overdue(waited_s)):
                self.is_hanging = True
                self._hangs(reason)
                return
