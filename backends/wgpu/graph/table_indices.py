"""Check a batch's indices against the tables that they index, because a device raises no error.

The check covers inputs, and parts of inputs, that are used as indices directly: token ids in an
embedding, labels in logits. For computed indices out of range, the device returns NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import fx

from backends.wgpu.graph.values import array_names_by_node
from protocol.base.errors import DataError

_aten = torch.ops.aten
_ALL_ELEMENTS: Final = frozenset({
    _aten.alias.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten._unsafe_view.default,  # noqa: SLF001
})  # fmt: skip
"""Operators whose result has exactly the elements of the first argument."""
_OTHER_ELEMENTS: Final = frozenset({
    _aten._to_copy.default,  # noqa: SLF001
    _aten.constant_pad_nd.default,
    _aten.select.int,
    _aten.slice.Tensor,
})  # fmt: skip
"""Operators that select elements, add constants, or truncate numbers."""


class OutsideTable(DataError):
    """An index that is outside its table.

    Attributes:
        row: Row of the input; None if the index does not belong to a row.
    """

    def __init__(self, text: str, row: int | None) -> None:
        super().__init__(text)
        self.row = row


@dataclass(frozen=True, slots=True)
class _View:
    """A copy of a traced node without its first argument, because lowering changes the graph."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.target(tensor, *self.args, **self.kwargs)
        return result


@dataclass(frozen=True, slots=True)
class _Lookup:
    """An input whose elements are indices.

    Attributes:
        array: Name of the input.
        lowest_index: Lowest valid index.
        rows: Rows of the table.
        ignored: A value that the loss ignores; None if there is none.
        views: Operators from the input to the indices, in order; empty if the whole input is used.
        module: Description of the module.
    """

    array: str
    lowest_index: int
    rows: int
    ignored: int | None
    views: tuple[_View, ...]
    module: str

    def first_outside(self, indices: Any) -> tuple[int, tuple[int, ...] | None] | None:
        """Return the first index outside the table, and its position in the input, None if it has
        no position; None if all indices are valid."""
        indices = np.asarray(indices)
        values = self._apply_views(indices)
        is_outside = (values < self.lowest_index) | (values >= self.rows)
        if self.ignored is not None:
            is_outside &= values != self.ignored
        if not is_outside.any():
            return None
        value = int(values[is_outside][0])
        positions = self._apply_views(np.arange(indices.size).reshape(indices.shape))
        position = int(positions[is_outside][0])
        # A constant that the model adds has no position, even if it looks like one.
        are_integers = indices.dtype.kind != "f"
        if not 0 <= position < indices.size or (
            are_integers and indices.reshape(-1)[position] != value
        ):
            return value, None
        return value, tuple(map(int, np.unravel_index(position, indices.shape)))

    def _apply_views(self, values: Any) -> Any:
        if not self.views:
            return values
        tensor = torch.tensor(values)
        for view in self.views:
            tensor = view.apply(tensor)
        return tensor.numpy()


class TableIndices:
    """Table lookups of a graph.

    Args:
        graph: A traced graph.
        arrays: Names of the graph's last placeholders, in order.
    """

    def __init__(self, graph: fx.GraphModule, arrays: Sequence[str]) -> None:
        names = array_names_by_node(graph, arrays)
        lookups: dict[str, _Lookup] = {}
        for node in graph.graph.nodes:
            for index, lowest_index, rows in _lookups_of(node):
                source, ignored, views = _source(index)
                if source in names:
                    module = str(node.meta.get("module") or "the model, or its loss,")
                    lookup = _Lookup(names[source], lowest_index, rows, ignored, views, module)
                    lookups.setdefault(repr(replace(lookup, module="")), lookup)
        self._lookups = tuple(lookups.values())

    def refuse_indices_outside(self, arrays: Mapping[str, Any]) -> None:
        """Check the arrays' values.

        Args:
            arrays: NumPy arrays by name.

        Raises:
            OutsideTable: An array has an index outside its table.
        """
        for lookup in self._lookups:
            if (first_outside := lookup.first_outside(arrays[lookup.array])) is not None:
                value, position = first_outside
                position_text = f" at {[*position]}" if position else ""
                raise OutsideTable(
                    f"input {lookup.array!r} has {value}{position_text}, which "
                    f"{lookup.module} looks up in "
                    f"{lookup.rows} rows: expected {lookup.lowest_index} to {lookup.rows - 1}",
                    position[0] if position else None,
                )


def _lookups_of(node: fx.Node) -> Iterator[tuple[fx.Node, int, int]]:
    """Yield (indices, lowest valid index, rows of the table)."""
    if node.op != "call_function":
        return
    if node.target is _aten.embedding.default:
        table, index = node.args[:2]
        yield index, 0, _shape(table)[0]  # type: ignore[misc]
    elif node.target is _aten.gather.default:
        table, dim, index = node.args[:3]
        if shape := _shape(table):
            yield index, 0, shape[dim]  # type: ignore[misc, index]
    elif node.target is _aten.index.Tensor:
        table, indices = node.args[:2]
        for index, rows in zip(indices, _shape(table), strict=False):  # type: ignore[arg-type]
            if isinstance(index, fx.Node) and _has_integers(index):
                yield index, -rows, rows


def _shape(table: Any) -> tuple[int, ...]:
    return tuple(table.meta["val"].shape)


def _has_integers(index: fx.Node) -> bool:
    value = index.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype not in {torch.bool, torch.uint8}


def _source(index: fx.Node) -> tuple[fx.Node, int | None, tuple[_View, ...]]:
    """Return the input that the indices come from, the ignored value, and the views in between."""
    ignored: int | None = None
    views: list[_View] = []
    while index.op == "call_function":
        if index.target in _ALL_ELEMENTS or index.target in _OTHER_ELEMENTS:
            source = index.args[0]
            views.append(_View(index.target, index.args[1:], index.kwargs))
        elif index.target is _aten.where.self and ignored is None:
            is_other, source, _ = index.args
            if not (isinstance(is_other, fx.Node) and is_other.target is _aten.ne.Scalar):
                break
            compared_node, value = is_other.args
            if compared_node is not source or not isinstance(value, int):
                break
            ignored = value
        else:
            break
        assert isinstance(source, fx.Node)
        index = source
    has_other_elements = any(view.target in _OTHER_ELEMENTS for view in views)
    return index, ignored, tuple(reversed(views)) if has_other_elements else ()
