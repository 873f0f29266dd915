"""An attempt at a step: any interleaving gives the bits of the recursive sum."""

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.run.exchange.round import Round, summarize_block
from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.exact.digest import weights_digest
from protocol.exact.reduction.average import average, square_sum
from protocol.exact.reduction.reducer import NonFinite
from protocol.exact.reduction.tree import Subtree, children, root
from protocol.exact.update import global_norm
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.exchange import ExchangeSpec
from protocol.wire.messages import BlockGradientPayload, SubtreeLoss
from tests.reference_bfloat16 import round_to_bfloat16

BLOCKS = tuple(
    Block(
        name=name,
        kind="block",
        tensors=tuple(TensorSpec(name=f"{name}.{n}", shape=s) for n, s in tensors),
    )
    for name, tensors in (("one", (("w", (2, 3)), ("b", (3,)))), ("two", (("w", (5,)),)))
)
LAST = len(BLOCKS) - 1
FLOAT32 = ExchangeSpec()


@pytest.fixture(autouse=True, scope="module")
def _several_chunks():
    patch = pytest.MonkeyPatch()
    patch.setattr(limits, "CHUNK_ELEMENTS", 4)
    yield
    patch.undo()


def gradient(leaf, block):
    return np.random.default_rng((leaf, block)).standard_normal(BLOCKS[block].elements).astype("f4")


def weight(leaf):
    return (leaf * 5 % 7) / 3


def identity_rounding(total):
    return total


ROUNDING = {"float32": identity_rounding, "bfloat16": round_to_bfloat16}
EXCHANGES = st.builds(
    ExchangeSpec, precision=st.sampled_from([*ROUNDING]), averages=st.sampled_from([*ROUNDING])
)


def tree_sum(lo, hi, leaf, rounding=identity_rounding):
    if hi - lo == 1:
        return rounding(leaf(lo))
    split = 1
    while split * 2 < hi - lo:
        split *= 2
    left, right = (tree_sum(*part, leaf, rounding) for part in ((lo, lo + split), (lo + split, hi)))
    return rounding(left + right)


def payload(subtree, block, chunk, *, weight_=None):
    total = tree_sum(subtree.lo, subtree.hi, weight) if weight_ is None else weight_
    return BlockGradientPayload(
        term=1,
        step=0,
        attempt=0,
        block=block,
        chunk=chunk,
        lo=subtree.lo,
        hi=subtree.hi,
        weight=total,
    )


def subtree_loss(subtree, loss_sum=None):
    total = (
        tree_sum(subtree.lo, subtree.hi, lambda leaf: leaf / 9) if loss_sum is None else loss_sum
    )
    weight_ = tree_sum(subtree.lo, subtree.hi, weight)
    return SubtreeLoss(
        term=1, step=0, attempt=0, lo=subtree.lo, hi=subtree.hi, loss_sum=total, weight=weight_,
        sums=b"", elapsed_ms=1.0,
    )  # fmt: skip


def chunks():
    return [(b, c) for b in reversed(range(len(BLOCKS))) for c in range(BLOCKS[b].chunks)]


def values(subtree, block, chunk, exchange=FLOAT32):
    return tree_sum(
        subtree.lo, subtree.hi, lambda leaf: gradient(leaf, block), ROUNDING[exchange.precision]
    )[BLOCKS[block].chunk_slice(chunk)].copy()


def deliver(round_, worker, subtree, *, upto=None, exchange=FLOAT32):
    """Deliver the payloads of a subtree in a worker's order, then its loss."""
    for block, chunk in chunks()[:upto]:
        round_.take_payload(
            worker, payload(subtree, block, chunk), values(subtree, block, chunk, exchange)
        )
    if upto is None:
        round_.take_loss(worker, subtree_loss(subtree))


def assert_equals_the_tree_sum(round_, microbatches, exchange):
    total = tree_sum(0, microbatches, weight)
    digests, squares = [], []
    for number, block in enumerate(BLOCKS):
        summed = tree_sum(
            0, microbatches, lambda leaf, b=number: gradient(leaf, b), ROUNDING[exchange.precision]
        )
        expected = np.empty_like(summed)
        average(summed, total, out=expected)
        expected = ROUNDING[exchange.averages](expected)
        assert round_.averages[number].tobytes() == expected.tobytes()
        squares.append(square_sum(expected))
        values_by_name = {t.name: expected[part].reshape(t.shape) for t, part in block.slices()}
        digests.append(weights_digest(values_by_name))
    assert round_.is_complete
    assert round_.averages_digest() == blake3("".join(digests).encode()).hexdigest()
    assert round_.gradient_norms.whole == global_norm(squares)
    loss = tree_sum(0, microbatches, lambda leaf: leaf / 9)
    assert round_.loss == (loss / total if total else 0.0)


def block_and_chunk(broadcast):
    """Return block and chunk of an average."""
    return broadcast.message.block, broadcast.message.chunk


def split_randomly(draw, subtree):
    if subtree.leaves == 1 or draw(st.booleans()):
        return [subtree]
    left, right = children(subtree)
    return split_randomly(draw, left) + split_randomly(draw, right)


def partial_sum_bytes(round_):
    """Return the bytes of partial sums."""
    chunk_sums = (
        partial_sum.sums
        for partial_sum in round_._reducer._partials.values()
        if partial_sum.sums is not None
    )
    return sum(values.nbytes for sums in chunk_sums for values in sums._pending.values())


@given(st.data())
@settings(max_examples=60)
def test_partial_sums_stay_within_the_limit_in_any_interleaving(data):
    """Workers send within their limits; the round always completes."""
    microbatches = data.draw(st.integers(1, 9))
    subtrees = split_randomly(data.draw, root(microbatches))
    limit_bytes, ahead_bytes = (data.draw(st.sampled_from([1, 100, 10_000])) for _ in "12")
    ahead_chunks = data.draw(st.integers(1, 3))
    sent_chunks: dict[Subtree, int] = {}
    ready: dict[str, list[Subtree]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "PARTIAL_SUMS_BYTES", limit_bytes)
        patch.setattr(limits, "UPLOAD_AHEAD_BYTES", ahead_bytes)
        patch.setattr(limits, "UPLOAD_AHEAD_CHUNKS", ahead_chunks)
        round_ = Round(BLOCKS, microbatches, 1, 0, 0)
        round_.expect_subtrees(len(subtrees))
        for subtree in subtrees:
            worker = data.draw(st.sampled_from("abc"))
            round_.assign(worker, (subtree,), is_local=worker == "c")
            ready.setdefault(worker, []).append(subtree)
            sent_chunks[subtree] = 0
            round_.take_loss(worker, subtree_loss(subtree))
        all_bytes = sum(block.elements * 4 for block in BLOCKS)
        most_bytes = max(limit_bytes, all_bytes // 2, len(subtrees) * 16)
        while not round_.is_complete:
            permitted = [
                (worker, subtree)
                for worker, own_subtrees in sorted(ready.items())
                for subtree in own_subtrees
                if sent_chunks[subtree] < round_.uploads(worker)
                and sent_chunks[subtree] < len(chunks())
            ]
            worker, subtree = data.draw(st.sampled_from(permitted))
            assert round_.pending(worker)
            block, chunk = chunks()[sent_chunks[subtree]]
            sent_chunks[subtree] += 1
            round_.take_payload(
                worker, payload(subtree, block, chunk), values(subtree, block, chunk)
            )
            round_.raise_uploads()
            assert partial_sum_bytes(round_) <= most_bytes
        assert not any(round_.pending(worker) for worker in ready)
    assert_equals_the_tree_sum(round_, microbatches, FLOAT32)


def test_worker_at_its_send_limit_has_no_pending_subtree(monkeypatch):
    monkeypatch.setattr(limits, "PARTIAL_SUMS_BYTES", 1)
    subtrees = leaf_subtrees(4)
    round_ = Round(BLOCKS, 4, 1, 0, 0)
    round_.expect_subtrees(len(subtrees))
    for worker, subtree in zip("abcd", subtrees, strict=True):
        round_.assign(worker, (subtree,))
    assert round_.uploads("a") == 1
    assert round_.pending("a") == (subtrees[0],)
    block, chunk = chunks()[0]
    for worker, subtree in zip("abcd", subtrees, strict=True):
        round_.take_loss(worker, subtree_loss(subtree))
        assert round_.pending(worker) == (subtree,)
        assert round_.raise_uploads() == []
        round_.take_payload(worker, payload(subtree, block, chunk), values(subtree, block, chunk))
        assert round_.pending(worker) == ()
    assert round_.raise_uploads() == ["a", "b", "c", "d"]
    assert round_.uploads("a") == 2
    assert round_.pending("a") == (subtrees[0],)


def leaf_subtrees(microbatches):
    return [Subtree(leaf, leaf + 1) for leaf in range(microbatches)]


@given(st.data())
@settings(max_examples=60)
def test_any_assignment_and_interleaving_gives_the_same_bits(data):
    microbatches = data.draw(st.integers(1, 9))
    subtrees = split_randomly(data.draw, root(microbatches))
    exchange = data.draw(EXCHANGES)
    round_ = Round(BLOCKS, microbatches, 1, 0, 0, exchange=exchange.codecs)
    queues: dict[str, list[tuple[Subtree, int, int]]] = {}
    for subtree in subtrees:
        worker = data.draw(st.sampled_from("abc"))
        round_.assign(worker, (subtree,))
        queues.setdefault(worker, []).extend(
            [(subtree, b, c) for b, c in chunks()] + [(subtree, -1, 0)]
        )
    averaged: list[tuple[int, int]] = []
    while queues:
        worker = data.draw(st.sampled_from(sorted(queues)))
        subtree, block, chunk = queues[worker].pop(0)
        if block < 0:
            assert round_.take_loss(worker, subtree_loss(subtree)) in (True, False)
        else:
            gradient = values(subtree, block, chunk, exchange)
            chunk_average = round_.take_payload(worker, payload(subtree, block, chunk), gradient)
            assert not isinstance(chunk_average, NonFinite)
            averaged += [block_and_chunk(chunk_average)] if chunk_average is not None else []
        if not queues[worker]:
            del queues[worker]
            assert not round_.unfinished(worker)
    assert sorted(averaged) == sorted(chunks())
    assert_equals_the_tree_sum(round_, microbatches, exchange)


@given(st.data())
@settings(max_examples=100)
def test_worker_losses_within_the_step_change_no_bit(data):
    """Workers are lost within subtrees; the missing subtrees are split and reassigned."""
    microbatches = data.draw(st.integers(1, 9))
    exchange = data.draw(EXCHANGES)
    round_ = Round(BLOCKS, microbatches, 1, 0, 0, exchange=exchange.codecs)
    for assignment in range(20):
        orphans = round_.unassigned_subtrees()
        if not orphans:
            break
        worker = f"w{assignment}"
        subtrees = [n for orphan in orphans for n in split_randomly(data.draw, orphan)]
        own_subtrees = (
            subtrees
            if assignment > 8
            else data.draw(st.lists(st.sampled_from(subtrees), unique=True))
        )
        round_.assign(worker, tuple(own_subtrees))
        last = (
            data.draw(st.integers(0, len(own_subtrees))) if assignment <= 8 else len(own_subtrees)
        )
        for subtree in own_subtrees[:last]:
            deliver(round_, worker, subtree, exchange=exchange)
        if last < len(own_subtrees):
            upto = data.draw(st.integers(0, len(chunks())))
            deliver(round_, worker, own_subtrees[last], upto=upto, exchange=exchange)
            round_.lose(worker, is_proven=True)
    assert_equals_the_tree_sum(round_, microbatches, exchange)
    assert not round_.is_tainted


def two_workers():
    round_ = Round(BLOCKS, 4, 1, 0, 0)
    round_.assign("ann", (Subtree(0, 2),))
    round_.assign("bob", (Subtree(2, 4),))
    return round_


@pytest.mark.parametrize(
    "subtree", [Subtree(0, 1), Subtree(2, 4), Subtree(1, 3), Subtree(0, 9), Subtree(3, 2)]
)
def test_unassigned_payload_is_refused(subtree):
    round_ = two_workers()
    with pytest.raises(OutOfOrder):
        round_.take_payload("ann", payload(subtree, 0, 0, weight_=1), np.zeros(4, np.float32))
    valid = subtree.lo < subtree.hi <= 4
    loss = subtree_loss(subtree, 1.0) if valid else SubtreeLoss(
        term=1, step=0, attempt=0, lo=subtree.lo, hi=subtree.hi, loss_sum=1, weight=1,
        sums=b"", elapsed_ms=1,
    )  # fmt: skip
    with pytest.raises(OutOfOrder):
        round_.take_loss("ann", loss)
    with pytest.raises(OutOfOrder, match="was not assigned"):
        round_.take_payload("eve", payload(Subtree(0, 2), 0, 0), np.zeros(4, np.float32))


def text_of(fault):
    return fault.describe(BLOCKS, has_replicas=False)


@pytest.mark.parametrize("bad_value", [np.nan, np.inf, -np.inf])
def test_non_finite_payload_is_named(bad_value):
    fault = two_workers().take_payload(
        "bob", payload(Subtree(2, 4), LAST, 0), np.full(4, bad_value, "f4")
    )
    assert fault == NonFinite(Subtree(2, 4), "bob", LAST)
    expected = "non-finite gradient in block 'two', microbatches [2,4), from worker 'bob'"
    assert text_of(fault) == expected


def test_non_finite_loss_is_named():
    fault = two_workers().take_loss("ann", subtree_loss(Subtree(0, 2), float("nan")))
    assert text_of(fault) == "non-finite loss, microbatches [0,2), from worker 'ann'"


def test_sums_that_overflow_are_named():
    round_ = two_workers()
    large_values = np.full(4, 3e38, np.float32)
    assert round_.take_payload("ann", payload(Subtree(0, 2), 0, 0), large_values.copy()) is None
    fault = round_.take_payload("bob", payload(Subtree(2, 4), 0, 0), large_values.copy())
    assert fault == NonFinite(Subtree(0, 4), None, 0)
    assert round_.take_loss("ann", subtree_loss(Subtree(0, 2), 1.7e308)) is True
    assert round_.take_loss("bob", subtree_loss(Subtree(2, 4), 1.7e308)) == NonFinite(Subtree(0, 4))


@pytest.mark.parametrize("payload_weight", [1e-300, 1e308])
def test_weights_without_finite_average_are_named(payload_weight):
    round_ = two_workers()
    ones = np.ones(4, np.float32)
    round_.take_payload("ann", payload(Subtree(0, 2), 0, 0, weight_=payload_weight), ones.copy())
    fault = round_.take_payload(
        "bob", payload(Subtree(2, 4), 0, 0, weight_=payload_weight), ones.copy()
    )
    assert fault == NonFinite(Subtree(0, 4), None, 0)


@pytest.mark.parametrize(
    ("value", "payload_weight", "worker"),
    [(np.nan, 1, "ann"), (-np.inf, 1, "ann"), (np.nan, 0, "ann"), (3e38, 1e-3, None)],
)
def test_non_finite_sum_is_blamed_on_its_worker_but_not_an_average(value, payload_weight, worker):
    round_ = Round(BLOCKS, 4, 1, 0, 0)
    round_.assign("ann", (Subtree(0, 4),))
    fault = round_.take_payload(
        "ann", payload(Subtree(0, 4), 0, 0, weight_=payload_weight), np.full(4, value, "f4")
    )
    assert fault == NonFinite(Subtree(0, 4), worker, 0)


def test_late_duplicates_change_nothing_and_do_not_halt():
    round_ = two_workers()
    deliver(round_, "ann", Subtree(0, 2))
    nan_payload = np.full(4, np.nan, np.float32)
    assert round_.take_payload("ann", payload(Subtree(0, 2), 0, 0), nan_payload) is None
    assert round_.take_loss("ann", subtree_loss(Subtree(0, 2), float("nan"))) is False
    deliver(round_, "bob", Subtree(2, 4))
    assert round_.take_payload("bob", payload(Subtree(2, 4), LAST, 0), nan_payload) is None
    assert_equals_the_tree_sum(round_, 4, FLOAT32)


def test_block_is_averaged_when_complete():
    round_ = two_workers()
    deliver(round_, "ann", Subtree(0, 2))
    broadcast = round_.take_payload(
        "bob", payload(Subtree(2, 4), LAST, 0), values(Subtree(2, 4), LAST, 0)
    )
    assert block_and_chunk(broadcast) == (LAST, 0)
    assert not round_.is_complete
    assert round_.unfinished("bob") == (Subtree(2, 4),)
    assert round_.unfinished("ann") == ()
    assert round_.unassigned_subtrees() == ()
    round_.lose("bob", is_proven=True)
    assert round_.unassigned_subtrees() == (Subtree(2, 4),)


def test_unproven_worker_taints_the_round():
    round_ = two_workers()
    round_.lose("bob", is_proven=False)
    assert not round_.is_tainted
    deliver(round_, "ann", Subtree(0, 2), upto=1)
    round_.lose("ann", is_proven=False)
    assert round_.is_tainted


def test_step_without_weight_has_a_zero_gradient():
    round_ = Round(BLOCKS, 1, 1, 0, 0)
    round_.assign("ann", (Subtree(0, 1),))
    for block, chunk in chunks():
        round_.take_payload("ann", payload(Subtree(0, 1), block, chunk, weight_=0), np.ones(
            len(values(Subtree(0, 1), block, chunk)), np.float32
        ))  # fmt: skip
    round_.take_loss("ann", subtree_loss(Subtree(0, 1), 0.0).model_copy(update={"weight": 0.0}))
    assert (round_.loss, round_.gradient_norms.whole) == (0.0, 0.0)


def test_commit_names_the_workers_of_its_subtrees():
    round_ = two_workers()
    deliver(round_, "bob", Subtree(2, 4))
    deliver(round_, "ann", Subtree(0, 2))
    assert round_.counted == ({"ann": (Subtree(0, 2),), "bob": (Subtree(2, 4),)},)


def test_double_assignments_report_every_set_of_counted_subtrees():
    round_ = two_workers()
    deliver(round_, "bob", Subtree(2, 4))
    round_.assign("bob", (Subtree(0, 2),))
    deliver(round_, "ann", Subtree(0, 2), upto=1)
    deliver(round_, "bob", Subtree(0, 2))
    assert round_.is_complete
    assert round_.counted == (
        {"ann": (Subtree(0, 2),), "bob": (Subtree(2, 4),)},
        {"bob": (Subtree(0, 2), Subtree(2, 4))},
    )


def test_round_waits_for_summaries_from_another_thread(monkeypatch):
    monkeypatch.setattr(limits, "EVENT_LOOP_REDUCE_BYTES", BLOCKS[LAST].elements * 4)
    round_ = Round(BLOCKS, 1, 1, 0, 0)
    round_.assign("a", (Subtree(0, 1),))
    requests = []
    for block, chunk in chunks():
        round_.take_payload(
            "a", payload(Subtree(0, 1), block, chunk), values(Subtree(0, 1), block, chunk)
        )
        requests += round_.summarize()
    round_.take_loss("a", subtree_loss(Subtree(0, 1)))
    assert [len(request.averages) for request in requests] == [
        2
    ]  # the rest is summarized here, at the end
    assert round_.is_summarizing
    assert not round_.is_complete
    for request in requests:
        round_.take_summaries(
            {n: summarize_block(*averages) for n, averages in request.averages.items()}
        )
    assert_equals_the_tree_sum(round_, 1, FLOAT32)


@pytest.fixture
def lead_of_one_chunk(monkeypatch):
    """Limit the lead to one chunk of any size."""
    monkeypatch.setattr(limits, "UPLOAD_AHEAD_BYTES", 1)
    monkeypatch.setattr(limits, "UPLOAD_AHEAD_CHUNKS", 1)


def send_chunks(round_, worker, subtree, count=1):
    """Send the next chunks of a subtree; return the workers that may send more afterwards."""
    sent_count = len(chunks()) - round_.shares[worker].outstanding_bits[subtree].bit_count()
    for block, chunk in chunks()[sent_count:][:count]:
        round_.take_payload(worker, payload(subtree, block, chunk), values(subtree, block, chunk))
    return round_.raise_uploads()


def round_of_three(local=""):
    """Make a round of three workers with one subtree each."""
    subtrees = leaf_subtrees(3)
    round_ = Round(BLOCKS, 3, 1, 0, 0)
    assert round_.expect_subtrees(len(subtrees)) == []
    for worker, subtree in zip("abc", subtrees, strict=True):
        round_.assign(worker, (subtree,), is_local=worker == local)
        round_.take_loss(worker, subtree_loss(subtree))
    return round_, subtrees


@pytest.mark.usefixtures("lead_of_one_chunk")
def test_senders_progress_equally():
    round_, (first, second, _) = round_of_three()
    assert [round_.uploads(worker) for worker in "abc"] == [1, 1, 1]
    assert send_chunks(round_, "a", first) == ["a"], "workers that still compute delay nobody"
    assert send_chunks(round_, "a", first) == ["a"]
    assert send_chunks(round_, "b", second) == ["b"], "workers that send delay others"
    assert send_chunks(round_, "a", first) == []
    assert round_.pending("a") == (), "a worker at its limit is not late"
    assert send_chunks(round_, "b", second) == ["b"]
    assert send_chunks(round_, "b", second) == ["a", "b"]
    assert [round_.uploads(worker) for worker in "abc"] == [4, 4, 1]


@pytest.mark.usefixtures("lead_of_one_chunk")
def test_local_worker_is_not_limited():
    round_, (first, _, third) = round_of_three(local="c")
    assert round_.uploads("c") == len(chunks())
    assert send_chunks(round_, "c", third) == []
    assert send_chunks(round_, "a", first) == ["a"]
    assert send_chunks(round_, "a", first) == ["a"]


@pytest.mark.usefixtures("lead_of_one_chunk")
def test_reassigned_subtree_blocks_nobody():
    """The first worker of the subtree may have stopped without notice."""
    round_, (first, second, _) = round_of_three()
    send_chunks(round_, "a", first)
    send_chunks(round_, "b", second)
    assert round_.expect_subtrees(1) == ["a", "b", "c"]
    assert round_.uploads("b") == len(chunks())
