"""Quantize the frozen base of a module on a device: linear layers and experts."""

from __future__ import annotations

import torch
from torch import nn

from backends.base.progress import Meter
from backends.eager.quantized_experts import quantize_experts
from backends.eager.quantized_linear import (
    QuantizedLinear,
    QuantizedWeight,
    ScratchBuffer,
    is_plain,
)
from backends.quantization.frozen_base import convert_to_float32, expert_layers, frozen_base
from backends.quantization.mapped_weights import quantize_tensor
from backends.quantization.quantize import STORAGE, dequantize
from protocol.machine.allocator import give_back_freed_memory
from protocol.spec.sections.model import BaseDtype


def quantize_frozen_base(module: nn.Module, base_dtype: BaseDtype, device: torch.device) -> None:
    """Quantize every weight of the frozen base whose layer can dequantize it.

    A layer with its own forward gets the rounded weight in float32.
    """
    storage = STORAGE[base_dtype]
    if storage == "f32":
        return
    base = [parameter for parameter in frozen_base(module).values() if parameter.dim() == 2]
    experts = expert_layers(module)
    stacks = [stack for layer in experts for stack in layer.parameters()]
    matrices = [*base, *(stack[0] for stack in stacks)]
    scratch = ScratchBuffer(max((matrix.numel() for matrix in matrices), default=0), device)
    meter = Meter(f"stored in {base_dtype}", sum(tensor.nbytes for tensor in (*base, *stacks)))
    del stacks, matrices
    while experts:
        layer = experts.pop()
        nbytes = sum(stack.nbytes for stack in layer.parameters())
        quantize_experts(module, layer, storage, device, scratch)
        meter.add(nbytes)
    while base:
        parameter = base.pop()  # now only its layers and this variable refer to it
        layers = [layer for layer in module.modules() if _reads(layer, parameter)]
        stored = quantize_tensor(parameter.detach(), storage)
        meter.add(parameter.nbytes)
        if not all(is_plain(layer) for layer in layers):
            parameter.data = torch.from_numpy(dequantize(stored)).to(parameter.device)
            continue
        weight = QuantizedWeight(stored, device)
        for layer in layers:
            del layer._parameters["weight"]  # noqa: SLF001 -- a property replaces it
            layer.__class__ = QuantizedLinear
            layer.quantized_weight, layer.scratch = weight, scratch  # type: ignore[assignment]
    convert_to_float32(module)
    give_back_freed_memory()


def _reads(layer: nn.Module, parameter: nn.Parameter) -> bool:
    return isinstance(layer, nn.Linear) and layer._parameters.get("weight") is parameter  # noqa: SLF001
