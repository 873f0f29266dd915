"""Detect a device that no longer answers, by the time that its earlier answers took.

While a device is opened or a task is prepared for it, every progress line counts as an answer. A
driver may hang forever in a call that cannot be interrupted. Time in which this process was stopped
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
"""A device may be silent for this long, even if its answers were fast."""
_LEAST_WITH_DATA_S: Final = 600.0
"""The same limit if code of the task reads samples before the device computes."""
_TIMES_SLOWEST: Final = 30
"""A device may take this many times as long as for its slowest answer before."""
_FIRST_ANSWER_S: Final = 1800.0
"""The limit for the first answer."""
_PREPARATION_S: Final = 1800.0
"""The limit for opening a device or preparing a task without a progress line."""
_CHECKS: Final = 60
"""Number of checks within `_LEAST_S`."""


class DeviceWatch:
    """Measures how long one device takes to answer, and reports once that it hangs.

    Args:
        on_hang: Called with the reason, in the watch's thread.
    """

    def __init__(self, on_hang: Callable[[str], None]) -> None:
        self._on_hang = on_hang
        self._awaited_answer = 0
        """Number of the awaited answer; 0 if none is awaited."""
        self._answers = 0
        self._least_s = 0.0
        self._slowest_s: float | None = None
        self._activity = ""
        """Description of the preparation in progress; empty if there is none."""
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        self.is_hanging = False

    def start(self) -> None:
        """Start the watch, if it is not running yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="device watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()

    @contextmanager
    def awaiting(self, *, with_data: bool = False) -> Iterator[None]:
        """Context in which the device owes an answer.

        Args:
            with_data: Whether code of the task reads samples in the context.
        """
        start_s = time.monotonic()
        self._answers += 1
        self._least_s = _LEAST_WITH_DATA_S if with_data else _LEAST_S
        self._awaited_answer = self._answers
        try:
            yield
        finally:
            self._awaited_answer = 0
            self._slowest_s = max(self._slowest_s or 0.0, time.monotonic() - start_s)

    @contextmanager
    def preparing(self, activity: str) -> Iterator[None]:
        """Context of a preparation, whose duration does not count for later answers.

        Args:
            activity: Description of the preparation, for the report.
        """
        self._activity = activity
        self.restart_limit()
        try:
            yield
        finally:
            self._awaited_answer = 0
            self._activity = ""

    def restart_limit(self) -> None:
        """Restart the time limit of the preparation in progress, if there is one."""
        if self._activity:
            self._answers += 1
            self._awaited_answer = self._answers

    def await_each(self, answers: Iterable[T], *, with_data: bool = False) -> Iterator[T]:
        """Yield the answers of the device, and watch the time until each of them."""
        iterator = iter(answers)
        while True:
            with self.awaiting(with_data=with_data):
                answer = next(iterator, None)
            if answer is None:
                return
            yield answer

    def overdue(self, waited_s: float) -> str:
        """Describe why the device counts as hanging after `waited_s`; empty if it does not yet."""
        if activity := self._activity:
            limit_s, usual = _PREPARATION_S, f"or a progress line, while {activity}"
        elif self._slowest_s is None:
            limit_s, usual = max(_FIRST_ANSWER_S, self._least_s), "there was none before"
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
        tick_s = _LEAST_S / _CHECKS
        awaited_answer, waited_s, last_s = 0, 0.0, time.monotonic()
        while not self._end.wait(tick_s):
            now_s = time.monotonic()
            # Cap the interval: a process that was stopped is not a hanging device.
            since_s, last_s = min(now_s - last_s, 2 * tick_s), now_s
            waited_s = waited_s + since_s if self._awaited_answer == awaited_answer else 0.0
            awaited_answer = self._awaited_answer
            if awaited_answer and (reason := self.overdue(waited_s)):
                self.is_hanging = True
                self._on_hang(reason)
                return
