"""A step of a capture: what its microbatches give stands in their order, whoever gave it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from coordinator.run.exchange.double_check import Differing
from coordinator.run.exchange.round import Round
from coordinator.run.outputs.kept import Kept
from protocol.base import limits
from protocol.base.errors import OutOfPlace
from protocol.exact.tree import Node
from protocol.spec.manifest import Block, TensorSpec
from protocol.wire.messages import BlockGradientPayload, CapturedRows, NodeLoss

BLOCKS = (Block(name="nothing", kind="block", tensors=(TensorSpec(name="n", shape=(1,)),)),)
PLACE = {"epoch": 1, "step": 0, "attempt": 0}
SIZES = (10, 10, 10, 3)
PIECE = 4


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(limits, "BODY_BYTES", PIECE)


def rows(leaf: int) -> np.ndarray:
    return np.arange(SIZES[leaf], dtype=np.uint8) + 20 * np.uint8(leaf)


def pieces(node: Node) -> list[tuple[CapturedRows, np.ndarray]]:
    return [
        (
            CapturedRows(**PLACE, lo=node.lo, hi=node.hi, microbatch=leaf, chunk=chunk),
            rows(leaf)[chunk * PIECE :][:PIECE],
        )
        for leaf in range(*node)
        for chunk in range(-(-SIZES[leaf] // PIECE))
    ]


def end(round_: Round, worker: str, node: Node) -> None:
    zeros = BlockGradientPayload(
        **PLACE, block=0, chunk=0, lo=node.lo, hi=node.hi, weight=float(node.leaves)
    )
    round_.payload(worker, zeros, np.zeros(1, np.float32))
    weight = float(node.leaves)
    loss = NodeLoss(
        **PLACE, lo=node.lo, hi=node.hi, loss_sum=1.0, weight=weight, sums=b"", elapsed_ms=1.0
    )
    round_.node_loss(worker, loss)


def give(round_: Round, worker: str, node: Node) -> None:
    for message, content in pieces(node):
        assert round_.captured(worker, message, content) is None
    end(round_, worker, node)


def begun(**nodes: tuple[Node, ...]) -> Round:
    round_ = Round(BLOCKS, len(SIZES), 1, 0, 0, kept=Kept(SIZES))
    for worker, given in nodes.items():
        round_.assign(worker, given)
        round_.double_check.given(worker, "one signature", given)
    return round_


EVERYTHING = np.concatenate([rows(leaf) for leaf in range(len(SIZES))])


@pytest.mark.parametrize("order", [*itertools.permutations(("ann", "bob", "cid"))])
def test_order_and_workers_do_not_show(order):
    nodes = {"ann": (Node(0, 2),), "bob": (Node(2, 3),), "cid": (Node(3, 4),)}
    round_ = begun(**nodes)
    for worker in order:
        assert not round_.complete
        give(round_, worker, *nodes[worker])
    assert round_.complete
    assert round_.kept is not None
    assert np.concatenate(round_.kept.content).tolist() == EVERYTHING.tolist()


def test_a_lost_worker_s_half_node_is_given_again_and_counted_once():
    round_ = begun(ann=(Node(0, 2),), bob=(Node(2, 4),))
    for message, content in pieces(Node(0, 2))[:4]:
        round_.captured("ann", message, content)
    round_.lose("ann", proven=True)
    assert round_.unassigned() == (Node(0, 2),)
    round_.assign("bob", (Node(0, 2),))
    give(round_, "bob", Node(0, 2))
    give(round_, "bob", Node(2, 4))
    assert round_.kept is not None
    assert np.concatenate(round_.kept.content).tolist() == EVERYTHING.tolist()


def test_unlike_logits_of_one_signature_name_both_workers():
    round_ = begun(ann=(Node(0, 1),), bob=(Node(0, 1),))
    give(round_, "ann", Node(0, 1))
    message, content = pieces(Node(0, 1))[1]
    differing = round_.captured("bob", message, content + np.uint8(1))
    assert differing == Differing(("bob", "ann"), "logits", Node(0, 1))
    assert "unlike logits" in str(differing)


def test_a_loss_before_all_of_a_node_s_logits_is_refused():
    round_ = begun(ann=(Node(0, 2),))
    for message, content in pieces(Node(0, 2))[:-1]:
        round_.captured("ann", message, content)
    with pytest.raises(OutOfPlace, match="before all of its logits"):
        end(round_, "ann", Node(0, 2))


@pytest.mark.parametrize(
    ("change", "count", "told"),
    [
        ({"chunk": 3}, PIECE, "no chunk 3 of microbatch 0"),
        ({"microbatch": 2}, PIECE, "of microbatch 2 in this node"),
        ({"chunk": 2}, PIECE, "expected 2 bytes, got 4"),
        ({}, 0, "expected 4 bytes, got 0"),
        ({"lo": 1, "hi": 2}, PIECE, "was not given to worker 'ann'"),
        ({"lo": 1, "hi": 3}, PIECE, "is no node"),
    ],
)
def test_what_does_not_fit_is_refused(change, count, told):
    round_ = begun(ann=(Node(0, 2),))
    message = pieces(Node(0, 2))[0][0].model_copy(update=change)
    with pytest.raises(OutOfPlace, match=told):
        round_.captured("ann", message, np.zeros(count, np.uint8))


def test_a_run_that_captures_nothing_takes_no_logits():
    round_ = Round(BLOCKS, len(SIZES), 1, 0, 0)
    round_.assign("ann", (Node(0, 2),))
    with pytest.raises(OutOfPlace, match="captures nothing"):
        round_.captured("ann", *pieces(Node(0, 2))[0])
