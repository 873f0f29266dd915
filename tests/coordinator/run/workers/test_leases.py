"""Who is late, by what was measured of itself and by what others do."""

from typing import Any, Final

import numpy as np

from coordinator.run.exchange.round import Round
from coordinator.run.workers.leases import Leases, OwnerLease, Stragglers
from coordinator.run.workers.membership import Membership
from protocol.base import limits
from protocol.exact.reduction.chunk_grid import chunk_digest
from protocol.exact.reduction.tree import Subtree
from protocol.spec.manifest import Block, TensorSpec
from protocol.wire.messages import AveragedBlockGradient, ChunkReduced, SubtreeLoss
from protocol.wire.peers import OwnerTable

TICK_MS = 100.0
MOST: Final = limits.SMALL_CHUNK_ELEMENTS
"""Of a chunk."""


def test_who_owes_nothing_is_not_silent_and_who_has_just_signed_is_for_no_time():
    leases = Leases()
    assert leases.silent_ms("ann") is None
    leases.sign("ann")
    assert leases.silent_ms("ann") == 0
    assert not leases.is_over("bob", 0.0)


class Race:
    """Two workers with a subtree each; the time goes on by ticks."""

    def __init__(self) -> None:
        self.members = Membership()
        self.stragglers = Stragglers(self.members)
        self.round = Round((), 4, 1, 0, 0)
        self._now_ms = 0.0
        for name, subtree in (("ann", Subtree(0, 2)), ("bob", Subtree(2, 4))):
            member = self.members.add(name)
            self.members.activate(member)
            member.measured(1.0)
            self.round.assign(name, (subtree,))
            self.stragglers.assigned(name)

    def wait(self, ms: float) -> None:
        for _ in range(int(ms / TICK_MS)):
            self._now_ms += TICK_MS
            self.stragglers.tick(self._now_ms)

    def finish(self, name: str, subtree: Subtree) -> None:
        self.stragglers.delivered(name)
        where: Any = {"term": 1, "step": 0, "attempt": 0, "lo": subtree.lo, "hi": subtree.hi}
        loss = SubtreeLoss(**where, loss_sum=1.0, weight=1.0, sums=b"", elapsed_ms=1.0)
        self.round.subtree_loss(name, loss)

    @property
    def late(self) -> list[str]:
        return [member.name for member in self.stragglers.late_workers(self.round)]


def test_a_worker_s_own_long_gaps_do_not_stretch_its_lease_beyond_what_others_need():
    race = Race()
    ann = race.members.get("ann")
    assert ann is not None
    for _ in range(9):  # it has been silent for a minute in each step
        ann.gave_sign(60_000.0)
        ann.planned(2)
    race.wait(300)
    race.finish("bob", Subtree(2, 4))
    race.wait(600)
    assert race.late == []
    race.wait(100)
    assert race.late == ["ann"]


def test_one_of_whom_nothing_was_measured_has_its_first_lease_whatever_others_need():
    race = Race()
    ann = race.members.get("ann")
    assert ann is not None
    ann._measured_ms.clear()
    race.finish("bob", Subtree(2, 4))
    race.wait(5000)
    assert race.late == []
    race.wait(100)
    assert race.late == ["ann"]


class Owners:
    """A step whose chunks two members own, of which one has sent its averages."""

    def __init__(self) -> None:
        self.lease = OwnerLease()
        self._now_ms = 0.0
        self.begin(0)

    def begin(self, step: int) -> None:
        blocks = (
            Block(name="b", kind="block", tensors=(TensorSpec(name="w", shape=(4 * MOST,)),)),
        )
        table = OwnerTable(members=("ann", "bob"), owners=(0, 1, 1, 1), scribe=None)
        self.round = Round(blocks, 1, 1, step, 0, owners=(1, table))
        self.average("ann", 0)

    def average(self, owner: str, number: int) -> None:
        values = np.zeros(MOST, np.float32)
        place = {**self.round.step_id, "owners": 1, "block": 0, "chunk": number}
        self.round.peer_average(owner, AveragedBlockGradient(**place), values)
        done = ChunkReduced(**place, digest=chunk_digest(values))
        self.round.peer_average(owner, done, ((owner, Subtree(0, 1)),))

    def late_after_ms(self) -> float:
        """When an owner that gives no sign is late."""
        begun_ms = self._now_ms
        while self.wait(TICK_MS) is None:
            assert self._now_ms < begun_ms + 10 * 60_000
        return self._now_ms - begun_ms

    def wait(self, ms: float) -> str | None:
        late = None
        for _ in range(int(ms / TICK_MS)):
            self._now_ms += TICK_MS
            self.lease.tick(self._now_ms)
            late = late or self.lease.late(self.round)
        return late


def test_an_owner_has_longer_where_owners_were_silent_before_they_gave_a_sign():
    owners = Owners()
    for number in (1, 2):
        assert owners.wait(1_900) is None
        owners.average("bob", number)
    assert owners.late_after_ms() > 3 * 1_700


def test_each_owner_of_a_step_has_twice_as_long_as_the_one_before():
    owners = Owners()
    first, second, third = (owners.late_after_ms() for _ in range(3))
    assert first < 2_500
    assert 1.8 * first < second < 2.2 * first
    assert 1.8 * second < third < 2.2 * second
    owners.begin(1)
    assert owners.late_after_ms() < 2_500
