"""Indices of a batch that are not in their table: torch raises, no device does.

Of inputs, or parts of them, that are indices as they are: token ids in an embedding, labels in the
classes' logits.
What is computed into an index first is not known here; there the device gives no number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import fx

from backends.wgpu.graph.values import arrays_of
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
"""What gives each element of the first argument, and no others."""
_OTHER_ELEMENTS: Final = frozenset({
    _aten._to_copy.default,  # noqa: SLF001
    _aten.constant_pad_nd.default,
    _aten.select.int,
    _aten.slice.Tensor,
})  # fmt: skip
"""What gives a part of them, adds constants, or cuts off what is behind a point."""


class OutsideTable(DataError):
    """An index that its table has not.

    Attributes:
        row: Of the input; None if the index is all of it.
    """

    def __init__(self, text: str, row: int | None) -> None:
        super().__init__(text)
        self.row = row


@dataclass(frozen=True, slots=True)
class _View:
    """A node as it was traced, but for its first argument: lowering changes the graph."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.target(tensor, *self.args, **self.kwargs)
        return found


@dataclass(frozen=True, slots=True)
class _Lookup:
    """An input whose elements are indices.

    Attributes:
        array: Its name.
        least: Of what is allowed.
        rows: Of the table.
        ignored: A value that is not looked up.
        views: What makes of the input what is looked up, in order; none: all of it is.
        where: The module, in words.
    """

    array: str
    least: int
    rows: int
    ignored: int | None
    views: tuple[_View, ...]
    where: str

    def outside(self, given: Any) -> tuple[int, tuple[int, ...] | None] | None:
        """The first one that is not in the table, and its place in the input, if it has one."""
        given = np.asarray(given)
        values = self._looked_up(given)
        wrong = (values < self.least) | (values >= self.rows)
        if self.ignored is not None:
            wrong &= values != self.ignored
        if not wrong.any():
            return None
        value = int(values[wrong][0])
        numbers = self._looked_up(np.arange(given.size).reshape(given.shape))
        number = int(numbers[wrong][0])
        # A constant that the model adds has no place, though it may be the number of one.
        whole = given.dtype.kind != "f"
        if not 0 <= number < given.size or (whole and given.reshape(-1)[number] != value):
            return value, None
        return value, tuple(map(int, np.unravel_index(number, given.shape)))

    def _looked_up(self, values: Any) -> Any:
        if not self.views:
            return values
        tensor = torch.tensor(values)
        for view in self.views:
            tensor = view.of(tensor)
        return tensor.numpy()


class TableIndices:
    """The lookups of a graph.

    Args:
        graph: As traced.
        arrays: Its last placeholders, in order.
    """

    def __init__(self, graph: fx.GraphModule, arrays: Sequence[str]) -> None:
        names = arrays_of(graph, arrays)
        found: dict[str, _Lookup] = {}
        for node in graph.graph.nodes:
            for index, least, rows in _looked_up(node):
                source, ignored, views = _source(index)
                if source in names:
                    where = str(node.meta.get("module") or "the model, or its loss,")
                    lookup = _Lookup(names[source], least, rows, ignored, views, where)
                    found.setdefault(repr(replace(lookup, where="")), lookup)
        self._lookups = tuple(found.values())

    def refuse_what_is_outside(self, given: Mapping[str, Any]) -> None:
        """Look at the arrays' values.

        Args:
            given: The arrays, numpy's, by name.

        Raises:
            OutsideTable: One has an index that its table has not.
        """
        for lookup in self._lookups:
            if (found := lookup.outside(given[lookup.array])) is not None:
                value, place = found
                at = f" at {[*place]}" if place else ""
                raise OutsideTable(
                    f"input {lookup.array!r} has {value}{at}, which {lookup.where} looks up in "
                    f"{lookup.rows} rows: expected {lookup.least} to {lookup.rows - 1}",
                    place[0] if place else None,
                )


def _looked_up(node: fx.Node) -> Iterator[tuple[fx.Node, int, int]]:
    """Indices, the least one allowed, and how many rows there are."""
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
            if isinstance(index, fx.Node) and _of_numbers(index):
                yield index, -rows, rows


def _shape(table: Any) -> tuple[int, ...]:
    return tuple(table.meta["val"].shape)


def _of_numbers(index: fx.Node) -> bool:
    value = index.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype not in {torch.bool, torch.uint8}


def _source(index: fx.Node) -> tuple[fx.Node, int | None, tuple[_View, ...]]:
    """What the indices are elements of, which value is replaced on the way, and by what views."""
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
            compared, value = is_other.args
            if compared is not source or not isinstance(value, int):
                break
            ignored = value
        else:
            break
        assert isinstance(source, fx.Node)
        index = source
    others = any(view.target in _OTHER_ELEMENTS for view in views)
    return index, ignored, tuple(reversed(views)) if others else ()
