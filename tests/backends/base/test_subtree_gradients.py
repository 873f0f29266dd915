"""Sums of a subtree on the host against a naive recursive sum, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.base.subtree_gradients import HostSums
from protocol.exact.reduction.tree import Subtree, children
from tests.reference_bfloat16 import round_to_bfloat16

Floats = NDArray[np.float32]


def no_rounding(values: Floats) -> Floats:
    return values


def naive_sum(
    subtree: Subtree, leaves: dict[int, Floats], rounding: Callable[[Floats], Floats] = no_rounding
) -> Floats:
    if subtree.leaves == 1:
        return rounding(leaves[subtree.lo])
    left, right = children(subtree)
    return rounding(naive_sum(left, leaves, rounding) + naive_sum(right, leaves, rounding))


def naive_float_sum(subtree: Subtree, leaves: dict[int, float]) -> float:
    if subtree.leaves == 1:
        return leaves[subtree.lo]
    left, right = children(subtree)
    return naive_float_sum(left, leaves) + naive_float_sum(right, leaves)


subtrees = st.builds(lambda size: Subtree(0, size), st.integers(1, 70))


@given(subtrees, st.integers(1, 3), st.integers(0, 2**32 - 1))
@pytest.mark.parametrize(
    ("precision", "rounding"), [("float32", no_rounding), ("bfloat16", round_to_bfloat16)]
)
def test_sums_have_the_bits_of_a_recursive_sum_along_the_tree(
    precision, rounding, subtree, blocks, seed
):
    rng = np.random.default_rng(seed)
    scale = np.float32(10) ** rng.integers(-6, 6, size=(subtree.leaves, blocks, 1)).astype(
        np.float32
    )
    values = (rng.standard_normal((subtree.leaves, blocks, 5)) * scale).astype(np.float32)
    sums = HostSums(subtree.leaves, blocks, precision)
    for leaf in range(subtree.lo, subtree.hi):
        is_last = leaf == subtree.hi - 1
        for block in reversed(range(blocks)):
            gradient = passed_values = values[leaf - subtree.lo, block].copy()
            if seed >> leaf % 32 & 1:  # a random half of the leaves: read-only, in three parts
                gradient.flags.writeable = False
                passed_values = (gradient[:2], gradient[2:2], gradient[2:])
            total = sums.add(leaf, block, passed_values)
            assert (total is not None) == is_last, (
                "a sum is final once the last leaf's block is added"
            )
            if total is not None:
                leaves = {subtree.lo + i: values[i, block] for i in range(subtree.leaves)}
                assert total.dtype == np.float32
                assert total.tobytes() == naive_sum(subtree, leaves, rounding).tobytes()


@given(subtrees, st.integers(0, 2**32 - 1))
def test_losses_and_weights_follow_the_tree_in_float64(subtree, seed):
    rng = np.random.default_rng(seed)
    losses = {
        leaf: float(value) for leaf, value in enumerate(rng.random(subtree.leaves), subtree.lo)
    }
    weights = {
        leaf: float(value) for leaf, value in enumerate(rng.random(subtree.leaves), subtree.lo)
    }
    sums = HostSums(subtree.leaves, 1)
    results = [sums.add_loss(leaf, losses[leaf], weights[leaf]) for leaf in losses]
    assert results[:-1] == [None] * (subtree.leaves - 1)
    assert results[-1] is not None
    assert results[-1].loss_sum == naive_float_sum(subtree, losses)
    assert results[-1].weight == naive_float_sum(subtree, weights)


@given(st.integers(1, 300))
def test_pending_sums_grow_with_the_logarithm_of_the_leaves(leaves):
    sums = HostSums(leaves, 1)
    for leaf in range(leaves):
        sums.add(leaf, 0, np.ones(1, np.float32))
        assert len(sums._blocks[0].pending) <= leaves.bit_length()


def test_running_sum_has_other_bits_than_the_tree():
    """Otherwise a comparison of bits could not detect a wrong order of additions."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((13, 1000)).astype(np.float32)
    running_sum = np.zeros(1000, np.float32)
    for row in values:
        running_sum += row
    tree_sum = naive_sum(Subtree(0, 13), dict(enumerate(values)))
    assert (running_sum != tree_sum).mean() > 0.2
