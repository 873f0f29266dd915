"""Which layer calls are of one kind: those that compute the same, whatever decides it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backends.wgpu.capture.capture import Capture, capture_step
from protocol.base.errors import SamestepError


class Layer(nn.Linear):
    """Knows its layer index, and a counter."""

    def __init__(self, layer_index: int, rule: str) -> None:
        super().__init__(4, 4)
        self.layer_idx = layer_index
        self.rule = rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return RULES[self.rule](self, super().forward(x))


class Scaled(torch.autograd.Function):
    """The same forward with its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return grad_outputs[0] * ctx.scale, None


def without_gradient(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(layer.layer_idx < 2):
        gate = x.sigmoid()
    return x * gate


def counted(_layer: Layer, x: torch.Tensor) -> torch.Tensor:
    COUNT[0] += 1
    return x * COUNT[0]


COUNT = [0]
RULES: dict[str, Any] = {
    "can_merge": lambda _layer, x: x.tanh(),
    "number with a default": lambda layer, x: x * (1 + getattr(layer, "layer_idx", 0) % 2),
    "has a number": lambda layer, x: x * (2 if hasattr(layer, "layer_idx") else 1),
    "no gradient": without_gradient,
    "gradient": lambda layer, x: Scaled.apply(x, 1.0 + layer.layer_idx % 2),
    "counted": counted,
}


class Stacked(nn.Module):
    def __init__(self, rule: str) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(Layer(layer_index, rule) for layer_index in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for layer in self.layers:
            x = layer(x)
        return x


def captured(rule: str) -> Capture:
    module = Stacked(rule)
    names = [name for name, _ in module.named_parameters()]
    return capture_step(module, lambda m, a: m(a["x"]).sum(), names, {"x": torch.ones(2, 4)})


@pytest.mark.parametrize(
    ("rule", "kinds"),
    [
        ("can_merge", 1),
        ("number with a default", 2),
        ("has a number", 1),
        ("no gradient", 2),
        ("gradient", 2),
    ],
)
def test_one_kind_per_forward_and_backward_path(rule, kinds):
    assert len({id(kind) for kind in captured(rule).kinds}) == kinds


def test_layer_that_changes_at_each_call_is_refused():
    with pytest.raises(SamestepError, match=r"layers\.0 to compute the same function"):
        captured("counted")
