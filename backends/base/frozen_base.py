"""Which weights of a module are its frozen base, and what they are in fewer bits.

The run spec's `model.base_dtype` stores the frozen base narrower. These are the weights of frozen
`nn.Linear` layers, which only matrix products read; embeddings, norms and biases stay float32, and
so does a head that shares its weight with an embedding. What a weight then *is* is the same on
every backend: the eager one rounds its float32 copy to it, a Vulkan device keeps the few bits.
"""

from __future__ import annotations

import torch

from backends.base.quantise import STORAGE, dequantise, group_of, quantise
from protocol.spec.run_spec import BaseDtype


def frozen_base(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Weights that may be stored narrower, by the name they have in `named_parameters`."""
    elsewhere = {
        id(parameter)
        for layer in module.modules()
        if not isinstance(layer, torch.nn.Linear)
        for parameter in layer.parameters(recurse=False)
    }
    linear = {id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Linear)}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if id(parameter) in linear - elsewhere
        and not parameter.requires_grad
        and group_of(parameter.shape[1])
    }


def widen(module: torch.nn.Module) -> None:
    """Give every weight that is still as its file has it, in half the bytes, its float32 value."""
    for parameter in module.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def round_frozen_base(module: torch.nn.Module, base_dtype: BaseDtype) -> None:
    """Give every weight of the frozen base the float32 value of its narrow form."""
    storage = STORAGE[base_dtype]
    if storage == "f32":
        return
    widen(module)
    for parameter in frozen_base(module).values():
        narrow = quantise(parameter.detach().cpu().float().numpy(), storage)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(dequantise(narrow)))
