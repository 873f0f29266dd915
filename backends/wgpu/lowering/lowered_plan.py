"""From a capture to a plan: every kind of layer is lowered once, then the whole is laid out.

It needs shapes only, no device and no values but the module's constants: so what a model would
take can be asked before it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from backends.wgpu.capture.capture import Capture
from backends.wgpu.graph.opaque import CallsOfTrace
from backends.wgpu.graph.values import NoRule, all_of
from backends.wgpu.lowering.layer_kernels import LayerKernels, lower_layer
from backends.wgpu.lowering.lowering import Templates, lower
from backends.wgpu.lowering.plan import Plan, make_plan
from backends.wgpu.weights.narrow_base import BaseLayout, Forms


def lowered_plan(
    capture: Capture,
    base: BaseLayout,
    constants: Mapping[str, torch.Tensor],
    templates: Templates,
    groups: Sequence[Sequence[int]],
) -> Plan:
    """Lower and lay out.

    Args:
        capture: What was traced; its graphs are changed.
        base: Which of the module's tensors are stored in fewer bits.
        constants: Those that never change, by name.
        templates: How kernels are written for the device.
        groups: Outputs that are read back together, in the order they are wanted.

    Raises:
        NoRule: An operator has none; all such of the model are named.
    """
    refused: list[NoRule] = []
    lowered: dict[tuple[int, Forms], LayerKernels] = {}
    calls = base.layer_forms(capture)
    for kind, forms in calls:
        if (id(kind), forms) not in lowered:
            try:
                lowered[id(kind), forms] = lower_layer(kind, forms, templates)
            except NoRule as error:
                refused.append(error)
    others = len(capture.arrays) + 1
    known = [*(constants.get(name) for name in capture.tensors), *[None] * others]
    with CallsOfTrace(capture.calls):  # a graph with mutations is traced once more
        try:
            first = slice(-capture.fields, None) if capture.fields else slice(0)
            outer = lower(capture.graph, known, base.forms(capture), templates, first)
        except NoRule as error:
            raise all_of([*refused, error]) from None
    if refused:
        raise all_of(refused)
    layers = [lowered[id(kind), forms] for kind, forms in calls]
    return make_plan(capture, outer, layers, groups, templates.joined)
