"""A frozen base in half precision as parameters, which torch's FSDP2 can shard.

On one device a base in fewer bits is memory of the layers (`narrow_base`). Sharded, each weight is
a parameter of the type in which it is stored: FSDP2 gathers it before a layer computes. Values,
layout and products are those on one device, so the bits are the same.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from backends.eager.narrow_linear import Bench, NarrowWeight, is_plain, product
from backends.quantization.frozen_base import expert_layers, frozen_base, widen
from backends.quantization.narrowing import quantize_tensor
from backends.quantization.quantize import STORAGE, dequantize
from protocol.base.errors import SamestepError
from protocol.machine.allocator import give_back_freed_memory
from protocol.spec.sections.model import BaseDtype

HALVES: Final = ("bfloat16", "float16")
"""The types that are sharded: one tensor of floats for each weight. Others are integers and scales,
which FSDP2 gathers in separate groups."""


class HalfLinear(nn.Linear):
    """A frozen `nn.Linear` with its weight in half precision."""

    bench: Bench

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- torch's name
        """As `nn.Linear`'s; the weight is converted again in backward."""
        return product(input, self.weight.detach(), self.bias, self.bench)


def halve_frozen_base(module: nn.Module, base_dtype: BaseDtype, device: torch.device) -> None:
    """Convert every weight of the frozen base on the host, if its layer can compute with it.

    A layer with its own forward keeps the rounded weight in float32.

    Args:
        module: The module.
        base_dtype: One of `HALVES`.
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
    bench = Bench(max((parameter.numel() for parameter in base), default=0), device)
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
        parameter.data = NarrowWeight(stored, torch.device("cpu")).matrix
        for layer in layers:
            layer.__class__ = HalfLinear
            layer.bench = bench  # type: ignore[assignment]
    widen(module, but=base)
    give_back_freed_memory()
