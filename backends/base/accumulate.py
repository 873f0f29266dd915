"""Sums gradients along the reduction tree, for one node, block by block.

Leaves come in order, and of each leaf its blocks. After the last leaf's block is added, the
block's node sum is final and given out at once, while that leaf's backward still runs on earlier
blocks. At most log2(leaves) + 1 arrays are held of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from backends.base.interface import Array, Loss
from protocol.exact.tree import Node

_Term = TypeVar("_Term", Array, float)


class TreeAccumulator:
    """The sums of one node of the tree over a step's microbatches."""

    def __init__(self, node: Node, blocks: int) -> None:
        self.node = node
        self._blocks = [_TreeSum[Array](node.leaves) for _ in range(blocks)]
        self._losses = _TreeSum[float](node.leaves)
        self._weights = _TreeSum[float](node.leaves)

    @classmethod
    def of(cls, leaves: int, blocks: int) -> TreeAccumulator:
        """For a node by itself, whose microbatches are counted from 0."""
        return cls(Node(0, leaves), blocks)

    def add(self, leaf: int, block: int, values: Array) -> Array | None:
        """Add one microbatch's gradient of one block.

        Args:
            leaf: The microbatch, from `node.lo` upwards without a gap.
            block: The block's number.
            values: Flat float32; the accumulator's own from now on, it adds into it.

        Returns:
            The node's sum of the block after its last leaf, else None.
        """
        assert values.dtype == "float32"
        assert values.flags.writeable
        return self._blocks[block].add(leaf - self.node.lo, values)

    def add_loss(self, leaf: int, loss_sum: float, weight: float) -> Loss | None:
        """Add one microbatch's loss sum and weight, in float64; gives the node's after its last."""
        loss = self._losses.add(leaf - self.node.lo, loss_sum)
        total = self._weights.add(leaf - self.node.lo, weight)
        return None if loss is None or total is None else Loss(loss, total)


def tree_sum(terms: Sequence[float]) -> float:
    """The terms of all leaves of a node along the tree, in float64."""
    sums = _TreeSum[float](len(terms))
    total: float | None = None
    for leaf, term in enumerate(terms):
        total = sums.add(leaf, term)
    assert total is not None, "a node has a leaf"
    return total


class _TreeSum(Generic[_Term]):
    """Terms in order, summed along the tree.

    The stack holds sums over perfect subtrees of falling size, as a binary counter of the leaves
    so far. What is left at the end is folded from the right: `protocol.exact.tree` splits off the
    largest power of two on the left.
    """

    __slots__ = ("_count", "_leaves", "_stack")

    def __init__(self, leaves: int) -> None:
        self._leaves = leaves
        self._count = 0
        self._stack: list[_Term] = []

    def add(self, index: int, term: _Term) -> _Term | None:
        assert index == self._count < self._leaves, "leaves come in order, each once"
        self._count += 1
        self._stack.append(term)
        merges = (self._count & -self._count).bit_length() - 1
        last = self._count == self._leaves
        for _ in range(len(self._stack) - 1 if last else merges):
            right = self._stack.pop()
            self._stack[-1] += right
        return self._stack.pop() if last else None
