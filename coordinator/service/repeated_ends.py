"""Who comes and goes for ever: a worker whose connections end alike, before it has taken a step.

Pure. One end is a fault of that moment; three alike in a row are a fault that stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from coordinator.members.doorway import CONTROL_PORT, NOTHING_SAID
from coordinator.run.outputs.facts import Fact

Phase = Literal["joining", "fetching files", "loading", "training"]
_TOO_OFTEN: Final = 3
_MOST_KEPT: Final = 1024
"""Of workers and addresses; anyone can connect from many."""
_PATH: Final = (
    "large messages do not get through; lower the MTU there (ip link set DEV mtu 1400), and see "
    "worker doctor --coordinator HOST:PORT"
)
_OTHERS_EVERY_S: Final = 600.0
_PROCESS: Final = (
    "its process may have been killed for memory: see its log, `worker doctor` and `dmesg` there"
)


@dataclass(frozen=True, slots=True)
class WorkerComesAndGoes(Fact):
    """A worker's connections have ended alike so many times in a row, without a step.

    `worker` is an address if it has never joined.
    """

    event = "worker_comes_and_goes"
    worker: str
    phase: Phase
    count: int
    reason: str
    cause: str

    def __str__(self) -> str:
        return (
            f"worker {self.worker} comes and goes: lost {self.count} times in a row while "
            f"{self.phase}: {self.reason}; {self.cause}"
        )


@dataclass(frozen=True, slots=True)
class NotAWorker(Fact):
    """Something connected to the workers' port and neither began TLS nor said that it is a worker.

    `count` is how often anything did so since this was last told.
    """

    event = "not_a_worker"
    address: str
    count: int
    reason: str

    def __str__(self) -> str:
        return (
            f"something at {self.address} that is not a worker connects to the workers' port "
            f"({self.count} so far): {self.reason}; {CONTROL_PORT}"
        )


class Others:
    """Who connects to the workers' port and is none: told at most once in ten minutes."""

    def __init__(self) -> None:
        self._count = 0
        self._told_s = -math.inf

    def came(self, address: str, reason: str, now_s: float) -> NotAWorker | None:
        """A fact to tell, if it is time for one; a mere check of the port is never told."""
        if reason == NOTHING_SAID:
            return None
        self._count += 1
        if now_s - self._told_s < _OTHERS_EVERY_S:
            return None
        fact, self._count = NotAWorker(address, self._count, reason), 0
        self._told_s = now_s
        return fact


class RepeatedEnds:
    """Counts ends of one phase in a row.

    Attributes:
        told: The newest fact about each that came and went too often, by name or address.
    """

    def __init__(self) -> None:
        self.told: dict[str, WorkerComesAndGoes] = {}
        self._ends: dict[str, tuple[Phase, int]] = {}

    def well(self, worker: str) -> None:
        """It has joined, if it is an address; else it has taken a step, or left as it should."""
        self._ends.pop(worker, None)
        self.told.pop(worker, None)

    def ended(
        self, worker: str, phase: Phase, reason: str, *, said: bool
    ) -> WorkerComesAndGoes | None:
        """A connection is over, and nothing came of it.

        Args:
            worker: Its name, or address.
            phase: What it was at.
            reason: Why it is over.
            said: Whether it said so itself: then that is the cause.

        Returns:
            A fact to tell: at the third time, and then after twice as many.
        """
        before, count = self._ends.pop(worker, (phase, 0))
        count = count + 1 if before == phase else 1
        self._ends[worker] = phase, count
        if len(self._ends) > _MOST_KEPT:
            self.well(next(iter(self._ends)))
        if count < _TOO_OFTEN:
            return None
        cause = "mend that, or keep it away" if said else f"likely: {_likely_cause(phase, reason)}"
        self.told[worker] = fact = WorkerComesAndGoes(worker, phase, count, reason, cause)
        turn, rest = divmod(count, _TOO_OFTEN)
        return fact if not rest and turn & (turn - 1) == 0 else None


def _likely_cause(phase: Phase, reason: str) -> str:
    if phase in ("joining", "fetching files") or "silent" in reason or "again" in reason:
        return _PATH
    return _PROCESS
