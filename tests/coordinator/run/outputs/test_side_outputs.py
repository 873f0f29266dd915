"""Side outputs of a step are in the order of microbatches for any assignment to workers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from coordinator.run.exchange.double_check import ResultMismatch
from coordinator.run.exchange.round import Round
from coordinator.run.outputs.side_outputs import SideOutputs
from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.exact.reduction.reducer import NonFinite
from protocol.exact.reduction.tree import Subtree
from protocol.spec.manifest import Block, EmbeddingField, EmbeddingLayout, TensorSpec
from protocol.wire.messages import BlockGradientPayload, CapturedRows, SubtreeLoss

BLOCKS = (Block(name="nothing", kind="block", tensors=(TensorSpec(name="n", shape=(1,)),)),)
STEP_ID = {"term": 1, "step": 0, "attempt": 0}
SIZES = (10, 10, 10, 3)
CHUNK_BYTES = 4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(limits, "BODY_BYTES", CHUNK_BYTES)


def rows(leaf: int) -> np.ndarray:
    return np.arange(SIZES[leaf], dtype=np.uint8) + 20 * np.uint8(leaf)


def chunks_of(subtree: Subtree) -> list[tuple[CapturedRows, np.ndarray]]:
    return [
        (
            CapturedRows(**STEP_ID, lo=subtree.lo, hi=subtree.hi, microbatch=leaf, chunk=chunk),
            rows(leaf)[chunk * CHUNK_BYTES :][:CHUNK_BYTES],
        )
        for leaf in range(*subtree)
        for chunk in range(-(-SIZES[leaf] // CHUNK_BYTES))
    ]


def finish_subtree(round_: Round, worker: str, subtree: Subtree) -> None:
    zeros = BlockGradientPayload(
        **STEP_ID, block=0, chunk=0, lo=subtree.lo, hi=subtree.hi, weight=float(subtree.leaves)
    )
    round_.take_payload(worker, zeros, np.zeros(1, np.float32))
    weight = float(subtree.leaves)
    loss = SubtreeLoss(
        **STEP_ID,
        lo=subtree.lo,
        hi=subtree.hi,
        loss_sum=1.0,
        weight=weight,
        sums=b"",
        elapsed_ms=1.0,
    )
    round_.take_loss(worker, loss)


def deliver(round_: Round, worker: str, subtree: Subtree) -> None:
    for message, content in chunks_of(subtree):
        assert round_.take_side_output(worker, message, content) is None
    finish_subtree(round_, worker, subtree)


def started_round(**subtrees: tuple[Subtree, ...]) -> Round:
    round_ = Round(BLOCKS, len(SIZES), 1, 0, 0, side_outputs=SideOutputs(SIZES))
    for worker, assigned_subtrees in subtrees.items():
        round_.assign(worker, assigned_subtrees)
        round_.double_check.assign(worker, "one numerics profile", assigned_subtrees)
    return round_


ALL_ROWS = np.concatenate([rows(leaf) for leaf in range(len(SIZES))])


@pytest.mark.parametrize("order", [*itertools.permutations(("ann", "bob", "cid"))])
def test_result_does_not_depend_on_order_or_workers(order):
    subtrees = {"ann": (Subtree(0, 2),), "bob": (Subtree(2, 3),), "cid": (Subtree(3, 4),)}
    round_ = started_round(**subtrees)
    for worker in order:
        assert not round_.is_complete
        deliver(round_, worker, *subtrees[worker])
    assert round_.is_complete
    assert round_.side_outputs is not None
    assert np.concatenate(round_.side_outputs.content).tolist() == ALL_ROWS.tolist()


def test_incomplete_subtree_of_a_lost_worker_counts_once():
    round_ = started_round(ann=(Subtree(0, 2),), bob=(Subtree(2, 4),))
    for message, content in chunks_of(Subtree(0, 2))[:4]:
        round_.take_side_output("ann", message, content)
    round_.lose("ann", is_proven=True)
    assert round_.unassigned_subtrees() == (Subtree(0, 2),)
    round_.assign("bob", (Subtree(0, 2),))
    deliver(round_, "bob", Subtree(0, 2))
    deliver(round_, "bob", Subtree(2, 4))
    assert round_.side_outputs is not None
    assert np.concatenate(round_.side_outputs.content).tolist() == ALL_ROWS.tolist()


def test_different_logits_of_one_numerics_profile_name_both_workers():
    round_ = started_round(ann=(Subtree(0, 1),), bob=(Subtree(0, 1),))
    deliver(round_, "ann", Subtree(0, 1))
    message, content = chunks_of(Subtree(0, 1))[1]
    difference = round_.take_side_output("bob", message, content + np.uint8(1))
    assert difference == ResultMismatch(("bob", "ann"), "logits", Subtree(0, 1))
    assert "different logits" in str(difference)


def test_non_finite_embedding_names_its_worker():
    (field,) = fields = (EmbeddingField(name="e", dtype="float32", shape=(2,)),)
    layout, subtree = EmbeddingLayout(fields=fields), Subtree(0, 1)
    round_ = Round(
        BLOCKS, 1, 1, 0, 0, side_outputs=SideOutputs([2 * CHUNK_BYTES]), embedding_layout=layout
    )
    values = np.ones(field.shape, np.float32)
    for worker in ("ann", "bob"):
        round_.assign(worker, (subtree,))
        round_.double_check.assign(worker, "one profile", (subtree,))
    for worker, last, expected in (
        ("ann", 1.0, None), ("bob", np.nan, NonFinite(subtree, "bob", is_embedding=True))
    ):  # fmt: skip
        values[1] = last
        for chunk, content in enumerate(values.view(np.uint8).reshape(2, CHUNK_BYTES)):
            message = CapturedRows(**STEP_ID, lo=0, hi=1, microbatch=0, chunk=chunk)
            outcome = round_.take_side_output(worker, message, content.copy())
        assert outcome == expected


def test_loss_before_all_logits_of_its_subtree_is_refused():
    round_ = started_round(ann=(Subtree(0, 2),))
    for message, content in chunks_of(Subtree(0, 2))[:-1]:
        round_.take_side_output("ann", message, content)
    with pytest.raises(OutOfOrder, match="before all of its side outputs"):
        finish_subtree(round_, "ann", Subtree(0, 2))


@pytest.mark.parametrize(
    ("change", "count", "expected_text"),
    [
        ({"chunk": 3}, CHUNK_BYTES, "no chunk 3 of microbatch 0"),
        ({"microbatch": 2}, CHUNK_BYTES, "of microbatch 2 in this subtree"),
        ({"chunk": 2}, CHUNK_BYTES, "expected 2 bytes, got 4"),
        ({}, 0, "expected 4 bytes, got 0"),
        ({"lo": 1, "hi": 2}, CHUNK_BYTES, "was not assigned to worker 'ann'"),
        ({"lo": 1, "hi": 3}, CHUNK_BYTES, "is not a subtree"),
    ],
)
def test_rows_of_wrong_shape_are_refused(change, count, expected_text):
    round_ = started_round(ann=(Subtree(0, 2),))
    message = chunks_of(Subtree(0, 2))[0][0].model_copy(update=change)
    with pytest.raises(OutOfOrder, match=expected_text):
        round_.take_side_output("ann", message, np.zeros(count, np.uint8))


def test_run_without_capture_refuses_logits():
    round_ = Round(BLOCKS, len(SIZES), 1, 0, 0)
    round_.assign("ann", (Subtree(0, 2),))
    with pytest.raises(OutOfOrder, match="captures nothing"):
        round_.take_side_output("ann", *chunks_of(Subtree(0, 2))[0])
