"""The gradients of a node whose sums are in the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from backends.base.interface import Batch, BlockAdded, BlockGradient, Leaf, Loss, NodeItem
from backends.base.node_stream import Microbatch, NodeStream
from backends.wgpu.device.running import Running
from protocol.exact.tree_sum import tree_sum


def added_on_device(
    leaves: Sequence[Leaf], start: Callable[[int, Batch, int], Running], blocks: int
) -> NodeStream:
    """Nothing comes back before the node's last microbatch; then its sums, and all its losses.

    Args:
        leaves: The node's microbatches.
        start: Starts the node's microbatch of this number.
        blocks: How many there are.
    """
    weights = [batch.weight for batch, _ in leaves]

    def begin(leaf: int, batch: Batch, seed: int) -> Microbatch:
        running = start(leaf, batch, seed)
        return Microbatch(items(running, last=leaf == len(leaves) - 1), running.stop)

    def items(running: Running, *, last: bool) -> Iterator[NodeItem]:
        for block in reversed(range(blocks)):
            arrays = running.next()
            if arrays is None:
                return
            if not last:
                yield BlockAdded(block)
                continue
            losses = arrays.pop() if block == 0 else None
            yield BlockGradient(block, np.concatenate(arrays) if len(arrays) > 1 else arrays[0])
            if losses is not None:
                yield Loss(tree_sum([float(loss) for loss in losses]), tree_sum(weights))

    return NodeStream(leaves, begin)
