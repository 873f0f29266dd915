"""A node's gradients, microbatch by microbatch, added on the host where the device does not."""

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
    Leaf,
    Loss,
    NodeItem,
    Program,
)
from protocol.base.errors import SamestepError
from protocol.exact.bfloat16 import rounded
from protocol.exact.tree import Node
from protocol.exact.tree_sum import ADDITIONS, TreeSum
from protocol.spec.manifest import Block
from protocol.spec.run_spec import Precision

Parts = tuple[Array, ...]
"""A block's gradient as one flat float32 array for each of its tensors: to be read only."""


class BlockParts(NamedTuple):
    """The gradient of one block over one microbatch, as autograd has left it."""

    block: int
    values: Parts


class Microbatch(NamedTuple):
    """One that a device has begun with.

    Attributes:
        items: What it gives: blocks in reverse order, then the loss; ends early once stopped.
        stop: Abandons it; returns when the device works on it no more. Called by any thread.
    """

    items: Iterator[NodeItem | BlockParts]
    stop: Callable[[], None]


class HostSums:
    """The sums of one node, on the host.

    Leaves come in order, and of each leaf its blocks. After the last leaf's block is added, the
    block's node sum is final and given out at once, while that leaf's backward still runs on
    earlier blocks. At most log2(leaves) + 1 arrays are held of a block.

    Args:
        leaves: How many.
        blocks: How many.
        precision: bfloat16: every leaf and every sum is rounded to it.
    """

    def __init__(self, leaves: int, blocks: int, precision: Precision = "float32") -> None:
        self._leaves = leaves
        self._precision = precision
        self._blocks = [self._nothing() for _ in range(blocks)]
        self._losses = TreeSum[float](leaves, add)
        self._weights = TreeSum[float](leaves, add)

    def add(self, leaf: int, block: int, values: Array | Parts) -> Array | None:
        """Add one microbatch's gradient of one block.

        Args:
            leaf: The microbatch's number in the node.
            block: The block's number.
            values: Flat float32; the sum's own from now on, it adds into it. Parts are only read.

        Returns:
            The node's sum of the block after its last leaf, the caller's own; else None.
        """
        if self._precision == "bfloat16":
            values = rounded(_joined(values))
        self._blocks[block].put(Node(leaf, leaf + 1), values)
        total = self._blocks[block].total
        if total is None:
            return None
        self._blocks[block] = self._nothing()  # its memory is the receiver's, not this node's
        return _joined(total)

    def _nothing(self) -> TreeSum[Array | Parts]:
        return TreeSum(self._leaves, partial(_sum_of, ADDITIONS[self._precision]))

    def add_loss(self, leaf: int, loss_sum: float, weight: float) -> Loss | None:
        """Add one microbatch's loss sum and weight, in float64; gives the node's after its last."""
        self._losses.put(Node(leaf, leaf + 1), loss_sum)
        self._weights.put(Node(leaf, leaf + 1), weight)
        loss, total = self._losses.total, self._weights.total
        return None if loss is None or total is None else Loss(loss, total)


def _joined(values: Array | Parts) -> Array:
    """Flat, and the caller's own."""
    if isinstance(values, tuple):
        return np.concatenate(values)
    assert values.dtype == "float32"
    assert values.flags.writeable
    return values


def _sum_of(
    add: Callable[[Array, Array], Array], left: Array | Parts, right: Array | Parts
) -> Array:
    """Left + right, into left; where that is in parts, the first sum is what joins them."""
    if not isinstance(right, tuple):
        return add(_joined(left), right)
    into = np.empty(sum(map(len, right)), np.float32) if isinstance(left, tuple) else left
    lo = 0
    with np.errstate(over="ignore", invalid="ignore"):  # found as non-finite later
        for number, part in enumerate(right):
            here = into[lo : lo + len(part)]
            lo += len(part)
            np.add(left[number] if isinstance(left, tuple) else here, part, out=here)
    return into


class NodeStream:
    """See `backends.base.interface.NodeGradients`.

    A generator cannot be closed while another thread waits inside it; this can, so that a halt or
    a cancelled node need not wait for the rest of a forward pass. Once closed, it ends.

    Args:
        leaves: The node's microbatches; the first is begun at once, each other after the one
            before.
        begin: Takes the number of a microbatch in its node, its batch and its seed.
        sums: Adds what they give, on the host; None where the device has done so.
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

    def __next__(self) -> NodeItem:
        while True:
            item = next(self._microbatch.items, None)
            if item is None:
                self._go_on()
            elif self.sums is None:
                assert not isinstance(item, BlockParts), "who adds by itself gives whole blocks"
                return item
            elif (given := self._added(self.sums, item)) is not None:
                return given

    def close(self) -> None:
        """Abandon what is left of the node; returns when the device works on it no more."""
        with self._lock:
            self._closed = True
        self._microbatch.stop()

    def __del__(self) -> None:
        if hasattr(self, "_microbatch"):
            self._microbatch.stop()

    def _go_on(self) -> None:
        """Begin with the next microbatch; under the lock, so that none is begun once closed."""
        with self._lock:
            self._leaf += 1
            if self._closed or self._leaf >= len(self._leaves):
                raise StopIteration
            self._microbatch = self._begin(self._leaf, *self._leaves[self._leaf])

    def _added(self, sums: HostSums, item: NodeItem | BlockParts) -> NodeItem | None:
        if isinstance(item, Loss):
            return sums.add_loss(self._leaf, item.loss_sum, item.weight)
        assert isinstance(item, BlockGradient | BlockParts)
        total = sums.add(self._leaf, item.block, item.values)
        return BlockAdded(item.block) if total is None else BlockGradient(item.block, total)


class HostSummedProgram:
    """What programs share whose gradients come by the microbatch and are added on the host."""

    loss_scale = 1.0
    """See `Program`."""
    memory = ""
    """Not known."""
    parity = ""
    """There is nothing that gradients could be compared with."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self._blocks = blocks

    def load(self, parameters: list[Array]) -> None:
        """Copy values in; see `Program.load`.

        Raises:
            SamestepError: The arrays do not fit the blocks.
        """
        check_sizes(parameters, self._blocks)
        self._load(parameters)

    def gradients(self, leaves: Sequence[Leaf]) -> NodeStream:
        """One node; the device starts on it at once, or with the first `next`."""
        return added_on_host(leaves, self._begin, len(self._blocks))

    def _load(self, parameters: list[Array]) -> None:
        raise NotImplementedError

    def _begin(self, leaf: int, batch: Batch, seed: int) -> Microbatch:
        raise NotImplementedError


def check_sizes(parameters: Sequence[Array], blocks: Sequence[Block]) -> None:
    """Refuse arrays that do not fit the blocks.

    Raises:
        SamestepError: They do not.
    """
    sizes, expected = [len(values) for values in parameters], [block.elements for block in blocks]
    if sizes != expected:
        raise SamestepError(f"expected blocks of {expected} elements, got {sizes}")


def added_on_host(
    leaves: Sequence[Leaf], begin: Callable[[int, Batch, int], Microbatch], blocks: int
) -> NodeStream:
    """The gradients of a node, added on the host: what every device can do."""
    return NodeStream(leaves, begin, HostSums(len(leaves), blocks))


def rounded_by_microbatch(program: Program, leaves: Sequence[Leaf], blocks: int) -> NodeStream:
    """The gradients of a node, every leaf and every sum of two rounded to bfloat16.

    On any device: what it would add by itself is asked for microbatch by microbatch.
    """

    def begin(leaf: int, batch: Batch, seed: int) -> Microbatch:
        del leaf
        stream = program.gradients([(batch, seed)])
        return Microbatch(iter(stream), stream.close)

    return NodeStream(leaves, begin, HostSums(len(leaves), blocks, "bfloat16"))
