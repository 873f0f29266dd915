"""Turn a traced graph into kernels over its values, in order of execution."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from backends.wgpu.capture.attention import should_fuse
from backends.wgpu.graph import passes
from backends.wgpu.graph.halves import mark_float16
from backends.wgpu.graph.opaque import LAYER_FORWARD
from backends.wgpu.graph.values import NoRule, combine_errors, scalar_of
from backends.wgpu.graph.views import is_view, whole_buffer
from backends.wgpu.lowering.fusion import LAYERS, Fusion, choose_buffers, is_layer_result
from backends.wgpu.lowering.joins import KernelFuser, fusion_order
from backends.wgpu.lowering.kernels import Emitter, Kernel, MatmulShader, is_known
from backends.wgpu.lowering.merging import merge_independent
from backends.wgpu.shaders.attention.layout import WORKGROUP_BYTES
from backends.wgpu.shaders.attention.problem import AttentionSizes
from backends.wgpu.shaders.quantized_layout import QuantizedLayout, set_quantized_layout
from protocol.base.errors import SamestepError

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Options of kernel generation for a device.

    Attributes:
        cooperative: Whether workgroups share long sums: faster on GPUs, slower on a CPU.
        matmul: Returns the shader and grid of a matrix product.
        canonical: Whether bits must not depend on the device.
        bindings: Storage buffers that a shader may bind.
        is_float16: Whether products have float16 operands, and float16 values are stored in two
            bytes.
        workgroup_bytes: Workgroup memory for attention; the tuner chooses that of products.
        microbatches: Limit on the number of small microbatches that are computed together.
    """

    cooperative: bool
    matmul: MatmulShader
    canonical: bool = False
    bindings: int = 8
    is_float16: bool = False
    workgroup_bytes: int = WORKGROUP_BYTES
    microbatches: int = 1

    @property
    def fuses_kernels(self) -> bool:
        """Whether kernels are fused and merged, as on a GPU, where each dispatch costs a wait."""
        return self.cooperative and not self.canonical

    def merge(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Merge independent kernels into common dispatches."""
        return merge_independent(kernels, self.bindings) if self.fuses_kernels else [*kernels]

    def fuses(self, sizes: AttentionSizes) -> bool:
        """Whether a trace keeps attention of these sizes as one operator."""
        return should_fuse(sizes, cooperative=self.cooperative and not self.canonical)


@dataclass(frozen=True, slots=True)
class CallStep:
    """A layer's forward or backward within the outer graph.

    Attributes:
        call: The layer call's number.
        is_forward: Whether this is the layer's forward.
        reads: Inputs of the forward, or gradients of outputs in the backward; each has its own
            buffer.
        writes: Results that are used, by index.
    """

    call: int
    is_forward: bool
    reads: tuple[fx.Node, ...]
    writes: Mapping[int, fx.Node]


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """A graph as a sequence of steps.

    Attributes:
        inputs: The placeholders.
        outputs: For each output the value whose buffer holds it, row-major, or None.
        steps: Kernels and layer calls in order.
        constants: Constant values that are read from memory.
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]
    steps: tuple[Kernel | CallStep, ...]
    constants: Mapping[fx.Node, torch.Tensor]


def lower(
    graph: fx.GraphModule,
    constant_inputs: Sequence[torch.Tensor | None],
    layouts: Sequence[QuantizedLayout | None],
    options: KernelOptions,
    first_outputs: slice = slice(0),
) -> LoweredGraph:
    """Lower a graph.

    Args:
        graph: A traced graph; it is modified.
        constant_inputs: For each placeholder its value if it never changes, else None.
        layouts: Quantized layouts of the first placeholders, or None.
        options: Options of kernel generation for the device.
        first_outputs: The outputs that must be complete before other kernels start.

    Raises:
        NoRule: Operators have no rule; the error names all of them.
    """
    # Simplify first: constants and fusion are decided for the simplified graph.
    graph = passes.simplify(graph)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, layout in zip(inputs, layouts, strict=False):  # all other inputs have plain storage
        set_quantized_layout(node, layout)
    pairs = zip(inputs, constant_inputs, strict=True)
    values = {node: value for node, value in pairs if value is not None}
    constant_values = passes.fold_constants(graph, values, portable=options.canonical)
    outputs = _separate_outputs(graph, constant_values)
    nodes = [node for node in graph.graph.nodes if node.op != "output"]
    if options.is_float16:
        mark_float16(nodes)
    _refuse_missing_rules(nodes, constant_values)
    fusion = choose_buffers(nodes, constant_values, [node for node in outputs if node is not None])
    emitter = Emitter(
        fusion.buffers,
        constant_values,
        options.cooperative,
        options.matmul,
        options.workgroup_bytes,
    )
    # An output may be a view of the buffer that holds it.
    output_buffers = tuple(None if n is None else whole_buffer(n, fusion.buffers) for n in outputs)
    calls = {node: _call_step(node, fusion.buffers) for node in nodes if node.target in LAYERS}
    reads = _reads(nodes, calls, fusion, emitter)
    early = _ancestors(outputs[first_outputs])
    bindings = options.bindings if options.fuses_kernels else 0
    fuser = KernelFuser(emitter, bindings, reads, output_buffers, early)
    steps: list[Kernel | CallStep] = []
    for node in fusion_order(reads, early) if options.fuses_kernels and not calls else reads:
        if node in calls:
            steps += [*fuser.flush_before(reads[node]), calls[node]]
        else:
            steps += fuser.add(node)
    steps += fuser.flush()
    values_read = {value for step in steps for value in step.reads} | {*output_buffers}
    constants = {node: value for node, value in constant_values.items() if node in values_read}
    return LoweredGraph(
        tuple(inputs), output_buffers, tuple(_drop_dead_steps(steps, output_buffers)), constants
    )


def _reads(
    nodes: Sequence[fx.Node],
    calls: Mapping[fx.Node, CallStep],
    fusion: Fusion,
    emitter: Emitter,
) -> dict[fx.Node, Collection[fx.Node]]:
    """Return the buffers that each layer call, and each value with a kernel, reads."""
    reads: dict[fx.Node, Collection[fx.Node]] = {}
    for node in nodes:
        if node in calls:
            reads[node] = {*calls[node].reads}
        elif (
            node.op == "call_function"
            and node in fusion.buffers
            and not (node in fusion.constants or is_layer_result(node))
        ):
            reads[node] = emitter.reads(node)
    return reads


def _ancestors(nodes: Sequence[fx.Node | None]) -> set[fx.Node]:
    """Return the values and everything that they depend on."""
    ancestors: set[fx.Node] = set()
    pending = [node for node in nodes if node is not None]
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending += node.all_input_nodes
    return ancestors


def _separate_outputs(
    graph: fx.GraphModule, constant_values: Mapping[fx.Node, torch.Tensor]
) -> list[fx.Node | None]:
    """Give each output its own buffer: copy inputs, constants and repeated outputs."""
    (output_node,) = [node for node in graph.graph.nodes if node.op == "output"]
    outputs: Any = output_node.args[0]
    results: list[fx.Node | None] = []
    roots: set[fx.Node] = set()
    for output in outputs if isinstance(outputs, list | tuple) else [outputs]:
        if output is None:
            results.append(None)
            continue
        node = root = output
        while is_view(root):
            root = root.args[0]
        if (
            root in roots
            or root in constant_values
            or root.op == "placeholder"
            or root.target is _FULL
        ):
            with graph.graph.inserting_before(output_node):
                copy = graph.graph.call_function(_aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            copy.meta["own"] = True
            node = copy
        roots.add(root)
        results.append(node)
    output_node.args = (tuple(results),)
    return results


_FULL = _aten.full.default


def _refuse_missing_rules(
    nodes: Sequence[fx.Node], constant_values: Mapping[fx.Node, torch.Tensor]
) -> None:
    """Refuse operators without a rule, before any kernel is generated.

    Raises:
        NoRule: Operators have no rule; the error names all of them.
        SamestepError: The step changes a buffer of the module.
    """
    errors: list[NoRule] = []
    rejected: set[fx.Node] = set()
    for node in nodes:
        if node.op != "call_function" or node in constant_values or node.target in LAYERS:
            continue
        if node.target is _aten.copy_.default:
            raise SamestepError(
                f"expected a forward without side effects, got one that changes a tensor of "
                f"{node.meta.get('module', '')!r}; use a layer without running state"
            )
        follows_rejected = not rejected.isdisjoint(node.all_input_nodes)
        if follows_rejected and node.target is operator.getitem:
            rejected.add(node)
            continue
        error = _missing_rule(node)
        if error is not None:
            rejected.add(node)
            if not (follows_rejected and error.reason):  # else a consequence of an earlier error
                errors.append(error)
    if errors:
        raise combine_errors(errors)


def _missing_rule(node: fx.Node) -> NoRule | None:
    if not (is_known(node) or is_layer_result(node)):
        return NoRule(node)
    try:
        scalar_of(node)
    except NoRule as error:
        return error
    return None


def _call_step(node: fx.Node, buffers: set[fx.Node]) -> CallStep:
    tensors, number = node.args
    reads = [whole_buffer(tensor, buffers) for tensor in tensors]  # type: ignore[union-attr, arg-type]
    assert None not in reads
    writes = {operator.index(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
    forward = node.target is LAYER_FORWARD
    return CallStep(operator.index(number), forward, tuple(reads), writes)  # type: ignore[arg-type]


def _drop_dead_steps(
    steps: Sequence[Kernel | CallStep], outputs: Sequence[fx.Node | None]
) -> list[Kernel | CallStep]:
    """Drop kernels whose results are not read; fusion may leave such kernels."""
    needed_values: set[fx.Node] = {node for node in outputs if node is not None}
    result: list[Kernel | CallStep] = []
    for step in reversed(steps):
        if isinstance(step, CallStep) or needed_values & {*step.writes}:
            needed_values |= {*step.reads}
            result.append(step)
    return result[::-1]
