"""Sums along the reduction tree: the only way in which gradients, losses and weights are added.

A worker adds the microbatches of a node, the coordinator the nodes of a step: with the same class,
so that nobody can tell from the bits who added what. Arrays in, arrays out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import add
from typing import Final, Generic, TypeVar

import numpy as np

from protocol.exact.bfloat16 import rounded
from protocol.exact.tree import Node, parent, root, sibling
from protocol.exact.update import Array
from protocol.spec.run_spec import Precision

T = TypeVar("T")


class TreeSum(Generic[T]):
    """The disjoint nodes that have arrived, merged with their siblings as far as can be.

    A node that is covered already is dropped. One that covers some that are there takes their
    place: it was given to a worker because of what they lack.
    """

    def __init__(self, microbatches: int, add: Callable[[T, T], T]) -> None:
        self._microbatches = microbatches
        self._add = add
        self._held: dict[Node, T] = {}

    @property
    def held(self) -> tuple[Node, ...]:
        """The nodes that are there, in order."""
        return tuple(sorted(self._held))

    def covers(self, node: Node) -> bool:
        """Whether the node's sum is part of what is held."""
        return any(lo <= node.lo and node.hi <= hi for lo, hi in self._held)

    def put(self, node: Node, value: T) -> bool:
        """Take a node's value and merge upwards; False if it is dropped.

        The value belongs to the sum from then on.
        """
        if self.covers(node):
            return False
        for held in [held for held in self._held if node.covers(held)]:
            del self._held[held]
        while (other := sibling(node, self._microbatches)) is not None and other in self._held:
            there = self._held.pop(other)
            value = self._add(value, there) if node < other else self._add(there, value)
            above = parent(node, self._microbatches)
            assert above is not None
            node = above
        self._held[node] = value
        return True

    @property
    def total(self) -> T | None:
        """The root's value once every node is there."""
        return self._held.get(root(self._microbatches))

    def missing(self, node: Node) -> Iterator[int]:
        """The microbatches of `node` that are not there."""
        for leaf in range(node.lo, node.hi):
            if not any(held.lo <= leaf < held.hi for held in self._held):
                yield leaf


def add_arrays(left: Array, right: Array) -> Array:
    """Left + right in float32, into left. Overflow is found as non-finite later."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add(left, right, out=left)


def add_rounded(left: Array, right: Array) -> Array:
    """Left + right in float32, rounded to bfloat16, into left."""
    return rounded(add_arrays(left, right))


ADDITIONS: Final[dict[Precision, Callable[[Array, Array], Array]]] = {
    "float32": add_arrays,
    "bfloat16": add_rounded,
}
"""How two sums become one, for each precision of a run's exchange."""


def tree_sum(terms: Sequence[float]) -> float:
    """The terms of all leaves of a node, in order, in float64."""
    sums = TreeSum[float](len(terms), add)
    for leaf, term in enumerate(terms):
        sums.put(Node(leaf, leaf + 1), term)
    total = sums.total
    assert total is not None, "a node has a leaf"
    return total
