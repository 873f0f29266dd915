"""The frozen base of a module: which weights `model.base_dtype` quantizes.

The base is the weights of frozen `nn.Linear` layers and the stacks of a mixture's experts, which
only matrix products read. Embeddings, norms and biases stay float32, and so does a head that shares
its weight with an embedding. The values are the same on every backend.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from backends.quantization.mapped_weights import release_pages
from backends.quantization.quantize import STORAGE, dequantize, group_size, quantize
from protocol.spec.sections.model import BaseDtype


def frozen_base(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the weights that may be quantized, named as in `named_parameters`."""
    embedding_ids = {
        id(parameter)
        for layer in module.modules()
        if not isinstance(layer, torch.nn.Linear)
        for parameter in layer.parameters(recurse=False)
    }
    linear = {id(layer.weight) for layer in module.modules() if isinstance(layer, torch.nn.Linear)}
    stacks = {id(stack) for layer in expert_layers(module) for stack in layer.parameters()}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if id(parameter) in (linear - embedding_ids) | stacks
        and not parameter.requires_grad
        and group_size(parameter.shape[-1])
    }


def expert_layers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of frozen experts that transformers computes one expert at a time.

    Their weights are stacks of matrices, (experts, outputs, inputs); the experts have no biases or
    norms of their own.
    """
    return [layer for layer in module.modules() if _has_stacks(layer)]


def _has_stacks(layer: Any) -> bool:
    if getattr(layer, "is_transposed", True) or getattr(layer, "has_bias", True):
        return False
    if getattr(layer, "has_post_expert_norm", True) or not hasattr(layer, "_apply_gate"):
        return False
    first_name = "gate_up_proj" if layer.has_gate else "up_proj"
    stacks = dict(layer.named_parameters())
    return stacks.keys() == {first_name, "down_proj"} and all(
        stack.dim() == 3 and not stack.requires_grad and group_size(stack.shape[-1])
        for stack in stacks.values()
    )


def convert_to_float32(
    module: torch.nn.Module, excluded: Collection[torch.nn.Parameter] = ()
) -> None:
    """Convert weights that are still in their file's 16-bit type to float32.

    Args:
        module: The module.
        excluded: Parameters that keep their type.
    """
    excluded_ids = {id(parameter) for parameter in excluded}
    for parameter in module.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16) and id(parameter) not in excluded_ids:
            half_values = parameter.data
            parameter.data = half_values.float()
            release_pages(half_values)


def round_frozen_base(module: torch.nn.Module, base_dtype: BaseDtype) -> None:
    """Round every weight of the frozen base to the values that its storage type can represent."""
    storage = STORAGE[base_dtype]
    if storage == "f32":
        return
    convert_to_float32(module)
    for parameter in frozen_base(module).values():
        matrix = parameter.detach().flatten(0, -2)
        stored = quantize(matrix.cpu().float().numpy(), storage)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(dequantize(stored)).view_as(parameter))
