"""Decides which values of a graph get a buffer; the others are computed where they are read.

A chain of elementwise operators is one kernel with what reads it, unless it is read often and
costs much, or would read too many buffers. A buffer costs a trip to memory and back, and a launch;
a value without one is computed anew by each of its readers.
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
    KEEP,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    PARTIAL,
    PRODUCTS_BESIDE,
    SUM_OF_PRODUCTS,
    UNIFORM,
)
from backends.wgpu.graph.values import elements_of
from backends.wgpu.graph.views import (
    Strided,
    above,
    is_copy,
    is_own,
    is_view,
    strided,
    whole_buffer,
)

_aten = torch.ops.aten

MATMULS: Final = frozenset({
    _aten.mm.default,
    _aten.bmm.default,
    PRODUCTS_BESIDE,
    SUM_OF_PRODUCTS,
})  # fmt: skip
ATTENTIONS: Final = frozenset({ATTENTION, ATTENTION_QUERIES, ATTENTION_KEYS})
_STRIDED: Final = MATMULS | ATTENTIONS
"""What reads strided views of buffers."""
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
"""A value that is read more than once is kept if it costs more operations than this."""
_CHAIN_COST: Final = 40
_BUFFERS: Final = 7
"""What a kernel reads: with its output, the 8 storage buffers that every adapter binds."""


@dataclass(slots=True)
class Fusion:
    """The decision for one graph.

    Attributes:
        buffers: Nodes whose values lie in memory of their own, row-major.
        folded: Nodes whose values are known.
        cost: Of each value, the operations for one element where it is read; 1 from a buffer.
        reads: The buffers that a reader of the value binds for it.
    """

    nodes: list[fx.Node]
    folded: Collection[fx.Node]
    buffers: set[fx.Node] = field(default_factory=set)
    cost: dict[fx.Node, int] = field(default_factory=dict)
    reads: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)

    def is_leaf(self, node: fx.Node) -> bool:
        """Whether the value is there without a kernel of its own or of a reader."""
        return node.op in {"placeholder", "get_attr"} or node in self.folded or is_part(node)


def is_part(node: fx.Node) -> bool:
    """Whether the node is one of the tensors that a layer gives."""
    return node.op == "call_function" and node.target is operator.getitem


def decide(nodes: Iterable[fx.Node], folded: Collection[fx.Node], kept: list[fx.Node]) -> Fusion:
    """Choose the buffers.

    Args:
        nodes: Of the graph in order, without its output.
        folded: Those whose values are known.
        kept: Those that must lie in a buffer: the graph's outputs.
    """
    fusion = Fusion(list(nodes), folded)
    readers = _readers(fusion, kept)
    for node in fusion.nodes:
        if node.target in LAYERS and node.op == "call_function":
            tensors: Any = node.args[0]
            # A layer's own kernels are shared by all layers: they bind buffers, not expressions.
            for tensor in tensors:
                _whole(fusion, tensor)
            continue
        _consider(fusion, node, readers[node])
    for node in fusion.nodes:  # what a product reads may have been kept in pieces only
        if node.op == "call_function" and node.target in _STRIDED and node not in folded:
            for operand in node.all_input_nodes:
                if read_where_it_lies(operand, fusion.buffers, node) is None:
                    fusion.buffers.add(operand)
    for node in kept:
        _whole(fusion, node)
    return fusion


def _readers(fusion: Fusion, kept: list[fx.Node]) -> dict[fx.Node, set[Any]]:
    """Who reads each value, looking through views."""
    readers: dict[fx.Node, set[Any]] = {node: set() for node in fusion.nodes}

    def add(node: fx.Node, reader: Any) -> None:
        readers[node].add(reader)
        while is_view(node) and node not in fusion.folded:
            node = above(node)
            readers[node].add(reader)

    for node in fusion.nodes:
        if node.op != "call_function" or node in fusion.folded or is_view(node):
            continue
        for read in node.all_input_nodes:
            add(read, node)
    for node in kept:
        add(node, "output")
    return readers


def _consider(fusion: Fusion, node: fx.Node, readers: set[Any]) -> None:
    if fusion.is_leaf(node):
        if node in fusion.folded and elements_of(node) == 1:
            # A number in the kernel's text.
            fusion.cost[node], fusion.reads[node] = 0, frozenset()
        else:
            _keep(fusion, node)
        return
    if is_own(node):  # the copy of an output, made because it must be a buffer
        _keep(fusion, node)
        return
    if is_view(node):
        _inherit(fusion, node)
        return
    _limit_reads(fusion, node)
    target = node.target
    if target in _STRIDED:
        for operand in node.all_input_nodes:
            _strided_operand(fusion, operand, node)
        _keep(fusion, node)
    elif target in REDUCTIONS | SCATTERS | SCANS:
        # One element takes a loop over many: a reader would run it for every element of its own.
        _keep(fusion, node)
    else:
        cost = _inputs_cost(fusion, node)
        cost += _TRANSCENDENTAL_COST if target in _COSTLY else 1
        if _is_kept(node, readers, cost):
            _keep(fusion, node)
        else:
            fusion.cost[node] = cost
            fusion.reads[node] = _inputs_read(fusion, node)


def _is_kept(node: fx.Node, readers: set[Any], cost: int) -> bool:
    if "output" in readers or any(r.target in LAYERS for r in readers):
        return not is_copy(node)  # a copy of what lies in a buffer may be that buffer
    if any(r.target in _STRIDED for r in readers):
        # A product reads each element many times over; but a strided view without the copy.
        return not (is_copy(node) or is_widening(node))
    if len(readers) > 1 and any(r.target in _EXTREMES for r in readers if r != "output"):
        # Backward asks which element it was: computed twice, it may differ in its last bit.
        return True
    return (len(readers) > 1 and cost > _SHARED_COST) or cost > _CHAIN_COST


def read_where_it_lies(
    operand: fx.Node, buffers: Collection[fx.Node], reader: fx.Node
) -> Strided | None:
    """An operand of a product or of attention, if that can read it from one of the buffers."""
    return strided(operand, buffers, widens=True, rounds=reader.target in MATMULS)


def _strided_operand(fusion: Fusion, operand: fx.Node, reader: fx.Node) -> None:
    """What a product reads lies in a buffer with strides: below its views, else by itself."""
    if read_where_it_lies(operand, fusion.buffers, reader) is not None:
        return
    root = operand
    while (is_view(root) or is_widening(root)) and root not in fusion.folded:
        root = above(root)
    if root not in fusion.buffers and not is_copy(root):
        _keep(fusion, root)
    if read_where_it_lies(operand, fusion.buffers, reader) is None:
        _keep(fusion, operand)


def _whole(fusion: Fusion, node: fx.Node) -> None:
    if whole_buffer(node, fusion.buffers) is None:
        _keep(fusion, node)


def _limit_reads(fusion: Fusion, node: fx.Node) -> None:
    """Keep the inputs that read the most, until the node binds few enough buffers."""
    while len(_inputs_read(fusion, node)) > _BUFFERS:
        widest = max(node.all_input_nodes, key=lambda n: len(fusion.reads[n]))
        if len(fusion.reads[widest]) <= 1:
            return
        while is_view(widest) and widest not in fusion.folded:
            widest = above(widest)  # a view has no memory of its own
        _keep(fusion, widest)
        # Values between that one and this were decided on before: they bind fewer buffers now.
        _refresh(fusion, node)


def _keep(fusion: Fusion, node: fx.Node) -> None:
    fusion.buffers.add(node)
    fusion.cost[node], fusion.reads[node] = 1, frozenset({node})


def _inherit(fusion: Fusion, node: fx.Node) -> None:
    fusion.cost[node] = fusion.cost[above(node)]
    fusion.reads[node] = fusion.reads[above(node)]


def _inputs_cost(fusion: Fusion, node: fx.Node) -> int:
    return sum(fusion.cost[read] for read in node.all_input_nodes)


def _inputs_read(fusion: Fusion, node: fx.Node) -> frozenset[fx.Node]:
    return frozenset[fx.Node]().union(*(fusion.reads[n] for n in node.all_input_nodes))


def _refresh(fusion: Fusion, until: fx.Node) -> None:
    """What earlier nodes read, after one of them got a buffer."""
    for node in fusion.nodes:
        if node is until:
            return
        if node not in fusion.reads or node in fusion.buffers or fusion.is_leaf(node):
            continue
        if is_view(node):
            _inherit(fusion, node)
        else:
            fusion.reads[node] = _inputs_read(fusion, node)
