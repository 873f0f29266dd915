"""Compute a subtree's gradients microbatch by microbatch, and add them on the host if the device
cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import add
from typing import NamedTuple, Self

import numpy as np

from backends.base.interface import (
    Array,
    Batch,
    BlockAdded,
    BlockGradient,
    GradientItem,
    Leaf,
    Loss,
    Program,
)
from protocol.base.errors import SamestepError
from protocol.exact.reduction.bfloat16 import round_to_bfloat16
from protocol.exact.reduction.tree import Subtree
from protocol.exact.reduction.tree_sum import ADDITIONS, TreeSum
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import Precision

Parts = tuple[Array, ...]
"""A block's gradient as one flat float32 array per tensor; read-only."""


class BlockParts(NamedTuple):
    """The gradient of one block over one microbatch, as autograd returns it."""

    block: int
    values: Parts


class Microbatch(NamedTuple):
    """A microbatch that a device has started.

    Attributes:
        items: The results: blocks in reverse order, then the loss. The iterator ends early once the
            microbatch is stopped.
        stop: Abandons the microbatch, and returns once the device has stopped. Thread-safe.
    """

    items: Iterator[GradientItem | BlockParts]
    stop: Callable[[], None]


class HostSums:
    """The sums of one subtree, on the host.

    Leaves (microbatches) are added in order. A block's sum is final once the last leaf's gradient
    is added, and is returned while that leaf's backward still runs on earlier blocks. At most
    log2(leaves) + 1 arrays are stored per block.

    Args:
        leaves: Number of leaves.
        blocks: Number of blocks.
        precision: With bfloat16, every leaf and every sum is rounded.
    """

    def __init__(self, leaves: int, blocks: int, precision: Precision = "float32") -> None:
        self._leaves = leaves
        self._precision = precision
        self._blocks = [self._new_sum() for _ in range(blocks)]
        self._losses = TreeSum[float](leaves, add)
        self._weights = TreeSum[float](leaves, add)

    def add(self, leaf: int, block: int, values: Array | Parts) -> Array | None:
        """Add one microbatch's gradient of one block.

        Args:
            leaf: The microbatch's number in the subtree.
            block: The block's number.
            values: Flat float32, owned by the sum from now on; `Parts` are only read.

        Returns:
            The subtree's sum of the block after its last leaf, owned by the caller; else None.
        """
        if self._precision == "bfloat16":
            values = round_to_bfloat16(_concatenate(values))
        self._blocks[block].put(Subtree(leaf, leaf + 1), values)
        total = self._blocks[block].total
        if total is None:
            return None
        self._blocks[block] = self._new_sum()  # the receiver owns the sum's memory
        return _concatenate(total)

    def _new_sum(self) -> TreeSum[Array | Parts]:
        return TreeSum(self._leaves, partial(_add_parts, ADDITIONS[self._precision]))

    def add_loss(self, leaf: int, loss_sum: float, weight: float) -> Loss | None:
        """Add one microbatch's loss sum and weight in float64; return the totals after the last."""
        self._losses.put(Subtree(leaf, leaf + 1), loss_sum)
        self._weights.put(Subtree(leaf, leaf + 1), weight)
        loss, total = self._losses.total, self._weights.total
        return None if loss is None or total is None else Loss(loss, total)


def _concatenate(values: Array | Parts) -> Array:
    """Return the values as one flat array that the caller owns."""
    if isinstance(values, tuple):
        return np.concatenate(values)
    assert values.dtype == "float32"
    assert values.flags.writeable
    return values


def _add_parts(
    add: Callable[[Array, Array], Array], left: Array | Parts, right: Array | Parts
) -> Array:
    """Add `right` to `left`, in place unless `left` is in parts."""
    if not isinstance(right, tuple):
        return add(_concatenate(left), right)
    total = np.empty(sum(map(len, right)), np.float32) if isinstance(left, tuple) else left
    lo = 0
    with np.errstate(over="ignore", invalid="ignore"):  # non-finite sums are detected later
        for number, part in enumerate(right):
            slice_ = total[lo : lo + len(part)]
            lo += len(part)
            np.add(left[number] if isinstance(left, tuple) else slice_, part, out=slice_)
    return total


class SubtreeGradients:
    """An iterator that implements `backends.base.interface.GradientStream`.

    Unlike a generator it can be closed while another thread waits inside it, so a halt or a
    canceled subtree need not wait for the rest of a forward pass. Once closed, it ends.

    Args:
        leaves: The subtree's microbatches; the first starts at once.
        begin: Starts a microbatch, given its number in the subtree, its batch and its seed.
        sums: Adds the results on the host; None if the device has added them.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        begin: Callable[[int, Batch, int], Microbatch],
        sums: HostSums | None = None,
    ) -> None:
        self.sums = sums
        self._begin = begin
        self._leaves = leaves
        self._leaf = 0
        self._closed = False
        self._lock = threading.Lock()
        self._microbatch = begin(0, *leaves[0])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GradientItem:
        while True:
            item = next(self._microbatch.items, None)
            if item is None:
                self._start_next()
            elif self.sums is None:
                assert not isinstance(item, BlockParts), (
                    "expected whole blocks from a device that adds gradients itself, got parts"
                )
                return item
            elif (item_of_sum := self._add(self.sums, item)) is not None:
                return item_of_sum

    def close(self) -> None:
        """Abandon the rest of the subtree, and return once the device has stopped."""
        with self._lock:
            self._closed = True
        self._microbatch.stop()

    def __del__(self) -> None:
        if hasattr(self, "_microbatch"):
            self._microbatch.stop()

    def _start_next(self) -> None:
        """Start the next microbatch, under the lock, so that none starts once closed."""
        with self._lock:
            self._leaf += 1
            if self._closed or self._leaf >= len(self._leaves):
                raise StopIteration
            self._microbatch = self._begin(self._leaf, *self._leaves[self._leaf])

    def _add(self, sums: HostSums, item: GradientItem | BlockParts) -> GradientItem | None:
        if isinstance(item, Loss):
            return sums.add_loss(self._leaf, item.loss_sum, item.weight)
        assert isinstance(item, BlockGradient | BlockParts)
        total = sums.add(self._leaf, item.block, item.values)
        return BlockAdded(item.block) if total is None else BlockGradient(item.block, total)


class HostSummedProgram:
    """Base of programs whose gradients are added on the host."""

    loss_scale = 1.0
    """See `Program`."""
    memory = ""
    """Unknown: no estimate is made."""
    parity = ""
    """There is no reference to compare gradients with."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self._blocks = blocks

    def load(self, parameters: list[Array]) -> None:
        """Copy in parameters; see `Program.load`.

        Raises:
            SamestepError: The arrays do not match the blocks.
        """
        check_sizes(parameters, self._blocks)
        self._load(parameters)

    def gradients(self, leaves: Sequence[Leaf]) -> SubtreeGradients:
        """Compute one subtree; the device starts now or with the first `next`."""
        return sum_on_host(leaves, self._begin, len(self._blocks))

    def _load(self, parameters: list[Array]) -> None:
        raise NotImplementedError

    def _begin(self, leaf: int, batch: Batch, seed: int) -> Microbatch:
        raise NotImplementedError


def check_sizes(parameters: Sequence[Array], blocks: Sequence[Block]) -> None:
    """Refuse arrays that do not match the blocks.

    Raises:
        SamestepError: The sizes differ.
    """
    sizes, expected = [len(values) for values in parameters], [block.elements for block in blocks]
    if sizes != expected:
        raise SamestepError(f"expected blocks of {expected} elements, got {sizes}")


def sum_on_host(
    leaves: Sequence[Leaf], begin: Callable[[int, Batch, int], Microbatch], blocks: int
) -> SubtreeGradients:
    """Compute a subtree's gradients and add them on the host, which works for every device."""
    return SubtreeGradients(leaves, begin, HostSums(len(leaves), blocks))


def sum_rounded_on_host(program: Program, leaves: Sequence[Leaf], blocks: int) -> SubtreeGradients:
    """Compute a subtree's gradients, with every leaf and every sum rounded to bfloat16.

    This works for every device: it requests single microbatches and adds them on the host.
    """

    def begin(leaf: int, batch: Batch, seed: int) -> Microbatch:
        del leaf
        stream = program.gradients([(batch, seed)])
        return Microbatch(iter(stream), stream.close)

    return SubtreeGradients(leaves, begin, HostSums(len(leaves), blocks, "bfloat16"))
