"""A worker's side of the exchange: the destination of its sums, and refusals."""

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
from worker.peers.gradient_exchange import GradientExchange, ToPeer

BLOCKS = (
    Block(name="layer", kind="block", tensors=(TensorSpec(name="w", shape=(200_000,)),)),
    Block(name="head", kind="non_block", tensors=(TensorSpec(name="h", shape=(10,)),)),
)
GRID = ChunkGrid(BLOCKS)
STEP_FIELDS = {"term": 1, "step": 0, "attempt": 0}
FIRST, SECOND = Subtree(0, 1), Subtree(1, 2)


def table(*members, owners=None, scribe=None):
    owners = owners or [number % len(members) for number in range(GRID.count)]
    return OwnerTable(members=members, owners=tuple(owners), scribe=scribe)


def exchange_of(name="a", owner_table=None, microbatches=2):
    exchange = GradientExchange(name, BLOCKS, Codecs())
    exchange.set_owners(1, owner_table or table("a", "b"))
    exchange.begin(plan(microbatches))
    return exchange


def plan(microbatches, uploads=100, **change):
    fields = {
        **STEP_FIELDS,
        "owners": 1,
        "uploads": uploads,
        "view": 1,
        "loss_scale": 1.0,
        **change,
    }
    return StepPlan(**fields, microbatches=microbatches, subtrees=())


def mark_committed(exchange, reference):
    """Mark the exchange's step as durable, with averages of these digests."""
    exchange.set_digests(AverageDigests(**STEP_FIELDS), reference)
    return exchange.commit(
        Commit(**STEP_FIELDS, scalars=SCALARS, loss=0.0, averages_digest="0" * 64)
    )


def chunk_fields(number, **overrides):
    block, chunk = GRID.chunk(number)
    return {**STEP_FIELDS, "owners": 1, "block": block, "chunk": chunk, **overrides}


def part(arrays, number):
    block, chunk = GRID.chunk(number)
    return arrays[block][BLOCKS[block].chunk_slice(chunk)]


def payload(number, lo, **overrides):
    block, _ = GRID.chunk(number)
    kind = BlockGradientPayload if BLOCKS[block].kind == "block" else NonBlockGradientPayload
    return kind(**chunk_fields(number, lo=lo, hi=lo + 1, weight=1.0, **overrides))


def average(number):
    block, _ = GRID.chunk(number)
    kind = AveragedBlockGradient if BLOCKS[block].kind == "block" else AveragedNonBlockGradient
    return kind(**chunk_fields(number))


def random_sums(seed):
    random = np.random.default_rng(seed)
    return [random.standard_normal(block.elements).astype(np.float32) for block in BLOCKS]


def raw(values):
    return np.ascontiguousarray(values).view(np.uint8)


def deliver_all(exchanges, actions_of):
    """Deliver messages until none is left; return the messages to the coordinator, by member."""
    reports: dict[str, list[object]] = {name: [] for name in exchanges}
    pending = [(name, action) for name, actions in actions_of for action in actions]
    while pending:
        name, action = pending.pop(0)
        match action:
            case ToPeer(peer, message, body):
                answers = exchanges[peer].receive(name, message, raw(body))
                pending += [(peer, each) for each in answers]
            case _:
                reports[name].append(action)
    return reports


def contribute_all(exchanges, subtree_of):
    return [
        (name, exchanges[name].contribute(subtree, block, 1.0, values))
        for name, subtree in subtree_of.items()
        for block, values in enumerate(random_sums(subtree.lo))
    ]


def expected_means():
    pair_sums = zip(random_sums(0), random_sums(1), strict=True)
    return [(one + other) * np.float32(0.5) for one, other in pair_sums]


def digests():
    mean_values = expected_means()
    chunk_digests = [chunk_digest(part(mean_values, number)) for number in range(GRID.count)]
    return np.frombuffer(b"".join(chunk_digests), np.uint8)


def accepted_averages(actions):
    return [action.averages for action in actions if isinstance(action, AveragesReady)]


def test_members_have_the_mean_and_the_coordinator_the_digests():
    exchanges = {"a": exchange_of("a"), "b": exchange_of("b")}
    reports = deliver_all(exchanges, contribute_all(exchanges, {"a": FIRST, "b": SECOND}))
    for name, each in exchanges.items():
        (averages,) = accepted_averages(mark_committed(each, digests()))
        assert [x.tobytes() for x in averages] == [x.tobytes() for x in expected_means()]
        messages_sent = [action.message for action in reports[name] if isinstance(action, Transmit)]
        own_chunks = [
            GRID.number(m.block, m.chunk) for m in messages_sent if isinstance(m, AveragedGradient)
        ]
        assert own_chunks == [n for n in own_chunks if table("a", "b").owner(n) == name]


def test_chunks_of_a_lost_owner_are_averaged_from_resent_sums():
    exchange_a = exchange_of("a")
    actions_sent = [
        action
        for _, actions in contribute_all({"a": exchange_a}, {"a": FIRST})
        for action in actions
    ]
    assert {action.peer for action in actions_sent if isinstance(action, ToPeer)} == {"b"}
    resent = exchange_a.set_owners(2, table("a", owners=[0] * GRID.count))
    resent += [  # the lost worker's subtree is computed again here
        action
        for block, values in enumerate(random_sums(1))
        for action in exchange_a.contribute(SECOND, block, 1.0, values)
    ]
    assert not [action for action in resent if isinstance(action, ToPeer)]
    (averages,) = accepted_averages(mark_committed(exchange_a, digests()))
    assert [x.tobytes() for x in averages] == [x.tobytes() for x in expected_means()]


def test_returned_chunk_needs_its_sums_again():
    """A worker has no sums of a chunk from the time when another worker owned it."""
    owner_exchange = exchange_of(owner_table=table("a", "b", owners=[0] * GRID.count))

    def receive_sums(number):
        actions = []
        for each in range(GRID.count):
            message = payload(each, 1).model_copy(update={"owners": number})
            actions += owner_exchange.receive("b", message, raw(part(random_sums(2), each)))
        return [a.message for a in actions if isinstance(a, Transmit)]

    assert [type(action) for action in receive_sums(1)] == [SumsArrived]
    owner_exchange.set_owners(2, table("a", "b", owners=[1] * GRID.count))
    assert owner_exchange.set_owners(3, table("a", "b", owners=[0] * GRID.count)) == []
    assert [type(action) for action in receive_sums(3)] == [SumsArrived]


def carry_messages(exchanges, pending, limit=None):
    """Deliver at most this many messages; return those still in transit."""
    while pending and limit != 0:
        name, action = pending.pop(0)
        if isinstance(action, ToPeer) and name in exchanges and action.peer in exchanges:
            answers = exchanges[action.peer].receive(name, action.message, raw(action.body.copy()))
            pending += [(action.peer, each) for each in answers]
        limit = None if limit is None else limit - 1
    return pending


@pytest.mark.parametrize("dead_owners", ["c", "bc"], ids=["one", "two at once"])
def test_dying_owners_at_any_stage_keep_the_bits(dead_owners):
    """Owners die after each message in turn; messages to and from them are lost."""
    subtrees = {"a": Subtree(0, 1), "b": Subtree(1, 2), "c": Subtree(2, 3)}
    pair_sums = [
        (one + other) + third for one, other, third in zip(*map(random_sums, range(3)), strict=True)
    ]
    mean_values = [total * np.float32(1 / 3) for total in pair_sums]
    digest_bytes = b"".join(chunk_digest(part(mean_values, number)) for number in range(GRID.count))
    stage, pending = 0, [("", None)]
    while pending:
        exchanges = {name: exchange_of(name, table(*"abc"), microbatches=3) for name in "abc"}
        contributions = contribute_all(exchanges, subtrees)
        pending = [(name, action) for name, actions in contributions for action in actions]
        pending = carry_messages(exchanges, pending, stage)
        in_transit = [(name, action) for name, action in pending if name not in dead_owners]
        for name in dead_owners:
            del exchanges[name]
        live_members, before = list(exchanges), table(*"abc")
        owners = [
            live_members.index(owner)
            if (owner := before.owner(n)) in live_members
            else n % len(live_members)
            for n in range(GRID.count)
        ]
        for name, each in exchanges.items():
            after = each.set_owners(2, table(*live_members, owners=owners))
            in_transit += [(name, action) for action in after]
        # a duplicate: it changes nothing
        resent = contribute_all({"a": exchanges["a"]}, {"a": Subtree(0, 1)})
        for name in dead_owners:
            for block, values in enumerate(random_sums(subtrees[name].lo)):
                resent.append(("a", exchanges["a"].contribute(subtrees[name], block, 1.0, values)))
        in_transit += [(name, action) for name, actions in resent for action in actions]
        assert carry_messages(exchanges, in_transit) == []
        for each in exchanges.values():
            (averages,) = accepted_averages(
                mark_committed(each, np.frombuffer(digest_bytes, np.uint8))
            )
            assert [x.tobytes() for x in averages] == [x.tobytes() for x in mean_values]
        stage += 1
    assert stage > 2 * GRID.count


def test_average_with_another_digest_is_refused_and_names_its_owner():
    exchanges = {"a": exchange_of("a"), "b": exchange_of("b")}
    deliver_all(exchanges, contribute_all(exchanges, {"a": FIRST, "b": SECOND}))
    wrong_digests = digests().copy()
    number = next(n for n in range(GRID.count) if table("a", "b").owner(n) == "b")
    wrong_digests[16 * number] ^= 1
    actions = mark_committed(exchanges["a"], wrong_digests)
    assert not accepted_averages(actions)
    messages = [action.message for action in actions]
    assert messages == [
        AverageMismatch(**chunk_fields(number), owner="b"), AveragesRequest(**STEP_FIELDS),
    ]  # fmt: skip


def test_missing_averages_of_a_committed_step_are_requested_once():
    exchange = exchange_of("a")
    exchange.contribute(FIRST, 0, 1.0, random_sums(0)[0])
    assert mark_committed(exchange, digests()) == []  # the owners may still send them
    requests = exchange.request_overdue()
    assert [action.message for action in requests] == [AveragesRequest(**STEP_FIELDS)]
    assert exchange.request_overdue() == []
    mean_values = expected_means()
    actions = []
    for block, each in enumerate(BLOCKS):
        kind = AveragedBlockGradient if each.kind == "block" else AveragedNonBlockGradient
        for chunk in range(each.chunks):
            values = raw(mean_values[block][each.chunk_slice(chunk)])
            actions += exchange.receive("", kind(**STEP_FIELDS, block=block, chunk=chunk), values)
    (averages,) = accepted_averages(actions)
    assert [x.tobytes() for x in averages] == [x.tobytes() for x in mean_values]


@pytest.mark.parametrize("sender", ["b", "c"])
def test_average_from_a_non_owner_is_refused(sender):
    number = next(n for n in range(GRID.count) if table("a", "b").owner(n) == "a")
    message = average(number)
    body = raw(np.zeros(GRID.elements(number), np.float32))
    with pytest.raises(OutOfOrder, match=f"from its owner, got it from '{sender}'"):
        exchange_of("a").receive(sender, message, body)


def test_sum_in_the_name_of_another_worker_is_refused():
    message = payload(0, 0, worker="b")
    with pytest.raises(OutOfOrder, match="expected a sum of 'c', got one of 'b'"):
        exchange_of("a").receive("c", message, raw(np.zeros(GRID.elements(0), np.float32)))


def test_non_finite_sum_is_reported_with_its_worker():
    message = payload(0, 0)
    body = raw(np.full(GRID.elements(0), np.inf, np.float32))
    (report,) = exchange_of("a").receive("b", message, body)
    assert report.message == NonFiniteSum(**STEP_FIELDS, lo=0, hi=1, worker="b", block=1, device="")


def test_early_sums_wait_and_late_sums_are_dropped():
    exchange = exchange_of("a")
    next_step_payload = payload(0, 0).model_copy(update={"step": 1})
    body = raw(np.ones(GRID.elements(0), np.float32))
    assert exchange.receive("b", next_step_payload, body) == []
    arrived = exchange.begin(plan(1, step=1))
    assert arrived, "the average of a step with one microbatch"
    assert exchange.receive("b", next_step_payload.model_copy(update={"step": 0}), body) == []


def test_a_table_of_another_shape_is_refused():
    with pytest.raises(OutOfOrder, match="chunks, got 1"):
        exchange_of("a").set_owners(2, table("a", owners=[0]))


def test_worker_without_links_sends_through_the_coordinator():
    exchange = exchange_of("c", table("a", "b"))
    actions = exchange.contribute(FIRST, 0, 1.0, random_sums(0)[0])
    assert {type(action) for action in actions} == {Transmit}


def star_exchange(uploads):
    exchange = GradientExchange("a", BLOCKS, Codecs())
    exchange.begin(plan(2, uploads, owners=0))
    return exchange


def to_coordinator(actions):
    return [GRID.number(a.message.block, a.message.chunk) for a in actions]


def test_chunks_for_the_coordinator_respect_its_credit():
    exchange = star_exchange(2)
    actions_sent = exchange.contribute(FIRST, 0, 1.0, random_sums(0)[0])
    assert {type(action) for action in actions_sent} == {Transmit}
    assert to_coordinator(exchange.contribute(FIRST, 1, 1.0, random_sums(0)[1])) == [0]
    assert to_coordinator(actions_sent) == [1]
    assert to_coordinator(exchange.extend_credit(Credit(**STEP_FIELDS, uploads=3))) == [2]
    exchange.cancel(Cancel(**STEP_FIELDS, subtrees=((0, 1),)))
    assert exchange.extend_credit(Credit(**STEP_FIELDS, uploads=100)) == []


def test_coordinator_gets_all_chunks_if_every_other_owner_is_lost():
    exchange_a = exchange_of("a")
    for block, values in enumerate(random_sums(0)):
        exchange_a.contribute(FIRST, block, 1.0, values)
    owner_table = OwnerTable.star(GRID.count)
    assert sorted(to_coordinator(exchange_a.set_owners(2, owner_table))) == [*range(GRID.count)]
