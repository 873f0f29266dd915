"""The gradient sums of a node, added on the host: what every device can do."""

from __future__ import annotations

from collections.abc import Iterator

from backends.base.accumulate import TreeAccumulator
from backends.base.interface import (
    Batch,
    BlockAdded,
    BlockGradient,
    Gradients,
    Loss,
    NodeItem,
    Program,
)
from backends.base.stream import GradientStream
from protocol.exact.tree import Node


class HostNodeSum:
    """See `backends.base.interface.NodeSum`.

    Args:
        program: Gives each microbatch's gradients.
        blocks: How many blocks it has.
        leaves: How many microbatches the node has.
    """

    def __init__(self, program: Program, blocks: int, leaves: int) -> None:
        self._program = program
        self._sums = TreeAccumulator(Node(0, leaves), blocks)
        self._added = 0

    def add(self, batch: Batch, seed: int) -> GradientStream[NodeItem]:
        """Compute the next microbatch; see `NodeSum.add`."""
        stream = self._program.gradients(batch, seed)
        return GradientStream(self._items(stream), stream.close)

    def _items(self, stream: Gradients) -> Iterator[NodeItem]:
        leaf, self._added = self._added, self._added + 1
        for item in stream:
            if isinstance(item, Loss):
                loss = self._sums.add_loss(leaf, item.loss_sum, item.weight)
                if loss is not None:
                    yield loss
                continue
            total = self._sums.add(leaf, item.block, item.values)
            yield BlockAdded(item.block) if total is None else BlockGradient(item.block, total)
