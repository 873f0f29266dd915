"""A frozen base in half precision as parameters, which torch's FSDP2 can shard.

On one device each layer holds its quantized weight (`quantized_base`). In a sharded model each
weight is a parameter of the type in which it is stored: FSDP2 gathers it before a layer computes.
Values, layout and products are those on one device, so the bits are the same.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from backends.eager.quantized_linear import QuantizedWeight, ScratchBuffer, is_plain, linear
from backends.quantization.frozen_base import convert_to_float32, expert_layers, frozen_base
from backends.quantization.mapped_weights import quantize_tensor
from backends.quantization.quantize import STORAGE, dequantize
from protocol.base.errors import SamestepError
from protocol.machine.allocator import give_back_freed_memory
from protocol.spec.sections.model import BaseDtype

SHARDABLE_TYPES: Final = ("bfloat16", "float16")
"""The 16-bit types that can be sharded, since a weight is one tensor of floats. The other types
store integers and scales, which FSDP2 gathers in separate groups."""


class HalfLinear(nn.Linear):
    """A frozen `nn.Linear` with its weight in half precision."""

    scratch: ScratchBuffer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- torch's name
        """Compute as `nn.Linear`; the weight is converted again in backward."""
        return linear(input, self.weight.detach(), self.bias, self.scratch)


def convert_base_to_half(module: nn.Module, base_dtype: BaseDtype, device: torch.device) -> None:
    """Convert every weight of the frozen base whose layer can compute with it, on the host.

    A layer with its own forward gets the rounded weight in float32.

    Args:
        module: The module.
        base_dtype: A type of `SHARDABLE_TYPES`.
        device: The device that will compute.

    Raises:
        SamestepError: The base has experts, whose stacks cannot be sharded in half precision.
    """
    if expert_layers(module):
        raise SamestepError(
            f"expected a base without experts for --shard with model.base_dtype {base_dtype}, got "
            "a mixture; use a float32 base, or remove --shard"
        )
    base = [*frozen_base(module).values()]
    scratch = ScratchBuffer(max((parameter.numel() for parameter in base), default=0), device)
    for parameter in base:
        layers = [
            layer
            for layer in module.modules()
            if isinstance(layer, nn.Linear) and layer.weight is parameter
        ]
        stored = quantize_tensor(parameter.detach(), STORAGE[base_dtype])
        if not all(is_plain(layer) for layer in layers):
            parameter.data = torch.from_numpy(dequantize(stored)).to(parameter.device)
            continue
        parameter.data = QuantizedWeight(stored, torch.device("cpu")).matrix
        for layer in layers:
            layer.__class__ = HalfLinear
            layer.scratch = scratch  # type: ignore[assignment]
    convert_to_float32(module, excluded=base)
    give_back_freed_memory()
