"""Frozen linear layers that store their weights in few bits and widen them to compute.

A weight is widened for its product in forward and again in backward, so only one is in float32 at
any time. The products are torch's, on the same values in the same layout, so the bits are those of
a layer with float32 weights.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.base.frozen_base import frozen_base, widen
from backends.base.narrowing import quantise_tensor
from backends.base.progress import Meter
from backends.base.quantise import NF4, STORAGE, Quantised, dequantise
from protocol.machine.allocator import give_back_freed_memory
from protocol.spec.sections.model import BaseDtype

_PLACES_AT_ONCE: Final = 1 << 16
"""Of nf4, as indices: few enough to leave no hole in memory; see `Bench`."""
_PAIRS_OF_NF4: Final = torch.from_numpy(NF4[np.arange(256)[:, None] >> np.array([0, 4]) & 15])
"""What a byte of nf4 stands for: (256, 2), the lower half first."""


class NarrowWeight:
    """A matrix in few bits on a device; `quantise` says what the bits are.

    Args:
        stored: The matrix.
        device: Where it is kept and widened.
    """

    def __init__(self, stored: Quantised, device: torch.device) -> None:
        self.shape = stored.rows, stored.columns
        self.device = device
        self._storage = stored.storage
        self._group = stored.group
        kept = {"bf16": "int16", "f16": "float16", "int8": "int8"}.get(stored.storage, "uint8")
        self._bits = torch.from_numpy(stored.words.view(kept)).to(device)
        if stored.storage == "bf16":
            self._bits = self._bits.view(torch.bfloat16)
        self._scales = torch.from_numpy(stored.scales).to(device)
        self._pairs = _PAIRS_OF_NF4.to(device)

    @property
    def nbytes(self) -> int:
        """Of bits and scales."""
        return self._bits.nbytes + self._scales.nbytes

    def wide(self, whole: torch.Tensor) -> torch.Tensor:
        """The float32 values, as `quantise.dequantise` has them, written into `whole`."""
        if self._storage in ("bf16", "f16", "int8"):
            whole.view(-1).copy_(self._bits)
            if self._storage != "int8":
                return whole
        elif self._storage == "nf4":
            pairs = whole.view(-1, 2)
            at_once = _PLACES_AT_ONCE if self.device.type == "cpu" else len(self._bits)
            for lo in range(0, len(self._bits), at_once):
                part = slice(lo, lo + at_once)
                torch.index_select(self._pairs, 0, self._bits[part].int(), out=pairs[part])
        else:  # the lower half of a byte comes first
            pairs = whole.view(-1, 2)
            pairs[:, 0] = self._bits & 15
            pairs[:, 1] = self._bits >> 4
            whole.sub_(8)
        whole.view(-1, self._group).mul_(self._scales[:, None])
        return whole


class Bench:
    """Where one weight at a time is wide: what each layer took anew would leave holes in memory,
    which what autograd keeps would fill.

    Args:
        elements: Of the largest weight.
        device: Where.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._elements = elements
        self._device = device
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def wide(self, narrow: NarrowWeight, kind: torch.dtype) -> torch.Tensor:
        """The values until the next are asked for: (rows, columns) of that type."""
        whole = narrow.wide(self._room(narrow.shape, torch.float32))
        if kind == torch.float32:
            return whole
        return self._room(narrow.shape, kind).copy_(whole)

    def _room(self, shape: tuple[int, int], kind: torch.dtype) -> torch.Tensor:
        if kind not in self._flat:
            self._flat[kind] = torch.empty(self._elements, dtype=kind, device=self._device)
        return self._flat[kind][: shape[0] * shape[1]].view(shape)


class NarrowLinear(nn.Linear):
    """A frozen `nn.Linear` whose weight has become narrow; see `narrow_frozen_base`."""

    narrow: NarrowWeight
    bench: Bench

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """Widened anew each time: for those who look at it."""
        return self.narrow.wide(torch.empty(self.narrow.shape, device=self.narrow.device))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- torch's name
        """As `nn.Linear`'s; what autograd would keep of the weight is widened again instead."""
        kind = _computed_in(input)
        weight = self.bench.wide(self.narrow, kind)
        place = weight.untyped_storage().data_ptr()

        def kept(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != place:
                return tensor
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def again(given: Any) -> torch.Tensor:
            if isinstance(given, torch.Tensor):
                return given
            return self.bench.wide(self.narrow, kind).as_strided(*given)

        with torch.autograd.graph.saved_tensors_hooks(kept, again):
            return nn.functional.linear(input, weight, self.bias)


def narrow_frozen_base(module: nn.Module, base_dtype: BaseDtype, device: torch.device) -> None:
    """Store every weight of the frozen base in few bits, where its layer can widen it.

    A layer that computes in a way of its own keeps the rounded weight in float32.
    """
    storage = STORAGE[base_dtype]
    if storage == "f32":
        return
    base = [*frozen_base(module).values()]
    bench = Bench(max((parameter.numel() for parameter in base), default=0), device)
    meter = Meter(f"stored in {base_dtype}", sum(each.nbytes for each in base))
    while base:
        parameter = base.pop()  # the last reference to it, once its layers have let go
        layers = [layer for layer in module.modules() if _reads(layer, parameter)]
        stored = quantise_tensor(parameter.detach(), storage)
        meter.add(parameter.nbytes)
        if not all(_is_plain(layer) for layer in layers):
            parameter.data = torch.from_numpy(dequantise(stored)).to(parameter.device)
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


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and "forward" not in vars(layer)


def _computed_in(given: torch.Tensor) -> torch.dtype:
    """What autocast would make of the weight: else it would keep its own copy of it."""
    kind = given.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
