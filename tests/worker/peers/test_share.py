"""A worker's side of the exchange: what goes where, and what is refused."""

import numpy as np
import pytest

from protocol.base.errors import OutOfOrder
from protocol.exact.reduction.chunk_grid import ChunkGrid, chunk_digest
from protocol.exact.reduction.tree import Subtree
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.exchange import Codecs
from protocol.wire.messages import (
    AveragedBlockGradient,
    AveragedGradient,
    AverageDigests,
    AveragedNonBlockGradient,
    AverageMismatch,
    AveragesRequest,
    BlockGradientPayload,
    Cancel,
    Commit,
    Credit,
    NonBlockGradientPayload,
    NonFiniteSum,
    StepPlan,
    SumsArrived,
)
from protocol.wire.peers import OwnerTable
from tests.message_samples import SCALARS
from worker.logic.actions import Transmit
from worker.logic.events import AveragesReady
from worker.peers.share import GradientExchange, ToPeer

BLOCKS = (
    Block(name="layer", kind="block", tensors=(TensorSpec(name="w", shape=(200_000,)),)),
    Block(name="head", kind="non_block", tensors=(TensorSpec(name="h", shape=(10,)),)),
)
GRID = ChunkGrid(BLOCKS)
PLACE = {"term": 1, "step": 0, "attempt": 0}
ONE, OTHER = Subtree(0, 1), Subtree(1, 2)


def table(*members, owners=None, scribe=None):
    owners = owners or [number % len(members) for number in range(GRID.count)]
    return OwnerTable(members=members, owners=tuple(owners), scribe=scribe)


def share(me="a", given=None, microbatches=2):
    exchange = GradientExchange(me, BLOCKS, Codecs())
    exchange.set_owners(1, given or table("a", "b"))
    exchange.begin(plan(microbatches))
    return exchange


def plan(microbatches, uploads=100, **change):
    fields = {**PLACE, "owners": 1, "uploads": uploads, "view": 1, "loss_scale": 1.0, **change}
    return StepPlan(**fields, microbatches=microbatches, subtrees=())


def committed(exchange, wanted):
    """Its step is durable, with averages of these digests."""
    exchange.set_digests(AverageDigests(**PLACE), wanted)
    return exchange.commit(Commit(**PLACE, scalars=SCALARS, loss=0.0, averages_digest="0" * 64))


def at(number, **more):
    block, chunk = GRID.chunk(number)
    return {**PLACE, "owners": 1, "block": block, "chunk": chunk, **more}


def part(arrays, number):
    block, chunk = GRID.chunk(number)
    return arrays[block][BLOCKS[block].chunk_slice(chunk)]


def payload(number, lo, **more):
    block, _ = GRID.chunk(number)
    kind = BlockGradientPayload if BLOCKS[block].kind == "block" else NonBlockGradientPayload
    return kind(**at(number, lo=lo, hi=lo + 1, weight=1.0, **more))


def average(number):
    block, _ = GRID.chunk(number)
    kind = AveragedBlockGradient if BLOCKS[block].kind == "block" else AveragedNonBlockGradient
    return kind(**at(number))


def sums(seed):
    random = np.random.default_rng(seed)
    return [random.standard_normal(block.elements).astype(np.float32) for block in BLOCKS]


def raw(values):
    return np.ascontiguousarray(values).view(np.uint8)


def play(shares, actions_of):
    """Carry messages until none is left; gives what was for the coordinator, by member."""
    reports: dict[str, list[object]] = {name: [] for name in shares}
    waiting = [(name, action) for name, actions in actions_of for action in actions]
    while waiting:
        name, action = waiting.pop(0)
        match action:
            case ToPeer(peer, message, body):
                answers = shares[peer].receive(name, message, raw(body))
                waiting += [(peer, each) for each in answers]
            case _:
                reports[name].append(action)
    return reports


def contributed(shares, subtree_of):
    return [
        (name, shares[name].contribute(subtree, block, 1.0, values))
        for name, subtree in subtree_of.items()
        for block, values in enumerate(sums(subtree.lo))
    ]


def expected():
    both = zip(sums(0), sums(1), strict=True)
    return [(one + other) * np.float32(0.5) for one, other in both]


def digests():
    means = expected()
    chunk_digests = [chunk_digest(part(means, number)) for number in range(GRID.count)]
    return np.frombuffer(b"".join(chunk_digests), np.uint8)


def taken(actions):
    return [action.averages for action in actions if isinstance(action, AveragesReady)]


def test_all_have_the_mean_and_the_coordinator_the_digests():
    shares = {"a": share("a"), "b": share("b")}
    reports = play(shares, contributed(shares, {"a": ONE, "b": OTHER}))
    for name, each in shares.items():
        (averages,) = taken(committed(each, digests()))
        assert [x.tobytes() for x in averages] == [x.tobytes() for x in expected()]
        to = [action.message for action in reports[name] if isinstance(action, Transmit)]
        own = [GRID.number(m.block, m.chunk) for m in to if isinstance(m, AveragedGradient)]
        assert own == [n for n in own if table("a", "b").owner(n) == name]


def test_a_lost_owner_s_chunks_are_averaged_by_another_from_sums_sent_again():
    alone = share("a")
    sent = [action for _, actions in contributed({"a": alone}, {"a": ONE}) for action in actions]
    assert {action.peer for action in sent if isinstance(action, ToPeer)} == {"b"}
    again = alone.set_owners(2, table("a", owners=[0] * GRID.count))
    again += [  # the subtree of the lost one is computed once more, here
        action
        for block, values in enumerate(sums(1))
        for action in alone.contribute(OTHER, block, 1.0, values)
    ]
    assert not [action for action in again if isinstance(action, ToPeer)]
    (averages,) = taken(committed(alone, digests()))
    assert [x.tobytes() for x in averages] == [x.tobytes() for x in expected()]


def test_a_chunk_that_is_given_back_needs_its_sums_again():
    """Of a chunk that it did not own meanwhile a worker has no sums: it says that none arrived."""
    owned = share(given=table("a", "b", owners=[0] * GRID.count))

    def give(number):
        actions = []
        for each in range(GRID.count):
            message = payload(each, 1).model_copy(update={"owners": number})
            actions += owned.receive("b", message, raw(part(sums(2), each)))
        return [a.message for a in actions if isinstance(a, Transmit)]

    assert [type(each) for each in give(1)] == [SumsArrived]
    owned.set_owners(2, table("a", "b", owners=[1] * GRID.count))
    assert owned.set_owners(3, table("a", "b", owners=[0] * GRID.count)) == []
    assert [type(each) for each in give(3)] == [SumsArrived]


def carried(shares, waiting, most=None):
    """Carry messages, at most so many; gives those that are still on their way."""
    while waiting and most != 0:
        name, action = waiting.pop(0)
        if isinstance(action, ToPeer) and name in shares and action.peer in shares:
            answers = shares[action.peer].receive(name, action.message, raw(action.body.copy()))
            waiting += [(action.peer, each) for each in answers]
        most = None if most is None else most - 1
    return waiting


@pytest.mark.parametrize("lost", ["c", "bc"], ids=["one", "two at once"])
def test_owners_that_die_at_any_stage_of_a_chunk_leave_the_bits(lost):
    """After each message in turn; what they had sent and what was sent to them is gone."""
    subtrees = {"a": Subtree(0, 1), "b": Subtree(1, 2), "c": Subtree(2, 3)}
    both = [(one + other) + third for one, other, third in zip(*map(sums, range(3)), strict=True)]
    means = [total * np.float32(1 / 3) for total in both]
    digest_bytes = b"".join(chunk_digest(part(means, number)) for number in range(GRID.count))
    stage, waiting = 0, [("", None)]
    while waiting:
        shares = {name: share(name, table(*"abc"), microbatches=3) for name in "abc"}
        contributions = contributed(shares, subtrees)
        waiting = [(name, action) for name, actions in contributions for action in actions]
        waiting = carried(shares, waiting, stage)
        on_their_way = [(name, action) for name, action in waiting if name not in lost]
        for name in lost:
            del shares[name]
        left, before = list(shares), table(*"abc")
        owners = [
            left.index(owner) if (owner := before.owner(n)) in left else n % len(left)
            for n in range(GRID.count)
        ]
        for name, each in shares.items():
            after = each.set_owners(2, table(*left, owners=owners))
            on_their_way += [(name, action) for action in after]
        again = contributed({"a": shares["a"]}, {"a": Subtree(0, 1)})  # known: it changes nothing
        for name in lost:
            for block, values in enumerate(sums(subtrees[name].lo)):
                again.append(("a", shares["a"].contribute(subtrees[name], block, 1.0, values)))
        on_their_way += [(name, action) for name, actions in again for action in actions]
        assert carried(shares, on_their_way) == []
        for each in shares.values():
            (averages,) = taken(committed(each, np.frombuffer(digest_bytes, np.uint8)))
            assert [x.tobytes() for x in averages] == [x.tobytes() for x in means]
        stage += 1
    assert stage > 2 * GRID.count


def test_an_average_that_is_not_what_the_coordinator_has_names_its_owner_and_is_not_taken():
    shares = {"a": share("a"), "b": share("b")}
    play(shares, contributed(shares, {"a": ONE, "b": OTHER}))
    wrong = digests().copy()
    number = next(n for n in range(GRID.count) if table("a", "b").owner(n) == "b")
    wrong[16 * number] ^= 1
    actions = committed(shares["a"], wrong)
    assert not taken(actions)
    messages = [action.message for action in actions]
    assert messages == [
        AverageMismatch(**at(number), owner="b"), AveragesRequest(**PLACE),
    ]  # fmt: skip


def test_averages_of_a_committed_step_that_do_not_come_are_asked_for_once():
    exchange = share("a")
    exchange.contribute(ONE, 0, 1.0, sums(0)[0])
    assert committed(exchange, digests()) == []  # their owners may be sending them
    requests = exchange.request_overdue()
    assert [action.message for action in requests] == [AveragesRequest(**PLACE)]
    assert exchange.request_overdue() == []
    means = expected()
    actions = []
    for block, each in enumerate(BLOCKS):
        kind = AveragedBlockGradient if each.kind == "block" else AveragedNonBlockGradient
        for chunk in range(each.chunks):
            values = raw(means[block][each.chunk_slice(chunk)])
            actions += exchange.receive("", kind(**PLACE, block=block, chunk=chunk), values)
    (averages,) = taken(actions)
    assert [x.tobytes() for x in averages] == [x.tobytes() for x in means]


@pytest.mark.parametrize("sender", ["b", "c"])
def test_who_does_not_own_a_chunk_sends_no_average_of_it(sender):
    number = next(n for n in range(GRID.count) if table("a", "b").owner(n) == "a")
    message = average(number)
    body = raw(np.zeros(GRID.elements(number), np.float32))
    with pytest.raises(OutOfOrder, match=f"from its owner, got it from '{sender}'"):
        share("a").receive(sender, message, body)


def test_a_sum_in_another_s_name_is_refused():
    message = payload(0, 0, worker="b")
    with pytest.raises(OutOfOrder, match="expected a sum of 'c', got one of 'b'"):
        share("a").receive("c", message, raw(np.zeros(GRID.elements(0), np.float32)))


def test_what_is_not_finite_is_reported_with_its_worker():
    message = payload(0, 0)
    body = raw(np.full(GRID.elements(0), np.inf, np.float32))
    (report,) = share("a").receive("b", message, body)
    assert report.message == NonFiniteSum(**PLACE, lo=0, hi=1, worker="b", block=1, device="")


def test_early_sums_wait_late_ones_are_dropped():
    exchange = share("a")
    later = payload(0, 0).model_copy(update={"step": 1})
    body = raw(np.ones(GRID.elements(0), np.float32))
    assert exchange.receive("b", later, body) == []
    arrived = exchange.begin(plan(1, step=1))
    assert arrived, "the average of a step with one microbatch"
    assert exchange.receive("b", later.model_copy(update={"step": 0}), body) == []


def test_a_table_of_another_shape_is_refused():
    with pytest.raises(OutOfOrder, match="chunks, got 1"):
        share("a").set_owners(2, table("a", owners=[0]))


def test_who_has_no_links_sends_through_the_coordinator():
    exchange = share("c", table("a", "b"))
    actions = exchange.contribute(ONE, 0, 1.0, sums(0)[0])
    assert {type(action) for action in actions} == {Transmit}


def star(uploads):
    exchange = GradientExchange("a", BLOCKS, Codecs())
    exchange.begin(plan(2, uploads, owners=0))
    return exchange


def to_coordinator(actions):
    return [GRID.number(a.message.block, a.message.chunk) for a in actions]


def test_the_coordinator_is_sent_as_many_chunks_as_it_allows():
    exchange = star(2)
    sent = exchange.contribute(ONE, 0, 1.0, sums(0)[0])
    assert {type(action) for action in sent} == {Transmit}
    assert to_coordinator(exchange.contribute(ONE, 1, 1.0, sums(0)[1])) == [0]
    assert to_coordinator(sent) == [1]
    assert to_coordinator(exchange.extend_credit(Credit(**PLACE, uploads=3))) == [2]
    exchange.cancel(Cancel(**PLACE, subtrees=((0, 1),)))
    assert exchange.extend_credit(Credit(**PLACE, uploads=100)) == []


def test_where_every_other_owner_is_lost_the_coordinator_is_sent_all_that_they_had():
    alone = share("a")
    for block, values in enumerate(sums(0)):
        alone.contribute(ONE, block, 1.0, values)
    owner_table = OwnerTable.star(GRID.count)
    assert sorted(to_coordinator(alone.set_owners(2, owner_table))) == [*range(GRID.count)]
