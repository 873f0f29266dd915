"""Tables larger than what a shader may bind: cut into parts of whole rows.

An embedding table or the weight of a head is cut where its rows allow it, and what reads it is
rewritten before the graph is lowered: a gather takes each row from the part that has it, a product
along the rows fills the output's columns part by part, and one over the rows adds up the parts'
in their order. The gradient of a trained table is computed in the same parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from backends.wgpu.capture.capture import Capture
from backends.wgpu.graph import passes
from backends.wgpu.graph.opaque import PRODUCTS_BESIDE, SUM_OF_PRODUCTS
from backends.wgpu.graph.passes import add
from backends.wgpu.graph.table_parts import RowPart, Tables
from backends.wgpu.graph.values import shape_of
from backends.wgpu.graph.views import is_view, strided
from backends.wgpu.weights.split_gradients import split_gradients
from protocol.base.errors import SamestepError
from protocol.base.limits import byte_size

_aten = torch.ops.aten


def split_tables(capture: Capture, tables: Tables, trained: Sequence[str] = ()) -> None:
    """Put the parts in place of the tables that are cut; the capture is changed.

    Args:
        capture: As traced.
        tables: Of each table that is cut its parts.
        trained: Names of the tensors whose gradients are the graph's outputs after the first. That
            of a table becomes as many outputs as it has parts.

    Raises:
        SamestepError: Something else than a gather or a product reads one, or adds to its gradient.
    """
    if not tables.keys() & {*capture.tensors}:
        return
    capture.graph = passes.simplified(capture.graph)
    if tables.keys() & {*trained}:
        split_gradients(capture.graph, tables, trained)
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
    """One table in a graph: its placeholder, the nodes of its parts, and the views of it."""

    def __init__(self, graph: fx.Graph, node: fx.Node, parts: Sequence[RowPart]) -> None:
        self._graph = graph
        self._node = node
        self._parts = parts
        self._nodes: list[fx.Node] = []
        self._views: list[fx.Node] = []

    def replace(self) -> None:
        """Parts in place of the table, and of all that reads it."""
        columns = shape_of(self._node)[1]
        with self._graph.inserting_before(self._node):
            for number, part in enumerate(self._parts):
                made = self._graph.placeholder(f"{self._node.name}_{number}")
                made.meta["val"] = self._node.meta["val"].new_empty((part.rows, columns))
                self._nodes.append(made)
        for reader in self._readers():
            with self._graph.inserting_before(reader):
                reader.replace_all_uses_with(self._instead(reader))
            self._graph.erase_node(reader)
        for node in reversed(self._views):
            self._graph.erase_node(node)
        self._graph.erase_node(self._node)

    def _readers(self) -> list[fx.Node]:
        """Who reads the table, looking through views of it."""
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

    def _instead(self, reader: fx.Node) -> fx.Node:
        """A node that gives what the reader did."""
        if reader.target is _aten.embedding.default and self._shows(reader.args[0]):
            return self._gathered(reader)
        if reader.target in {_aten.mm.default, _aten.bmm.default}:
            left, right = reader.args
            if self._shows(right) and not self._is_of_table(left):
                return self._summed(reader)
            if self._shows(right, turned=True) and not self._is_of_table(left):
                return self._beside(reader)
        whole = byte_size(4 * self._node.meta["val"].numel())
        raise SamestepError(
            f"{self._parts[0].table!r} ({whole}) does not fit in one buffer of the device; "
            "it can be cut into parts for an embedding and for products, but "
            f"{reader.meta.get('module') or 'the loss'} reads it by {reader.target}; "
            "use a cpu or cuda worker for this model"
        )

    def _is_of_table(self, value: Any) -> bool:
        return value is self._node or value in self._views

    def _shows(self, value: Any, *, turned: bool = False) -> bool:
        """Whether a matrix, or each of a batch, is the table or, turned, its transpose."""
        if not self._is_of_table(value):
            return False
        found = strided(value, {self._node})
        rows, columns = shape_of(self._node)
        shape = (columns, rows) if turned else (rows, columns)
        steps = (1, columns) if turned else (columns, 1)
        return (
            found is not None
            and not found.offset
            and shape_of(value)[-2:] == shape
            and found.strides[-2:] == steps
            and not any(found.strides[:-2])
        )

    def _gathered(self, reader: fx.Node) -> fx.Node:
        """Each row from the part that has it; the others give some row of theirs."""
        numbers: Any = reader.args[1]
        value: fx.Node | None = None
        for part, node in [*zip(self._parts, self._nodes, strict=True)][::-1]:
            within = numbers
            if part.first:
                within = add(self._graph, reader, _aten.sub.Tensor, numbers, part.first)
            within = add(self._graph, reader, _aten.clamp.default, within, 0, part.rows - 1)
            rows = add(self._graph, reader, _aten.embedding.default, node, within)
            if value is None:
                value = rows
                continue
            here = add(self._graph, reader, _aten.lt.Scalar, numbers, part.end)
            here = add(self._graph, reader, _aten.unsqueeze.default, here, -1)
            value = add(self._graph, reader, _aten.where.self, here, rows, value)
        assert value is not None
        return value

    def _beside(self, reader: fx.Node) -> fx.Node:
        """X @ table^T: columns of the output, part by part."""
        turned = [add(self._graph, reader, _aten.permute.default, n, [1, 0]) for n in self._nodes]
        product = add(self._graph, reader, PRODUCTS_BESIDE, self._left(reader), turned)
        return self._shaped(reader, product)

    def _summed(self, reader: fx.Node) -> fx.Node:
        """G @ table: the sum of the products with the parts, in their order."""
        left = self._left(reader)
        lefts = [
            add(self._graph, reader, _aten.slice.Tensor, left, 1, part.first, part.end)
            for part in self._parts
        ]
        product = add(self._graph, reader, SUM_OF_PRODUCTS, lefts, self._nodes)
        return self._shaped(reader, product)

    def _left(self, reader: fx.Node) -> fx.Node:
        """The left operand as one matrix: all of a batch meet the same table."""
        left = reader.args[0]
        assert isinstance(left, fx.Node)
        shape = shape_of(left)
        if len(shape) == 2:
            return left
        flat = [shape[0] * shape[1], shape[2]]
        return add(self._graph, reader, _aten.reshape.default, left, flat)

    def _shaped(self, reader: fx.Node, product: fx.Node) -> fx.Node:
        if len(shape_of(reader)) == 2:
            return product
        return add(self._graph, reader, _aten.reshape.default, product, [*shape_of(reader)])
