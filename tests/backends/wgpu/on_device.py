"""Run a function of torch tensors on the device, outside a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from backends.base.interface import Trainable
from backends.wgpu.device.device import Device
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram


class Function(nn.Module):
    """Wraps a function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def on_device(
    device: Device,
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    *,
    cooperative: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Run the function on the device and return its results.

    `cooperative` uses the kernels of a GPU, whose invocations cooperate.
    """
    module = Function(function)
    kernel_options = KernelOptions(cooperative=cooperative, matmul=MatmulTuner(device).shader)
    program = CompiledProgram(
        device, Trainable((), module, lambda m, a: m(a)), kernel_options, adds_on_device=True
    )
    try:
        result = program.forward(tuple(tensors), {})
    finally:
        program.close()
    return result if isinstance(result, tuple) else (result,)


def gradients_on_device(
    device: Device, function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the function's sum with respect to its float tensors."""

    def backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.dtype.is_floating_point) for x in inputs]
            return torch.autograd.grad(
                function(*leaves).sum(), [x for x in leaves if x.requires_grad]
            )

    return on_device(device, backward, tensors)
