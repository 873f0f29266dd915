"""Passes over a traced graph."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from backends.wgpu.graph import passes

LONG_SUM = 40_000
"""Terms of a sum that a pass splits into two stages, since it has more than 16,384."""


def test_long_sum_of_a_constant_is_left_to_the_device():
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(LONG_SUM, dtype=torch.float32).sum()

    graph = passes.simplify(make_fx(forward, tracing_mode="fake")(torch.ones(3)))
    constants = passes.fold_constants(graph, {})
    assert [tuple(value.shape) for value in constants.values()] == [(LONG_SUM,)]
