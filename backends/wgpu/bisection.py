"""Which operator a device computes otherwise than torch.

The step is traced again with its layers open, and run once more with every value kept. Each
operator is then computed by torch on the CPU from the device's own values of what it reads, so one
that is wrong is not blamed on those after it.
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
from backends.wgpu.capture.layer_call import Like
from backends.wgpu.device.packing import from_words
from backends.wgpu.graph import passes
from backends.wgpu.graph.values import NO_MODULE

_FLOOR: Final = 1e-2
"""Of what an operator reads: what cancels is compared with that."""
_MOST_ELEMENTS: Final = 2**27
"""Of all values together; more are not kept."""


class Runs(Protocol):
    """What is asked of a program."""

    def run_once(self, capture: Capture, batch: Batch, seed: int) -> list[Array | None]:
        """Each output of a capture that is no program's, flat; None for zeros."""


@dataclass(frozen=True, slots=True)
class _Operator:
    """One node as it was traced: lowering changes the graph."""

    node: fx.Node
    target: Any
    args: Any
    kwargs: Any

    def __str__(self) -> str:
        shape = list(self.node.meta["val"].shape)
        module = self.node.meta.get("module") or NO_MODULE
        name = str(self.target).removeprefix("aten.")
        return f"{name!r}, which gives shape {shape} in {module}"


def odd_operator(  # noqa: PLR0917
    program: Runs,
    capture: Capture,
    values: Mapping[str, torch.Tensor],
    batch: Batch,
    seeds: torch.Tensor,
    seed: int,
    within: float,
) -> str:
    """The first operator that differs by more than `within`, in words; empty if none does.

    Args:
        program: It runs the capture.
        capture: With no layer closed; it is changed.
        values: Of the module's tensors.
        batch: A microbatch.
        seeds: Of its draws: (count, 2) int32.
        seed: What they were made of.
        within: A share of the norm.
    """
    graph = capture.graph = passes.simplified(capture.graph)
    operators = [
        _Operator(node, node.target, node.args, node.kwargs)
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]
    kept = [each for each in operators if isinstance(each.node.meta.get("val"), torch.Tensor)]
    if sum(each.node.meta["val"].numel() for each in kept) > _MOST_ELEMENTS:
        return ""
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    given = [*(values[name] for name in capture.tensors), seeds]
    given += [arrays[name] for name in capture.arrays]
    known = _inputs(graph, given)
    (last,) = (node for node in graph.graph.nodes if node.op == "output")
    last.args = ([each.node for each in kept],)
    capture.outputs = tuple(Like.of(each.node.meta["val"]) for each in kept)
    got = program.run_once(capture, batch, seed)
    for each, like, found in zip(kept, capture.outputs, got, strict=True):
        assert like is not None
        if found is not None:
            known[each.node] = from_words(found, like.shape, like.dtype)
    return next((str(each) for each in operators if _is_odd(each, known, within)), "")


def _inputs(graph: fx.GraphModule, given: Sequence[torch.Tensor]) -> dict[fx.Node, Any]:
    holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    known: dict[fx.Node, Any] = dict(zip(holders, given, strict=True))
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(graph, str(node.target))
    return known


def _is_odd(one: _Operator, known: dict[fx.Node, Any], within: float) -> bool:
    """Whether its result is not what torch makes of what it reads; keeps a result that the device
    did not give."""
    try:
        args = fx.map_arg(one.args, known.__getitem__)
        kwargs = fx.map_arg(one.kwargs, known.__getitem__)
        with torch.no_grad():
            expected = one.target(*args, **kwargs)
    except (KeyError, NotImplementedError, RuntimeError):
        return False  # one of ours that torch cannot compute, or what reads it
    got = known.setdefault(one.node, expected)
    if not isinstance(expected, torch.Tensor) or got is expected:
        return False
    if not expected.is_floating_point():
        return not torch.equal(expected, got)
    read = [x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor)]
    floor = _FLOOR * max((_norm(x.float().numpy()) for x in read), default=0.0)
    wanted, there = expected.double().numpy(), got.double().numpy()
    finite = np.isfinite(wanted)
    if not np.array_equal(wanted[~finite], there[~finite], equal_nan=True):
        return True
    apart = float(np.linalg.norm(wanted[finite] - there[finite]))
    return not apart <= within * max(_norm(wanted), floor)  # what is not finite, too


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values[np.isfinite(values)].astype(np.float64)))
