"""Who is late, by what was measured of itself and by what others do."""

from typing import Any

from coordinator.run.exchange.round import Round
from coordinator.run.workers.leases import Leases, Stragglers
from coordinator.run.workers.membership import Membership
from protocol.exact.tree import Node
from protocol.wire.messages import NodeLoss

TICK_MS = 100.0


def test_who_owes_nothing_is_not_silent_and_who_has_just_signed_is_for_no_time():
    leases = Leases()
    assert leases.silent_ms("ann") is None
    leases.sign("ann")
    assert leases.silent_ms("ann") == 0
    assert not leases.is_over("bob", 0.0)


class Race:
    """Two workers with a node each; the time goes on by ticks."""

    def __init__(self) -> None:
        self.members = Membership()
        self.stragglers = Stragglers(self.members)
        self.round = Round((), 4, 1, 0, 0)
        self._now_ms = 0.0
        for name, node in (("ann", Node(0, 2)), ("bob", Node(2, 4))):
            member = self.members.add(name)
            self.members.activate(member)
            member.measured(1.0)
            self.round.assign(name, (node,))
            self.stragglers.given(name)

    def wait(self, ms: float) -> None:
        for _ in range(int(ms / TICK_MS)):
            self._now_ms += TICK_MS
            self.stragglers.tick(self._now_ms)

    def finish(self, name: str, node: Node) -> None:
        self.stragglers.delivered(name)
        where: Any = {"epoch": 1, "step": 0, "attempt": 0, "lo": node.lo, "hi": node.hi}
        loss = NodeLoss(**where, loss_sum=1.0, weight=1.0, sums=b"", elapsed_ms=1.0)
        self.round.node_loss(name, loss)

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
    race.finish("bob", Node(2, 4))
    race.wait(600)
    assert race.late == []
    race.wait(100)
    assert race.late == ["ann"]


def test_one_of_whom_nothing_was_measured_has_its_first_lease_whatever_others_need():
    race = Race()
    ann = race.members.get("ann")
    assert ann is not None
    ann._measured_ms.clear()
    race.finish("bob", Node(2, 4))
    race.wait(5000)
    assert race.late == []
    race.wait(100)
    assert race.late == ["ann"]
