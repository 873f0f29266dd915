"""Shares of a subtree: every leaf is counted once, and all ranks compute equally many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.torchrun.leader import lockstep_shares

SIZES = st.integers(1, 40), st.integers(1, 9)


def counted_leaves(shares) -> list[int]:
    subtrees = [
        share.subtree for rank_shares in shares for share in rank_shares if share.is_counted
    ]
    return sorted(leaf for subtree in subtrees for leaf in range(*subtree))


@given(*SIZES)
def test_ranks_have_equally_many_shares_and_count_each_leaf_once(leaves, ranks):
    shares = lockstep_shares(leaves, ranks)
    assert counted_leaves(shares) == list(range(leaves))
    assert len({len(rank_shares) for rank_shares in shares}) == 1
