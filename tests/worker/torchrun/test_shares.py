"""How a subtree is divided among ranks: every leaf once, along the tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.torchrun.leader import lockstep_shares

SIZES = st.integers(1, 40), st.integers(1, 9)


def leaves_of(shares) -> list[int]:
    subtrees = [
        share.subtree for rank_shares in shares for share in rank_shares if share.is_counted
    ]
    return sorted(leaf for subtree in subtrees for leaf in range(*subtree))


@given(*SIZES)
def test_lockstep_ranks_compute_equally_often(leaves, ranks):
    shares = lockstep_shares(leaves, ranks)
    assert leaves_of(shares) == list(range(leaves))
    assert len({len(rank_shares) for rank_shares in shares}) == 1
