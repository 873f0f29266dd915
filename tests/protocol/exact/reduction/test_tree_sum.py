"""Sums along the tree against a recursive sum of the leaves, for any arrivals in any order."""

from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.exact.reduction.average import is_finite
from protocol.exact.reduction.tree import Subtree, children, cover, root
from protocol.exact.reduction.tree_sum import TreeSum, add_arrays, tree_sum


def naive(leaves, lo, hi):
    if hi - lo == 1:
        return leaves[lo]
    split = 1
    while split * 2 < hi - lo:
        split *= 2
    left, right = naive(leaves, lo, lo + split), naive(leaves, lo + split, hi)
    return left + right


def all_subtrees(subtree):
    descendants = (
        [] if subtree.leaves == 1 else [n for c in children(subtree) for n in all_subtrees(c)]
    )
    return [subtree, *descendants]


def cut(draw, subtree):
    """Draw disjoint subtrees that make up `subtree`."""
    if subtree.leaves == 1 or draw(st.booleans()):
        return [subtree]
    left, right = children(subtree)
    return cut(draw, left) + cut(draw, right)


@st.composite
def arrivals(draw):
    """Draw microbatches, and subtrees that cover all of them, with duplicates and overlaps."""
    microbatches = draw(st.integers(1, 20))
    parts = cut(draw, root(microbatches))
    extra = draw(st.lists(st.sampled_from(all_subtrees(root(microbatches))), max_size=12))
    return microbatches, draw(st.permutations(parts + extra))


def noise(microbatches):
    rng = np.random.default_rng(microbatches)
    scales = np.float32(10) ** rng.integers(-6, 7, (microbatches, 1)).astype(np.float32)
    return rng.standard_normal((microbatches, 3)).astype(np.float32) * scales


@given(arrivals())
def test_any_order_and_overlaps_give_the_bits_of_the_recursive_sum(case):
    microbatches, subtrees = case
    leaves = noise(microbatches)
    sums = TreeSum(microbatches, add_arrays)
    for subtree in subtrees:
        sums.put(subtree, naive(leaves, *subtree).copy())
    total = sums.total
    assert total is not None
    assert total.tobytes() == naive(leaves, 0, microbatches).tobytes()
    assert sums.pending == (root(microbatches),)


@given(arrivals())
def test_every_leaf_counts_exactly_once(case):
    microbatches, subtrees = case
    sums: TreeSum[list[int]] = TreeSum(microbatches, lambda left, right: left + right)
    leaves: set[int] = set()
    for subtree in subtrees:
        before = leaves.issuperset(range(*subtree))
        assert sums.covers(subtree) is any(pending.covers(subtree) for pending in sums.pending)
        is_new = sums.put(subtree, list(range(*subtree)))
        leaves |= set(range(*subtree))
        assert is_new or before
        assert sorted(leaf for value in sums._pending.values() for leaf in value) == sorted(leaves)
        assert set(sums.missing(root(microbatches))) == set(range(microbatches)) - leaves
    assert sums.total == list(range(microbatches))


@given(st.integers(1, 40), st.data())
def test_pending_sums_are_the_smallest_cover(microbatches, data):
    leaves = data.draw(st.permutations(range(microbatches)))
    count = data.draw(st.integers(0, microbatches))
    sums = TreeSum(microbatches, add)
    for leaf in leaves[:count]:
        assert sums.put(Subtree(leaf, leaf + 1), 1.0)
    assert sums.pending == cover(sorted(leaves[:count]), microbatches)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=40))
def test_terms_in_order_are_added_along_the_tree(terms):
    assert tree_sum(terms) == naive(terms, 0, len(terms))


def test_a_descendant_after_its_ancestor_is_dropped():
    sums = TreeSum(4, add)
    assert sums.put(Subtree(0, 2), 3.0)
    assert not sums.put(Subtree(0, 1), 100.0)
    assert not sums.put(Subtree(0, 2), 100.0)
    assert sums.put(Subtree(2, 4), 4.0)
    assert sums.total == 7.0


def test_ancestor_replaces_its_descendants():
    sums = TreeSum(4, add)
    assert sums.put(Subtree(1, 2), 100.0)
    assert sums.put(Subtree(2, 3), 5.0)
    assert sums.put(Subtree(0, 2), 3.0)
    assert sums.pending == (Subtree(0, 2), Subtree(2, 3))
    assert sums.total is None


@pytest.mark.parametrize("bad_value", [np.nan, np.inf, -np.inf])
@given(index=st.integers(0, 9))
def test_one_bad_element_is_detected(bad_value, index):
    values = np.ones(10, np.float32)
    assert is_finite(values)
    values[index] = bad_value
    assert not is_finite(values)


def test_large_finite_values_are_finite_and_opposite_infinities_are_not():
    assert is_finite(np.full(8, 3e38, np.float32))
    assert not is_finite(np.array([np.inf, -np.inf], np.float32))
    assert is_finite(np.empty(0, np.float32))


def test_overflow_is_silent_and_detected():
    large_values = np.full(2, 3e38, np.float32)
    assert not is_finite(add_arrays(large_values, large_values.copy()))
