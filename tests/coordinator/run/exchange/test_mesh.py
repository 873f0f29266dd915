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


def opened(made, *names, hosts=None, dials=()):
    actions = []
    for name in names:
        made.joined(name, (hosts or {}).get(name, f"host-{name}"))
        port = 0 if name in dials else 7000
        actions = made.opened(name, PeerPort(run_id="run", port=port, fingerprint=bytes(32)))
    return actions


def linked(made, *names, mbit=1000.0, but=()):
    for one in names:
        for other in names:
            if one != other and {one, other} not in but:
                made.linked(one, other, mbit)


def test_all_are_told_all_others_with_the_key_of_the_two():
    made = mesh()
    actions = opened(made, "a", "b", "c")
    assert [action.worker for action in actions] == ["a", "b", "c"]
    assert all(isinstance(action.message, Peers) for action in actions)
    listing = parse(PeerList, actions[0].body)
    assert [peer.name for peer in listing.peers] == ["b", "c"]
    assert listing.peers[0].key == pair_key(SECRET, "b", "a").hex() != listing.peers[1].key


def test_a_star_asks_nobody_to_listen_and_sharded_all():
    assert mesh("star").joined("a", "h") == []
    assert mesh(secret=b"").joined("a", "h") == []
    (asked,) = mesh().joined("a", "h")
    assert isinstance(asked.message, ListenForPeers)
    made = mesh("auto")
    assert made.joined("a", "h1") + made.joined("b", "h2") + made.joined("c", "h2") == []
    assert [action.worker for action in made.joined("d", "h3")] == ["a", "b", "c", "d"]


def test_equal_links_own_equal_parts_and_who_is_reported_once():
    made = mesh()
    opened(made, *"abcd")
    linked(made, *"abcd")
    table = made.choose("abcd", 0)
    assert set(made.owned().values()) <= {0.25, 0.258, 0.242, 0.226, 0.29, 0.222, 0.278}
    actions = made.tell("abcd")
    assert [action.worker for action in actions] == list("abcd")
    assert all(isinstance(action.message, Owners) for action in actions)
    assert made.tell("abcd") == []
    assert made.choose("abcd", 1) == table
    assert made.tell("abcd") == []


def test_one_without_links_takes_part_through_the_coordinator():
    made = mesh()
    opened(made, *"abcd")
    linked(made, *"abcd", but=[{"a", "d"}, {"b", "d"}])
    assert made.choose("abcd", 0).members == ("a", "b", "c")


def test_of_two_that_are_cut_off_from_each_other_one_stays():
    made = mesh()
    opened(made, *"abc")
    linked(made, *"abc")
    made.choose("abc", 0)
    made.unlinked("a", "b")
    table = made.without(())
    assert table.members == ("a", "c")
    assert set(table.owners) == {0, 1}


def test_a_lost_owner_s_chunks_go_to_the_others_and_theirs_stay():
    made = mesh()
    opened(made, *"abc")
    linked(made, *"abc")
    before = made.choose("abc", 0)
    made.lost("b")
    after = made.without({"b"})
    for number in range(len(before.owners)):
        assert after.owner(number) in ("a", "c")
        assert before.owner(number) in ("b", after.owner(number))
    assert made.number == 2
    assert made.without("abc") == made.star
    assert made.number == 3, "within a step all have to be told"


def test_a_slow_owner_owns_nothing_for_a_while():
    made = mesh()
    opened(made, *"abc")
    linked(made, *"abc")
    made.choose("abc", 0)
    made.demote("b", 5)
    assert made.reown("b").members == ("a", "b", "c")
    assert made.owned()["b"] == 0
    assert made.choose("abc", 4) != made.star
    assert made.owned()["b"] == 0
    assert made.choose("abc", 5) != made.star
    assert made.owned()["b"] > 0


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
    made = mesh()
    opened(made, *"abc", hosts={"b": ""})
    linked(made, *"abc")
    assert made.choose("abc", 0).scribe == "b"
    assert made.without({"b"}).scribe is None


def test_a_slow_link_owns_nothing_and_quick_ones_alike():
    assert _shares([60.0, 1000.0, 900.0, 1100.0])[0] == 0
    quick = _shares([60.0, 1000.0, 900.0, 1100.0])[1:]
    assert max(quick) == pytest.approx(min(quick))
    assert sum(quick) == pytest.approx(1.0)
    assert _shares([100.0] * 4) == pytest.approx([0.25] * 4)


def test_auto_chooses_by_what_was_measured():
    made = mesh("auto")
    opened(made, *"abcd", hosts={"a": ""})
    linked(made, *"abcd")
    assert made.choose("abcd", 0) != made.star
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
    made = mesh("auto")
    opened(made, *"abcd", hosts={"a": ""})
    for _ in range(9):
        assert made.choose("abcd", 0) == made.star  # nobody is linked yet
        made.took(1000.0, sharded=False)
    linked(made, *"abcd")
    for _ in range(17):
        assert made.choose("abcd", 0) != made.star
        made.took(1100.0, sharded=True)
    assert made.choose("abcd", 0) == made.star
    assert made.reason == "a star: its steps took 1000 ms, sharded ones 1100 ms"
    assert made.owned() == {}
    assert made.choose("abc", 0) != made.star


def test_a_run_whose_payloads_only_the_coordinator_takes_has_no_links():
    made = mesh("auto", secret=b"")
    assert [made.joined(name, f"h{name}") for name in "abc"] == [[], [], []]
    assert made.choose("abc", 0) == made.star
    assert made.reason == "a star: this run has no links between workers"


def test_workers_own_all_chunks_or_the_coordinator_does():
    """Whoever comes and goes, and within a step too."""
    for seed in range(100):
        rng, made = random.Random(seed), mesh(random.Random(seed).choice(["sharded", "auto"]))
        for step in range(20):
            name = rng.choice("abcdef")
            match rng.randrange(6):
                case 0:
                    made.lost(name)
                    made.without([name])
                case 1:
                    made.without([name])
                case 2 if name in made.table.members:
                    made.demote(name, step + 3)
                    made.reown(name)
                case _:
                    opened(made, name)
                    linked(made, *made._listening)
            table = made.choose([*made._listening], step) if rng.random() < 0.5 else made.table
            assert table.has_peers == (COORDINATOR not in table.members)
            assert parse(OwnerTable, table.to_bytes()) == table


def test_a_table_of_both_is_refused():
    both = OwnerTable(members=("a", COORDINATOR), owners=(0, 1), scribe=None)
    with pytest.raises(MessageError, match="expected workers or the coordinator, got both"):
        parse(OwnerTable, both.to_bytes())
