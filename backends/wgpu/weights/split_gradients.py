"""The gradient of a trained table, computed in the parts in which the table lies.

It is a sum of what each use of the table adds: a product for a head, a scatter of rows for an
embedding. Each is computed for the rows of one part alone, in the same order as for the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from backends.wgpu.graph.passes import add
from backends.wgpu.graph.table_parts import RowPart, Tables
from backends.wgpu.graph.values import shape_of
from protocol.base.errors import SamestepError

_aten = torch.ops.aten
_ROWS_AND_COLUMNS = [1, 0]


def split_gradients(graph: fx.GraphModule, tables: Tables, trained: Sequence[str]) -> None:
    """Put gradients of parts in place of those of the tables that are cut.

    Args:
        graph: Outputs: the loss, then the gradient of each of `trained`, or None; then others.
        tables: Of each table that is cut its parts.
        trained: Names of the trained tensors.

    Raises:
        SamestepError: Something else than a gather or a product adds to a gradient.
    """
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    loss, *rest = output.args[0]
    gradients, others = rest[: len(trained)], rest[len(trained) :]
    outputs = [loss]
    for name, gradient in zip(trained, gradients, strict=True):
        parts = tables.get(name, ())
        if not parts or gradient is None:
            outputs += [gradient] * max(1, len(parts))
        else:
            outputs += [_Gradient(graph.graph, gradient, part).rows() for part in parts]
    output.args = ([*outputs, *others],)
    graph.graph.eliminate_dead_code()


class _Gradient:
    """Of one part, from that of its table."""

    def __init__(self, graph: fx.Graph, whole: fx.Node, part: RowPart) -> None:
        self._graph = graph
        self._whole = whole
        self._part = part

    def rows(self) -> fx.Node:
        """The part's rows of it."""
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        with self._graph.inserting_before(output):
            return self._rows_of(self._whole)

    def _rows_of(self, node: fx.Node) -> fx.Node:
        given: Any = node.args
        if node.target is _aten.add.Tensor and len(given) == 2 and not node.kwargs:
            one, other = (self._rows_of(term) for term in given)
            return self._add(_aten.add.Tensor, one, other)
        if node.target is _aten.permute.default and [*given[1]] == _ROWS_AND_COLUMNS:
            return self._columns_of(given[0])
        if node.target is _aten.mm.default:
            return self._add(_aten.mm.default, self._slice(given[0], 0), given[1])
        if node.target is _aten.index_put.default and len(given) == 4 and given[3] is True:
            return self._scattered(node, *given[:3])
        raise self._refusal(node)

    def _refusal(self, node: fx.Node) -> SamestepError:
        return SamestepError(
            f"{self._part.table!r} does not fit in one buffer of the device; its gradient can be "
            "computed in parts where an embedding or a product adds to it, but "
            f"{node.meta.get('module') or 'the loss'} does by {node.target}; use a cpu or cuda "
            "worker for this model"
        )

    def _columns_of(self, node: fx.Node) -> fx.Node:
        """The part's columns of a matrix, turned."""
        given: Any = node.args
        if node.target is _aten.permute.default and [*given[1]] == _ROWS_AND_COLUMNS:
            return self._rows_of(given[0])
        if node.target is not _aten.mm.default:
            raise self._refusal(node)
        product = self._add(_aten.mm.default, given[0], self._slice(given[1], 1))
        return self._add(_aten.permute.default, product, _ROWS_AND_COLUMNS)

    def _slice(self, node: fx.Node, dim: int) -> fx.Node:
        return self._add(_aten.slice.Tensor, node, dim, self._part.first, self._part.end)

    def _scattered(
        self, node: fx.Node, under: fx.Node, indices: Sequence[fx.Node | None], values: fx.Node
    ) -> fx.Node:
        """Rows that belong to other parts are added as zeros, somewhere in this one."""
        numbers, *others = indices
        zeros = under.target is _aten.full.default and under.args[1] == 0
        if others or numbers is None or not zeros:
            raise self._refusal(node)
        part = self._part
        after = self._add(_aten.ge.Scalar, numbers, part.first)
        before = self._add(_aten.lt.Scalar, numbers, part.end)
        here = self._add(_aten.bitwise_and.Tensor, after, before)
        for _ in range(len(shape_of(values)) - len(shape_of(numbers))):
            here = self._add(_aten.unsqueeze.default, here, -1)
        within = self._add(_aten.sub.Tensor, numbers, part.first)
        within = self._add(_aten.clamp.default, within, 0, part.rows - 1)
        nothing = self._add(_aten.full_like.default, values, 0.0)
        kept = self._add(_aten.where.self, here, values, nothing)
        rows = self._slice(under, 0)
        return self._add(_aten.index_put.default, rows, [within], kept, True)

    def _add(self, target: Any, *args: Any) -> fx.Node:
        return add(self._graph, self._whole, target, *args)
