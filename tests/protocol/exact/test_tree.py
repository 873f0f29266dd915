"""The reduction tree against the plainest reading of its definition."""

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from protocol.exact.tree import Node, children, cover, is_node, parent, path, root, sibling

counts = st.integers(1, 70)


def naive_split(lo, hi):
    k = 1
    while k * 2 < hi - lo:
        k *= 2
    return lo + k


def naive_nodes(lo: int, hi: int) -> list[tuple[Node, Node | None]]:
    """Every node, each before those below it, with the node above it."""
    found: list[tuple[Node, Node | None]] = [(Node(lo, hi), None)]
    if hi - lo > 1:
        middle = naive_split(lo, hi)
        for below in (naive_nodes(lo, middle), naive_nodes(middle, hi)):
            found.append((below[0][0], Node(lo, hi)))
            found.extend(below[1:])
    return found


def naive_sum(leaves, lo, hi):
    if hi - lo == 1:
        return leaves[lo]
    middle = naive_split(lo, hi)
    return naive_sum(leaves, lo, middle) + naive_sum(leaves, middle, hi)


def fewest_nodes(wanted, microbatches):
    """The size of the smallest set of disjoint nodes that is exactly `wanted`, by trying all."""
    nodes = [node for node, _ in naive_nodes(0, microbatches)]

    @cache
    def fewest(rest):
        if not rest:
            return 0
        first = min(rest)
        fitting = [n for n in nodes if n.lo == first and rest.issuperset(range(n.lo, n.hi))]
        return 1 + min(fewest(rest.difference(range(n.lo, n.hi))) for n in fitting)

    return fewest(frozenset(wanted))


def test_splits_as_rfc_6962_does():
    assert children(Node(0, 2)) == (Node(0, 1), Node(1, 2))
    assert children(Node(0, 7)) == (Node(0, 4), Node(4, 7))
    assert children(Node(0, 8)) == (Node(0, 4), Node(4, 8))
    assert children(Node(4, 7)) == (Node(4, 6), Node(6, 7))
    assert children(Node(0, 9)) == (Node(0, 8), Node(8, 9))


def test_a_node_prints_as_its_range():
    assert str(Node(3, 5)) == "[3,5)"


@given(counts)
def test_nodes_parents_and_siblings_are_those_of_the_recursion(microbatches):
    above = dict(naive_nodes(0, microbatches))
    assert len(above) == 2 * microbatches - 1
    for node, expected in above.items():
        assert parent(node, microbatches) == expected
        beside = [n for n, p in above.items() if p == expected and n != node]
        assert sibling(node, microbatches) == (beside[0] if expected else None)


@given(counts, st.integers(-3, 75), st.integers(-3, 75))
def test_nothing_else_is_a_node(microbatches, lo, hi):
    expected = Node(lo, hi) in dict(naive_nodes(0, microbatches))
    assert is_node(Node(lo, hi), microbatches) == expected


@given(counts, st.data())
def test_a_path_goes_from_the_root_to_the_node_by_children(microbatches, data):
    node = data.draw(st.sampled_from([n for n, _ in naive_nodes(0, microbatches)]))
    steps = path(node, microbatches)
    assert steps[0] == root(microbatches)
    assert steps[-1] == node
    assert all(lower in children(upper) for upper, lower in itertools.pairwise(steps))


@given(st.integers(1, 13), st.data())
def test_a_cover_is_exact_in_order_and_the_smallest(microbatches, data):
    wanted = data.draw(st.sets(st.integers(0, microbatches - 1)))
    nodes = cover(sorted(wanted), microbatches)
    assert [leaf for n in nodes for leaf in range(n.lo, n.hi)] == sorted(wanted)
    assert all(is_node(node, microbatches) for node in nodes)
    assert len(nodes) == fewest_nodes(wanted, microbatches)


@given(counts)
def test_the_cover_of_everything_is_the_root(microbatches):
    assert cover(range(microbatches), microbatches) == (root(microbatches),)


@given(st.integers(1, 40), st.data())
def test_any_cut_and_any_order_of_merging_gives_the_bits_of_the_recursion(microbatches, data):
    seed = data.draw(st.integers(0, 2**32))
    workers = data.draw(st.lists(st.integers(0, 4), min_size=microbatches, max_size=microbatches))
    random = np.random.default_rng(seed)
    leaves = random.standard_normal((microbatches, 5)).astype(np.float32)
    held: dict[Node | None, NDArray[np.float32]] = {}
    for worker in set(workers):
        mine = [leaf for leaf in range(microbatches) if workers[leaf] == worker]
        held |= {n: naive_sum(leaves, n.lo, n.hi) for n in cover(mine, microbatches)}
    while len(held) > 1:
        ready = [n for n in held if n and sibling(n, microbatches) in held]
        above = parent(data.draw(st.sampled_from(sorted(ready))), microbatches)
        assert above is not None
        left, right = children(above)
        held[above] = held.pop(left) + held.pop(right)
    whole = held[root(microbatches)]
    assert whole.tobytes() == naive_sum(leaves, 0, microbatches).tobytes()


@pytest.mark.parametrize(
    ("outer", "inner", "covered"),
    [((0, 4), (2, 4), True), ((0, 4), (0, 4), True), ((0, 4), (3, 5), False)],
)
def test_covers(outer, inner, covered):
    assert Node(*outer).covers(Node(*inner)) is covered
