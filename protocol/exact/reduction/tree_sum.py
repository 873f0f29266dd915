"""Sums along the reduction tree. Gradients, losses and weights are added in no other order.

A worker adds the microbatches of a subtree, and the owner of a chunk adds the subtrees of a step,
both with the same class. So the bits do not depend on which process adds which part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import add
from typing import Final, Generic, TypeVar

import numpy as np

from protocol.exact.kernels.library import library_for
from protocol.exact.reduction.average import Array
from protocol.exact.reduction.bfloat16 import round_to_bfloat16
from protocol.exact.reduction.tree import Subtree, parent, root, sibling
from protocol.spec.sections.exchange import Precision

T = TypeVar("T")


class TreeSum(Generic[T]):
    """Sums of disjoint subtrees, each merged with its sibling as soon as both have arrived.

    A subtree whose sum is already included is dropped. A subtree that contains subtrees whose sums
    have arrived replaces them: it was assigned because some of its microbatches were missing.
    """

    def __init__(self, microbatches: int, add: Callable[[T, T], T]) -> None:
        self._microbatches = microbatches
        self._add = add
        self._pending: dict[Subtree, T] = {}

    @property
    def pending(self) -> tuple[Subtree, ...]:
        """The subtrees whose sums have arrived and are not yet merged, in order."""
        return tuple(sorted(self._pending))

    def covers(self, subtree: Subtree) -> bool:
        """Return whether one of the sums includes the subtree."""
        return any(lo <= subtree.lo and subtree.hi <= hi for lo, hi in self._pending)

    def put(self, subtree: Subtree, value: T) -> bool:
        """Add a subtree's value and merge upward; return False if the value is dropped.

        The value must not be used afterwards: it may become part of a sum.
        """
        if self.covers(subtree):
            return False
        for part in [part for part in self._pending if subtree.covers(part)]:
            del self._pending[part]
        while (other := sibling(subtree, self._microbatches)) in self._pending:
            assert other is not None
            partner = self._pending.pop(other)
            value = self._add(value, partner) if subtree < other else self._add(partner, value)
            enclosing = parent(subtree, self._microbatches)
            assert enclosing is not None
            subtree = enclosing
        self._pending[subtree] = value
        return True

    @property
    def total(self) -> T | None:
        """The root's value; None while any subtree is missing."""
        return self._pending.get(root(self._microbatches))

    def missing(self, subtree: Subtree) -> Iterator[int]:
        """Yield the microbatches of `subtree` that are missing."""
        for leaf in range(subtree.lo, subtree.hi):
            if not any(part.lo <= leaf < part.hi for part in self._pending):
                yield leaf


def add_arrays(left: Array, right: Array) -> Array:
    """Add `right` to `left` in place, in float32; the caller checks for overflow."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add(left, right, out=left)


def add_rounded(left: Array, right: Array) -> Array:
    """Add `right` to `left` in place, in float32, and round to bfloat16."""
    if (library := library_for(right, writes=(left,))) is not None:
        library.add_rounded(left, right)
        return left
    return round_to_bfloat16(add_arrays(left, right))


ADDITIONS: Final[dict[Precision, Callable[[Array, Array], Array]]] = {
    "float32": add_arrays,
    "bfloat16": add_rounded,
}
"""The addition of two sums, for each precision of `exchange`."""


def tree_sum(terms: Sequence[float]) -> float:
    """Sum the terms of a subtree's leaves along the tree, in float64."""
    sums = TreeSum[float](len(terms), add)
    for leaf, term in enumerate(terms):
        sums.put(Subtree(leaf, leaf + 1), term)
    total = sums.total
    assert total is not None, "a subtree has a leaf"
    return total
