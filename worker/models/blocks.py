"""Division of a torch module's trainable tensors into blocks, by the module's structure.

The repeated layers of a model (BERT's `encoder.layer`, Llama's `layers`, an MLP's layers) are its
blocks. Modules registered before them are the non-block "embeddings", those after them the
non-block "head". Registration order is assumed to be forward order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from protocol.base.errors import DataError
from protocol.spec.manifest import Block, TensorSpec

_MINOR_STACK: Final = 0.25
"""A stack of other layers counts only with at least this part of the largest stack's parameters,
so that the layers of a two-layer head do not count as the model's layers."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """A container of layers of one class.

    Attributes:
        layers: Name prefixes of the layers, in order.
        layer_class: Class of the layers.
        elements: Number of elements of all parameters.
    """

    layers: tuple[str, ...]
    layer_class: type[nn.Module]
    elements: int


def cut_into_blocks(module: nn.Module) -> tuple[Block, ...]:
    """Return the trainable tensors by block, in forward order.

    A tensor that several layers share belongs to the earliest, because its gradient is final only
    when backward has passed all of these layers. A model without repeated layers is one block.

    Raises:
        DataError: Nothing in the module is trainable.
    """
    stacks = _main_stacks(module)
    layer_positions = _layer_positions(stacks)
    groups: dict[tuple[int, str], list[TensorSpec]] = {}
    last_position = 0
    for name, parameter in module.named_parameters():
        position = next(
            (layer_positions[prefix] for prefix in _prefixes(name) if prefix in layer_positions),
            None,
        )
        if position is not None:
            last_position = max(last_position, position[0])
        if parameter.requires_grad:
            tensor_spec = TensorSpec(name=name, shape=tuple(parameter.shape))
            # Stacks have odd positions; modules before, between and after them have even ones.
            groups.setdefault(position or (last_position + last_position % 2, ""), []).append(
                tensor_spec
            )
    if not groups:
        raise DataError(
            "expected a model with trainable tensors, got one with all frozen: set requires_grad"
        )
    order = sorted(groups, key=lambda key: (key[0], _layer_number(key[1])))
    return tuple(
        Block(
            name=layer or _outside_name(position, len(stacks)),
            kind="block" if layer or not stacks else "non_block",
            tensors=tuple(groups[position, layer]),
        )
        for position, layer in order
    )


def cut_by_size(module: nn.Module, elements: int) -> tuple[Block, ...]:
    """Return the trainable tensors by block; a model without repeated layers is divided by size.

    Each such block has at least `elements` elements, except possibly the last. Blocks are in
    registration order, so gradients of later blocks are sent while backward computes earlier ones.

    Raises:
        DataError: Nothing in the module is trainable.
    """
    blocks = cut_into_blocks(module)
    if len(blocks) > 1:
        return blocks
    parts: list[list[TensorSpec]] = [[]]
    for tensor in blocks[0].tensors:
        if sum(spec.elements for spec in parts[-1]) >= elements:
            parts.append([])
        parts[-1].append(tensor)
    return tuple(
        Block(name=f"part.{number}", kind="block", tensors=tuple(specs))
        for number, specs in enumerate(parts)
    )


def _outside_name(position: int, stacks: int) -> str:
    if not stacks:
        return "model"
    if position == 0:
        return "embeddings"
    return "head" if position == 2 * stacks else f"between.{position // 2}"


def _layer_number(layer: str) -> int:
    return int(layer.rpartition(".")[2]) if layer else 0


def _layer_positions(stacks: list[_Stack]) -> dict[str, tuple[int, str]]:
    """Map each layer's prefix to its stack's position and its block's name."""
    positions: dict[str, tuple[int, str]] = {}
    for index, stack in enumerate(stacks):
        for prefix in stack.layers:
            positions[prefix] = (2 * index + 1, f"layer.{len(positions)}")
    return positions


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts)))


def _main_stacks(module: nn.Module) -> list[_Stack]:
    stacks = list(_outermost_stacks(module, ""))
    if not stacks:
        return []
    largest_stack = max(stacks, key=lambda stack: stack.elements)
    return [
        stack
        for stack in stacks
        if stack.layer_class is largest_stack.layer_class
        or stack.elements >= _MINOR_STACK * largest_stack.elements
    ]


def _outermost_stacks(module: nn.Module, prefix: str) -> Iterator[_Stack]:
    """Yield the outermost containers of layers of one class, in order."""
    children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    if isinstance(module, nn.ModuleList | nn.Sequential):
        layers = [(name, child) for name, child in children if _elements(child)]
        classes = {type(child) for _, child in layers}
        if len(classes) == 1 and (len(layers) > 1 or isinstance(module, nn.ModuleList)):
            names = tuple(name for name, _ in layers)
            yield _Stack(names, classes.pop(), sum(_elements(child) for _, child in layers))
            return
    for name, child in children:
        yield from _outermost_stacks(child, f"{name}.")


def _elements(module: nn.Module) -> int:
    return sum(torch.numel(parameter) for parameter in module.parameters())
