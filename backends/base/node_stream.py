"""The iterator that gives a node's gradients, microbatch by microbatch: any thread may close it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

from backends.base.accumulate import TreeAccumulator
from backends.base.interface import Batch, BlockAdded, BlockGradient, Leaf, Loss, NodeItem


class Microbatch(NamedTuple):
    """One that a device has begun with.

    Attributes:
        items: What it gives: blocks in reverse order, then the loss; ends early once stopped.
        stop: Abandons it; returns when the device works on it no more. Called by any thread.
    """

    items: Iterator[NodeItem]
    stop: Callable[[], None]


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
        sums: TreeAccumulator | None = None,
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
            elif (given := item if self.sums is None else self._added(self.sums, item)) is not None:
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

    def _added(self, sums: TreeAccumulator, item: NodeItem) -> NodeItem | None:
        leaf = sums.node.lo + self._leaf
        if isinstance(item, Loss):
            return sums.add_loss(leaf, item.loss_sum, item.weight)
        assert isinstance(item, BlockGradient)
        total = sums.add(leaf, item.block, item.values)
        return BlockAdded(item.block) if total is None else BlockGradient(item.block, total)


def added_on_host(
    leaves: Sequence[Leaf], begin: Callable[[int, Batch, int], Microbatch], blocks: int
) -> NodeStream:
    """The gradients of a node, added on the host: what every device can do."""
    return NodeStream(leaves, begin, TreeAccumulator.of(len(leaves), blocks))
