"""Decide which values of a graph get a buffer; other values are computed inline by their readers.

A chain of elementwise operators is fused into its reader's kernel unless it is expensive and read
more than once, or would bind too many buffers. A buffer costs memory traffic and a launch; a value
without one is recomputed by each of its readers.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from backends.wgpu.graph.halves import is_widening
from backends.wgpu.graph.opaque import (
    ATTENTION,
    ATTENTION_KEYS,
    ATTENTION_QUERIES,
    JOINED_PRODUCTS,
    KEEP,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    PARTIAL,
    SUM_OF_PRODUCTS,
    UNIFORM,
)
from backends.wgpu.graph.values import elements_of
from backends.wgpu.graph.views import (
    StridedView,
    is_copy,
    is_view,
    needs_buffer,
    source_of,
    strided_view,
    whole_buffer,
)

_aten = torch.ops.aten

MATMULS: Final = frozenset({
    _aten.mm.default,
    _aten.bmm.default,
    JOINED_PRODUCTS,
    SUM_OF_PRODUCTS,
})  # fmt: skip
ATTENTIONS: Final = frozenset({ATTENTION, ATTENTION_QUERIES, ATTENTION_KEYS})
_STRIDED: Final = MATMULS | ATTENTIONS
"""Operators that read strided views of buffers."""
SCATTERS: Final = frozenset({_aten.index_put.default, _aten.scatter_add.default})
SCANS: Final = frozenset({_aten.cumsum.default})
REDUCTIONS: Final = frozenset({
    _aten.sum.dim_IntList,
    _aten.sum.default,
    _aten.mean.dim,
    _aten.mean.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.argmax.default,
    _aten.argmin.default,
    _aten.any.default,
    _aten.any.dim,
    _aten.any.dims,
    PARTIAL,
})  # fmt: skip
LAYERS: Final = frozenset({LAYER_FORWARD, LAYER_BACKWARD})
_EXTREMES: Final = frozenset({
    _aten.amax.default, _aten.amin.default, _aten.argmax.default, _aten.argmin.default,
})  # fmt: skip

_COSTLY: Final = frozenset({
    _aten.exp.default,
    _aten.log.default,
    _aten.sigmoid.default,
    _aten.erf.default,
    _aten.tanh.default,
    _aten.cos.default,
    _aten.sin.default,
    KEEP,
    UNIFORM,
})  # fmt: skip
_TRANSCENDENTAL_COST: Final = 5
_SHARED_COST: Final = 5
"""A value with several readers gets a buffer if it costs more operations than this."""
_CHAIN_COST: Final = 40
_BUFFERS: Final = 7
"""Buffers that a kernel may read: with its output, the 8 that every adapter can bind."""


@dataclass(slots=True)
class Fusion:
    """The decisions for one graph.

    Attributes:
        nodes: The graph's nodes in order, without its output.
        buffers: Nodes with their own buffer, row-major.
        constants: Nodes whose values are known.
        cost: Operations that a reader spends per element of a value; 1 for a buffer.
        reads: Buffers that a reader binds for a value.
    """

    nodes: list[fx.Node]
    constants: Collection[fx.Node]
    buffers: set[fx.Node] = field(default_factory=set)
    cost: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)

    def is_leaf(self, node: fx.Node) -> bool:
        """Whether the value needs no kernel: an input or a constant."""
        return (
            node.op in {"placeholder", "get_attr"}
            or node in self.constants
            or is_layer_result(node)
        )


def is_layer_result(node: fx.Node) -> bool:
    """Whether the node is one of a layer's results."""
    return node.op == "call_function" and node.target is operator.getitem


def choose_buffers(
    nodes: Iterable[fx.Node], constants: Collection[fx.Node], outputs: list[fx.Node]
) -> Fusion:
    """Choose the values that get a buffer.

    Args:
        nodes: The graph's nodes in order, without its output.
        constants: The nodes whose values are known.
        outputs: The nodes that must have a buffer: the graph's outputs.
    """
    fusion = Fusion(list(nodes), constants)
    readers = _readers(fusion, outputs)
    for node in fusion.nodes:
        if node.target in LAYERS and node.op == "call_function":
            tensors: Any = node.args[0]
            # A layer's own kernels are shared by all layers: they bind buffers, not expressions.
            for tensor in tensors:
                _require_whole_buffer(fusion, tensor)
            continue
        _choose_for(fusion, node, readers[node])
    for node in fusion.nodes:  # a product's operand may have no contiguous buffer
        if node.op == "call_function" and node.target in _STRIDED and node not in constants:
            for operand in node.all_input_nodes:
                if strided_operand(operand, fusion.buffers, node) is None:
                    fusion.buffers.add(operand)
    for node in outputs:
        _require_whole_buffer(fusion, node)
    return fusion


def _readers(fusion: Fusion, outputs: list[fx.Node]) -> dict[fx.Node, set[Any]]:
    """Return the readers of each value, looking through views."""
    readers: dict[fx.Node, set[Any]] = {node: set() for node in fusion.nodes}

    def add(node: fx.Node, reader: Any) -> None:
        readers[node].add(reader)
        while is_view(node) and node not in fusion.constants:
            node = source_of(node)
            readers[node].add(reader)

    for node in fusion.nodes:
        if node.op != "call_function" or node in fusion.constants or is_view(node):
            continue
        for input_node in node.all_input_nodes:
            add(input_node, node)
    for node in outputs:
        add(node, "output")
    return readers


def _choose_for(fusion: Fusion, node: fx.Node, readers: set[Any]) -> None:
    if fusion.is_leaf(node):
        if node in fusion.constants and elements_of(node) == 1:
            # Inlined as a literal.
            fusion.cost[node], fusion.reads[node] = 0, frozenset()
        else:
            _give_buffer(fusion, node)
        return
    if needs_buffer(node):  # the copy of an output, which must be a buffer
        _give_buffer(fusion, node)
        return
    if is_view(node):
        _copy_from_source(fusion, node)
        return
    _limit_reads(fusion, node)
    target = node.target
    if target in _STRIDED:
        for operand in node.all_input_nodes:
            _require_strided_operand(fusion, operand, node)
        _give_buffer(fusion, node)
    elif target in REDUCTIONS | SCATTERS | SCANS:
        # An element takes a loop over many terms, which a reader would repeat for each of its
        # elements.
        _give_buffer(fusion, node)
    else:
        cost = _inputs_cost(fusion, node)
        cost += _TRANSCENDENTAL_COST if target in _COSTLY else 1
        if _is_buffer_worthwhile(node, readers, cost):
            _give_buffer(fusion, node)
        else:
            fusion.cost[node] = cost
            fusion.reads[node] = _reads_of_inputs(fusion, node)


def _is_buffer_worthwhile(node: fx.Node, readers: set[Any], cost: int) -> bool:
    if "output" in readers or any(r.target in LAYERS for r in readers):
        return not is_copy(node)  # a copy of a buffer may be that buffer
    if any(r.target in _STRIDED for r in readers):
        # A product reads each element many times. It can read a strided view without a copy.
        return not (is_copy(node) or is_widening(node))
    if len(readers) > 1 and any(r.target in _EXTREMES for r in readers if r != "output"):
        # Backward looks for the equal element: a recomputed value may differ in its last bit.
        return True
    return (len(readers) > 1 and cost > _SHARED_COST) or cost > _CHAIN_COST


def strided_operand(
    operand: fx.Node, buffers: Collection[fx.Node], reader: fx.Node
) -> StridedView | None:
    """Return an operand as a strided view of a buffer that its reader can use, or None."""
    return strided_view(operand, buffers, widens=True, rounds=reader.target in MATMULS)


def _require_strided_operand(fusion: Fusion, operand: fx.Node, reader: fx.Node) -> None:
    """Give a product's operand a buffer: the tensor below its views, or the operand itself."""
    if strided_operand(operand, fusion.buffers, reader) is not None:
        return
    root = operand
    while (is_view(root) or is_widening(root)) and root not in fusion.constants:
        root = source_of(root)
    if root not in fusion.buffers and not is_copy(root):
        _give_buffer(fusion, root)
    if strided_operand(operand, fusion.buffers, reader) is None:
        _give_buffer(fusion, operand)


def _require_whole_buffer(fusion: Fusion, node: fx.Node) -> None:
    if whole_buffer(node, fusion.buffers) is None:
        _give_buffer(fusion, node)


def _limit_reads(fusion: Fusion, node: fx.Node) -> None:
    """Give buffers to the inputs that read most, until the node binds few enough buffers."""
    while len(_reads_of_inputs(fusion, node)) > _BUFFERS:
        widest = max(node.all_input_nodes, key=lambda n: len(fusion.reads[n]))
        if len(fusion.reads[widest]) <= 1:
            return
        while is_view(widest) and widest not in fusion.constants:
            widest = source_of(widest)  # a view has no buffer
        _give_buffer(fusion, widest)
        # Nodes between `widest` and `node` bind fewer buffers now.
        _refresh(fusion, node)


def _give_buffer(fusion: Fusion, node: fx.Node) -> None:
    fusion.buffers.add(node)
    fusion.cost[node], fusion.reads[node] = 1, frozenset({node})


def _copy_from_source(fusion: Fusion, node: fx.Node) -> None:
    fusion.cost[node] = fusion.cost[source_of(node)]
    fusion.reads[node] = fusion.reads[source_of(node)]


def _inputs_cost(fusion: Fusion, node: fx.Node) -> int:
    return sum(fusion.cost[input_node] for input_node in node.all_input_nodes)


def _reads_of_inputs(fusion: Fusion, node: fx.Node) -> frozenset[fx.Node]:
    return frozenset[fx.Node]().union(*(fusion.reads[n] for n in node.all_input_nodes))


def _refresh(fusion: Fusion, last_node: fx.Node) -> None:
    """Recompute the reads of earlier nodes after one of them got a buffer."""
    for node in fusion.nodes:
        if node is last_node:
            return
        if node not in fusion.reads or node in fusion.buffers or fusion.is_leaf(node):
            continue
        if is_view(node):
            _copy_from_source(fusion, node)
        else:
            fusion.reads[node] = _reads_of_inputs(fusion, node)
