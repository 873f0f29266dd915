"""Late workers are determined from their own speed and the speed of others."""

from typing import Any, Final

import numpy as np

from coordinator.run.exchange.round import Round
from coordinator.run.workers.membership import Membership
from coordinator.run.workers.stragglers import Leases, OwnerLease, Stragglers
from protocol.base import limits
from protocol.exact.reduction.chunk_grid import chunk_digest
from protocol.exact.reduction.tree import Subtree
from protocol.spec.manifest import Block, TensorSpec
from protocol.wire.messages import AveragedBlockGradient, ChunkReduced, SubtreeLoss
from protocol.wire.peers import OwnerTable

TICK_MS = 100.0
CHUNK_ELEMENTS: Final = limits.SMALL_CHUNK_ELEMENTS
"""Elements of a chunk."""


def test_silence_counts_only_while_work_is_due():
    leases = Leases()
    assert leases.silent_ms("ann") is None
    leases.renew("ann")
    assert leases.silent_ms("ann") == 0
    assert not leases.has_expired("bob", 0.0)


class TwoWorkerStep:
    """Two workers with one subtree each; time advances in ticks."""

    def __init__(self) -> None:
        self.members = Membership()
        self.stragglers = Stragglers(self.members)
        self.round = Round((), 4, 1, 0, 0)
        self._now_ms = 0.0
        for name, subtree in (("ann", Subtree(0, 2)), ("bob", Subtree(2, 4))):
            member = self.members.add(name)
            self.members.activate(member)
            member.add_measurement(1.0)
            self.round.assign(name, (subtree,))
            self.stragglers.note_assignment(name)

    def wait(self, ms: float) -> None:
        for _ in range(int(ms / TICK_MS)):
            self._now_ms += TICK_MS
            self.stragglers.tick(self._now_ms)

    def finish(self, name: str, subtree: Subtree) -> None:
        self.stragglers.note_delivery(name)
        step_id: Any = {"term": 1, "step": 0, "attempt": 0, "lo": subtree.lo, "hi": subtree.hi}
        loss = SubtreeLoss(**step_id, loss_sum=1.0, weight=1.0, sums=b"", elapsed_ms=1.0)
        self.round.take_loss(name, loss)

    @property
    def late_workers(self) -> list[str]:
        return [member.name for member in self.stragglers.find_late_workers(self.round)]


def test_long_gaps_of_a_worker_do_not_extend_its_lease_beyond_others():
    step = TwoWorkerStep()
    ann = step.members.get("ann")
    assert ann is not None
    for _ in range(9):  # ann was silent for a minute in each step
        ann.note_silence(60_000.0)
        ann.note_share(2)
    step.wait(300)
    step.finish("bob", Subtree(2, 4))
    step.wait(600)
    assert step.late_workers == []
    step.wait(100)
    assert step.late_workers == ["ann"]


def test_unmeasured_worker_has_its_first_lease():
    step = TwoWorkerStep()
    ann = step.members.get("ann")
    assert ann is not None
    ann._measured_ms.clear()
    step.finish("bob", Subtree(2, 4))
    step.wait(5000)
    assert step.late_workers == []
    step.wait(100)
    assert step.late_workers == ["ann"]


class OwnedStep:
    """A step with two chunk owners, of which one has sent its averages."""

    def __init__(self) -> None:
        self.lease = OwnerLease()
        self._now_ms = 0.0
        self.begin(0)

    def begin(self, step: int) -> None:
        blocks = (
            Block(
                name="b", kind="block", tensors=(TensorSpec(name="w", shape=(4 * CHUNK_ELEMENTS,)),)
            ),
        )
        table = OwnerTable(members=("ann", "bob"), owners=(0, 1, 1, 1), scribe=None)
        self.round = Round(blocks, 1, 1, step, 0, numbered_table=(1, table))
        self.send_average("ann", 0)

    def send_average(self, owner: str, number: int) -> None:
        values = np.zeros(CHUNK_ELEMENTS, np.float32)
        step_id = {**self.round.step_id, "owners": 1, "block": 0, "chunk": number}
        self.round.take_peer_average(owner, AveragedBlockGradient(**step_id), values)
        message = ChunkReduced(**step_id, digest=chunk_digest(values))
        self.round.take_peer_average(owner, message, ((owner, Subtree(0, 1)),))

    def late_after_ms(self) -> float:
        """Return the time after which a silent owner is late."""
        start_ms = self._now_ms
        while self.wait(TICK_MS) is None:
            assert self._now_ms < start_ms + 10 * 60_000
        return self._now_ms - start_ms

    def wait(self, ms: float) -> str | None:
        late_owner = None
        for _ in range(int(ms / TICK_MS)):
            self._now_ms += TICK_MS
            self.lease.tick(self._now_ms)
            late_owner = late_owner or self.lease.find_late_owner(self.round)
        return late_owner


def test_owner_lease_grows_with_observed_silence():
    owners = OwnedStep()
    for number in (1, 2):
        assert owners.wait(1_900) is None
        owners.send_average("bob", number)
    assert owners.late_after_ms() > 3 * 1_700


def test_owner_lease_doubles_within_a_step():
    owners = OwnedStep()
    first, second, third = (owners.late_after_ms() for _ in range(3))
    assert first < 2_500
    assert 1.8 * first < second < 2.2 * first
    assert 1.8 * second < third < 2.2 * second
    owners.begin(1)
    assert owners.late_after_ms() < 2_500
