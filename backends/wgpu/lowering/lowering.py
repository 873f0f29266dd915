"""Turns a traced graph into kernels over its values, in the order they run."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from backends.wgpu.capture.attention import pays
from backends.wgpu.graph import passes
from backends.wgpu.graph.halves import hold_halves
from backends.wgpu.graph.opaque import LAYER_FORWARD
from backends.wgpu.graph.values import NoRule, all_of, scalar_of
from backends.wgpu.graph.views import is_view, whole_buffer
from backends.wgpu.lowering.fusion import LAYERS, decide, is_part
from backends.wgpu.lowering.joins import Joins, ordered
from backends.wgpu.lowering.kernels import Emitter, Kernel, MatmulShader, is_known
from backends.wgpu.lowering.together import together
from backends.wgpu.shaders.attention.layout import WORKGROUP_BYTES
from backends.wgpu.shaders.attention.problem import AttentionSizes
from backends.wgpu.shaders.narrow import Narrow, mark
from protocol.base.errors import SamestepError

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Templates:
    """How kernels are written for a device.

    Attributes:
        cooperative: Whether workgroups share long sums: good on GPUs, not on a CPU.
        matmul: The template of matrix products.
        canonical: Whether nothing that decides bits may depend on the device.
        bindings: Storage buffers that a shader may bind.
        halves: Whether products are computed with operands of float16, and what is of that type is
            held in two bytes.
        workgroup_bytes: Of workgroup memory, for attention; products choose for themselves.
        microbatches: How many may be computed at once, where they are small.
    """

    cooperative: bool
    matmul: MatmulShader
    canonical: bool = False
    bindings: int = 8
    halves: bool = False
    workgroup_bytes: int = WORKGROUP_BYTES
    microbatches: int = 1

    @property
    def joins(self) -> bool:
        """Whether dispatches are made fewer: on a GPU each of them costs a wait."""
        return self.cooperative and not self.canonical

    def joined(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Those that do not wait for each other, together."""
        return together(kernels, self.bindings) if self.joins else [*kernels]

    def fuses(self, sizes: AttentionSizes) -> bool:
        """Whether a trace shall keep attention of these sizes in one piece."""
        return pays(sizes, cooperative=self.cooperative and not self.canonical)


@dataclass(frozen=True, slots=True)
class CallStep:
    """A layer's forward or backward within the outer graph.

    Attributes:
        call: The layer call's number.
        forward: Which of the two.
        reads: Inputs of the forward, or tangents of the backward, in buffers of their own.
        writes: What is used of what it gives, by place.
    """

    call: int
    forward: bool
    reads: tuple[fx.Node, ...]
    writes: Mapping[int, fx.Node]


@dataclass(frozen=True, slots=True)
class Lowered:
    """A graph as steps.

    Attributes:
        inputs: The placeholders.
        outputs: For each output the value whose buffer holds it, row-major; or None.
        steps: In order.
        constants: Values that are known and read from memory.
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]
    steps: tuple[Kernel | CallStep, ...]
    constants: Mapping[fx.Node, torch.Tensor]


def lower(
    graph: fx.GraphModule,
    known: Sequence[torch.Tensor | None],
    forms: Sequence[Narrow | None],
    template: Templates,
    first: slice = slice(0),
) -> Lowered:
    """Lower a graph.

    Args:
        graph: As traced; it is changed.
        known: For each placeholder its value, if that never changes.
        forms: For the first placeholders how their buffers hold them, if not as they are.
        template: How kernels are written for this device.
        first: The outputs that shall be there before the rest is begun.

    Raises:
        NoRule: An operator has no rule; all such of the graph are named.
    """
    # Simplified first: what is folded and fused below is decided for the graph that is left.
    graph = passes.simplified(graph)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, form in zip(inputs, forms, strict=False):  # the rest are read as they are
        mark(node, form)
    values = {node: value for node, value in zip(inputs, known, strict=True) if value is not None}
    folded = passes.constants(graph, values, exactly=template.canonical)
    outputs = _outputs(graph, folded)
    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    if template.halves:
        hold_halves(nodes)
    _check(nodes, folded)
    fusion = decide(nodes, folded, [node for node in outputs if node is not None])
    emitter = Emitter(
        fusion.buffers, folded, template.cooperative, template.matmul, template.workgroup_bytes
    )
    # An output may be a view of the buffer that holds it.
    held = tuple(None if n is None else whole_buffer(n, fusion.buffers) for n in outputs)
    calls = {node: _call(node, fusion.buffers) for node in nodes if node.target in LAYERS}
    reads: dict[fx.Node, Collection[fx.Node]] = {}
    for node in nodes:
        if node in calls:
            reads[node] = {*calls[node].reads}
        elif (
            node.op == "call_function"
            and node in fusion.buffers
            and not (node in folded or is_part(node))
        ):
            reads[node] = emitter.reads(node)
    early = _above(outputs[first])
    joins = Joins(emitter, template.bindings if template.joins else 0, reads, held, early)
    steps: list[Kernel | CallStep] = []
    for node in ordered(reads, early) if template.joins and not calls else reads:
        if node in calls:
            steps += [*joins.before(reads[node]), calls[node]]
        else:
            steps += joins.add(node)
    steps += joins.rest()
    read = {r for step in steps for r in step.reads} | {n for n in held if n is not None}
    constants = {node: value for node, value in folded.items() if node in read}
    return Lowered(tuple(inputs), held, tuple(_needed(steps, held)), constants)


def _above(nodes: Sequence[fx.Node | None]) -> set[fx.Node]:
    """The values, and all that they are computed of."""
    found: set[fx.Node] = set()
    left = [node for node in nodes if node is not None]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _outputs(graph: fx.GraphModule, folded: Mapping[fx.Node, torch.Tensor]) -> list[fx.Node | None]:
    """Each in a buffer that nothing else is: an input, a constant or a second output is copied."""
    (last,) = [node for node in graph.graph.nodes if node.op == "output"]
    given: Any = last.args[0]
    results: list[fx.Node | None] = []
    seen: set[fx.Node] = set()
    for output in given if isinstance(given, list | tuple) else [given]:
        if output is None:
            results.append(None)
            continue
        node = root = output
        while is_view(root):
            root = root.args[0]
        if root in seen or root in folded or root.op == "placeholder" or root.target is _FULL:
            with graph.graph.inserting_before(last):
                copy = graph.graph.call_function(_aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            copy.meta["own"] = True
            node = copy
        seen.add(root)
        results.append(node)
    last.args = (tuple(results),)
    return results


_FULL = _aten.full.default


def _check(nodes: Sequence[fx.Node], folded: Mapping[fx.Node, torch.Tensor]) -> None:
    """Refuse what has no rule, before any kernel is written.

    Raises:
        NoRule: An operator has none; all that have none are named.
        SamestepError: A buffer of the model would change.
    """
    found: list[NoRule] = []
    refused: set[fx.Node] = set()
    for node in nodes:
        if node.op != "call_function" or node in folded or node.target in LAYERS:
            continue
        if node.target is _aten.copy_.default:
            raise SamestepError(
                f"a tensor of the model changes in forward ({node.meta.get('module', '')!r}), "
                "which no replica could follow; use a layer without running state"
            )
        follows = not refused.isdisjoint(node.all_input_nodes)
        if follows and node.target is operator.getitem:
            refused.add(node)
            continue
        error = _refused(node)
        if error is not None:
            refused.add(node)
            if not (follows and error.reason):  # a type that what was refused before has made
                found.append(error)
    if found:
        raise all_of(found)


def _refused(node: fx.Node) -> NoRule | None:
    if not (is_known(node) or is_part(node)):
        return NoRule(node)
    try:
        scalar_of(node)
    except NoRule as error:
        return error
    return None


def _call(node: fx.Node, buffers: set[fx.Node]) -> CallStep:
    tensors, number = node.args
    reads = [whole_buffer(tensor, buffers) for tensor in tensors]  # type: ignore[union-attr, arg-type]
    assert None not in reads
    writes = {operator.index(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
    forward = node.target is LAYER_FORWARD
    return CallStep(operator.index(number), forward, tuple(reads), writes)  # type: ignore[arg-type]


def _needed(
    steps: Sequence[Kernel | CallStep], outputs: Sequence[fx.Node | None]
) -> list[Kernel | CallStep]:
    """Without kernels whose results nobody reads: fusion may have left some behind."""
    wanted: set[fx.Node] = {node for node in outputs if node is not None}
    kept: list[Kernel | CallStep] = []
    for step in reversed(steps):
        if isinstance(step, CallStep) or wanted & {*step.writes}:
            wanted |= {*step.reads}
            kept.append(step)
    return kept[::-1]
