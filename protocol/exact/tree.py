"""The reduction tree over the microbatches of a step: which sums exist, and of what.

Over microbatches [lo, hi) a node is one leaf if hi - lo = 1; else it is split at k, the largest
power of two below hi - lo, and node(lo, hi) = node(lo, lo + k) + node(lo + k, hi). This is the
split of RFC 6962 (section 2.1). The shape depends on the number of microbatches alone, so a sum
taken along it has the same bits whoever computed which part, and in which order parts arrived.
Float addition is not associative: only this tree is ever used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple


class Node(NamedTuple):
    """Microbatches lo (inclusive) to hi (exclusive) of a step."""

    lo: int
    hi: int

    @property
    def leaves(self) -> int:
        """How many microbatches the node covers."""
        return self.hi - self.lo

    def covers(self, other: Node) -> bool:
        """Whether `other` is this node or lies below it."""
        return self.lo <= other.lo and other.hi <= self.hi

    def __str__(self) -> str:
        return f"[{self.lo},{self.hi})"


def leaves_of(nodes: Iterable[Node]) -> Iterator[Node]:
    """What nodes are made of, in their order."""
    for node in nodes:
        for leaf in range(node.lo, node.hi):
            yield Node(leaf, leaf + 1)


def root(microbatches: int) -> Node:
    """The node over all microbatches of a step."""
    return Node(0, microbatches)


def children(node: Node) -> tuple[Node, Node]:
    """Left and right child of a node of at least two leaves."""
    left = 1 << ((node.leaves - 1).bit_length() - 1)
    return Node(node.lo, node.lo + left), Node(node.lo + left, node.hi)


@lru_cache(maxsize=1 << 14)
def path(node: Node, microbatches: int) -> tuple[Node, ...]:
    """The nodes from the root down to `node`, both included; empty if there is no such node.

    Asked for with every payload, so what was found is kept: enough for the largest step.
    """
    if not 0 <= node.lo < node.hi <= microbatches:
        return ()
    at = root(microbatches)
    steps = [at]
    while at != node:
        if at.leaves == 1:
            return ()
        left, right = children(at)
        if left.covers(node):
            at = left
        elif right.covers(node):
            at = right
        else:
            return ()
        steps.append(at)
    return tuple(steps)


def is_node(node: Node, microbatches: int) -> bool:
    """Whether `node` is a node of the tree over that many microbatches."""
    return bool(path(node, microbatches))


def parent(node: Node, microbatches: int) -> Node | None:
    """The node above, or None for the root."""
    above = path(node, microbatches)
    return above[-2] if len(above) > 1 else None


def sibling(node: Node, microbatches: int) -> Node | None:
    """The other child of the parent, or None for the root."""
    above = parent(node, microbatches)
    if above is None:
        return None
    left, right = children(above)
    return right if node == left else left


def cover(leaves: Iterator[int] | list[int] | range, microbatches: int) -> tuple[Node, ...]:
    """The fewest nodes that together hold exactly these microbatches, in order.

    Args:
        leaves: Microbatch numbers, each within the step.
        microbatches: How many the step has.
    """
    wanted = frozenset(leaves)
    found: list[Node] = []

    def descend(node: Node) -> None:
        inside = sum(1 for leaf in range(node.lo, node.hi) if leaf in wanted)
        if inside == node.leaves:
            found.append(node)
        elif inside:
            for child in children(node):
                descend(child)

    if wanted:
        descend(root(microbatches))
    return tuple(found)
