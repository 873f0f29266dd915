"""Frozen layers that keep their weights in few bits, and widen them while they compute.

A weight is widened for its layer's product in forward and once more for that of backward, so at any
time a single one is there in float32. The products are torch's own on the same values in the same
layout, so the bits are those of a layer that is kept wide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backends.base.frozen_base import STORAGE, frozen_base
from backends.base.quantise import Quantised, dequantise, quantise
from protocol.spec.run_spec import BaseDtype


class NarrowWeight:
    """A matrix in few bits on a device; `quantise` says what the bits are.

    Args:
        stored: The matrix.
        device: Where it is kept and widened.
    """

    def __init__(self, stored: Quantised, device: torch.device) -> None:
        self.shape = stored.rows, stored.columns
        self._storage = stored.storage
        self._group = stored.group
        kept = {"bf16": "int16", "f16": "float16", "int8": "int8", "int4": "uint8"}[stored.storage]
        self._bits = torch.from_numpy(stored.words.view(kept)).to(device)
        if stored.storage == "bf16":
            self._bits = self._bits.view(torch.bfloat16)
        self._scales = torch.from_numpy(stored.scales).to(device)

    def wide(self) -> torch.Tensor:
        """The float32 values, as `quantise.dequantise` has them: (rows, columns)."""
        if self._storage in ("bf16", "f16"):
            return self._bits.float().reshape(self.shape)
        if self._storage == "int8":
            whole = self._bits.float()
        else:  # the lower half of a byte comes first
            halves = torch.stack((self._bits & 15, self._bits >> 4), dim=-1)
            whole = halves.float().sub_(8)
        whole = whole.reshape(-1, self._group).mul_(self._scales[:, None])
        return whole.reshape(self.shape)


class NarrowLinear(nn.Linear):
    """A frozen `nn.Linear` whose weight has become narrow; see `narrow`."""

    narrow: NarrowWeight

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Widened anew each time: for those who look at it."""
        return self.narrow.wide()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- torch's name
        """As `nn.Linear`'s; what autograd would keep of the weight is widened again instead."""
        kind = _computed_in(input)
        weight = self.narrow.wide().to(kind)
        place = weight.untyped_storage().data_ptr()

        def kept(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != place:
                return tensor
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def again(given: Any) -> torch.Tensor:
            if isinstance(given, torch.Tensor):
                return given
            return self.narrow.wide().to(kind).as_strided(*given)

        with torch.autograd.graph.saved_tensors_hooks(kept, again):
            return nn.functional.linear(input, weight, self.bias)


def narrow_frozen_base(module: nn.Module, base_dtype: BaseDtype, device: torch.device) -> None:
    """Store every weight of the frozen base in few bits, where its layer can widen it.

    A layer that computes in a way of its own keeps the rounded weight in float32.
    """
    storage = STORAGE[base_dtype]
    if storage == "f32":
        return
    for parameter in frozen_base(module).values():
        layers = [layer for layer in module.modules() if _reads(layer, parameter)]
        stored = quantise(parameter.detach().cpu().float().numpy(), storage)
        if not all(_is_plain(layer) for layer in layers):
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(dequantise(stored)))
            continue
        weight = NarrowWeight(stored, device)
        for layer in layers:
            del layer._parameters["weight"]  # noqa: SLF001 -- a property stands in its place
            layer.__class__ = NarrowLinear
            layer.narrow = weight  # type: ignore[assignment]


def _reads(layer: nn.Module, parameter: nn.Parameter) -> bool:
    return isinstance(layer, nn.Linear) and layer._parameters.get("weight") is parameter  # noqa: SLF001


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and "forward" not in vars(layer)


def _computed_in(given: torch.Tensor) -> torch.dtype:
    """What autocast would make of the weight: else it would keep its own copy of it."""
    kind = given.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
