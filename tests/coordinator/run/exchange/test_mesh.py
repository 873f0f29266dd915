"""The choice of chunk owners, and of a star where it is faster."""

import random

import pytest

from coordinator.run.exchange.mesh import Mesh, _equal_time_shares
from protocol.base.errors import MessageError
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.exchange import ExchangeSpec
from protocol.wire.messages import ListenForPeers, Owners, PeerPort, Peers
from protocol.wire.peers import COORDINATOR, OwnerTable, PeerList, pair_key, parse

BLOCKS = (Block(name="b", kind="block", tensors=(TensorSpec(name="w", shape=(2_000_000,)),)),)
SECRET = bytes(32)


def mesh(topology="sharded", secret=SECRET):
    return Mesh("run", 1, ExchangeSpec(topology=topology), BLOCKS, secret)


def open_mesh(peer_mesh, *names, hosts=None, dials=()):
    actions = []
    for name in names:
        peer_mesh.add_worker(name, (hosts or {}).get(name, f"host-{name}"))
        port = 0 if name in dials else 7000
        actions = peer_mesh.add_listener(
            name, PeerPort(run_id="run", port=port, fingerprint=bytes(32))
        )
    return actions


def link_all(peer_mesh, *names, mbit=1000.0, except_pairs=()):
    for one in names:
        for other in names:
            if one != other and {one, other} not in except_pairs:
                peer_mesh.add_link(one, other, mbit)


def test_each_worker_gets_all_peers_with_pairwise_keys():
    peer_mesh = mesh()
    actions = open_mesh(peer_mesh, "a", "b", "c")
    assert [action.worker for action in actions] == ["a", "b", "c"]
    assert all(isinstance(action.message, Peers) for action in actions)
    listing = parse(PeerList, actions[0].body)
    assert [peer.name for peer in listing.peers] == ["b", "c"]
    assert listing.peers[0].key == pair_key(SECRET, "b", "a").hex() != listing.peers[1].key


def test_workers_listen_for_peers_only_if_links_may_be_used():
    assert mesh("star").add_worker("a", "h") == []
    assert mesh(secret=b"").add_worker("a", "h") == []
    (listen_action,) = mesh().add_worker("a", "h")
    assert isinstance(listen_action.message, ListenForPeers)
    peer_mesh = mesh("auto")
    assert (
        peer_mesh.add_worker("a", "h1")
        + peer_mesh.add_worker("b", "h2")
        + peer_mesh.add_worker("c", "h2")
        == []
    )
    assert [action.worker for action in peer_mesh.add_worker("d", "h3")] == ["a", "b", "c", "d"]


def test_equal_links_own_equal_parts_and_owners_are_reported_once():
    peer_mesh = mesh()
    open_mesh(peer_mesh, *"abcd")
    link_all(peer_mesh, *"abcd")
    table = peer_mesh.choose_table("abcd", 0)
    assert set(peer_mesh.owned_shares().values()) <= {0.25, 0.258, 0.242, 0.226, 0.29, 0.222, 0.278}
    actions = peer_mesh.send_table("abcd")
    assert [action.worker for action in actions] == list("abcd")
    assert all(isinstance(action.message, Owners) for action in actions)
    assert peer_mesh.send_table("abcd") == []
    assert peer_mesh.choose_table("abcd", 1) == table
    assert peer_mesh.send_table("abcd") == []


def test_worker_without_links_uses_the_coordinator():
    peer_mesh = mesh()
    open_mesh(peer_mesh, *"abcd")
    link_all(peer_mesh, *"abcd", except_pairs=[{"a", "d"}, {"b", "d"}])
    assert peer_mesh.choose_table("abcd", 0).members == ("a", "b", "c")


def test_one_of_two_disconnected_peers_stays():
    peer_mesh = mesh()
    open_mesh(peer_mesh, *"abc")
    link_all(peer_mesh, *"abc")
    peer_mesh.choose_table("abc", 0)
    peer_mesh.remove_link("a", "b")
    table = peer_mesh.reassign_lost(())
    assert table.members == ("a", "c")
    assert set(table.owners) == {0, 1}


def test_chunks_of_a_lost_owner_move_and_others_stay():
    peer_mesh = mesh()
    open_mesh(peer_mesh, *"abc")
    link_all(peer_mesh, *"abc")
    before = peer_mesh.choose_table("abc", 0)
    peer_mesh.remove_worker("b")
    after = peer_mesh.reassign_lost({"b"})
    for number in range(len(before.owners)):
        assert after.owner(number) in ("a", "c")
        assert before.owner(number) in ("b", after.owner(number))
    assert peer_mesh.number == 2
    assert peer_mesh.reassign_lost("abc") == peer_mesh.star
    assert peer_mesh.number == 3, "within a step, all workers get the new table"


def test_slow_owner_temporarily_owns_nothing():
    peer_mesh = mesh()
    open_mesh(peer_mesh, *"abc")
    link_all(peer_mesh, *"abc")
    peer_mesh.choose_table("abc", 0)
    peer_mesh.demote("b", 5)
    assert peer_mesh.reassign_owner("b").members == ("a", "b", "c")
    assert peer_mesh.owned_shares()["b"] == 0
    assert peer_mesh.choose_table("abc", 4) != peer_mesh.star
    assert peer_mesh.owned_shares()["b"] == 0
    assert peer_mesh.choose_table("abc", 5) != peer_mesh.star
    assert peer_mesh.owned_shares()["b"] > 0


def test_slow_owner_stays_if_others_lack_bandwidth():
    peer_mesh = mesh("sharded")
    open_mesh(peer_mesh, *"abc")
    link_all(peer_mesh, *"abc", mbit=1000.0)
    for other in "ac":
        peer_mesh.add_link("b", other, 10.0)
    peer_mesh.choose_table("abc", 0)
    for name in "abc":
        if peer_mesh.owned_shares()[name]:
            peer_mesh.demote(name, 5)
    table = peer_mesh.choose_table("abc", 1)
    assert table != peer_mesh.star
    assert sum(peer_mesh.owned_shares().values()) == pytest.approx(1.0, abs=0.01)


def test_scribe_runs_on_the_coordinator_s_machine():
    peer_mesh = mesh()
    open_mesh(peer_mesh, *"abc", hosts={"b": ""})
    link_all(peer_mesh, *"abc")
    assert peer_mesh.choose_table("abc", 0).scribe == "b"
    assert peer_mesh.reassign_lost({"b"}).scribe is None


def test_slow_link_owns_nothing_and_fast_links_own_equal_parts():
    assert _equal_time_shares([60.0, 1000.0, 900.0, 1100.0])[0] == 0
    fast_shares = _equal_time_shares([60.0, 1000.0, 900.0, 1100.0])[1:]
    assert max(fast_shares) == pytest.approx(min(fast_shares))
    assert sum(fast_shares) == pytest.approx(1.0)
    assert _equal_time_shares([100.0] * 4) == pytest.approx([0.25] * 4)


def test_auto_chooses_by_measurements():
    peer_mesh = mesh("auto")
    open_mesh(peer_mesh, *"abcd", hosts={"a": ""})
    link_all(peer_mesh, *"abcd")
    assert peer_mesh.choose_table("abcd", 0) != peer_mesh.star
    slow_mesh = mesh("auto")
    open_mesh(slow_mesh, *"abcd", hosts={"a": ""})
    link_all(slow_mesh, *"abc")
    link_all(slow_mesh, *"abcd", mbit=60.0)
    assert slow_mesh.choose_table("abcd", 0) == slow_mesh.star or "sharded" in slow_mesh.reason
    small_mesh = mesh("auto")
    open_mesh(small_mesh, *"ab")
    link_all(small_mesh, *"ab")
    assert small_mesh.choose_table("ab", 0) == small_mesh.star
    assert small_mesh.reason == "a star: fewer than 3 hosts"


def test_auto_returns_to_a_faster_star_until_membership_changes():
    peer_mesh = mesh("auto")
    open_mesh(peer_mesh, *"abcd", hosts={"a": ""})
    for _ in range(9):
        assert peer_mesh.choose_table("abcd", 0) == peer_mesh.star  # no links yet
        peer_mesh.note_duration(1000.0, sharded=False)
    link_all(peer_mesh, *"abcd")
    for _ in range(17):
        assert peer_mesh.choose_table("abcd", 0) != peer_mesh.star
        peer_mesh.note_duration(1100.0, sharded=True)
    assert peer_mesh.choose_table("abcd", 0) == peer_mesh.star
    assert peer_mesh.reason == "a star: its steps took 1000 ms, sharded ones 1100 ms"
    assert peer_mesh.owned_shares() == {}
    assert peer_mesh.choose_table("abc", 0) != peer_mesh.star


def test_coordinator_only_payloads_need_no_links():
    peer_mesh = mesh("auto", secret=b"")
    assert [peer_mesh.add_worker(name, f"h{name}") for name in "abc"] == [[], [], []]
    assert peer_mesh.choose_table("abc", 0) == peer_mesh.star
    assert peer_mesh.reason == "a star: this run has no links between workers"


def test_either_workers_or_the_coordinator_own_all_chunks():
    """Random joins, losses and demotions, also within a step."""
    for seed in range(100):
        rng, peer_mesh = random.Random(seed), mesh(random.Random(seed).choice(["sharded", "auto"]))
        for step in range(20):
            name = rng.choice("abcdef")
            match rng.randrange(6):
                case 0:
                    peer_mesh.remove_worker(name)
                    peer_mesh.reassign_lost([name])
                case 1:
                    peer_mesh.reassign_lost([name])
                case 2 if name in peer_mesh.table.members:
                    peer_mesh.demote(name, step + 3)
                    peer_mesh.reassign_owner(name)
                case _:
                    open_mesh(peer_mesh, name)
                    link_all(peer_mesh, *peer_mesh._endpoints)
            table = (
                peer_mesh.choose_table([*peer_mesh._endpoints], step)
                if rng.random() < 0.5
                else peer_mesh.table
            )
            assert table.has_peers == (COORDINATOR not in table.members)
            assert parse(OwnerTable, table.to_bytes()) == table


def test_table_with_workers_and_coordinator_is_refused():
    mixed_table = OwnerTable(members=("a", COORDINATOR), owners=(0, 1), scribe=None)
    with pytest.raises(MessageError, match="expected workers or the coordinator, got both"):
        parse(OwnerTable, mixed_table.to_bytes())
