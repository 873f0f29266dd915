"""Convolutions, pooling, norms of channels and recurrent layers: forward and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.backends.wgpu.on_device import on_device

Convolution = Callable[..., torch.Tensor]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_alike(device: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Compare the result, and gradients that differ from element to element."""

    def both(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in x]
            result = function(*leaves)
            weights = torch.linspace(-1, 1, result.numel()).view(result.shape)
            total = (result * weights + result**2).sum()
            return result.detach(), *torch.autograd.grad(total, leaves)

    (result, *gradients), (expected, *other_results) = (
        on_device(device, both, inputs),
        both(*inputs),
    )
    torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)
    for one, other in zip(gradients, other_results, strict=True):
        assert float((one - other).norm()) <= 2e-5 * float(other.norm())


CONVOLUTIONS: dict[str, tuple[Convolution, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "patches": (functional.conv2d, (2, 3, 8, 8), (5, 3, 4, 4), {"stride": 4}),
    "padded, strided": (
        functional.conv2d, (2, 3, 7, 6), (4, 3, 3, 2), {"stride": (2, 1), "padding": 1},
    ),
    "by channel": (functional.conv2d, (2, 4, 6, 6), (4, 1, 3, 3), {"groups": 4, "padding": 1}),
    "in groups, dilated": (
        functional.conv1d, (2, 4, 9), (6, 2, 3), {"groups": 2, "dilation": 2, "padding": 2},
    ),
    "of three dimensions": (functional.conv3d, (1, 2, 4, 5, 3), (3, 2, 2, 2, 2), {}),
    "transposed": (
        functional.conv_transpose2d, (2, 4, 3, 4), (4, 3, 3, 2),
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(device, name):
    function, shape, weight, options = CONVOLUTIONS[name]
    outputs = weight[1] * options.get("groups", 1) if name == "transposed" else weight[0]
    operands = drawn(*shape), drawn(*weight, seed=1), drawn(outputs, seed=2)
    assert_alike(device, lambda x, w, b: function(x, w, b, **options), *operands)


def test_pooling(device):
    def function(x: torch.Tensor) -> torch.Tensor:
        pooled = [
            functional.max_pool2d(x, 2),
            functional.max_pool2d(x, 3, 2, 1),
            functional.max_pool2d(x, (2, 3), (1, 2), ceil_mode=True),
            functional.avg_pool2d(x, 2),
            functional.avg_pool2d(x, 3, 2, 1),
            functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            functional.adaptive_avg_pool2d(x, 1),
        ]
        return torch.cat([each.flatten(1) for each in pooled], 1)

    assert_alike(device, function, drawn(2, 3, 6, 7))


def test_norms_of_channels(device):
    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        grouped = functional.group_norm(x, 2, weight, bias)
        by_instance = functional.instance_norm(x, weight=weight, bias=bias)
        return torch.cat([grouped, by_instance, functional.normalize(x, dim=1)], 1)

    assert_alike(device, function, drawn(2, 4, 5, 3), drawn(4, seed=1), drawn(4, seed=2))


def test_a_batch_norm_in_evaluation_mode(device):
    mean, variance = drawn(4, seed=3), drawn(4, seed=4).exp()

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        images = functional.batch_norm(x, mean.to(x), variance.to(x), weight, bias)
        rows = functional.batch_norm(x[:, :, 0, 0], mean.to(x), variance.to(x))
        return torch.cat([images.flatten(1), rows], 1)

    assert_alike(device, function, drawn(2, 4, 5, 3), drawn(4, seed=1), drawn(4, seed=2))


def test_a_recurrent_layer(device):
    layer = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
    weights = [weight.detach() for weight in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]

    def function(x: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        inputs_by_name = dict(zip(names, inputs, strict=True))
        result: torch.Tensor = torch.func.functional_call(layer, inputs_by_name, (x,))[0]
        return result

    assert_alike(device, function, drawn(2, 2, 4), *weights)


def test_gathered_elements(device):
    indices = torch.tensor([[0, 2], [1, 1], [2, 0]])

    def function(x: torch.Tensor) -> torch.Tensor:
        single = x.mean()
        parts = [
            x.repeat(2, 2)[:3],
            x.roll(2, 1),
            x.index_select(0, indices[:, 0]),
            x.gather(1, indices),
            x.gather(0, indices[:2]),
            x.max(1).values[:, None],
            x.min(0, keepdim=True).values.expand(3, -1),
            single.gather(0, single.argmax(0)).flip(-1).cumsum(-1).expand(3, 1),
        ]
        return torch.cat([each[:2] for each in parts], 1)

    assert_alike(device, function, drawn(3, 5))
