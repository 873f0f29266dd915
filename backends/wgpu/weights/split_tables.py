"""Split tables that are larger than a shader may bind into parts of whole rows.

The readers of an embedding table or a head's weight are rewritten before lowering: a gather selects
each row from its part, a product with the transpose fills the output's columns part by part, and a
product with the table adds the parts' products in order. The gradient of a trained table is split
in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from backends.wgpu.capture.capture import Capture
from backends.wgpu.graph import passes
from backends.wgpu.graph.opaque import JOINED_PRODUCTS, SUM_OF_PRODUCTS
from backends.wgpu.graph.passes import insert_node
from backends.wgpu.graph.table_parts import RowPart, Tables
from backends.wgpu.graph.values import shape_of
from backends.wgpu.graph.views import is_view, strided_view
from backends.wgpu.weights.split_gradients import split_gradients
from protocol.base.errors import SamestepError
from protocol.base.limits import byte_size

_aten = torch.ops.aten


def split_tables(capture: Capture, tables: Tables, trained_names: Sequence[str] = ()) -> None:
    """Replace split tables by their parts; modifies the capture.

    Args:
        capture: A capture.
        tables: Parts of each split table.
        trained_names: Names of the tensors whose gradients are the graph's outputs after the first.
            A split table's gradient becomes one output per part.

    Raises:
        SamestepError: An operator other than a gather or a product uses a split table.
    """
    if not tables.keys() & {*capture.tensors}:
        return
    capture.graph = passes.simplify(capture.graph)
    if tables.keys() & {*trained_names}:
        split_gradients(capture.graph, tables, trained_names)
    holders = [node for node in capture.graph.graph.nodes if node.op == "placeholder"]
    names: list[str] = []
    for name, node in zip(capture.tensors, holders, strict=False):
        if name not in tables or not node.users:
            names.append(name)
            continue
        _Table(capture.graph.graph, node, tables[name]).replace()
        names += map(str, tables[name])
    capture.tensors = tuple(names)


class _Table:
    """A table in a graph: its placeholder, the nodes of its parts, and its views."""

    def __init__(self, graph: fx.Graph, node: fx.Node, parts: Sequence[RowPart]) -> None:
        self._graph = graph
        self._node = node
        self._parts = parts
        self._nodes: list[fx.Node] = []
        self._views: list[fx.Node] = []

    def replace(self) -> None:
        """Replace the table and all its readers."""
        columns = shape_of(self._node)[1]
        with self._graph.inserting_before(self._node):
            for number, part in enumerate(self._parts):
                holder = self._graph.placeholder(f"{self._node.name}_{number}")
                holder.meta["val"] = self._node.meta["val"].new_empty((part.rows, columns))
                self._nodes.append(holder)
        for reader in self._readers():
            with self._graph.inserting_before(reader):
                reader.replace_all_uses_with(self._replacement(reader))
            self._graph.erase_node(reader)
        for node in reversed(self._views):
            self._graph.erase_node(node)
        self._graph.erase_node(self._node)

    def _readers(self) -> list[fx.Node]:
        """Return the readers of the table, looking through its views."""
        readers: dict[fx.Node, None] = {}
        sources = [self._node]
        while sources:
            for user in sources.pop().users:
                if is_view(user):
                    self._views.append(user)
                    sources.append(user)
                else:
                    readers[user] = None
        return [*readers]

    def _replacement(self, reader: fx.Node) -> fx.Node:
        """Return a node that replaces a reader."""
        if reader.target is _aten.embedding.default and self._is_table(reader.args[0]):
            return self._gather(reader)
        if reader.target in {_aten.mm.default, _aten.bmm.default}:
            left, right = reader.args
            if self._is_table(right) and not self._is_of_table(left):
                return self._sum_over_parts(reader)
            if self._is_table(right, transposed=True) and not self._is_of_table(left):
                return self._columns_by_part(reader)
        size = byte_size(4 * self._node.meta["val"].numel())
        raise SamestepError(
            f"expected embeddings and products to use {self._parts[0].table!r} ({size}), which "
            f"does not fit in one buffer of the device, got {reader.target} in "
            f"{reader.meta.get('module') or 'the loss'}; use a cpu or cuda worker for this model"
        )

    def _is_of_table(self, value: Any) -> bool:
        return value is self._node or value in self._views

    def _is_table(self, value: Any, *, transposed: bool = False) -> bool:
        """Whether a matrix, or each of a batch, is the table or its transpose."""
        if not self._is_of_table(value):
            return False
        view = strided_view(value, {self._node})
        rows, columns = shape_of(self._node)
        shape = (columns, rows) if transposed else (rows, columns)
        steps = (1, columns) if transposed else (columns, 1)
        return (
            view is not None
            and not view.offset
            and shape_of(value)[-2:] == shape
            and view.strides[-2:] == steps
            and not any(view.strides[:-2])
        )

    def _gather(self, reader: fx.Node) -> fx.Node:
        """Gather rows from each part with clamped indices, and select the row of the right part."""
        numbers: Any = reader.args[1]
        value: fx.Node | None = None
        for part, node in [*zip(self._parts, self._nodes, strict=True)][::-1]:
            local_indices = numbers
            if part.first:
                local_indices = insert_node(
                    self._graph, reader, _aten.sub.Tensor, numbers, part.first
                )
            local_indices = insert_node(
                self._graph, reader, _aten.clamp.default, local_indices, 0, part.rows - 1
            )
            rows = insert_node(self._graph, reader, _aten.embedding.default, node, local_indices)
            if value is None:
                value = rows
                continue
            in_part = insert_node(self._graph, reader, _aten.lt.Scalar, numbers, part.end)
            in_part = insert_node(self._graph, reader, _aten.unsqueeze.default, in_part, -1)
            value = insert_node(self._graph, reader, _aten.where.self, in_part, rows, value)
        assert value is not None
        return value

    def _columns_by_part(self, reader: fx.Node) -> fx.Node:
        """Compute X @ table^T: columns of the output, part by part."""
        transposed = [
            insert_node(self._graph, reader, _aten.permute.default, n, [1, 0]) for n in self._nodes
        ]
        product = insert_node(
            self._graph, reader, JOINED_PRODUCTS, self._left_operand(reader), transposed
        )
        return self._restore_shape(reader, product)

    def _sum_over_parts(self, reader: fx.Node) -> fx.Node:
        """Compute G @ table: the sum of the products with the parts, in order."""
        left = self._left_operand(reader)
        lefts = [
            insert_node(self._graph, reader, _aten.slice.Tensor, left, 1, part.first, part.end)
            for part in self._parts
        ]
        product = insert_node(self._graph, reader, SUM_OF_PRODUCTS, lefts, self._nodes)
        return self._restore_shape(reader, product)

    def _left_operand(self, reader: fx.Node) -> fx.Node:
        """Flatten the left operand's batch: all its matrices use the same table."""
        left = reader.args[0]
        assert isinstance(left, fx.Node)
        shape = shape_of(left)
        if len(shape) == 2:
            return left
        flat = [shape[0] * shape[1], shape[2]]
        return insert_node(self._graph, reader, _aten.reshape.default, left, flat)

    def _restore_shape(self, reader: fx.Node, product: fx.Node) -> fx.Node:
        if len(shape_of(reader)) == 2:
            return product
        return insert_node(self._graph, reader, _aten.reshape.default, product, [*shape_of(reader)])
