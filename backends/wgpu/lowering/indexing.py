"""Rules of operators that read elements at other indices: gather, concatenate, pad, scatter."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph.index import ZERO, as_coordinate
from backends.wgpu.graph.values import NoRule, Scalar, literal, scalar_of, shape_of
from backends.wgpu.graph.views import Coordinates
from backends.wgpu.shaders.kernel_text import KernelText, Rule, guard_value

_aten = torch.ops.aten


def _embedding(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    table, numbers = node.args[:2]
    assert isinstance(table, fx.Node)
    row, is_valid = k.index(numbers, coords[:-1], shape_of(table)[0])
    return guard_value(k.element(table, [row, coords[-1]]), [is_valid], scalar_of(node))


def _gather(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    source, dim, numbers = node.args[:3]
    assert isinstance(source, fx.Node)
    if not coords:
        return k.element(source, [])
    axis = operator.index(dim) % len(coords)  # type: ignore[arg-type]
    coords = [*coords]
    coords[axis], is_valid = k.index(numbers, coords, shape_of(source)[axis])
    return guard_value(k.element(source, coords), [is_valid], scalar_of(node))


def _index(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    source, numbers = node.args
    assert isinstance(source, fx.Node)
    leading, count = leading_indices(node, numbers)
    shape = shape_of(source)
    rows = [k.index(x, coords[:count], shape[i], from_end=True) for i, x in enumerate(leading)]
    value = k.element(source, [*(row for row, _ in rows), *coords[count:]])
    return guard_value(value, [is_valid for _, is_valid in rows], scalar_of(node))


def leading_indices(node: fx.Node, indices: Any) -> tuple[list[fx.Node], int]:
    """Return the tensors that index the first dimensions, and the number of dimensions of their
    result.

    Raises:
        NoRule: The tensors index other dimensions, or are boolean.
    """
    leading = [index for index in indices if index is not None]
    if leading != list(indices)[: len(leading)] or any(scalar_of(x) == "bool" for x in leading):
        raise NoRule(node, "of dimensions other than the first, or with boolean indices")
    return leading, len(broadcast_shape(leading))


def broadcast_shape(nodes: Sequence[fx.Node]) -> tuple[int, ...]:
    """Return the shape of tensors that are broadcast against each other."""
    meta_tensors = [torch.empty(shape_of(node), device="meta") for node in nodes]
    shape: tuple[int, ...] = tuple(torch.broadcast_tensors(*meta_tensors)[0].shape)  # type: ignore[no-untyped-call]
    return shape


def _cat(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    tensors: Any = node.args[0]
    parts = [x for x in tensors if shape_of(x) != (0,)]
    dim = operator.index(node.args[1] if len(node.args) > 1 else 0) % len(coords)  # type: ignore[arg-type]
    start, ends, values = 0, [], []
    for part in parts:
        size = shape_of(part)[dim]
        values.append(_clamped_element(k, part, coords, dim, start, size, scalar))
        start += size
        ends.append(start)
    text = values[-1]
    for end, value in reversed([*zip(ends[:-1], values[:-1], strict=True)]):
        text = f"select({text}, {value}, {coords[dim]} < {end}u)"
    return text


def _clamped_element(  # noqa: PLR0917
    k: KernelText,
    part: fx.Node,
    coords: Coordinates,
    dim: int,
    start: int,
    size: int,
    scalar: Scalar,
    step: int = 1,
) -> str:
    """Return an element of a part that covers every `step`-th index from `start`; other indices are
    clamped."""
    coordinates = [*coords]
    if start or size != coords[dim].size:
        offset = f"(i32({coords[dim]}) - {start})"
        text = f"u32(clamp({offset if step == 1 else f'{offset} / {step}'}, 0, {size - 1}))"
        coordinates[dim] = as_coordinate(k.let(text), size)
    return k.element(part, coordinates, scalar)


def _slice_scatter(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    arguments: list[Any] = [*node.args, *(None, None, 0, None, None, 1)[len(node.args) :]]
    base, part, dim, start, _end, step = arguments
    assert isinstance(base, fx.Node)
    assert isinstance(part, fx.Node)
    axis = operator.index(dim) % len(coords)
    first_index: Any = start or 0
    first_index = first_index + coords[axis].size if first_index < 0 else first_index
    size = shape_of(part)[axis]
    end = first_index + (size - 1) * step + 1
    condition = f"({coords[axis]} >= {first_index}u && {coords[axis]} < {end}u)"
    if step != 1:
        condition = f"({condition} && ({coords[axis]} - {first_index}u) % {step}u == 0u)"
    value = _clamped_element(k, part, coords, axis, first_index, size, scalar, step)
    return f"select({k.element(base, coords, scalar)}, {value}, {condition})"


def _select_scatter(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    base, part, dim, index = node.args
    assert isinstance(base, fx.Node)
    assert isinstance(part, fx.Node)
    axis = operator.index(dim) % len(coords)  # type: ignore[arg-type]
    number = operator.index(index) % coords[axis].size  # type: ignore[arg-type]
    value = k.element(part, [*coords[:axis], *coords[axis + 1 :]], scalar)
    return f"select({k.element(base, coords, scalar)}, {value}, {coords[axis]} == {number}u)"


def _pad(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    scalar = scalar_of(node)
    source, widths = node.args[:2]
    assert isinstance(source, fx.Node)
    value = node.args[2] if len(node.args) > 2 else 0
    sizes, source_coords, conditions = shape_of(source), [*coords], []
    pairs: list[Any] = list(widths)  # type: ignore[arg-type]
    for number in range(len(pairs) // 2):
        dim = len(coords) - 1 - number
        pad_before, pad_after = pairs[2 * number : 2 * number + 2]
        if pad_before == pad_after == 0:
            continue
        source_index = k.let(f"(i32({coords[dim]}) - ({pad_before}))")
        conditions.append(f"{source_index} >= 0 && {source_index} < {sizes[dim]}")
        source_coords[dim] = as_coordinate(
            k.let(f"u32(clamp({source_index}, 0, {sizes[dim] - 1}))"), sizes[dim]
        )
    element = k.element(source, source_coords, scalar)
    if not conditions:
        return element
    return f"select({literal(value, scalar)}, {element}, {' && '.join(conditions)})"


def _scatter(k: KernelText, node: fx.Node, coords: Coordinates) -> str:
    """Return an element of a scatter with one index for each position in the other dimensions."""
    scalar = scalar_of(node)
    base, dim, numbers, value = node.args
    assert isinstance(base, fx.Node)
    assert isinstance(numbers, fx.Node)
    axis = operator.index(dim) % len(coords)  # type: ignore[arg-type]
    if any(
        size != (1 if number == axis else coords[number].size)
        for number, size in enumerate(shape_of(numbers))
    ):
        raise NoRule(node, "with several indices along the dimension, or not for all others")
    row = [*coords]
    row[axis] = ZERO
    index, is_valid = k.index(numbers, row, coords[axis].size)
    new_value = (
        k.element(value, row, scalar) if isinstance(value, fx.Node) else literal(value, scalar)
    )
    result = f"select({k.element(base, coords, scalar)}, {new_value}, {index} == {coords[axis]})"
    return guard_value(result, [is_valid], scalar)


INDEXING: Final[dict[Any, Rule]] = {
    _aten.embedding.default: _embedding,
    _aten.gather.default: _gather,
    _aten.index.Tensor: _index,
    _aten.cat.default: _cat,
    _aten.slice_scatter.default: _slice_scatter,
    _aten.select_scatter.default: _select_scatter,
    _aten.constant_pad_nd.default: _pad,
    _aten.scatter.value: _scatter,
    _aten.scatter.src: _scatter,
}
