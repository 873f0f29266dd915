"""Collects gradients while backward runs and gives whole blocks away in reverse order.

A parameter's hook fires when its gradient is final. A block is given away once all its tensors
are there and all later blocks are gone; so the order never depends on the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from protocol.errors import SamestepError
from protocol.manifest import Block

Emit = Callable[[int, torch.Tensor], None]
"""Takes a block's number and its gradient: flat float32 on the device, the receiver's own."""


@dataclass(slots=True)
class _Open:
    """What a microbatch has of a block so far."""

    flat: torch.Tensor
    missing: set[str] = field(default_factory=set)


class BlockOrder:
    """One microbatch's blocks, from first gradient to last block out."""

    def __init__(
        self, blocks: Sequence[Block], device: torch.device, emit: Emit, unused: frozenset[str]
    ) -> None:
        self._blocks = blocks
        self._device = device
        self._emit = emit
        self._unused = unused
        self._open: dict[int, _Open] = {}
        self._next = len(blocks) - 1
        self._give()

    def add(self, number: int, place: slice, name: str, gradient: torch.Tensor) -> None:
        """The final gradient of one tensor, any layout; `place` in the block's flat array."""
        block = self._open.get(number) or self._start(number)
        if number > self._next or name not in block.missing:
            raise SamestepError(
                f"{name!r} got its gradient twice in one backward; expected once "
                "(re-entrant checkpointing? use the non-reentrant form)"
            )
        block.flat[place].view(gradient.shape).copy_(
            gradient.to_dense() if gradient.is_sparse else gradient
        )
        block.missing.discard(name)
        self._give()

    def flush(self) -> None:
        """Backward is over: what has no gradient counts as zeros."""
        while self._next >= 0:
            block = self._open.get(self._next) or self._start(self._next)
            self._finish(block)

    def _start(self, number: int) -> _Open:
        block = self._blocks[number]
        flat = torch.empty(block.elements, dtype=torch.float32, device=self._device)
        names = {tensor.name for tensor in block.tensors}
        self._open[number] = _Open(flat, names)
        return self._open[number]

    def _give(self) -> None:
        """Give away every block that is due and complete."""
        while self._next >= 0:
            block = self._open.get(self._next)
            if block is None:
                names = {tensor.name for tensor in self._blocks[self._next].tensors}
                if not names <= self._unused:
                    return
                block = self._start(self._next)
            if not block.missing <= self._unused:
                return
            self._finish(block)

    def _finish(self, block: _Open) -> None:
        for tensor, place in self._blocks[self._next].slices():
            if tensor.name in block.missing:
                block.flat[place].zero_()
        del self._open[self._next]
        number, self._next = self._next, self._next - 1
        self._emit(number, block.flat)


def unused_parameters(
    loss: torch.Tensor, parameters: Mapping[str, torch.nn.Parameter]
) -> frozenset[str]:
    """Names of the parameters that the graph of `loss` does not reach: they get no gradient."""
    reached: set[int] = set()
    seen = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        stack.extend(above for above, _ in node.next_functions)
    return frozenset(name for name, value in parameters.items() if id(value) not in reached)
