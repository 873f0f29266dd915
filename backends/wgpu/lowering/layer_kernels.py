"""Lower one kind of layer call, and split its kernels into forward and backward.

A kind is lowered as one graph, so that fusion sees which values forward and backward both read.
Forward consists of the kernels that the results need; the buffers that backward reads from them are
the saved activations. With checkpointing only the inputs are saved, and backward recomputes the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from backends.wgpu.capture.capture import Kind
from backends.wgpu.lowering.kernels import Kernel
from backends.wgpu.lowering.lowering import CallStep, KernelOptions, lower
from backends.wgpu.shaders.quantized_layout import QuantizedLayout


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """A lowered kind of layer call.

    Attributes:
        inputs: Inputs of the call, then gradients of its outputs.
        results: Results of forward.
        gradients: Gradient of each differentiable input; None if backward does not reach it.
        forward: Kernels in order.
        backward: Kernels in order; includes recomputation if `checkpoint`.
        constants: Constant values.
        checkpoint: Whether forward saves no activations.
    """

    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    constants: dict[fx.Node, torch.Tensor]
    checkpoint: bool


def lower_layer(
    kind: Kind, layouts: Sequence[QuantizedLayout | None], options: KernelOptions
) -> LayerKernels:
    """Lower a kind and split its kernels; `layouts` as for `lower`.

    Raises:
        NoRule: An operator has no rule.
    """
    placeholders = [node for node in kind.graph.graph.nodes if node.op == "placeholder"]
    lowered = lower(kind.graph, [None] * len(placeholders), layouts, options, slice(kind.results))
    kernels = [step for step in lowered.steps if not isinstance(step, CallStep)]
    results = tuple(node for node in lowered.outputs[: kind.results] if node is not None)
    gradients = lowered.outputs[kind.results :]
    forward = _kernels_for(kernels, {*results})
    backward = [kernel for kernel in kernels if kernel not in forward]
    if kind.checkpoint:
        backward = _kernels_for(kernels, {node for node in gradients if node is not None})
    return LayerKernels(
        lowered.inputs,
        results,
        gradients,
        tuple(options.merge(forward)),
        tuple(options.merge(backward)),
        dict(lowered.constants),
        kind.checkpoint,
    )


def _kernels_for(kernels: list[Kernel], needed_values: set[fx.Node]) -> list[Kernel]:
    """Return the kernels on which the values depend, in order; adds the values that they read."""
    result = []
    for kernel in reversed(kernels):
        if needed_values & {*kernel.writes}:
            needed_values |= {*kernel.reads}
            result.append(kernel)
    return result[::-1]
