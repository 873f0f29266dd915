"""Store the frozen base of a module in fewer bits on a device: linear layers and experts."""

from __future__ import annotations

import torch
from torch import nn

from backends.base.progress import Meter
from backends.eager.narrow_experts import narrow_experts
from backends.eager.narrow_linear import Bench, NarrowLinear, NarrowWeight, is_plain
from backends.quantization.frozen_base import expert_layers, frozen_base, widen
from backends.quantization.narrowing import quantize_tensor
from backends.quantization.quantize import STORAGE, dequantize
from protocol.machine.allocator import give_back_freed_memory
from protocol.spec.sections.model import BaseDtype


def narrow_frozen_base(module: nn.Module, base_dtype: BaseDtype, device: torch.device) -> None:
    """Store every weight of the frozen base in fewer bits, if its layer can widen it.

    A layer with its own forward keeps the rounded weight in float32.
    """
    storage = STORAGE[base_dtype]
    if storage == "f32":
        return
    base = [each for each in frozen_base(module).values() if each.dim() == 2]
    experts = expert_layers(module)
    stacks = [each for layer in experts for each in layer.parameters()]
    matrices = [*base, *(stack[0] for stack in stacks)]
    bench = Bench(max((matrix.numel() for matrix in matrices), default=0), device)
    meter = Meter(f"stored in {base_dtype}", sum(each.nbytes for each in (*base, *stacks)))
    del stacks, matrices
    while experts:
        layer = experts.pop()
        nbytes = sum(each.nbytes for each in layer.parameters())
        narrow_experts(module, layer, storage, device, bench)
        meter.add(nbytes)
    while base:
        parameter = base.pop()  # now the only reference, apart from its layers
        layers = [layer for layer in module.modules() if _reads(layer, parameter)]
        stored = quantize_tensor(parameter.detach(), storage)
        meter.add(parameter.nbytes)
        if not all(is_plain(layer) for layer in layers):
            parameter.data = torch.from_numpy(dequantize(stored)).to(parameter.device)
            continue
        weight = NarrowWeight(stored, device)
        for layer in layers:
            del layer._parameters["weight"]  # noqa: SLF001 -- a property stands in its place
            layer.__class__ = NarrowLinear
            layer.narrow, layer.bench = weight, bench  # type: ignore[assignment]
    widen(module)
    give_back_freed_memory()


def _reads(layer: nn.Module, parameter: nn.Parameter) -> bool:
    return isinstance(layer, nn.Linear) and layer._parameters.get("weight") is parameter  # noqa: SLF001
