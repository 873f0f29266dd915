"""Rules of operators that read elements at other indices: gather, concatenate, pad, scatter."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph.index import ZERO, plain
from backends.wgpu.graph.values import NoRule, Scalar, literal, scalar_of, shape_of
from backends.wgpu.graph.views import Coordinates
from backends.wgpu.shaders.kernel_text import KernelText, Rule, where_valid

_aten = torch.ops.aten


def _embedding(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    table, numbers = node.args[:2]
    assert isinstance(table, fx.Node)
    row, is_valid = k.index(numbers, at[:-1], shape_of(table)[0])
    return where_valid(k.element(table, [row, at[-1]]), [is_valid], scalar_of(node))


def _gather(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    source, dim, numbers = node.args[:3]
    assert isinstance(source, fx.Node)
    if not at:
        return k.element(source, [])
    axis = operator.index(dim) % len(at)  # type: ignore[arg-type]
    at = [*at]
    at[axis], is_valid = k.index(numbers, at, shape_of(source)[axis])
    return where_valid(k.element(source, at), [is_valid], scalar_of(node))


def _index(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    source, numbers = node.args
    assert isinstance(source, fx.Node)
    leading, count = leading_indices(node, numbers)
    shape = shape_of(source)
    rows = [k.index(x, at[:count], shape[i], from_end=True) for i, x in enumerate(leading)]
    value = k.element(source, [*(row for row, _ in rows), *at[count:]])
    return where_valid(value, [is_valid for _, is_valid in rows], scalar_of(node))


def leading_indices(node: fx.Node, indices: Any) -> tuple[list[fx.Node], int]:
    """Return the tensors that index the first dimensions, and how many dimensions replace them.

    Raises:
        NoRule: They index other dimensions, or are boolean.
    """
    leading = [index for index in indices if index is not None]
    if leading != list(indices)[: len(leading)] or any(scalar_of(x) == "bool" for x in leading):
        raise NoRule(node, "of dimensions other than the first, or with boolean indices")
    return leading, len(broadcast_shape(leading))


def broadcast_shape(nodes: Sequence[fx.Node]) -> tuple[int, ...]:
    """Return the shape of tensors that are broadcast against each other."""
    holders = [torch.empty(shape_of(node), device="meta") for node in nodes]
    shape: tuple[int, ...] = tuple(torch.broadcast_tensors(*holders)[0].shape)  # type: ignore[no-untyped-call]
    return shape


def _cat(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    tensors: Any = node.args[0]
    parts = [x for x in tensors if shape_of(x) != (0,)]
    dim = operator.index(node.args[1] if len(node.args) > 1 else 0) % len(at)  # type: ignore[arg-type]
    start, ends, values = 0, [], []
    for part in parts:
        size = shape_of(part)[dim]
        values.append(_window(k, part, at, dim, start, size, scalar))
        start += size
        ends.append(start)
    text = values[-1]
    for end, value in reversed([*zip(ends[:-1], values[:-1], strict=True)]):
        text = f"select({text}, {value}, {at[dim]} < {end}u)"
    return text


def _window(  # noqa: PLR0917
    k: KernelText,
    part: fx.Node,
    at: Coordinates,
    dim: int,
    start: int,
    size: int,
    scalar: Scalar,
    step: int = 1,
) -> str:
    """Read an element of a part that covers every `step`-th index from `start`; indices outside are
    clamped."""
    coordinates = [*at]
    if start or size != at[dim].size:
        offset = f"(i32({at[dim]}) - {start})"
        text = f"u32(clamp({offset if step == 1 else f'{offset} / {step}'}, 0, {size - 1}))"
        coordinates[dim] = plain(k.let(text), size)
    return k.element(part, coordinates, scalar)


def _slice_scatter(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    arguments: list[Any] = [*node.args, *(None, None, 0, None, None, 1)[len(node.args) :]]
    base, part, dim, start, _end, step = arguments
    assert isinstance(base, fx.Node)
    assert isinstance(part, fx.Node)
    axis = operator.index(dim) % len(at)
    first_index: Any = start or 0
    first_index = first_index + at[axis].size if first_index < 0 else first_index
    size = shape_of(part)[axis]
    end = first_index + (size - 1) * step + 1
    condition = f"({at[axis]} >= {first_index}u && {at[axis]} < {end}u)"
    if step != 1:
        condition = f"({condition} && ({at[axis]} - {first_index}u) % {step}u == 0u)"
    value = _window(k, part, at, axis, first_index, size, scalar, step)
    return f"select({k.element(base, at, scalar)}, {value}, {condition})"


def _select_scatter(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    base, part, dim, index = node.args
    assert isinstance(base, fx.Node)
    assert isinstance(part, fx.Node)
    axis = operator.index(dim) % len(at)  # type: ignore[arg-type]
    number = operator.index(index) % at[axis].size  # type: ignore[arg-type]
    value = k.element(part, [*at[:axis], *at[axis + 1 :]], scalar)
    return f"select({k.element(base, at, scalar)}, {value}, {at[axis]} == {number}u)"


def _pad(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    scalar = scalar_of(node)
    source, widths = node.args[:2]
    assert isinstance(source, fx.Node)
    value = node.args[2] if len(node.args) > 2 else 0
    sizes, source_at, conditions = shape_of(source), [*at], []
    pairs: list[Any] = list(widths)  # type: ignore[arg-type]
    for number in range(len(pairs) // 2):
        dim = len(at) - 1 - number
        pad_before, pad_after = pairs[2 * number : 2 * number + 2]
        if pad_before == pad_after == 0:
            continue
        source_index = k.let(f"(i32({at[dim]}) - ({pad_before}))")
        conditions.append(f"{source_index} >= 0 && {source_index} < {sizes[dim]}")
        source_at[dim] = plain(
            k.let(f"u32(clamp({source_index}, 0, {sizes[dim] - 1}))"), sizes[dim]
        )
    element = k.element(source, source_at, scalar)
    if not conditions:
        return element
    return f"select({literal(value, scalar)}, {element}, {' && '.join(conditions)})"


def _scatter(k: KernelText, node: fx.Node, at: Coordinates) -> str:
    """Scatter along a dimension, with one index for each position in the other dimensions."""
    scalar = scalar_of(node)
    under, dim, numbers, value = node.args
    assert isinstance(under, fx.Node)
    assert isinstance(numbers, fx.Node)
    axis = operator.index(dim) % len(at)  # type: ignore[arg-type]
    if any(
        size != (1 if number == axis else at[number].size)
        for number, size in enumerate(shape_of(numbers))
    ):
        raise NoRule(node, "with several indices along the dimension, or not for all others")
    row = [*at]
    row[axis] = ZERO
    index, is_there = k.index(numbers, row, at[axis].size)
    new_value = (
        k.element(value, row, scalar) if isinstance(value, fx.Node) else literal(value, scalar)
    )
    placed = f"select({k.element(under, at, scalar)}, {new_value}, {index} == {at[axis]})"
    return where_valid(placed, [is_there], scalar)


PLACEMENT: Final[dict[Any, Rule]] = {
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
