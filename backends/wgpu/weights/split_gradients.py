"""Split the gradient of a trained table into the table's parts.

The gradient is a sum over the table's uses: a product for a head, a scatter of rows for an
embedding. Each term is computed per part, in the same order as for the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from backends.wgpu.graph.passes import insert_node
from backends.wgpu.graph.table_parts import RowPart, Tables
from backends.wgpu.graph.values import shape_of
from protocol.base.errors import SamestepError

_aten = torch.ops.aten
_ROWS_AND_COLUMNS = [1, 0]


def split_gradients(graph: fx.GraphModule, tables: Tables, trained_names: Sequence[str]) -> None:
    """Replace the gradients of split tables by gradients of their parts.

    Args:
        graph: Outputs: the loss, then the gradient of each of `trained_names`, or None; then
            others.
        tables: Parts of each split table.
        trained_names: Names of the trained tensors.

    Raises:
        SamestepError: An operator other than a gather or a product adds to a gradient.
    """
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    loss, *remaining = output.args[0]
    gradients, other_outputs = remaining[: len(trained_names)], remaining[len(trained_names) :]
    outputs = [loss]
    for name, gradient in zip(trained_names, gradients, strict=True):
        parts = tables.get(name, ())
        if not parts or gradient is None:
            outputs += [gradient] * max(1, len(parts))
        else:
            outputs += [_Gradient(graph.graph, gradient, part).rows() for part in parts]
    output.args = ([*outputs, *other_outputs],)
    graph.graph.eliminate_dead_code()


class _Gradient:
    """The gradient of one part, derived from the table's."""

    def __init__(self, graph: fx.Graph, table_gradient: fx.Node, part: RowPart) -> None:
        self._graph = graph
        self._table_gradient = table_gradient
        self._part = part

    def rows(self) -> fx.Node:
        """Return the gradient of the part's rows."""
        (output,) = (node for node in self._graph.nodes if node.op == "output")
        with self._graph.inserting_before(output):
            return self._rows_of(self._table_gradient)

    def _rows_of(self, node: fx.Node) -> fx.Node:
        arguments: Any = node.args
        if node.target is _aten.add.Tensor and len(arguments) == 2 and not node.kwargs:
            left, right = (self._rows_of(term) for term in arguments)
            return self._add(_aten.add.Tensor, left, right)
        if node.target is _aten.permute.default and [*arguments[1]] == _ROWS_AND_COLUMNS:
            return self._columns_of(arguments[0])
        if node.target is _aten.mm.default:
            return self._add(_aten.mm.default, self._slice(arguments[0], 0), arguments[1])
        if node.target is _aten.index_put.default and len(arguments) == 4 and arguments[3] is True:
            return self._scatter_part(node, *arguments[:3])
        raise self._refusal(node)

    def _refusal(self, node: fx.Node) -> SamestepError:
        return SamestepError(
            f"expected embeddings and products to use {self._part.table!r}, which does not fit in "
            f"one buffer of the device, got {node.target} in "
            f"{node.meta.get('module') or 'the loss'}; use a cpu or cuda worker for this model"
        )

    def _columns_of(self, node: fx.Node) -> fx.Node:
        """Return the part's columns of a matrix, transposed."""
        arguments: Any = node.args
        if node.target is _aten.permute.default and [*arguments[1]] == _ROWS_AND_COLUMNS:
            return self._rows_of(arguments[0])
        if node.target is not _aten.mm.default:
            raise self._refusal(node)
        product = self._add(_aten.mm.default, arguments[0], self._slice(arguments[1], 1))
        return self._add(_aten.permute.default, product, _ROWS_AND_COLUMNS)

    def _slice(self, node: fx.Node, dim: int) -> fx.Node:
        return self._add(_aten.slice.Tensor, node, dim, self._part.first, self._part.end)

    def _scatter_part(
        self, node: fx.Node, under: fx.Node, indices: Sequence[fx.Node | None], values: fx.Node
    ) -> fx.Node:
        """Scatter a part's rows; rows of other parts are added as zeros at a clamped index."""
        numbers, *other_indices = indices
        zeros = under.target is _aten.full.default and under.args[1] == 0
        if other_indices or numbers is None or not zeros:
            raise self._refusal(node)
        part = self._part
        at_or_after = self._add(_aten.ge.Scalar, numbers, part.first)
        is_before = self._add(_aten.lt.Scalar, numbers, part.end)
        in_part = self._add(_aten.bitwise_and.Tensor, at_or_after, is_before)
        for _ in range(len(shape_of(values)) - len(shape_of(numbers))):
            in_part = self._add(_aten.unsqueeze.default, in_part, -1)
        local_indices = self._add(_aten.sub.Tensor, numbers, part.first)
        local_indices = self._add(_aten.clamp.default, local_indices, 0, part.rows - 1)
        zero_values = self._add(_aten.full_like.default, values, 0.0)
        selected = self._add(_aten.where.self, in_part, values, zero_values)
        rows = self._slice(under, 0)
        return self._add(_aten.index_put.default, rows, [local_indices], selected, True)

    def _add(self, target: Any, *args: Any) -> fx.Node:
        return insert_node(self._graph, self._table_gradient, target, *args)
