"""Turn a capture into a plan: lower every kind of layer once, then lay out the whole step.

A plan needs shapes and the module's constants, but no device, so a model's memory can be estimated
before a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from backends.wgpu.capture.capture import Capture
from backends.wgpu.graph.opaque import RegisteredCalls
from backends.wgpu.graph.values import NoRule, combine_errors
from backends.wgpu.lowering.layer_kernels import LayerKernels, lower_layer
from backends.wgpu.lowering.lowering import KernelOptions, lower
from backends.wgpu.lowering.plan import Plan, make_plan
from backends.wgpu.weights.quantized_base import BaseLayout, Layouts


def lower_to_plan(
    capture: Capture,
    base: BaseLayout,
    constants: Mapping[str, torch.Tensor],
    options: KernelOptions,
    groups: Sequence[Sequence[int]],
) -> Plan:
    """Lower a capture and lay out its plan.

    Args:
        capture: The trace; its graphs are modified.
        base: Layouts of the module's quantized tensors.
        constants: Tensors that never change, by name.
        options: Options of kernel generation for the device.
        groups: Groups of outputs that are read back together, in order.

    Raises:
        NoRule: Operators have no rule; the error names all of them.
    """
    errors: list[NoRule] = []
    layers_by_kind: dict[tuple[int, Layouts], LayerKernels] = {}
    calls = base.layer_layouts(capture)
    for kind, layouts in calls:
        if (id(kind), layouts) not in layers_by_kind:
            try:
                layers_by_kind[id(kind), layouts] = lower_layer(kind, layouts, options)
            except NoRule as error:
                errors.append(error)
    varying = len(capture.arrays) + 1
    constant_inputs = [*(constants.get(name) for name in capture.tensors), *[None] * varying]
    with RegisteredCalls(capture.calls):  # a graph with in-place operators is traced again
        try:
            first_outputs = slice(-capture.fields, None) if capture.fields else slice(0)
            outer = lower(
                capture.graph, constant_inputs, base.layouts(capture), options, first_outputs
            )
        except NoRule as error:
            raise combine_errors([*errors, error]) from None
    if errors:
        raise combine_errors(errors)
    layers = [layers_by_kind[id(kind), layouts] for kind, layouts in calls]
    return make_plan(capture, outer, layers, groups, options.merge)
