"""The gradient sums of a node, added on the device: a `backends.base.interface.NodeSum`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from backends.base.accumulate import tree_sum
from backends.base.interface import Batch, BlockAdded, BlockGradient, Loss, NodeItem
from backends.base.stream import GradientStream
from backends.wgpu.device.running import Running


class DeviceNodeSum:
    """Nothing comes back before the node's last microbatch; then its sums, and all its losses.

    Args:
        start: Starts the node's microbatch of this number.
        blocks: How many there are.
        leaves: How many microbatches the node has.
    """

    def __init__(
        self, start: Callable[[Batch, int, int], Running], blocks: int, leaves: int
    ) -> None:
        self._start = start
        self._blocks = blocks
        self._leaves = leaves
        self._weights: list[float] = []

    def add(self, batch: Batch, seed: int) -> GradientStream[NodeItem]:
        """Compute the next microbatch; see `NodeSum.add`."""
        running = self._start(batch, seed, len(self._weights))
        self._weights.append(batch.weight)
        return GradientStream(self._items(running), running.stop)

    def _items(self, running: Running) -> Iterator[NodeItem]:
        last = len(self._weights) == self._leaves
        for block in reversed(range(self._blocks)):
            arrays = running.next()
            if arrays is None:
                return
            if not last:
                yield BlockAdded(block)
                continue
            losses = arrays.pop() if block == 0 else None
            yield BlockGradient(block, np.concatenate(arrays) if len(arrays) > 1 else arrays[0])
            if losses is not None:
                yield Loss(tree_sum([float(loss) for loss in losses]), tree_sum(self._weights))
