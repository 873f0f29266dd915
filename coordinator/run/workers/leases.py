"""Until when a worker may be silent about what it owes, and who is late in a step.

Pure: the time comes with `tick`. A lease follows what was measured of the worker itself; the
constants only keep noise and first steps, which warm up, from counting as lateness.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from coordinator.run.exchange.round import Round
from coordinator.run.outputs.actions import Report
from coordinator.run.outputs.facts import WorkerLate
from coordinator.run.workers.agreement import Agreement
from coordinator.run.workers.membership import COMPUTING, Member, Membership
from protocol.base import limits

_PATIENCE: Final = 3.0
"""How many times what is expected of a worker it may take."""
_LEASE_FLOOR_MS: Final = 500.0
_SILENCES_KEPT: Final = 16
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
        """Time goes on. A gap in the ticks (the process was suspended) counts for no lease."""
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

    def silent_ms(self, worker: str) -> float | None:
        """How long it has been silent; None if it owes nothing."""
        since_ms = self._since_ms.get(worker)
        return None if since_ms is None else self.now_ms - since_ms

    def is_over(self, worker: str, expected_ms: float | None) -> bool:
        """Whether it is late.

        Args:
            worker: Its name.
            expected_ms: How long it should take, as measured; None if nothing was.
        """
        silent_ms = self.silent_ms(worker)
        lease_ms = _FIRST_LEASE_MS if expected_ms is None else _PATIENCE * expected_ms
        return silent_ms is not None and silent_ms > max(lease_ms, _LEASE_FLOOR_MS)


class OwnerLease:
    """Whether a step waits for one owner of slices alone, and for how long.

    Slices of a silent owner go to others, to whom all is sent again: on a machine or a link that
    is merely slow that would only make it slower. So a lease follows how long owners were silent
    before they gave a sign after all, and is twice as long after each that was over in a step.
    """

    def __init__(self) -> None:
        self._now_ms = 0.0
        self._since_ms = 0.0
        self._seen: tuple[str, int] | None = None
        self._place: dict[str, int] = {}
        self._over = 0
        self._silences_ms: deque[float] = deque(maxlen=_SILENCES_KEPT)

    def tick(self, now_ms: float) -> None:
        """Time goes on. A gap in the ticks counts for no lease."""
        gap_ms = now_ms - self._now_ms
        if gap_ms > 3 * limits.TICK_MS:
            self._since_ms += gap_ms
        self._now_ms = now_ms

    def late(self, round_: Round) -> str | None:
        """The owner that everything waits for and that has given no sign for a lease: its slices
        are to go to others now."""
        if round_.place != self._place:
            self._place, self._over = round_.place, 0
        silent_ms = self._now_ms - self._since_ms
        seen = self._waited_for(round_)
        if seen != self._seen:
            if self._seen is not None:
                self._silences_ms.append(silent_ms)
            self._seen, self._since_ms = seen, self._now_ms
            return None
        if seen is None or silent_ms <= self._lease_ms:
            return None
        self._over += 1
        self._seen = None
        return seen[0]

    @property
    def _lease_ms(self) -> float:
        measured_ms = _PATIENCE * max(self._silences_ms, default=0.0)
        return 2.0**self._over * max(limits.OWNER_LEASE_MS, measured_ms)

    def _waited_for(self, round_: Round) -> tuple[str, int] | None:
        """The only owner whose averages are still to come, and how many."""
        collecting = {} if round_.sliced is None else round_.sliced.collecting()
        owing = [(name, count) for name, count in collecting.items() if count]
        return owing[0] if len(owing) == 1 and len(collecting) > 1 else None


class Stragglers:
    """Leases on work and on answers, for all members of a run."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._work = Leases()
        self._shares = Leases()
        """From when each was last given nodes, whatever it has sent since."""
        self._answers = Leases()
        self._told: set[str] = set()

    def tick(self, now_ms: float) -> None:
        """Time goes on."""
        self._work.tick(now_ms)
        self._shares.tick(now_ms)
        self._answers.tick(now_ms)

    def given(self, worker: str) -> None:
        """It was given nodes."""
        self._work.sign(worker)
        self._shares.sign(worker)

    def delivered(self, worker: str) -> None:
        """It has sent a part of what it owes."""
        gap_ms = self._work.sign(worker)
        member = self._members.get(worker)
        if member is not None:
            member.gave_sign(gap_ms)
            member.late = False

    def may_send(self, worker: str) -> None:
        """It owes more than it did, since it may send more."""
        self._work.sign(worker)

    def answered(self, worker: str) -> None:
        """It has answered to a commit."""
        member, ms = self._members.get(worker), self._answers.silent_ms(worker)
        if member is not None and ms is not None:
            member.answered(ms)
        self._answers.forget(worker)

    def passed_over(self, member: Member) -> None:
        """Nobody waits for its answer any more; it takes this long at the least."""
        if (ms := self._answers.silent_ms(member.name)) is not None:
            member.measured_answer(ms)
        self._answers.forget(member.name)

    def lose(self, worker: str) -> None:
        """It has left."""
        self._work.forget(worker)
        self._shares.forget(worker)
        self._answers.forget(worker)

    def committed(self, round_: Round, owed: Iterable[str]) -> None:
        """A step is over; these are to say that they have taken it."""
        for worker, share in round_.shares.items():
            member = self._members.get(worker)
            silent_ms = self._work.silent_ms(worker)
            if member is not None and member.late and share.owed and silent_ms is not None:
                # What it did not finish was cancelled: it takes this long at the least.
                member.measured(silent_ms / max(node.leaves for node in share.owed))
            self._work.forget(worker)
            self._shares.forget(worker)
        for worker in owed:
            self._answers.sign(worker)
        self._told.clear()

    def late_workers(self, round_: Round) -> list[Member]:
        """Those whose lease on nodes of this round is over.

        A lease follows what was measured of the worker, and what others do: shares are planned to
        be done at one time, so one that takes several times as long as those that are done is
        late, however slow it has been before.
        """
        late, done_ms = [], self._done_ms(round_)
        for worker in sorted(round_.shares):
            member = self._members.get(worker)
            pending = round_.pending(worker)
            if member is None or not pending:
                continue
            expected_ms = member.expected_work_ms(max(node.leaves for node in pending))
            if round_.stretches:  # it says how far it is, all the while
                expected_ms = member.expected_gap_ms
            over = self._work.is_over(worker, expected_ms)
            if done_ms is not None and expected_ms is not None:
                over = over or self._shares.is_over(worker, done_ms)
            if over:
                member.late = True
                late.append(member)
        return late

    def _done_ms(self, round_: Round) -> float | None:
        """How long the slowest took of those that have sent all they were given."""
        took = [
            share_ms - silent_ms
            for worker, share in round_.shares.items()
            if share.nodes and not share.owed
            if (share_ms := self._shares.silent_ms(worker)) is not None
            if (silent_ms := self._work.silent_ms(worker)) is not None
        ]
        return max(took, default=None)

    def late_answers(self, agreement: Agreement, *, blocked: bool) -> list[Member]:
        """Those that have long not answered to a commit, if others have and wait for them.

        Args:
            agreement: Knows who has not answered.
            blocked: Whether nothing else is waited for. Until then a slow answer costs nothing,
                and only the worker's own lease counts; then others' answers do as well.
        """
        silent = set(agreement.silent)
        computing = [member for member in self._members if member.state in COMPUTING]
        prompt = [member for member in computing if member.name not in silent]
        if not prompt:
            return []
        known = [ms for member in prompt if (ms := member.expected_answer_ms) is not None]
        late = []
        for member in computing:
            expected_ms = member.expected_answer_ms
            if blocked and known and expected_ms is not None:
                expected_ms = min(expected_ms, max(known))
            if member.name in silent and self._answers.is_over(member.name, expected_ms):
                late.append(member)
        return late

    def reports_owner(self, worker: str, step: int) -> list[Report]:
        """An owner of slices is late."""
        return [Report(WorkerLate(worker, step, "averages of its slices"))]

    def reports(self, late: list[Member], step: int, owing: str) -> list[Report]:
        """Each of them once in a step."""
        new = [member.name for member in late if member.name not in self._told]
        self._told.update(new)
        return [Report(WorkerLate(w, step, owing)) for w in new]
