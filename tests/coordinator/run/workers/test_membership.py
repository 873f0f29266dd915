"""Members, their states, and the resulting views."""

import pytest

from coordinator.run.workers.membership import Membership, MemberState
from protocol.wire.messages import Ready

READY = Ready(
    run_id="r", backend="cpu", device="a processor", initial_digest="0" * 64,
    step=0, state_digest="0" * 64, signature="1" * 64,
    signature_text="text",
)  # fmt: skip


def test_view_changes_with_the_set_of_computing_workers():
    members = Membership()
    ann, bob = members.add("ann"), members.add("bob")
    ann.become_ready(READY)
    assert members.view == 0
    members.activate(ann)
    assert members.view == 1
    members.remove("bob")
    assert members.view == 1
    members.deactivate(ann)
    assert members.view == 2
    members.remove("ann")
    assert members.view == 2
    assert bob.state is MemberState.PREPARING


@pytest.mark.parametrize("state", [MemberState.ACTIVE, MemberState.DRAINING])
def test_loss_of_a_computing_worker_makes_a_new_view(state):
    members = Membership()
    member = members.add("ann")
    members.activate(member)
    member.state = state
    assert members.remove("ann") is member
    assert members.view == 2
    assert members.remove("ann") is None
    assert members.view == 2


def test_names_are_sorted_and_filtered_by_state():
    members = Membership()
    for name in ("cem", "ann", "bob"):
        members.add(name)
    members.activate(members.add("dan"))
    assert members.names(MemberState.PREPARING) == ["ann", "bob", "cem"]
    assert members.names(MemberState.PREPARING, MemberState.ACTIVE) == ["ann", "bob", "cem", "dan"]
    assert [member.name for member in members] == ["ann", "bob", "cem", "dan"]
    assert "dan" in members
    assert len(members) == 4


def test_speed_is_the_median_of_the_newest_times():
    members = Membership()
    member = members.add("ann")
    members.activate(member)
    assert members.speeds() == {"ann": None}
    for ms in (10.0, 10.0, 900.0):
        member.add_measurement(ms)
    assert members.speeds() == {"ann": 10.0}
    for _ in range(20):
        member.add_measurement(3.0)
    assert members.speeds() == {"ann": 3.0}


def test_speeds_are_of_active_and_profiles_of_computing_members():
    members = Membership()
    for name, state in zip("abc", MemberState, strict=False):
        member = members.add(name)
        member.become_ready(READY.model_copy(update={"signature": name * 64}))
        member.state = state
    e = members.add("e")
    e.become_ready(READY)
    e.state = MemberState.ACTIVE
    assert list(members.speeds()) == ["e"]
    assert members.numerics_profiles == {"1" * 64}
