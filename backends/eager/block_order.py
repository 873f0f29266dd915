"""Collect gradients while backward runs, and emit whole blocks in reverse order.

A parameter's hook fires when its gradient is final. A block is emitted once all its gradients have
arrived and all later blocks are emitted, so the order does not depend on the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from protocol.base.errors import SamestepError
from protocol.spec.manifest import Block

Emit = Callable[[int, list[torch.Tensor | None]], None]
"""Takes a block's number and its tensors' gradients, flat float32 on the device; a gradient is None
if backward did not reach the tensor. Gradients are read-only: autograd may share memory between
tensors that differ only in shape."""


class BlockOrder:
    """The blocks of one microbatch, from the first gradient to the last emitted block.

    `add` runs between two matrix products, so it does little work and copies no gradient.

    Args:
        blocks: The manifest's blocks.
        emit: Receives each block.
        unused_names: Names of tensors that backward does not reach, whose gradients do not delay a
            block.
    """

    def __init__(self, blocks: Sequence[Block], emit: Emit, unused_names: frozenset[str]) -> None:
        self._blocks = blocks
        self._emit = emit
        self._unused_names = unused_names
        self._gradients: list[dict[str, torch.Tensor]] = [{} for _ in blocks]
        self._missing_counts = [len(block.tensors) for block in blocks]
        if unused_names:
            self._missing_counts = [
                sum(t.name not in unused_names for t in block.tensors) for block in blocks
            ]
        self._next_block = len(blocks) - 1
        self._emit_complete()

    def add(self, number: int, name: str, gradient: torch.Tensor) -> None:
        """Store the final gradient of one tensor of a block, in any layout, without a copy.

        Raises:
            SamestepError: The tensor already has a gradient, or its block has been emitted.
        """
        gradients = self._gradients[number]
        if number > self._next_block or name in gradients:
            raise SamestepError(
                f"expected one gradient of {name!r} per backward, got another, as from reentrant "
                "checkpointing; pass use_reentrant=False to checkpoint"
            )
        gradients[name] = gradient
        self._missing_counts[number] -= name not in self._unused_names
        if number == self._next_block:
            self._emit_complete()

    @property
    def has_emitted(self) -> bool:
        """Whether any block has been emitted."""
        return self._next_block < len(self._blocks) - 1

    def flush(self) -> None:
        """Emit all remaining blocks: backward has ended, so missing gradients are absent."""
        while self._next_block >= 0:
            self._finish_block()

    def _emit_complete(self) -> None:
        """Emit the next blocks, up to the first that lacks gradients."""
        while self._next_block >= 0 and not self._missing_counts[self._next_block]:
            self._finish_block()

    def _finish_block(self) -> None:
        number, self._next_block = self._next_block, self._next_block - 1
        gradients, self._gradients[number] = self._gradients[number], {}
        self._emit(number, [_flatten(gradients.get(t.name)) for t in self._blocks[number].tensors])


def _flatten(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    return (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)


def unused_parameters(
    loss: torch.Tensor, parameters: Mapping[str, torch.nn.Parameter]
) -> frozenset[str]:
    """Return the names of the parameters that the graph of `loss` does not reach."""
    reached_ids: set[int] = set()
    seen_nodes = set()
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen_nodes:
            continue
        seen_nodes.add(node)
        if hasattr(node, "variable"):
            reached_ids.add(id(node.variable))
        stack.extend(source for source, _ in node.next_functions)
    return frozenset(name for name, value in parameters.items() if id(value) not in reached_ids)
