"""The reduction tree against a literal reading of its definition."""

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.exact.reduction.tree import (
    Subtree,
    children,
    cover,
    is_subtree,
    parent,
    path,
    root,
    sibling,
)

counts = st.integers(1, 70)


def naive_split(lo, hi):
    k = 1
    while k * 2 < hi - lo:
        k *= 2
    return lo + k


def naive_subtrees(lo: int, hi: int) -> list[tuple[Subtree, Subtree | None]]:
    """Return every subtree with its parent, parents first."""
    pairs: list[tuple[Subtree, Subtree | None]] = [(Subtree(lo, hi), None)]
    if hi - lo > 1:
        middle = naive_split(lo, hi)
        for child_pairs in (naive_subtrees(lo, middle), naive_subtrees(middle, hi)):
            pairs.append((child_pairs[0][0], Subtree(lo, hi)))
            pairs.extend(child_pairs[1:])
    return pairs


def naive_sum(leaves, lo, hi):
    if hi - lo == 1:
        return leaves[lo]
    middle = naive_split(lo, hi)
    return naive_sum(leaves, lo, middle) + naive_sum(leaves, middle, hi)


def fewest_subtrees(expected, microbatches):
    """Return the size of the smallest set of disjoint subtrees that equals the set, by brute
    force."""
    subtrees = [subtree for subtree, _ in naive_subtrees(0, microbatches)]

    @cache
    def fewest(rest):
        if not rest:
            return 0
        first = min(rest)
        candidates = [n for n in subtrees if n.lo == first and rest.issuperset(range(n.lo, n.hi))]
        return 1 + min(fewest(rest.difference(range(n.lo, n.hi))) for n in candidates)

    return fewest(frozenset(expected))


def test_splits_match_rfc_6962():
    assert children(Subtree(0, 2)) == (Subtree(0, 1), Subtree(1, 2))
    assert children(Subtree(0, 7)) == (Subtree(0, 4), Subtree(4, 7))
    assert children(Subtree(0, 8)) == (Subtree(0, 4), Subtree(4, 8))
    assert children(Subtree(4, 7)) == (Subtree(4, 6), Subtree(6, 7))
    assert children(Subtree(0, 9)) == (Subtree(0, 8), Subtree(8, 9))


def test_a_subtree_prints_as_its_range():
    assert str(Subtree(3, 5)) == "[3,5)"


@given(counts)
def test_subtrees_parents_and_siblings_match_the_recursion(microbatches):
    parent_by_subtree = dict(naive_subtrees(0, microbatches))
    assert len(parent_by_subtree) == 2 * microbatches - 1
    for subtree, expected in parent_by_subtree.items():
        assert parent(subtree, microbatches) == expected
        siblings = [n for n, p in parent_by_subtree.items() if p == expected and n != subtree]
        assert sibling(subtree, microbatches) == (siblings[0] if expected else None)


@given(counts, st.integers(-3, 75), st.integers(-3, 75))
def test_nothing_else_is_a_subtree(microbatches, lo, hi):
    expected = Subtree(lo, hi) in dict(naive_subtrees(0, microbatches))
    assert is_subtree(Subtree(lo, hi), microbatches) == expected


@given(counts, st.data())
def test_a_path_goes_from_the_root_to_the_subtree_by_children(microbatches, data):
    subtree = data.draw(st.sampled_from([n for n, _ in naive_subtrees(0, microbatches)]))
    steps = path(subtree, microbatches)
    assert steps[0] == root(microbatches)
    assert steps[-1] == subtree
    assert all(lower in children(upper) for upper, lower in itertools.pairwise(steps))


@given(st.integers(1, 13), st.data())
def test_a_cover_is_exact_in_order_and_the_smallest(microbatches, data):
    expected = data.draw(st.sets(st.integers(0, microbatches - 1)))
    subtrees = cover(sorted(expected), microbatches)
    assert [leaf for n in subtrees for leaf in range(n.lo, n.hi)] == sorted(expected)
    assert all(is_subtree(subtree, microbatches) for subtree in subtrees)
    assert len(subtrees) == fewest_subtrees(expected, microbatches)


@given(counts)
def test_the_cover_of_everything_is_the_root(microbatches):
    assert cover(range(microbatches), microbatches) == (root(microbatches),)


@given(st.integers(1, 40), st.data())
def test_any_cut_and_any_order_of_merging_gives_the_bits_of_the_recursion(microbatches, data):
    seed = data.draw(st.integers(0, 2**32))
    workers = data.draw(st.lists(st.integers(0, 4), min_size=microbatches, max_size=microbatches))
    random = np.random.default_rng(seed)
    leaves = random.standard_normal((microbatches, 5)).astype(np.float32)
    sums: dict[Subtree | None, NDArray[np.float32]] = {}
    for worker in set(workers):
        worker_leaves = [leaf for leaf in range(microbatches) if workers[leaf] == worker]
        sums |= {n: naive_sum(leaves, n.lo, n.hi) for n in cover(worker_leaves, microbatches)}
    while len(sums) > 1:
        ready = [n for n in sums if n and sibling(n, microbatches) in sums]
        parent_subtree = parent(data.draw(st.sampled_from(sorted(ready))), microbatches)
        assert parent_subtree is not None
        left, right = children(parent_subtree)
        sums[parent_subtree] = sums.pop(left) + sums.pop(right)
    total = sums[root(microbatches)]
    assert total.tobytes() == naive_sum(leaves, 0, microbatches).tobytes()


@pytest.mark.parametrize(
    ("outer", "inner", "is_covered"),
    [((0, 4), (2, 4), True), ((0, 4), (0, 4), True), ((0, 4), (3, 5), False)],
)
def test_subtree_covers_its_descendants_and_itself(outer, inner, is_covered):
    assert Subtree(*outer).covers(Subtree(*inner)) is is_covered
