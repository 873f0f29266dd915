"""Who exchanges chunks with whom, who owns how much, and when a star is the better way."""

import random

import pytest

from coordinator.run.exchange.mesh import Mesh, _shares
from protocol.base.errors import MessageError
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.exchange import ExchangeSpec
from protocol.wire.messages import ListenForPeers, Owners, PeerPort, Peers
from protocol.wire.peers import COORDINATOR, OwnerTable, PeerList, pair_key, parse

BLOCKS = (Block(name="b", kind="block", tensors=(TensorSpec(name="w", shape=(2_000_000,)),)),)
SECRET = bytes(32)


def mesh(way="sharded", secret=SECRET):
    return Mesh("run", 1, ExchangeSpec(topology=way), BLOCKS, secret)


def opened(peer_mesh, *names, hosts=None, dials=()):
    actions = []
    for name in names:
        peer_mesh.joined(name, (hosts or {}).get(name, f"host-{name}"))
        port = 0 if name in dials else 7000
        actions = peer_mesh.opened(name, PeerPort(run_id="run", port=port, fingerprint=bytes(32)))
    return actions


def linked(peer_mesh, *names, mbit=1000.0, but=()):
    for one in names:
        for other in names:
            if one != other and {one, other} not in but:
                peer_mesh.linked(one, other, mbit)


def test_all_are_told_all_others_with_the_key_of_the_two():
    peer_mesh = mesh()
    actions = opened(peer_mesh, "a", "b", "c")
    assert [action.worker for action in actions] == ["a", "b", "c"]
    assert all(isinstance(action.message, Peers) for action in actions)
    listing = parse(PeerList, actions[0].body)
    assert [peer.name for peer in listing.peers] == ["b", "c"]
    assert listing.peers[0].key == pair_key(SECRET, "b", "a").hex() != listing.peers[1].key


def test_a_star_asks_nobody_to_listen_and_sharded_all():
    assert mesh("star").joined("a", "h") == []
    assert mesh(secret=b"").joined("a", "h") == []
    (action_to_listen,) = mesh().joined("a", "h")
    assert isinstance(action_to_listen.message, ListenForPeers)
    peer_mesh = mesh("auto")
    assert (
        peer_mesh.joined("a", "h1") + peer_mesh.joined("b", "h2") + peer_mesh.joined("c", "h2")
        == []
    )
    assert [action.worker for action in peer_mesh.joined("d", "h3")] == ["a", "b", "c", "d"]


def test_equal_links_own_equal_parts_and_who_is_reported_once():
    peer_mesh = mesh()
    opened(peer_mesh, *"abcd")
    linked(peer_mesh, *"abcd")
    table = peer_mesh.choose("abcd", 0)
    assert set(peer_mesh.owned().values()) <= {0.25, 0.258, 0.242, 0.226, 0.29, 0.222, 0.278}
    actions = peer_mesh.tell("abcd")
    assert [action.worker for action in actions] == list("abcd")
    assert all(isinstance(action.message, Owners) for action in actions)
    assert peer_mesh.tell("abcd") == []
    assert peer_mesh.choose("abcd", 1) == table
    assert peer_mesh.tell("abcd") == []


def test_one_without_links_takes_part_through_the_coordinator():
    peer_mesh = mesh()
    opened(peer_mesh, *"abcd")
    linked(peer_mesh, *"abcd", but=[{"a", "d"}, {"b", "d"}])
    assert peer_mesh.choose("abcd", 0).members == ("a", "b", "c")


def test_of_two_that_are_cut_off_from_each_other_one_stays():
    peer_mesh = mesh()
    opened(peer_mesh, *"abc")
    linked(peer_mesh, *"abc")
    peer_mesh.choose("abc", 0)
    peer_mesh.unlinked("a", "b")
    table = peer_mesh.without(())
    assert table.members == ("a", "c")
    assert set(table.owners) == {0, 1}


def test_a_lost_owner_s_chunks_go_to_the_others_and_theirs_stay():
    peer_mesh = mesh()
    opened(peer_mesh, *"abc")
    linked(peer_mesh, *"abc")
    before = peer_mesh.choose("abc", 0)
    peer_mesh.lost("b")
    after = peer_mesh.without({"b"})
    for number in range(len(before.owners)):
        assert after.owner(number) in ("a", "c")
        assert before.owner(number) in ("b", after.owner(number))
    assert peer_mesh.number == 2
    assert peer_mesh.without("abc") == peer_mesh.star
    assert peer_mesh.number == 3, "within a step all have to be told"


def test_a_slow_owner_owns_nothing_for_a_while():
    peer_mesh = mesh()
    opened(peer_mesh, *"abc")
    linked(peer_mesh, *"abc")
    peer_mesh.choose("abc", 0)
    peer_mesh.demote("b", 5)
    assert peer_mesh.reown("b").members == ("a", "b", "c")
    assert peer_mesh.owned()["b"] == 0
    assert peer_mesh.choose("abc", 4) != peer_mesh.star
    assert peer_mesh.owned()["b"] == 0
    assert peer_mesh.choose("abc", 5) != peer_mesh.star
    assert peer_mesh.owned()["b"] > 0


def test_a_slow_owner_stays_where_the_others_have_no_bandwidth_to_own_anything():
    members = mesh("sharded")
    opened(members, *"abc")
    linked(members, *"abc", mbit=1000.0)
    for other in "ac":
        members.linked("b", other, 10.0)
    members.choose("abc", 0)
    for name in "abc":
        if members.owned()[name]:
            members.demote(name, 5)
    table = members.choose("abc", 1)
    assert table != members.star
    assert sum(members.owned().values()) == pytest.approx(1.0, abs=0.01)


def test_the_scribe_is_on_the_coordinator_s_machine():
    peer_mesh = mesh()
    opened(peer_mesh, *"abc", hosts={"b": ""})
    linked(peer_mesh, *"abc")
    assert peer_mesh.choose("abc", 0).scribe == "b"
    assert peer_mesh.without({"b"}).scribe is None


def test_a_slow_link_owns_nothing_and_quick_ones_alike():
    assert _shares([60.0, 1000.0, 900.0, 1100.0])[0] == 0
    quick = _shares([60.0, 1000.0, 900.0, 1100.0])[1:]
    assert max(quick) == pytest.approx(min(quick))
    assert sum(quick) == pytest.approx(1.0)
    assert _shares([100.0] * 4) == pytest.approx([0.25] * 4)


def test_auto_chooses_by_what_was_measured():
    peer_mesh = mesh("auto")
    opened(peer_mesh, *"abcd", hosts={"a": ""})
    linked(peer_mesh, *"abcd")
    assert peer_mesh.choose("abcd", 0) != peer_mesh.star
    slow = mesh("auto")
    opened(slow, *"abcd", hosts={"a": ""})
    linked(slow, *"abc")
    linked(slow, *"abcd", mbit=60.0)
    assert slow.choose("abcd", 0) == slow.star or "sharded" in slow.reason
    few = mesh("auto")
    opened(few, *"ab")
    linked(few, *"ab")
    assert few.choose("ab", 0) == few.star
    assert few.reason == "a star: fewer than 3 hosts"


def test_auto_goes_back_to_a_star_that_proved_quicker_until_others_take_part():
    peer_mesh = mesh("auto")
    opened(peer_mesh, *"abcd", hosts={"a": ""})
    for _ in range(9):
        assert peer_mesh.choose("abcd", 0) == peer_mesh.star  # nobody is linked yet
        peer_mesh.took(1000.0, sharded=False)
    linked(peer_mesh, *"abcd")
    for _ in range(17):
        assert peer_mesh.choose("abcd", 0) != peer_mesh.star
        peer_mesh.took(1100.0, sharded=True)
    assert peer_mesh.choose("abcd", 0) == peer_mesh.star
    assert peer_mesh.reason == "a star: its steps took 1000 ms, sharded ones 1100 ms"
    assert peer_mesh.owned() == {}
    assert peer_mesh.choose("abc", 0) != peer_mesh.star


def test_a_run_whose_payloads_only_the_coordinator_takes_has_no_links():
    peer_mesh = mesh("auto", secret=b"")
    assert [peer_mesh.joined(name, f"h{name}") for name in "abc"] == [[], [], []]
    assert peer_mesh.choose("abc", 0) == peer_mesh.star
    assert peer_mesh.reason == "a star: this run has no links between workers"


def test_workers_own_all_chunks_or_the_coordinator_does():
    """Whoever comes and goes, and within a step too."""
    for seed in range(100):
        rng, peer_mesh = random.Random(seed), mesh(random.Random(seed).choice(["sharded", "auto"]))
        for step in range(20):
            name = rng.choice("abcdef")
            match rng.randrange(6):
                case 0:
                    peer_mesh.lost(name)
                    peer_mesh.without([name])
                case 1:
                    peer_mesh.without([name])
                case 2 if name in peer_mesh.table.members:
                    peer_mesh.demote(name, step + 3)
                    peer_mesh.reown(name)
                case _:
                    opened(peer_mesh, name)
                    linked(peer_mesh, *peer_mesh._listening)
            table = (
                peer_mesh.choose([*peer_mesh._listening], step)
                if rng.random() < 0.5
                else peer_mesh.table
            )
            assert table.has_peers == (COORDINATOR not in table.members)
            assert parse(OwnerTable, table.to_bytes()) == table


def test_a_table_of_both_is_refused():
    both = OwnerTable(members=("a", COORDINATOR), owners=(0, 1), scribe=None)
    with pytest.raises(MessageError, match="expected workers or the coordinator, got both"):
        parse(OwnerTable, both.to_bytes())
