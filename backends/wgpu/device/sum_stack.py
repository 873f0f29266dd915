"""Node sums in the device's memory: gradients are added there, and only the sums come back.

For each trained tensor the device holds the sums over perfect subtrees of the microbatches so far,
as a binary counter does: see `protocol.exact.tree_sum`, which does the same on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backends.wgpu.device.running import Submission
from backends.wgpu.device.target import Buffer, ComputeTarget, Copy
from backends.wgpu.shaders.dispatch import Dispatch
from backends.wgpu.shaders.sum_kernels import add, keep, note_loss
from protocol.base.limits import MICROBATCHES_PER_STEP


@dataclass(frozen=True, slots=True)
class Merge:
    """What is done with a microbatch's gradient.

    Attributes:
        held: Sums that are held before it.
        merges: How often the newest two become one; the gradient counts as the newest.
        last: Whether it is the node's last: then one sum is left, and is brought back.
    """

    held: int
    merges: int
    last: bool


def merge_of(leaf: int, leaves: int) -> Merge:
    """For microbatch `leaf` (from 0) of a node of so many."""
    held, last = leaf.bit_count(), leaf == leaves - 1
    trailing_ones = (leaf + 1 & -(leaf + 1)).bit_length() - 1
    return Merge(held, held if last else trailing_ones, last)


def levels_of(leaves: int) -> int:
    """How many sums of each tensor are held at most."""
    merges = [merge_of(leaf, leaves) for leaf in range(leaves - 1)]
    return max((merge.held + 1 for merge in merges if not merge.merges), default=0)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where a microbatch leaves its results.

    Attributes:
        gradients: For each block, last block first, a buffer of each of its tensors.
        loss: One float32.
    """

    gradients: Sequence[Sequence[Buffer]]
    loss: Buffer


class SumStack:
    """The memory in which nodes are summed, one node after the other.

    Args:
        device: Its additions are exact.
        nbytes: For each block, last block first, the bytes of each of its tensors.
    """

    def __init__(self, device: ComputeTarget, nbytes: Sequence[Sequence[int]]) -> None:
        self._device = device
        self._nbytes = nbytes
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
        self, parts: Sequence[Submission], sources: Sources, leaf: int, leaves: int
    ) -> Iterator[Submission]:
        """A microbatch's submissions, with what adds its results to the node's sums."""
        merge = merge_of(leaf, leaves)
        block = 0
        for part in parts:
            if not part.last:
                yield part
                continue
            dispatches, buffers = self._of_block(block, sources.gradients[block], merge)
            copies = [
                Copy(buffer, nbytes)
                for buffer, nbytes in zip(self._levels[0][block], self._nbytes[block], strict=True)
            ]
            block += 1
            if block == len(self._nbytes):
                given = len(buffers)
                buffers += [sources.loss, self._losses]
                dispatches.append(note_loss(given, given + 1, first=leaf == 0))
                copies.append(Copy(self._losses, 4 * leaves, 4))
            prepared = self._device.prepare(dispatches, buffers)
            yield Submission(part.prepared + prepared, tuple(copies) if merge.last else (), True)

    def _of_block(
        self, block: int, gradients: Sequence[Buffer], merge: Merge
    ) -> tuple[list[Dispatch], list[Buffer]]:
        """Dispatches over the buffers given with them."""
        dispatches: list[Dispatch] = []
        buffers: list[Buffer] = []
        for tensor, given in enumerate(gradients):
            held = [level[block][tensor] for level in self._levels[: merge.held + 1]]
            first = len(buffers)
            buffers += [*held, given]
            newest = len(buffers) - 1
            nbytes = held[0].nbytes
            if not merge.merges:
                dispatches.append(keep(newest, first + merge.held, nbytes))
            for level in reversed(range(merge.held - merge.merges, merge.held)):
                dispatches.append(add(newest, first + level, nbytes))
                newest = first + level
        return dispatches, buffers
