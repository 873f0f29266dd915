"""Who is late in a step: with gradients, or with the answer to a commit.

Pure: the time comes with `tick`.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.run.actions import Report
from coordinator.run.agreement import Agreement
from coordinator.run.leases import Leases
from coordinator.run.membership import Membership, MemberState
from coordinator.run.round import Round


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

    def late_workers(self, round_: Round) -> list[str]:
        """Those whose lease on nodes of this round is over."""
        late = []
        for worker, share in sorted(round_.shares.items()):
            member = self._members.get(worker)
            if member is None or not share.pending:
                continue
            largest = max(node.leaves for node in share.pending)
            if self._work.is_over(worker, member.expected_work_ms(largest)):
                member.late = True
                late.append(worker)
        return late

    def late_answers(self, agreement: Agreement) -> list[str]:
        """Those that have long not answered to a commit, if others have and wait for them."""
        silent = agreement.silent
        computing = self._members.names(MemberState.ACTIVE, MemberState.DRAINING)
        if len(silent) == len(computing):
            return []
        members = [self._members.get(worker) for worker in silent]
        return [
            member.name
            for member in members
            if member and self._answers.is_over(member.name, member.expected_answer_ms)
        ]

    def reports(self, late: list[str], step: int, owing: str) -> list[Report]:
        """Each of them once in a step."""
        new = [worker for worker in late if worker not in self._told]
        self._told.update(new)
        return [Report("straggler", {"worker": w, "step": step, "owing": owing}) for w in new]
