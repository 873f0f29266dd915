"""Subtree sums in the device's memory: gradients are added there, and only the sums come back.

For each trained tensor the device holds the sums over perfect subtrees of the microbatches so far,
as a binary counter does: see `protocol.exact.tree_sum`, which does the same on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.wgpu.device.running import Submission
from backends.wgpu.device.target import Buffer, ComputeTarget, Copy
from backends.wgpu.shaders.dispatch import Dispatch
from backends.wgpu.shaders.sum_kernels import add, keep, note_losses
from protocol.base.limits import MICROBATCHES_PER_STEP


@dataclass(frozen=True, slots=True)
class Merge:
    """What is done with a microbatch's gradient.

    Attributes:
        pending_sums: Pending sums before it.
        merges: How often the newest two become one; the gradient counts as the newest.
        last: Whether it is the subtree's last: then one sum is left, and is brought back.
    """

    pending_sums: int
    merges: int
    last: bool


def merge_of(leaf: int, leaves: int) -> Merge:
    """For microbatch `leaf` (from 0) of a subtree of so many."""
    held, last = leaf.bit_count(), leaf == leaves - 1
    trailing_ones = (leaf + 1 & -(leaf + 1)).bit_length() - 1
    return Merge(held, held if last else trailing_ones, last)


def levels_of(leaves: int) -> int:
    """How many sums of each tensor are held at most."""
    merges = [merge_of(leaf, leaves) for leaf in range(leaves - 1)]
    return max((merge.pending_sums + 1 for merge in merges if not merge.merges), default=0)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where microbatches that are computed at once leave their results.

    Attributes:
        gradients: For each microbatch, for each block, last block first, a buffer of each of its
            tensors.
        loss: One float32 of each microbatch.
        stride: Bytes from one loss to the next.
    """

    gradients: Sequence[Sequence[Sequence[Buffer]]]
    loss: Buffer
    stride: int = 0


class SumStack:
    """The memory in which subtrees are summed, one subtree after the other.

    Args:
        device: Its additions are exact.
        nbytes: For each block, last block first, the bytes of each of its tensors.
        pairs: Of how many tensors a dispatch adds, a power of two.
    """

    def __init__(
        self, device: ComputeTarget, nbytes: Sequence[Sequence[int]], pairs: int = 1
    ) -> None:
        self._device = device
        self._nbytes = nbytes
        self._pairs = pairs
        self._levels: list[list[list[Buffer]]] = []
        self._losses = device.buffer(4 * (1 + MICROBATCHES_PER_STEP))

    @property
    def level_bytes(self) -> int:
        """Memory of one sum of all tensors."""
        return sum(map(sum, self._nbytes))

    @property
    def held_bytes(self) -> int:
        """Memory that is held for sums."""
        return len(self._levels) * self.level_bytes

    def release(self) -> None:
        """Let go of it."""
        self._levels.clear()

    def hold(self, levels: int) -> None:
        """Make room for so many sums of each tensor."""
        while len(self._levels) < levels:
            self._levels.append([[self._device.buffer(n) for n in b] for b in self._nbytes])

    def summing(
        self,
        parts: Sequence[Submission],
        sources: Sources,
        first: int,
        leaves: int,
        segments_before: int = 0,
    ) -> Iterator[Submission]:
        """The submissions of microbatches from `first` on, as many as there are sources, with what
        adds their results to the subtree's sums, one after the other; so many segments before the
        first block's stay as they are."""
        many = len(sources.gradients)
        merges = [merge_of(leaf, leaves) for leaf in range(first, first + many)]
        block = 0
        for part in parts:
            if segments_before or not part.last:
                segments_before -= part.last
                yield part
                continue
            buffers = _Numbered()
            given = [microbatch[block] for microbatch in sources.gradients]
            dispatches = [*self._of_block(block, given, merges, buffers)]
            copies = [
                Copy(buffer, nbytes)
                for buffer, nbytes in zip(self._levels[0][block], self._nbytes[block], strict=True)
            ]
            block += 1
            if block == len(self._nbytes):
                numbers = buffers[sources.loss], buffers[self._losses]
                note = note_losses(*numbers, many, sources.stride, first=first == 0)
                dispatches.append(note)
                copies.append(Copy(self._losses, 4 * leaves, 4))
            prepared = self._device.prepare(dispatches, [*buffers])
            last = merges[-1].last
            yield Submission(part.prepared + prepared, tuple(copies) if last else (), True)

    def _of_block(
        self,
        block: int,
        given: Sequence[Sequence[Buffer]],
        merges: Sequence[Merge],
        buffers: _Numbered,
    ) -> Iterator[Dispatch]:
        """Dispatches that add each microbatch's gradients of a block."""
        held = [level[block] for level in self._levels]
        for tensors in self._together(block):
            nbytes = max(self._nbytes[block][tensor] for tensor in tensors)
            sums = [[buffers[level[tensor]] for tensor in tensors] for level in held]
            for gradients, merge in zip(given, merges, strict=True):
                newest = [buffers[gradients[tensor]] for tensor in tensors]
                if not merge.merges:
                    yield keep(newest, sums[merge.pending_sums], nbytes)
                for level in reversed(range(merge.pending_sums - merge.merges, merge.pending_sums)):
                    yield add(newest, sums[level], nbytes)
                    newest = sums[level]

    def _together(self, block: int) -> Iterator[Sequence[int]]:
        """A block's tensors, in groups of one dispatch: powers of two, so that shaders are few;
        those of like sizes together."""
        sizes = self._nbytes[block]
        left = sorted(range(len(sizes)), key=lambda tensor: sizes[tensor])
        while left:
            many = min(self._pairs, 1 << len(left).bit_length() - 1)
            yield left[:many]
            left = left[many:]


class _Numbered(dict[Buffer, int]):
    """Buffers in the order in which they were first asked for."""

    def __missing__(self, buffer: Buffer) -> int:
        self[buffer] = len(self)
        return self[buffer]
