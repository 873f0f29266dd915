"""Subtree sums in the device's memory: gradients are added there, and only sums are read back.

For each trained tensor the device stores the sums over complete subtrees of the microbatches so
far, like the digits of a binary counter; `protocol.exact.reduction.tree_sum` does the same on the
host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.wgpu.device.running import Submission
from backends.wgpu.device.target import Buffer, ComputeTarget, Copy
from backends.wgpu.shaders.dispatch import Dispatch
from backends.wgpu.shaders.sum_kernels import add, copy, store_losses
from protocol.base.limits import MICROBATCHES_PER_STEP


@dataclass(frozen=True, slots=True)
class LeafAdditions:
    """The additions for a microbatch's gradient.

    Attributes:
        pending_sums: Number of pending sums before the gradient.
        merges: How many times the two newest sums are added; the gradient is the newest sum.
        is_last: Whether this is the subtree's last microbatch, after which one sum is left.
    """

    pending_sums: int
    merges: int
    is_last: bool


def additions_for_leaf(leaf: int, leaves: int) -> LeafAdditions:
    """Return the additions for microbatch `leaf` (from 0) of a subtree of `leaves`."""
    pending, is_last = leaf.bit_count(), leaf == leaves - 1
    trailing_ones = (leaf + 1 & -(leaf + 1)).bit_length() - 1
    return LeafAdditions(pending, pending if is_last else trailing_ones, is_last)


def largest_level_count(leaves: int) -> int:
    """Return the largest number of pending sums per tensor."""
    merges = [additions_for_leaf(leaf, leaves) for leaf in range(leaves - 1)]
    return max((merge.pending_sums + 1 for merge in merges if not merge.merges), default=0)


@dataclass(frozen=True, slots=True)
class Sources:
    """Buffers with the results of microbatches that are computed together.

    Attributes:
        gradients: Per microbatch, per block (last block first), a buffer per tensor.
        loss: The losses, one float32 per microbatch.
        stride: Distance between losses in bytes.
    """

    gradients: Sequence[Sequence[Sequence[Buffer]]]
    loss: Buffer
    stride: int = 0


class SumStack:
    """The memory of subtree sums; subtrees are summed one at a time.

    Args:
        device: A device with exact additions.
        nbytes: Per block (last block first), the size of each tensor in bytes.
        tensors_per_dispatch: Number of tensors that one dispatch adds, a power of two.
    """

    def __init__(
        self, device: ComputeTarget, nbytes: Sequence[Sequence[int]], tensors_per_dispatch: int = 1
    ) -> None:
        self._device = device
        self._nbytes = nbytes
        self._tensors_per_dispatch = tensors_per_dispatch
        self._levels: list[list[list[Buffer]]] = []
        self._losses = device.buffer(4 * (1 + MICROBATCHES_PER_STEP))

    @property
    def level_bytes(self) -> int:
        """Memory of one sum of all tensors."""
        return sum(map(sum, self._nbytes))

    @property
    def reserved_bytes(self) -> int:
        """Memory allocated for sums."""
        return len(self._levels) * self.level_bytes

    def release(self) -> None:
        """Free the memory."""
        self._levels.clear()

    def reserve(self, levels: int) -> None:
        """Allocate memory for `levels` sums of each tensor."""
        while len(self._levels) < levels:
            self._levels.append([[self._device.buffer(n) for n in b] for b in self._nbytes])

    def append_additions(
        self,
        parts: Sequence[Submission],
        sources: Sources,
        first_leaf: int,
        leaves: int,
        segments_before: int = 0,
    ) -> Iterator[Submission]:
        """Append additions to the submissions of microbatches.

        Args:
            parts: Submissions that compute the microbatches.
            sources: Buffers with the results of the microbatches.
            first_leaf: Number of the first microbatch in its subtree.
            leaves: Number of microbatches in the subtree.
            segments_before: Number of segments before the first block's segment; they are
                unchanged.
        """
        count = len(sources.gradients)
        merges = [
            additions_for_leaf(leaf, leaves) for leaf in range(first_leaf, first_leaf + count)
        ]
        block = 0
        for part in parts:
            if segments_before or not part.is_last:
                segments_before -= part.is_last
                yield part
                continue
            buffers = _BufferNumbers()
            gradients = [microbatch[block] for microbatch in sources.gradients]
            dispatches = [*self._add_block(block, gradients, merges, buffers)]
            copies = [
                Copy(buffer, nbytes)
                for buffer, nbytes in zip(self._levels[0][block], self._nbytes[block], strict=True)
            ]
            block += 1
            if block == len(self._nbytes):
                numbers = buffers[sources.loss], buffers[self._losses]
                store_dispatch = store_losses(
                    *numbers, count, sources.stride, first=first_leaf == 0
                )
                dispatches.append(store_dispatch)
                copies.append(Copy(self._losses, 4 * leaves, 4))
            commands = self._device.prepare(dispatches, [*buffers])
            is_last = merges[-1].is_last
            yield Submission(part.commands + commands, tuple(copies) if is_last else (), True)

    def _add_block(
        self,
        block: int,
        microbatch_gradients: Sequence[Sequence[Buffer]],
        merges: Sequence[LeafAdditions],
        buffers: _BufferNumbers,
    ) -> Iterator[Dispatch]:
        """Yield dispatches that add each microbatch's gradients of a block."""
        level_buffers = [level[block] for level in self._levels]
        for tensors in self._tensor_groups(block):
            nbytes = max(self._nbytes[block][tensor] for tensor in tensors)
            sums = [[buffers[level[tensor]] for tensor in tensors] for level in level_buffers]
            for gradients, merge in zip(microbatch_gradients, merges, strict=True):
                newest_buffers = [buffers[gradients[tensor]] for tensor in tensors]
                if not merge.merges:
                    yield copy(newest_buffers, sums[merge.pending_sums], nbytes)
                for level in reversed(range(merge.pending_sums - merge.merges, merge.pending_sums)):
                    yield add(newest_buffers, sums[level], nbytes)
                    newest_buffers = sums[level]

    def _tensor_groups(self, block: int) -> Iterator[Sequence[int]]:
        """Yield groups of a block's tensors, one dispatch each.

        The tensors have similar sizes, and their number is a power of two, which limits the number
        of shaders.
        """
        sizes = self._nbytes[block]
        remaining = sorted(range(len(sizes)), key=lambda tensor: sizes[tensor])
        while remaining:
            count = min(self._tensors_per_dispatch, 1 << len(remaining).bit_length() - 1)
            yield remaining[:count]
            remaining = remaining[count:]


class _BufferNumbers(dict[Buffer, int]):
    """Numbers buffers in order of first use."""

    def __missing__(self, buffer: Buffer) -> int:
        self[buffer] = len(self)
        return self[buffer]
