"""Which rank computes which part of a node.

Pure. A share is a node of the tree over the leaves of what the member was given, so that sums of
shares merge to the very sum that one process would have.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from protocol.exact.tree import Node, cover


class RankShare(NamedTuple):
    """A part; one that is not kept is computed for the others' sake alone.

    Attributes:
        node: Over the leaves of the member's node, counted from 0.
        kept: Whether its sum counts.
    """

    node: Node
    kept: bool = True


def in_parallel(leaves: int, ranks: int) -> list[list[RankShare]]:
    """Contiguous and nearly equal; a rank may have none."""
    cuts = [rank * leaves // ranks for rank in range(ranks + 1)]
    return [[RankShare(node) for node in cover(range(lo, hi), leaves)] for lo, hi in pairwise(cuts)]


def in_lockstep(leaves: int, ranks: int) -> list[list[RankShare]]:
    """One leaf each at a time; whoever has none left computes the last one again."""
    rounds = -(-leaves // ranks)
    return [
        [
            RankShare(Node(min(leaf, leaves - 1), min(leaf, leaves - 1) + 1), leaf < leaves)
            for leaf in range(rank, rounds * ranks, ranks)
        ]
        for rank in range(ranks)
    ]
