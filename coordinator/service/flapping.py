"""Workers that keep reconnecting: their connections end in the same way, before they take a step.

Pure. One lost connection is an incident; three of the same kind in a row are a persistent fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from coordinator.members.acceptor import CONTROL_PORT
from coordinator.run.outputs.events import Event
from protocol.wire.acceptor import NOTHING_RECEIVED

Phase = Literal["joining", "fetching files", "loading", "training"]
_TOO_OFTEN: Final = 3
_MOST_KEPT: Final = 1024
"""How many workers and addresses are remembered: anyone can connect from many addresses."""
_NETWORK_CAUSE: Final = (
    "large messages do not arrive; lower the MTU there (ip link set DEV mtu 1400), and run "
    "worker doctor --coordinator HOST:PORT"
)
_STRAYS_EVERY_S: Final = 600.0
_PROCESS_CAUSE: Final = (
    "its process may have been killed for memory: see its log, `worker doctor` and `dmesg` there"
)


@dataclass(frozen=True, slots=True)
class WorkerFlapping(Event):
    """A worker's connections have ended in the same way `count` times in a row, without a step.

    `worker` is an address if the worker has never joined.
    """

    name = "worker_flapping"
    worker: str
    phase: Phase
    count: int
    reason: str
    cause: str

    def __str__(self) -> str:
        return (
            f"worker {self.worker} keeps disconnecting: lost {self.count} times in a row while "
            f"{self.phase}: {self.reason}; {self.cause}"
        )


@dataclass(frozen=True, slots=True)
class StrayConnection(Event):
    """A peer connected to the workers' port that is not a worker.

    `count` is the number of such connections since the last report.
    """

    name = "not_a_worker"
    address: str
    count: int
    reason: str

    def __str__(self) -> str:
        return (
            f"something at {self.address} that is not a worker connects to the workers' port "
            f"({self.count} so far): {self.reason}; {CONTROL_PORT}"
        )


class StrayConnections:
    """Counts connections of peers that are not workers; they are reported once in ten minutes."""

    def __init__(self) -> None:
        self._count = 0
        self._reported_s = -math.inf

    def count(self, address: str, reason: str, now_s: float) -> StrayConnection | None:
        """Count a connection; return an event if one is due. A port check is never reported."""
        if reason == NOTHING_RECEIVED:
            return None
        self._count += 1
        if now_s - self._reported_s < _STRAYS_EVERY_S:
            return None
        event, self._count = StrayConnection(address, self._count, reason), 0
        self._reported_s = now_s
        return event


class FlapDetector:
    """Counts consecutive connections that ended in the same phase.

    Attributes:
        reported: The newest event about each flapping worker, by name or address.
    """

    def __init__(self) -> None:
        self.reported: dict[str, WorkerFlapping] = {}
        self._ends: dict[str, tuple[Phase, int]] = {}

    def reset(self, worker: str) -> None:
        """Forget a worker that has taken a step or left properly, or an address that has joined."""
        self._ends.pop(worker, None)
        self.reported.pop(worker, None)

    def count_end(
        self, worker: str, phase: Phase, reason: str, *, is_explained: bool
    ) -> WorkerFlapping | None:
        """Count a connection that ended without a step.

        Args:
            worker: The worker's name, or address.
            phase: The phase in which the connection ended.
            reason: Why the connection ended.
            is_explained: Whether `reason` is the cause: the worker gave it, or was refused.

        Returns:
            An event at the third end, and then each time the count has doubled; else None.
        """
        earlier_phase, count = self._ends.pop(worker, (phase, 0))
        count = count + 1 if earlier_phase == phase else 1
        self._ends[worker] = phase, count
        if len(self._ends) > _MOST_KEPT:
            self.reset(next(iter(self._ends)))
        if count < _TOO_OFTEN:
            return None
        cause = (
            "fix that, or keep the worker away"
            if is_explained
            else f"likely: {_likely_cause(phase, reason)}"
        )
        self.reported[worker] = event = WorkerFlapping(worker, phase, count, reason, cause)
        multiple, rest = divmod(count, _TOO_OFTEN)
        return event if not rest and multiple & (multiple - 1) == 0 else None


def _likely_cause(phase: Phase, reason: str) -> str:
    if phase in ("joining", "fetching files") or "silent" in reason or "again" in reason:
        return _NETWORK_CAUSE
    return _PROCESS_CAUSE
