"""Sum a subtree's gradients in the device's memory."""

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
from backends.wgpu.device.running import RunningPlan
from protocol.exact.reduction.tree_sum import tree_sum


def sum_on_device(  # noqa: PLR0917
    leaves: Sequence[Leaf],
    groups: Sequence[range],
    start: Callable[[range], RunningPlan],
    mark_absent: Callable[[int, Array], Array],
    blocks: int,
    read_embeddings: Callable[[RunningPlan, range], bool],
) -> SubtreeGradients:
    """Sum a subtree on the device; read back the sums and the losses after the last microbatch.

    Args:
        leaves: The subtree's microbatches.
        groups: Ranges of the leaves, in order; the leaves of a range are computed together.
        start: Starts a group.
        mark_absent: Takes a block's number and its sum after all groups have started; marks the
            tensors that no microbatch reaches.
        blocks: Number of blocks.
        read_embeddings: Takes a group's run and reads the embeddings before its blocks; returns
            whether to continue.
    """
    weights = [batch.weight for batch, _ in leaves]

    def start_leaf(number: int, _batch: Batch, _seed: int) -> Microbatch:
        group = groups[number]
        run = start(group)
        return Microbatch(group_items(run, group), run.stop)

    def group_items(run: RunningPlan, group: range) -> Iterator[GradientItem]:
        if not read_embeddings(run, group):
            return
        for block in reversed(range(blocks)):
            arrays = run.next()
            if arrays is None:
                return
            if block == blocks - 1:  # the group's other microbatches yield no gradients
                for finished_block in [*reversed(range(blocks))] * (len(group) - 1):
                    yield BlockAdded(finished_block)
                    if run.is_stopped:
                        return
            if group.stop < len(leaves):
                yield BlockAdded(block)
                continue
            losses = arrays.pop() if block == 0 else None
            values = np.concatenate(arrays) if len(arrays) > 1 else np.array(arrays[0])
            yield BlockGradient(block, mark_absent(block, values))
            if losses is not None:
                yield Loss(tree_sum([float(loss) for loss in losses]), tree_sum(weights))

    return SubtreeGradients([leaves[group.start] for group in groups], start_leaf)
