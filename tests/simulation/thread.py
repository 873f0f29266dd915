"""A thread of a simulated coordinator: jobs one after the other, results in order, later."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from protocol.base.errors import SamestepError
from tests.simulation.clock import Clock, Process

Then = Callable[[Any], None]
Failed = Callable[[SamestepError], None]


@dataclass(frozen=True)
class Halved:
    """A job that a crash can leave half done."""

    first_half: Callable[[], Any]
    whole: Callable[[], Any]

    def __call__(self) -> Any:
        return self.whole()


class Thread:
    """Does its jobs one after the other; what comes of them reaches the event loop in order."""

    def __init__(self, clock: Clock, rng: Random, process: Process) -> None:
        self._clock = clock
        self._rng = rng
        self._process = process
        self._jobs: deque[tuple[float, Callable[[], Any], Then | None, Failed]] = deque()
        self._results: deque[Callable[[], None]] = deque()
        self._busy = False

    def do(
        self, up_to_ms: float, work: Callable[[], Any], then: Then | None, failed: Failed
    ) -> None:
        """Work for so long at most, then let the event loop go on with what came of it."""
        self._jobs.append((up_to_ms * self._rng.random(), work, then, failed))
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        self._busy = bool(self._jobs)
        if self._busy:
            self._clock.after(self._jobs[0][0], self._work, self._process)

    def _work(self) -> None:
        while self._jobs:
            _, work, then, failed = self._jobs.popleft()
            try:
                result = work()
            except SamestepError as error:
                self._post(lambda failed=failed, error=error: failed(error))  # type: ignore[misc]
            else:
                if then is not None:
                    self._post(lambda then=then, result=result: then(result))  # type: ignore[misc]
            if self._jobs and self._jobs[0][0]:
                break
        self._begin()

    def die(self) -> None:
        """What it was at may be half done."""
        if self._jobs and isinstance(self._jobs[0][1], Halved) and self._rng.random() < 0.7:
            with contextlib.suppress(SamestepError):
                self._jobs[0][1].first_half()

    def _post(self, act: Callable[[], None]) -> None:
        self._results.append(act)
        self._clock.after(0.3 * self._rng.random(), self._deliver, self._process)

    def _deliver(self) -> None:
        self._results.popleft()()
