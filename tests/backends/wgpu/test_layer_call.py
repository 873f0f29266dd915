"""Layer calls share a kind, and so one lowering, only if they compute the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backends.wgpu.capture.capture import Capture, capture_step
from protocol.base.errors import SamestepError


class Layer(nn.Linear):
    """A linear layer with an activation of `ACTIVATIONS`, which may depend on the layer's index."""

    def __init__(self, layer_index: int, activation: str) -> None:
        super().__init__(4, 4)
        self.layer_idx = layer_index
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATIONS[self.activation](self, super().forward(x))


class ScaledGradient(torch.autograd.Function):
    """The identity, with a scaled gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return grad_outputs[0] * ctx.scale, None


def gated(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    """Return gated values; the gate has a gradient in the first two layers only."""
    with torch.set_grad_enabled(layer.layer_idx < 2):
        gate = x.sigmoid()
    return x * gate


def scaled_by_call_count(_layer: Layer, x: torch.Tensor) -> torch.Tensor:
    CALL_COUNT[0] += 1
    return x * CALL_COUNT[0]


CALL_COUNT = [0]
ACTIVATIONS: dict[str, Any] = {
    "same": lambda _layer, x: x.tanh(),
    "index is used": lambda layer, x: x * (1 + getattr(layer, "layer_idx", 0) % 2),
    "index is tested": lambda layer, x: x * (2 if hasattr(layer, "layer_idx") else 1),
    "gradient is disabled by index": gated,
    "gradient is scaled by index": lambda layer, x: ScaledGradient.apply(
        x, 1.0 + layer.layer_idx % 2
    ),
    "calls are counted": scaled_by_call_count,
}


class Stack(nn.Module):
    """Four layers with one activation."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(Layer(layer_index, activation) for layer_index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for layer in self.layers:
            x = layer(x)
        return x


def capture(activation: str) -> Capture:
    module = Stack(activation)
    names = [name for name, _ in module.named_parameters()]
    return capture_step(module, lambda m, a: m(a["x"]).sum(), names, {"x": torch.ones(2, 4)})


@pytest.mark.parametrize(
    ("activation", "kinds"),
    [
        ("same", 1),
        ("index is used", 2),
        ("index is tested", 1),
        ("gradient is disabled by index", 2),
        ("gradient is scaled by index", 2),
    ],
)
def test_layers_share_a_kind_if_forward_and_backward_are_equal(activation, kinds):
    assert len({id(kind) for kind in capture(activation).kinds}) == kinds


def test_a_layer_that_changes_with_each_call_is_refused():
    with pytest.raises(SamestepError, match=r"layers\.0 to compute the same function"):
        capture("calls are counted")
