"""Until when a worker may be silent about what it owes, and who is late in a step.

Pure: the time comes with `tick`. A lease follows what was measured of the worker itself; the
constants only keep noise and first steps, which warm up, from counting as lateness.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from coordinator.run.actions import Report
from coordinator.run.agreement import Agreement
from coordinator.run.facts import WorkerLate
from coordinator.run.membership import COMPUTING, Member, Membership
from coordinator.run.round import Round
from protocol.base import limits

_PATIENCE: Final = 3.0
"""How many times what is expected of a worker it may take."""
_LEASE_FLOOR_MS: Final = 500.0
_FIRST_LEASE_MS: Final = 5_000.0
"""For one of whom nothing was measured yet."""


class Leases:
    """The last sign of each worker that owes something.

    Attributes:
        now_ms: The time of the newest tick.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._since_ms: dict[str, float] = {}

    def tick(self, now_ms: float) -> None:
        """Time goes on. If it was not looked at for long, nobody's lease ran meanwhile."""
        gap_ms = now_ms - self.now_ms
        if gap_ms > 3 * limits.TICK_MS:
            for worker in self._since_ms:
                self._since_ms[worker] += gap_ms
        self.now_ms = now_ms

    def sign(self, worker: str) -> float:
        """It has been given something, or has delivered something.

        Returns:
            Milliseconds since its last sign.
        """
        gap_ms = self.now_ms - self._since_ms.get(worker, self.now_ms)
        self._since_ms[worker] = self.now_ms
        return gap_ms

    def forget(self, worker: str) -> None:
        """It owes nothing any more."""
        self._since_ms.pop(worker, None)

    def silent_ms(self, worker: str) -> float:
        """How long it has been silent; 0 if it owes nothing."""
        return self.now_ms - self._since_ms.get(worker, self.now_ms)

    def is_over(self, worker: str, expected_ms: float | None) -> bool:
        """Whether it is late.

        Args:
            worker: Its name.
            expected_ms: How long it should take, as measured; None if nothing was.
        """
        lease_ms = _FIRST_LEASE_MS if expected_ms is None else _PATIENCE * expected_ms
        return self.silent_ms(worker) > max(lease_ms, _LEASE_FLOOR_MS)


class Stragglers:
    """Leases on work and on answers, for all members of a run."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._work = Leases()
        self._answers = Leases()
        self._told: set[str] = set()

    def tick(self, now_ms: float) -> None:
        """Time goes on."""
        self._work.tick(now_ms)
        self._answers.tick(now_ms)

    def given(self, worker: str) -> None:
        """It was given nodes."""
        self._work.sign(worker)

    def delivered(self, worker: str) -> None:
        """It has sent a part of what it owes."""
        gap_ms = self._work.sign(worker)
        member = self._members.get(worker)
        if member is not None:
            member.gave_sign(gap_ms)
            member.late = False

    def answered(self, worker: str) -> None:
        """It has answered to a commit."""
        member = self._members.get(worker)
        if member is not None and (ms := self._answers.silent_ms(worker)):
            member.answered(ms)
        self._answers.forget(worker)

    def lose(self, worker: str) -> None:
        """It has left."""
        self._work.forget(worker)
        self._answers.forget(worker)

    def committed(self, round_: Round, owed: Iterable[str]) -> None:
        """A step is over; these are to say that they have taken it."""
        for worker, share in round_.shares.items():
            member = self._members.get(worker)
            silent_ms = self._work.silent_ms(worker)
            if member is not None and member.late and share.pending and silent_ms:
                # What it did not finish was cancelled: it takes this long at the least.
                member.measured(silent_ms / max(node.leaves for node in share.pending))
            self._work.forget(worker)
        for worker in owed:
            self._answers.sign(worker)
        self._told.clear()

    def late_workers(self, round_: Round) -> list[Member]:
        """Those whose lease on nodes of this round is over."""
        late = []
        for worker, share in sorted(round_.shares.items()):
            member = self._members.get(worker)
            if member is None or not share.pending:
                continue
            largest = max(node.leaves for node in share.pending)
            if self._work.is_over(worker, member.expected_work_ms(largest)):
                member.late = True
                late.append(member)
        return late

    def late_answers(self, agreement: Agreement) -> list[Member]:
        """Those that have long not answered to a commit, if others have and wait for them."""
        silent = agreement.silent
        computing = self._members.names(*COMPUTING)
        if len(silent) == len(computing):
            return []
        members = [self._members.get(worker) for worker in silent]
        return [
            member
            for member in members
            if member and self._answers.is_over(member.name, member.expected_answer_ms)
        ]

    def reports(self, late: list[Member], step: int, owing: str) -> list[Report]:
        """Each of them once in a step."""
        new = [member.name for member in late if member.name not in self._told]
        self._told.update(new)
        return [Report(WorkerLate(w, step, owing)) for w in new]
