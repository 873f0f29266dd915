"""Add gradients over the microbatches of a subtree on the device; copy each block to the host once.

Devices add float32 as IEEE 754 defines, so sums along the tree have the same bits as on the host.
Only `BlockCopy.finish` makes the host wait for the device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from backends.base.interface import Array, Loss
from protocol.exact.reduction.tree import Subtree
from protocol.exact.reduction.tree_sum import TreeSum, tree_sum
from protocol.spec.manifest import Block

_SMALLEST_RING_ELEMENTS: Final = 1 << 20


def join_parts(
    block: Block, parts: Sequence[torch.Tensor | None], device: torch.device
) -> torch.Tensor:
    """Return a block's gradient, flat float32.

    Parts that are None are absent; see `protocol.exact.reduction.absent`.
    """
    absent_value = -0.0
    flat = torch.cat(
        [
            torch.full((tensor.elements,), absent_value, device=device) if part is None else part
            for tensor, part in zip(block.tensors, parts, strict=True)
        ]
    )
    starts = [
        slice_.start
        for (tensor, slice_), part in zip(block.slices(), parts, strict=True)
        if part is not None and tensor.elements
    ]
    for start in starts:  # a first value of -0.0, which would mean "absent", becomes +0.0
        flat[start : start + 1] += 0.0
    return flat


class SubtreeSums:
    """The sums of one subtree, which the device adds.

    Args:
        leaves: Number of microbatches.
        blocks: Number of blocks.
        device: The device.
    """

    def __init__(self, leaves: int, blocks: int, device: torch.device) -> None:
        self.leaves = leaves
        self._device = device
        self._blocks = [TreeSum[torch.Tensor](leaves, _add) for _ in range(blocks)]
        self._losses: list[torch.Tensor | None] = [None] * leaves
        """Each loss as float32 values: one, or the two halves of a float64."""
        self._weights = [0.0] * leaves

    def add(self, leaf: int, block: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Add a microbatch's gradient of a block; return the sum after the last microbatch.

        The sum reuses the gradient's memory.
        """
        sums = self._blocks[block]
        sums.put(Subtree(leaf, leaf + 1), gradient)
        total = sums.total
        if total is not None:
            self._blocks[block] = TreeSum[torch.Tensor](self.leaves, _add)
        return total

    def set_loss(self, leaf: int, loss: torch.Tensor, weight: float) -> None:
        """Store a microbatch's loss, which stays on the device, and its weight.

        A microbatch that is computed again after a failure replaces its earlier values.
        """
        values = loss.detach().to(self._device).reshape(1)
        if values.dtype != torch.float64:  # not all devices support float64
            values = values.float()
        self._losses[leaf] = values.view(torch.float32)
        self._weights[leaf] = weight

    def append_losses(self, block: torch.Tensor) -> torch.Tensor:
        """Return the last block followed by all losses, so that one copy is enough."""
        losses = [loss for loss in self._losses if loss is not None]
        if len(losses) != self.leaves:
            raise AssertionError(f"expected {self.leaves} losses, got {len(losses)}")
        return torch.cat([block, *losses])

    @property
    def loss_elements(self) -> int:
        """The number of elements that `append_losses` appends."""
        return sum(self._loss_sizes())

    def loss(self, host_values: Array) -> Loss:
        """Return the subtree's loss from the values that `append_losses` appended."""
        losses, lo = [], 0
        for size in self._loss_sizes():
            # Copied because float64 values must be aligned.
            values = host_values[lo : lo + size].copy()
            losses.append(float(values.view(np.float64 if size > 1 else np.float32)[0]))
            lo += size
        return Loss(tree_sum(losses), tree_sum(self._weights))

    def _loss_sizes(self) -> list[int]:
        return [0 if loss is None else len(loss) for loss in self._losses]


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


class StagingMemory:
    """A ring of pinned host memory, through which blocks are copied in order.

    Torch's own cache of pinned memory rounds each size up to a power of two and never frees it.

    Args:
        block_elements: The size of each block.
    """

    def __init__(self, block_elements: Sequence[int]) -> None:
        staging_elements = max(*block_elements, min(sum(block_elements), _SMALLEST_RING_ELEMENTS))
        self._memory = torch.empty(1 << (staging_elements - 1).bit_length(), pin_memory=True)
        self._in_use: deque[tuple[int, int]] = deque()
        self._changed = threading.Condition()

    def take(self, elements: int, is_abandoned: Callable[[], bool]) -> torch.Tensor | None:
        """Return the next part of the memory, after waiting until it is free; None once abandoned.

        A part larger than the ring gets separate memory.
        """
        if elements > len(self._memory):
            return torch.empty(elements, pin_memory=True)
        with self._changed:
            start = None
            while (start := self._free_start(elements)) is None and not is_abandoned():
                self._changed.wait()
            if start is None:
                return None
            self._in_use.append((start, start + elements))
            return self._memory[start : start + elements]

    def release(self, part: torch.Tensor) -> None:
        """Make a part free again. Parts must be released in the order in which they were taken."""
        with self._changed:
            if part.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr():
                self._in_use.popleft()
            self._changed.notify_all()

    def release_all(self) -> None:
        """Free all parts, which no copy uses any more."""
        with self._changed:
            self._in_use.clear()
            self._changed.notify_all()

    def wake(self) -> None:
        """Make a waiting `take` check again whether it is abandoned."""
        with self._changed:
            self._changed.notify_all()

    def _free_start(self, elements: int) -> int | None:
        if not self._in_use:
            return 0
        used_start, used_end = self._in_use[0][0], self._in_use[-1][1]
        if used_start < used_end:  # the used memory does not wrap around
            if used_end + elements <= len(self._memory):
                return used_end
            return 0 if elements <= used_start else None
        return used_end if used_end + elements <= used_start else None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block's sum on its way to the host.

    Attributes:
        block: The block's number.
        host: The destination: flat float32, the block and then the losses.
        copy_event: Recorded once the copy is complete.
        sums: The sums whose losses are copied too; None if the block is not the last.
    """

    block: int
    host: torch.Tensor
    copy_event: torch.Event
    sums: SubtreeSums | None

    def finish(self, staging: StagingMemory) -> tuple[Array, Loss | None]:
        """Wait for the copy; return the block's sum, owned by the caller, and the loss if it was
        copied too."""
        self.copy_event.synchronize()
        values: Any = np.array(self.host.numpy())
        staging.release(self.host)
        if self.sums is None:
            return values, None
        split = len(values) - self.sums.loss_elements
        return values[:split].copy(), self.sums.loss(values[split:])


class BlockCopier:
    """Copies blocks to the host on a separate stream, in parallel with backward."""

    def __init__(self, device: torch.device, blocks: Sequence[Block]) -> None:
        self.device = device
        self._stream = torch.Stream(device)
        self.staging = StagingMemory([block.elements for block in blocks])

    def copy(
        self,
        number: int,
        values: torch.Tensor,
        sums: SubtreeSums | None,
        is_abandoned: Callable[[], bool],
    ) -> BlockCopy | None:
        """Start copying a block; return None once abandoned."""
        host = self.staging.take(len(values), is_abandoned)
        if host is None:
            return None
        self._stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self._stream:
            host.copy_(values, non_blocking=True)
            values.record_stream(self._stream)
            copy_event = torch.Event(self.device)
            copy_event.record(self._stream)
        return BlockCopy(number, host, copy_event, sums)
