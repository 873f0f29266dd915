"""The reduction tree over the microbatches of a step, which fixes the order of additions.

Over microbatches [lo, hi) a subtree is one leaf if hi - lo = 1; else it is split at k, the largest
power of two below hi - lo, and subtree(lo, hi) = subtree(lo, lo + k) + subtree(lo + k, hi). This is
the split of RFC 6962 (section 2.1). The shape depends only on the number of microbatches. So if the
leaves' gradients are equal, the bits of the sum are equal, regardless of which worker computes
which part and in which order the parts arrive. Float addition is not associative, so no other order
is ever used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple


class Subtree(NamedTuple):
    """Microbatches lo (inclusive) to hi (exclusive) of a step."""

    lo: int
    hi: int

    @property
    def leaves(self) -> int:
        """Number of microbatches in the subtree."""
        return self.hi - self.lo

    def covers(self, other: Subtree) -> bool:
        """Return whether `other` is this subtree or part of it."""
        return self.lo <= other.lo and other.hi <= self.hi

    def __str__(self) -> str:
        return f"[{self.lo},{self.hi})"


def leaves_of(subtrees: Iterable[Subtree]) -> Iterator[Subtree]:
    """Yield the leaves of subtrees, in order."""
    for subtree in subtrees:
        for leaf in range(subtree.lo, subtree.hi):
            yield Subtree(leaf, leaf + 1)


def root(microbatches: int) -> Subtree:
    """Return the subtree over all microbatches of a step."""
    return Subtree(0, microbatches)


def children(subtree: Subtree) -> tuple[Subtree, Subtree]:
    """Return the left and right child of a subtree with at least two leaves."""
    left = 1 << ((subtree.leaves - 1).bit_length() - 1)
    return Subtree(subtree.lo, subtree.lo + left), Subtree(subtree.lo + left, subtree.hi)


@lru_cache(maxsize=1 << 14)
def path(subtree: Subtree, microbatches: int) -> tuple[Subtree, ...]:
    """Return the subtrees from the root down to `subtree`; empty if the tree lacks it.

    Cached since every payload needs it; the cache fits the largest step.
    """
    if not 0 <= subtree.lo < subtree.hi <= microbatches:
        return ()
    current = root(microbatches)
    subtrees = [current]
    while current != subtree:
        if current.leaves == 1:
            return ()
        left, right = children(current)
        if left.covers(subtree):
            current = left
        elif right.covers(subtree):
            current = right
        else:
            return ()
        subtrees.append(current)
    return tuple(subtrees)


def is_subtree(subtree: Subtree, microbatches: int) -> bool:
    """Return whether the tree over this number of microbatches contains `subtree`."""
    return bool(path(subtree, microbatches))


def parent(subtree: Subtree, microbatches: int) -> Subtree | None:
    """Return the parent of a subtree; None for the root."""
    subtrees = path(subtree, microbatches)
    return subtrees[-2] if len(subtrees) > 1 else None


def sibling(subtree: Subtree, microbatches: int) -> Subtree | None:
    """Return the other child of the parent; None for the root."""
    above = parent(subtree, microbatches)
    if above is None:
        return None
    left, right = children(above)
    return right if subtree == left else left


def cover(leaves: Iterator[int] | list[int] | range, microbatches: int) -> tuple[Subtree, ...]:
    """Return the fewest subtrees that together contain exactly these microbatches, in order.

    Args:
        leaves: Microbatch numbers of the step.
        microbatches: Number of microbatches of the step.
    """
    selected = frozenset(leaves)
    subtrees: list[Subtree] = []

    def descend(subtree: Subtree) -> None:
        count = sum(1 for leaf in range(subtree.lo, subtree.hi) if leaf in selected)
        if count == subtree.leaves:
            subtrees.append(subtree)
        elif count:
            for child in children(subtree):
                descend(child)

    if selected:
        descend(root(microbatches))
    return tuple(subtrees)
