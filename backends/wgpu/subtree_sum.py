"""The gradients of a subtree whose sums are in the device's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from backends.base.interface import (
    Array,
    Batch,
    BlockAdded,
    BlockGradient,
    GradientItem,
    Leaf,
    Loss,
)
from backends.base.subtree_gradients import Microbatch, SubtreeGradients
from backends.wgpu.device.running import Running
from protocol.exact.tree_sum import tree_sum


def added_on_device(  # noqa: PLR0917
    leaves: Sequence[Leaf],
    groups: Sequence[range],
    start: Callable[[range], Running],
    marked: Callable[[int, Array], Array],
    blocks: int,
    begun: Callable[[Running, range], bool],
) -> SubtreeGradients:
    """Nothing comes back before the subtree's last microbatch; then its sums, and all its losses.

    Args:
        leaves: The subtree's microbatches.
        groups: Their numbers, in order: those of a group are computed at once.
        start: Starts a group.
        marked: Takes a block's number and its sum once all groups were started; marks in it the
            tensors that no microbatch reaches.
        blocks: How many there are.
        begun: Takes a group's run, and reads what comes before its blocks; whether it goes on.
    """
    weights = [batch.weight for batch, _ in leaves]

    def begin(number: int, _batch: Batch, _seed: int) -> Microbatch:
        group = groups[number]
        running = start(group)
        return Microbatch(items(running, group), running.stop)

    def items(running: Running, group: range) -> Iterator[GradientItem]:
        if not begun(running, group):
            return
        for block in reversed(range(blocks)):
            arrays = running.next()
            if arrays is None:
                return
            if block == blocks - 1:  # all but the group's last have no items of their own
                for added in [*reversed(range(blocks))] * (len(group) - 1):
                    yield BlockAdded(added)
                    if running.stopped:
                        return
            if group.stop < len(leaves):
                yield BlockAdded(block)
                continue
            losses = arrays.pop() if block == 0 else None
            values = np.concatenate(arrays) if len(arrays) > 1 else np.array(arrays[0])
            yield BlockGradient(block, marked(block, values))
            if losses is not None:
                yield Loss(tree_sum([float(loss) for loss in losses]), tree_sum(weights))

    return SubtreeGradients([leaves[group.start] for group in groups], begin)
