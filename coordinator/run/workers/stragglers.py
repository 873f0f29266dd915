"""Leases: how long a worker may be silent while work or an answer is due. Find late workers.

Pure: the time comes with `tick`. A lease depends on measurements of the worker, and on how long
the others took for the same step; the constants only keep noise and slow first steps from counting
as lateness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from coordinator.run.exchange.round import Round
from coordinator.run.outputs.actions import Report
from coordinator.run.outputs.events import WorkerLate
from coordinator.run.workers.membership import COMPUTING, Member, Membership
from coordinator.run.workers.state_agreement import Agreement
from protocol.base import limits

_PATIENCE: Final = 3.0
"""A lease lasts this many times the duration expected of the worker."""
_LEASE_FLOOR_MS: Final = 500.0
_SILENCES_KEPT: Final = 16
_FIRST_LEASE_MS: Final = 5_000.0
"""The lease of a worker without measurements."""


class Leases:
    """The time at which the lease of each worker began; sent results begin it again.

    Attributes:
        now_ms: The time of the newest tick.
    """

    def __init__(self) -> None:
        self.now_ms = 0.0
        self._since_ms: dict[str, float] = {}

    def tick(self, now_ms: float) -> None:
        """Advance the time. A gap in the ticks (a suspended process) shortens no lease."""
        gap_ms = now_ms - self.now_ms
        if gap_ms > 3 * limits.TICK_MS:
            for worker in self._since_ms:
                self._since_ms[worker] += gap_ms
        self.now_ms = now_ms

    def renew(self, worker: str) -> float:
        """Begin a worker's lease again: it was assigned work, or has sent results.

        Returns:
            Milliseconds since the lease last began; 0 without an earlier lease.
        """
        gap_ms = self.now_ms - self._since_ms.get(worker, self.now_ms)
        self._since_ms[worker] = self.now_ms
        return gap_ms

    def forget(self, worker: str) -> None:
        """End a worker's lease."""
        self._since_ms.pop(worker, None)

    def silent_ms(self, worker: str) -> float | None:
        """Return how long a worker has been silent; None without a lease."""
        since_ms = self._since_ms.get(worker)
        return None if since_ms is None else self.now_ms - since_ms

    def has_expired(self, worker: str, expected_ms: float | None) -> bool:
        """Return whether a worker is late: whether its lease has expired.

        Args:
            worker: The worker's name.
            expected_ms: Expected duration, from measurements; None without any.
        """
        silent_ms = self.silent_ms(worker)
        lease_ms = _FIRST_LEASE_MS if expected_ms is None else _PATIENCE * expected_ms
        return silent_ms is not None and silent_ms > max(lease_ms, _LEASE_FLOOR_MS)


class OwnerLease:
    """Detects a late chunk owner: the only owner that a step still waits for.

    Chunks of a silent owner go to other owners, and all sums are sent again. On a slow machine or
    link this would cost even more time. So the lease depends on how long owners were silent before
    they sent again, and doubles each time it expires in a step.
    """

    def __init__(self) -> None:
        self._now_ms = 0.0
        self._since_ms = 0.0
        self._last_wait: tuple[str, int] | None = None
        self._step_id: dict[str, int] = {}
        self._expirations = 0
        self._silences_ms: deque[float] = deque(maxlen=_SILENCES_KEPT)

    def tick(self, now_ms: float) -> None:
        """Advance the time. A gap in the ticks does not shorten the lease."""
        gap_ms = now_ms - self._now_ms
        if gap_ms > 3 * limits.TICK_MS:
            self._since_ms += gap_ms
        self._now_ms = now_ms

    def find_late_owner(self, round_: Round) -> str | None:
        """Return the owner whose lease has expired, if the step waits only for it: its chunks must
        go to other owners now."""
        if round_.step_id != self._step_id:
            self._step_id, self._expirations = round_.step_id, 0
        silent_ms = self._now_ms - self._since_ms
        wait = self._find_only_owner(round_)
        if wait != self._last_wait:
            if self._last_wait is not None:
                self._silences_ms.append(silent_ms)
            self._last_wait, self._since_ms = wait, self._now_ms
            return None
        if wait is None or silent_ms <= self._lease_ms:
            return None
        self._expirations += 1
        self._last_wait = None
        return wait[0]

    @property
    def _lease_ms(self) -> float:
        measured_ms = _PATIENCE * max(self._silences_ms, default=0.0)
        return 2.0**self._expirations * max(limits.OWNER_LEASE_MS, measured_ms)

    def _find_only_owner(self, round_: Round) -> tuple[str, int] | None:
        """Return the only owner with missing averages, and how many are missing."""
        counts = round_.peers.outstanding_counts()
        late_owners = [(name, count) for name, count in counts.items() if count]
        return late_owners[0] if len(late_owners) == 1 and len(counts) > 1 else None


class Stragglers:
    """Leases on work and on answers, for all members of a run."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._work = Leases()
        self._shares = Leases()
        """Leases that run from the assignment of subtrees; deliveries do not renew them."""
        self._answers = Leases()
        self._reported: set[str] = set()

    def tick(self, now_ms: float) -> None:
        """Advance the time."""
        self._work.tick(now_ms)
        self._shares.tick(now_ms)
        self._answers.tick(now_ms)

    def note_assignment(self, worker: str) -> None:
        """Note that a worker was assigned subtrees."""
        self._work.renew(worker)
        self._shares.renew(worker)

    def note_delivery(self, worker: str) -> None:
        """Note that a worker has sent a part of its results."""
        gap_ms = self._work.renew(worker)
        member = self._members.get(worker)
        if member is not None:
            member.note_silence(gap_ms)
            member.is_late = False

    def note_credit(self, worker: str) -> None:
        """Note that a worker may send more chunks, so that more is due."""
        self._work.renew(worker)

    def note_answer(self, worker: str) -> None:
        """Note a worker's answer to a commit."""
        member, ms = self._members.get(worker), self._answers.silent_ms(worker)
        if member is not None and ms is not None:
            member.note_timely_answer(ms)
        self._answers.forget(worker)

    def stop_waiting_for(self, member: Member) -> None:
        """Stop waiting for a worker's answer; the time so far is a lower bound of its duration."""
        if (ms := self._answers.silent_ms(member.name)) is not None:
            member.add_answer_time(ms)
        self._answers.forget(member.name)

    def lose(self, worker: str) -> None:
        """End all leases of a worker that has left."""
        self._work.forget(worker)
        self._shares.forget(worker)
        self._answers.forget(worker)

    def end_step(self, round_: Round, answering: Iterable[str]) -> None:
        """Note that a step is over; these workers must answer to its commit."""
        for worker, share in round_.shares.items():
            member = self._members.get(worker)
            silent_ms = self._work.silent_ms(worker)
            if (
                member is not None
                and member.is_late
                and share.outstanding_bits
                and silent_ms is not None
            ):
                # Its unfinished work was cancelled: it would have taken at least this long.
                member.add_measurement(
                    silent_ms / max(subtree.leaves for subtree in share.outstanding_bits)
                )
            self._work.forget(worker)
            self._shares.forget(worker)
        for worker in answering:
            self._answers.renew(worker)
        self._reported.clear()

    def find_late_workers(self, round_: Round) -> list[Member]:
        """Return the workers whose lease on subtrees of this round has expired.

        A lease depends on measurements of the worker and on the other workers: shares are planned
        to finish together, so a worker that takes several times as long as the finished ones is
        late, however slow it was before.
        """
        late_members, finished_ms = [], self._slowest_finished_ms(round_)
        for worker in sorted(round_.shares):
            member = self._members.get(worker)
            pending = round_.pending(worker)
            if member is None or not pending:
                continue
            expected_ms = member.expected_work_ms(max(subtree.leaves for subtree in pending))
            if round_.has_inner_phases:  # the worker reports its progress throughout
                expected_ms = member.expected_gap_ms
            has_expired = self._work.has_expired(worker, expected_ms)
            if finished_ms is not None and expected_ms is not None:
                has_expired = has_expired or self._shares.has_expired(worker, finished_ms)
            if has_expired:
                member.is_late = True
                late_members.append(member)
        return late_members

    def _slowest_finished_ms(self, round_: Round) -> float | None:
        """Return how long the slowest of the finished workers took."""
        durations_ms = [
            share_ms - silent_ms
            for worker, share in round_.shares.items()
            if share.subtrees and not share.outstanding_bits
            if (share_ms := self._shares.silent_ms(worker)) is not None
            if (silent_ms := self._work.silent_ms(worker)) is not None
        ]
        return max(durations_ms, default=None)

    def find_late_answers(self, agreement: Agreement, *, blocked: bool) -> list[Member]:
        """Return workers whose answer to a commit is late, if others have answered and wait.

        Args:
            agreement: The answers so far.
            blocked: Whether the step waits only for answers. If not, a slow answer costs nothing,
                and only the worker's own lease counts; if so, the times of other workers' answers
                count as well.
        """
        silent_names = set(agreement.silent_workers)
        computing = [member for member in self._members if member.state in COMPUTING]
        answered = [member for member in computing if member.name not in silent_names]
        if not answered:
            return []
        times_ms = [ms for member in answered if (ms := member.expected_answer_ms) is not None]
        late_members = []
        for member in computing:
            expected_ms = member.expected_answer_ms
            if blocked and times_ms and expected_ms is not None:
                expected_ms = min(expected_ms, max(times_ms))
            if member.name in silent_names and self._answers.has_expired(member.name, expected_ms):
                late_members.append(member)
        return late_members

    def report_late_owner(self, worker: str, step: int) -> list[Report]:
        """Report a late chunk owner."""
        return [Report(WorkerLate(worker, step, "averages of its chunks"))]

    def report_late_workers(self, late: list[Member], step: int, due_item: str) -> list[Report]:
        """Report each late worker once in a step."""
        new_names = [member.name for member in late if member.name not in self._reported]
        self._reported.update(new_names)
        return [Report(WorkerLate(w, step, due_item)) for w in new_names]
