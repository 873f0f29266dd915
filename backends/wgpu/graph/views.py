"""View operators: their coordinates, and their strides over a buffer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph.halves import is_half, is_rounding, is_widening
from backends.wgpu.graph.index import (
    ZERO,
    Coordinate,
    as_coordinate,
    broadcast,
    contiguous_strides,
    reshape,
)
from backends.wgpu.graph.values import shape_of

_aten = torch.ops.aten
Coordinates = list[Coordinate]
_Rule = Callable[[fx.Node, Coordinates, tuple[int, ...]], Coordinates]


def is_view(node: fx.Node) -> bool:
    """Whether the node's elements are elements of its first argument."""
    return node.op == "call_function" and node.target in _RULES


def is_copy(node: fx.Node) -> bool:
    """Whether the node is a copy of its first argument."""
    return node.op == "call_function" and node.target is _aten.clone.default


def needs_buffer(node: fx.Node) -> bool:
    """Whether the node is a copy that must have its own buffer."""
    return bool(node.meta.get("own"))


def source_of(node: fx.Node) -> fx.Node:
    """Return the tensor of which the node is a view."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def map_to_source(node: fx.Node, coordinates: Coordinates) -> Coordinates:
    """Map coordinates in a view to coordinates in its source."""
    shape = shape_of(node)
    sized_coordinates = [c.with_size(size) for c, size in zip(coordinates, shape, strict=True)]
    return _RULES[node.target](node, sized_coordinates, shape_of(source_of(node)))


@dataclass(frozen=True, slots=True)
class StridedView:
    """A tensor as a strided view of a buffer; strides and offset are in elements.

    With `rounds`, the reader rounds elements to float16.
    """

    base: fx.Node
    strides: tuple[int, ...]
    offset: int
    rounds: bool = False


def strided_view(
    node: fx.Node, buffers: Collection[fx.Node], *, widens: bool = False, rounds: bool = False
) -> StridedView | None:
    """Return the node as a strided view of the nearest of `buffers`, or None if it is no such view.

    Args:
        node: A tensor.
        buffers: Values with a buffer.
        widens: Whether the reader can widen float16 to float32.
        rounds: Whether the reader can also round an input of the graph to float16.
    """
    chain = []
    base, rounding = node, False
    while base not in buffers:
        if rounds and is_rounding(base) and _is_input(source_of(base)):
            rounding = True
        elif needs_buffer(base) or not (
            is_view(base) or is_copy(base) or (widens and is_widening(base))
        ):
            return None
        chain.append(base)
        base = source_of(base)
    tensor = torch.empty(shape_of(base), device="meta")
    try:
        for step in reversed(chain):
            tensor = _apply(step, tensor)
    except RuntimeError:
        return None
    return StridedView(base, tuple(tensor.stride()), int(tensor.storage_offset()), rounding)


def _is_input(node: fx.Node) -> bool:
    while is_view(node):
        node = source_of(node)
    return node.op == "placeholder" and not is_half(node)


def whole_buffer(node: fx.Node, buffers: Collection[fx.Node]) -> fx.Node | None:
    """Return the buffer that holds exactly this tensor in row-major order, or None."""
    view = strided_view(node, buffers)
    if view is None or view.offset or shape_of(node) == ():
        return view.base if view is not None and shape_of(view.base) in {(), (1,)} else None
    shape = shape_of(node)
    covers_buffer = torch.empty(shape, device="meta").numel() == view.base.meta["val"].numel()
    row_major_strides = contiguous_strides(shape)
    is_contiguous = all(
        size == 1 or stride == row_major_stride
        for size, stride, row_major_stride in zip(
            shape, view.strides, row_major_strides, strict=True
        )
    )
    return view.base if covers_buffer and is_contiguous else None


def _apply(step: fx.Node, tensor: torch.Tensor) -> torch.Tensor:
    if is_copy(step) or is_widening(step) or is_rounding(step):
        return tensor
    if step.target in _RESHAPES:
        return tensor.view(shape_of(step))
    result: torch.Tensor = step.target(tensor, *step.args[1:], **step.kwargs)  # type: ignore[operator]
    if result.untyped_storage()._cdata != tensor.untyped_storage()._cdata:  # noqa: SLF001
        raise _NoStridesError
    return result


class _NoStridesError(RuntimeError):
    """The result has no strides over the buffer, because torch copies in an operator that is a view
    here, such as flip."""


def _reshape(node: fx.Node, coordinates: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    return reshape(coordinates, shape_of(node), shape)


def _permute(node: fx.Node, coordinates: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    result: Coordinates = [ZERO] * len(shape)
    for coordinate, dim in zip(coordinates, _ints(node.args[1]), strict=True):
        result[dim % len(shape)] = coordinate
    return result


def _transpose(node: fx.Node, coordinates: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    first_dim, second_dim = (_int(dim) % len(shape) for dim in node.args[1:3])
    coordinates[first_dim], coordinates[second_dim] = (
        coordinates[second_dim],
        coordinates[first_dim],
    )
    return coordinates


def _unsqueeze(node: fx.Node, coordinates: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    dim = _int(node.args[1]) % (len(shape) + 1)
    return coordinates[:dim] + coordinates[dim + 1 :]


def _squeeze(node: fx.Node, coordinates: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    dims_argument = node.args[1] if len(node.args) > 1 else list(range(len(shape)))
    dims = [dims_argument] if isinstance(dims_argument, int) else _ints(dims_argument)
    removed = {dim % len(shape) for dim in dims if shape[dim % len(shape)] == 1}
    remaining = iter(coordinates)
    return [ZERO if dim in removed else next(remaining) for dim in range(len(shape))]


def _expand(node: fx.Node, coordinates: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    del node
    return broadcast(coordinates, shape)


def _slice(node: fx.Node, coordinates: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    arguments: list[Any] = [*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :]]
    dim, start, step = _int(arguments[0]) % len(shape), arguments[1], _int(arguments[3])
    size = shape[dim]
    first_index = _int(start) if start is not None else 0
    first_index = min(max(first_index + size if first_index < 0 else first_index, 0), size)
    text = str(coordinates[dim])
    text = f"({text} * {step}u)" if step != 1 else text
    if first_index or step != 1:
        coordinates[dim] = as_coordinate(
            f"({text} + {first_index}u)" if first_index else text, size
        )
    return coordinates


def _select(node: fx.Node, coordinates: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    dim = _int(node.args[1]) % len(shape)
    index = _int(node.args[2]) % shape[dim]
    return [*coordinates[:dim], as_coordinate(f"{index}u", shape[dim]), *coordinates[dim:]]


def _flip(node: fx.Node, coordinates: Coordinates, shape: tuple[int, ...]) -> Coordinates:
    for dim in _ints(node.args[1]) if shape else ():
        axis = dim % len(shape)
        if shape[axis] > 1:
            flipped = f"({shape[axis] - 1}u - {coordinates[axis]})"
            coordinates[axis] = as_coordinate(flipped, shape[axis])
    return coordinates


def _int(value: Any) -> int:
    return operator.index(value)


def _ints(value: Any) -> list[int]:
    return [operator.index(item) for item in value]


_RESHAPES: Final = frozenset({
    _aten.view.default,
    _aten._unsafe_view.default,  # noqa: SLF001
    _aten.reshape.default,
})  # fmt: skip
_RULES: Final[dict[Any, _Rule]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    _aten.permute.default: _permute,
    _aten.t.default: lambda _node, coordinates, _shape: coordinates[::-1],
    _aten.transpose.int: _transpose,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.default: _squeeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.expand.default: _expand,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.alias.default: lambda _node, coordinates, _shape: coordinates,
    _aten.detach.default: lambda _node, coordinates, _shape: coordinates,
    _aten.flip.default: _flip,
}
