"""How a node is shared out among ranks: every leaf once, along the tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.exact.tree import is_node
from worker.ranks.shares import in_lockstep, in_parallel

SIZES = st.integers(1, 40), st.integers(1, 9)


def leaves_of(shares) -> list[int]:
    kept = [share.node for each in shares for share in each if share.kept]
    return sorted(leaf for node in kept for leaf in range(*node))


@given(*SIZES)
def test_in_parallel_every_leaf_is_computed_once_in_nodes_of_the_tree(leaves, ranks):
    shares = in_parallel(leaves, ranks)
    assert len(shares) == ranks
    assert leaves_of(shares) == list(range(leaves))
    assert all(is_node(share.node, leaves) for each in shares for share in each)


@given(*SIZES)
def test_in_lockstep_all_ranks_compute_as_often(leaves, ranks):
    shares = in_lockstep(leaves, ranks)
    assert leaves_of(shares) == list(range(leaves))
    assert len({len(each) for each in shares}) == 1
