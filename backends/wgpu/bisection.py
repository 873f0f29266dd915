"""Find the operator whose result differs between a device and torch.

The step is traced again with its layers inlined and run with every intermediate value as an output.
Torch on the CPU then computes each operator from the device's values of its operands, so that a
wrong result is not attributed to later operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import fx

from backends.base.interface import Array, Batch
from backends.wgpu.capture.capture import Capture
from backends.wgpu.capture.layer_call import TensorSpec
from backends.wgpu.device.packing import from_words
from backends.wgpu.graph import passes
from backends.wgpu.graph.values import NO_MODULE

_RELATIVE_FLOOR: Final = 1e-2
"""Smallest norm to compare a result with, relative to the operands' norm: results may cancel."""
_MOST_ELEMENTS: Final = 2**27
"""Limit on the elements of all intermediate values."""


class CaptureRunner(Protocol):
    """The methods of a program that the search uses."""

    def run_once(self, capture: Capture, batch: Batch, seed: int) -> list[Array | None]:
        """Run a temporary capture; return each output, flat, or None for zeros."""


@dataclass(frozen=True, slots=True)
class _Operator:
    """A copy of a traced node, because lowering changes the graph."""

    node: fx.Node
    target: Any
    args: Any
    kwargs: Any

    def __str__(self) -> str:
        shape = list(self.node.meta["val"].shape)
        module = self.node.meta.get("module") or NO_MODULE
        name = str(self.target).removeprefix("aten.")
        return f"{name!r}, which gives shape {shape} in {module}"


def describe_differing_operator(  # noqa: PLR0917
    program: CaptureRunner,
    capture: Capture,
    values: Mapping[str, torch.Tensor],
    batch: Batch,
    seeds: torch.Tensor,
    seed: int,
    tolerance: float,
) -> str:
    """Describe the first operator that differs by more than `tolerance`; empty if none does.

    Args:
        program: Runs the capture.
        capture: A capture with all layers inlined; it is modified.
        values: The module's tensors by name.
        batch: A microbatch.
        seeds: Seeds of the microbatch's random draws: (count, 2) int32.
        seed: The microbatch's seed, from which `seeds` derive.
        tolerance: Allowed difference, relative to the norm.
    """
    graph = capture.graph = passes.simplify(capture.graph)
    operators = [
        _Operator(node, node.target, node.args, node.kwargs)
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]
    tensor_operators = [
        operator
        for operator in operators
        if isinstance(operator.node.meta.get("val"), torch.Tensor)
    ]
    if sum(operator.node.meta["val"].numel() for operator in tensor_operators) > _MOST_ELEMENTS:
        return ""
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    inputs = [*(values[name] for name in capture.tensors), seeds]
    inputs += [arrays[name] for name in capture.arrays]
    node_values = _input_values(graph, inputs)
    (output_node,) = (node for node in graph.graph.nodes if node.op == "output")
    output_node.args = ([operator.node for operator in tensor_operators],)
    capture.outputs = tuple(
        TensorSpec.of(operator.node.meta["val"]) for operator in tensor_operators
    )
    results = program.run_once(capture, batch, seed)
    for operator, spec, result in zip(tensor_operators, capture.outputs, results, strict=True):
        assert spec is not None
        if result is not None:
            node_values[operator.node] = from_words(result, spec.shape, spec.dtype)
    return next(
        (str(operator) for operator in operators if _differs(operator, node_values, tolerance)),
        "",
    )


def _input_values(graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(graph, str(node.target))
    return values


def _differs(operator: _Operator, values: dict[fx.Node, Any], tolerance: float) -> bool:
    """Whether the device's result differs from torch's.

    Where the device has no result, torch's is stored in `values`.
    """
    try:
        args = fx.map_arg(operator.args, values.__getitem__)
        kwargs = fx.map_arg(operator.kwargs, values.__getitem__)
        with torch.no_grad():
            expected = operator.target(*args, **kwargs)
    except (KeyError, NotImplementedError, RuntimeError):
        return False  # torch cannot compute this operator, or an operator before it, on the CPU
    result = values.setdefault(operator.node, expected)
    if not isinstance(expected, torch.Tensor) or result is expected:
        return False
    if not expected.is_floating_point():
        return not torch.equal(expected, result)
    tensors = [x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor)]
    floor = _RELATIVE_FLOOR * max((_norm(x.float().numpy()) for x in tensors), default=0.0)
    expected_values, result_values = expected.double().numpy(), result.double().numpy()
    is_finite = np.isfinite(expected_values)
    if not np.array_equal(expected_values[~is_finite], result_values[~is_finite], equal_nan=True):
        return True
    difference = float(np.linalg.norm(expected_values[is_finite] - result_values[is_finite]))
    return not difference <= tolerance * max(_norm(expected_values), floor)  # true also for NaN


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values[np.isfinite(values)].astype(np.float64)))
