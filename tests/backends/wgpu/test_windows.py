"""Results and gradients of convolutions, pooling, channel norms and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.backends.wgpu.on_device import on_device

Convolution = Callable[..., torch.Tensor]


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_equals_torch(
    device: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> None:
    """Compare the result and the gradients; the gradient of the result differs by element."""

    def result_and_gradients(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            result = function(*leaves)
            weights = torch.linspace(-1, 1, result.numel()).view(result.shape)
            loss = (result * weights + result**2).sum()
            return result.detach(), *torch.autograd.grad(loss, leaves)

    result, *gradients = on_device(device, result_and_gradients, inputs)
    expected_result, *expected_gradients = result_and_gradients(*inputs)
    torch.testing.assert_close(result, expected_result, rtol=2e-5, atol=2e-5)
    for actual, expected in zip(gradients, expected_gradients, strict=True):
        assert float((actual - expected).norm()) <= 2e-5 * float(expected.norm())


# Function, shapes of input and weight, and options.
CONVOLUTIONS: dict[str, tuple[Convolution, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "patches": (functional.conv2d, (2, 3, 8, 8), (5, 3, 4, 4), {"stride": 4}),
    "padded and strided": (
        functional.conv2d, (2, 3, 7, 6), (4, 3, 3, 2), {"stride": (2, 1), "padding": 1},
    ),
    "depthwise": (functional.conv2d, (2, 4, 6, 6), (4, 1, 3, 3), {"groups": 4, "padding": 1}),
    "grouped and dilated": (
        functional.conv1d, (2, 4, 9), (6, 2, 3), {"groups": 2, "dilation": 2, "padding": 2},
    ),
    "three dimensions": (functional.conv3d, (1, 2, 4, 5, 3), (3, 2, 2, 2, 2), {}),
    "transposed": (
        functional.conv_transpose2d, (2, 4, 3, 4), (4, 3, 3, 2),
        {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(device, name):
    function, input_shape, weight_shape, options = CONVOLUTIONS[name]
    outputs = weight_shape[0]
    if name == "transposed":
        outputs = weight_shape[1] * options["groups"]
    operands = (
        random_tensor(*input_shape),
        random_tensor(*weight_shape, seed=1),
        random_tensor(outputs, seed=2),
    )
    assert_equals_torch(device, lambda x, w, b: function(x, w, b, **options), *operands)


def test_pooling(device):
    def function(x: torch.Tensor) -> torch.Tensor:
        results = [
            functional.max_pool2d(x, 2),
            functional.max_pool2d(x, 3, 2, 1),
            functional.max_pool2d(x, (2, 3), (1, 2), ceil_mode=True),
            functional.avg_pool2d(x, 2),
            functional.avg_pool2d(x, 3, 2, 1),
            functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            functional.adaptive_avg_pool2d(x, 1),
        ]
        return torch.cat([result.flatten(1) for result in results], 1)

    assert_equals_torch(device, function, random_tensor(2, 3, 6, 7))


def test_channel_norms(device):
    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        grouped = functional.group_norm(x, 2, weight, bias)
        by_instance = functional.instance_norm(x, weight=weight, bias=bias)
        return torch.cat([grouped, by_instance, functional.normalize(x, dim=1)], 1)

    assert_equals_torch(
        device,
        function,
        random_tensor(2, 4, 5, 3),
        random_tensor(4, seed=1),
        random_tensor(4, seed=2),
    )


def test_batch_norm_in_evaluation_mode(device):
    mean, variance = random_tensor(4, seed=3), random_tensor(4, seed=4).exp()

    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        images = functional.batch_norm(x, mean.to(x), variance.to(x), weight, bias)
        rows = functional.batch_norm(x[:, :, 0, 0], mean.to(x), variance.to(x))
        return torch.cat([images.flatten(1), rows], 1)

    assert_equals_torch(
        device,
        function,
        random_tensor(2, 4, 5, 3),
        random_tensor(4, seed=1),
        random_tensor(4, seed=2),
    )


def test_bidirectional_lstm(device):
    layer = nn.LSTM(4, 3, bidirectional=True, batch_first=True)
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def function(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        parameters = dict(zip(weights, values, strict=True))
        result: torch.Tensor = torch.func.functional_call(layer, parameters, (x,))[0]
        return result

    assert_equals_torch(device, function, random_tensor(2, 2, 4), *weights.values())


def test_gathered_elements(device):
    indices = torch.tensor([[0, 2], [1, 1], [2, 0]])

    def function(x: torch.Tensor) -> torch.Tensor:
        scalar = x.mean()
        results = [
            x.repeat(2, 2)[:3],
            x.roll(2, 1),
            x.index_select(0, indices[:, 0]),
            x.gather(1, indices),
            x.gather(0, indices[:2]),
            x.max(1).values[:, None],
            x.min(0, keepdim=True).values.expand(3, -1),
            scalar.gather(0, scalar.argmax(0)).flip(-1).cumsum(-1).expand(3, 1),
        ]
        return torch.cat([result[:2] for result in results], 1)

    assert_equals_torch(device, function, random_tensor(3, 5))
