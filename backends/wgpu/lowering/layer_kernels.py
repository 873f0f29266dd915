"""The kernels of one kind of layer call, parted into forward and backward.

A kind is lowered as one graph, so that fusion sees which values both halves read. The kernels
that the results need are the forward; what they leave in memory for the others is what is saved.
With checkpointing nothing but the inputs is, and backward begins with those again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from backends.wgpu.capture.capture import Kind
from backends.wgpu.lowering.kernels import Kernel
from backends.wgpu.lowering.lowering import CallStep, Templates, lower
from backends.wgpu.shaders.narrow import Narrow


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """One kind, lowered.

    Attributes:
        inputs: Inputs of the call, then tangents.
        results: What forward gives.
        gradients: For each differentiable input; None where backward does not reach it.
        forward: In order.
        backward: In order; complete by itself if `checkpoint`.
        constants: Values that are known.
        checkpoint: Whether forward leaves nothing behind but its results.
    """

    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    constants: dict[fx.Node, torch.Tensor]
    checkpoint: bool


def lower_layer(kind: Kind, forms: Sequence[Narrow | None], template: Templates) -> LayerKernels:
    """Lower a kind and part it; `forms` as for `lower`.

    Raises:
        NoRule: An operator has no rule.
    """
    holders = [node for node in kind.graph.graph.nodes if node.op == "placeholder"]
    lowered = lower(kind.graph, [None] * len(holders), forms, template, slice(kind.results))
    kernels = [step for step in lowered.steps if not isinstance(step, CallStep)]
    results = tuple(node for node in lowered.outputs[: kind.results] if node is not None)
    gradients = lowered.outputs[kind.results :]
    forward = _leading_to(kernels, {*results})
    rest = [kernel for kernel in kernels if kernel not in forward]
    if kind.checkpoint:
        rest = _leading_to(kernels, {node for node in gradients if node is not None})
    return LayerKernels(
        lowered.inputs,
        results,
        gradients,
        tuple(template.joined(forward)),
        tuple(template.joined(rest)),
        dict(lowered.constants),
        kind.checkpoint,
    )


def _leading_to(kernels: list[Kernel], wanted: set[fx.Node]) -> list[Kernel]:
    found = []
    for kernel in reversed(kernels):
        if wanted & {*kernel.writes}:
            wanted |= {*kernel.reads}
            found.append(kernel)
    return found[::-1]
