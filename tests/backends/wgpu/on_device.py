"""Run a function of torch tensors on the device, without a training step around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from backends.base.interface import Trainable
from backends.wgpu.device.device import Device
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.program import CompiledProgram


class Function(nn.Module):
    """A module that wraps a function."""

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
    """Compute the function on the device; `cooperative` as on a GPU."""
    module = Function(function)
    template = Templates(cooperative=cooperative, matmul=MatmulTuner(device).shader)
    program = CompiledProgram(
        device, Trainable((), module, lambda m, a: m(a)), template, adds_on_device=True
    )
    try:
        result = program.forward(tuple(tensors), {})
    finally:
        program.close()
    return result if isinstance(result, tuple) else (result,)


def gradients_on_device(
    device: Device, function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Compute on the device the gradients of the function's sum by its float tensors."""

    def backward(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.dtype.is_floating_point) for x in inputs]
            return torch.autograd.grad(
                function(*leaves).sum(), [x for x in leaves if x.requires_grad]
            )

    return on_device(device, backward, tensors)
