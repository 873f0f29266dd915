"""The frozen base of a module, and its weights in fewer bits.

`model.base_dtype` stores the frozen base in fewer bits: the weights of frozen `nn.Linear` layers,
which only matrix products read. Embeddings, norms and biases stay float32, and so does a head that
shares its weight with an embedding. The values are the same on every backend.
"""

from __future__ import annotations

import torch

from backends.base.narrowing import release_pages
from backends.base.quantise import STORAGE, dequantise, group_of, quantise
from protocol.spec.sections.model import BaseDtype


def frozen_base(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the weights that may be stored in fewer bits, named as in `named_parameters`."""
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
    """Convert weights that are still in their file's 16-bit type to float32."""
    for parameter in module.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            half = parameter.data
            parameter.data = half.float()
            release_pages(half)


def round_frozen_base(module: torch.nn.Module, base_dtype: BaseDtype) -> None:
    """Round every weight of the frozen base to the values that its storage type can represent."""
    storage = STORAGE[base_dtype]
    if storage == "f32":
        return
    widen(module)
    for parameter in frozen_base(module).values():
        narrow = quantise(parameter.detach().cpu().float().numpy(), storage)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(dequantise(narrow)))
