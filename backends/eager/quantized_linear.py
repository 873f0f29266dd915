"""Frozen linear layers that convert their weights in forward, and again in backward.

A quantized weight is dequantized for its product, so there is only one dequantized weight at any
time. A weight that is stored in the type in which the layer computes (bfloat16 under autocast to
bfloat16) is the operand itself. A float32 weight under autocast is converted twice, since autograd
would keep a copy of each. The products are torch's, on the same values in the same layout, so the
bits are those of a layer with float32 weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.quantization.mapped_weights import PART_ELEMENTS
from backends.quantization.quantize import NF4, QuantizedMatrix, Storage

_PART_ELEMENTS_OF_CPU: Final = 1 << 18
"""`PART_ELEMENTS` of a CPU: a part fits its cache."""
_FLOAT_DTYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16}
_INDICES_AT_ONCE: Final = 1 << 16
"""Bytes of nf4 that a CPU converts to indices at a time: few, so that the indices do not fragment
memory; see `ScratchBuffer`."""
_NIBBLES: Final = np.arange(256)[:, None] >> np.array([0, 4]) & 15
"""The two codes of each byte: (256, 2), the lower half first."""
_PAIRS: Final = {
    "nf4": torch.from_numpy(NF4[_NIBBLES]),
    "int4": torch.from_numpy(_NIBBLES.astype(np.float32) - 8),
}
"""The two numbers of each byte, as a table of 256 rows."""


@cache
def _pairs_on(device: torch.device, storage: Storage) -> torch.Tensor:
    return _PAIRS[storage].to(device)


class QuantizedWeight:
    """A quantized matrix on a device; `backends.quantization.quantize` defines the encoding.

    Args:
        stored: The matrix.
        device: The device that stores and dequantizes it.
    """

    def __init__(self, stored: QuantizedMatrix, device: torch.device) -> None:
        self.shape = stored.rows, stored.columns
        self.device = device
        self._storage = stored.storage
        self._group = stored.group
        dtype_name = {"bf16": "int16", "f16": "float16", "int8": "int8"}.get(
            stored.storage, "uint8"
        )
        bits = torch.from_numpy(stored.words.view(dtype_name))
        self.dtype: torch.dtype | None = _FLOAT_DTYPES.get(stored.storage)
        """The floating-point type in which the matrix is stored; None for integers with scales."""
        # Copied to memory that torch allocates: an operand's alignment can change a product's bits.
        self._bits = bits.to(device, copy=self.dtype is not None)
        if self.dtype is not None:
            self._bits = self._bits.view(self.dtype)
        self._scales = torch.from_numpy(stored.scales).to(device)
        # On a card one kernel reads numbers and scales and writes the operand, which saves memory
        # traffic. The CPU would first copy both to a common type.
        self._has_fused_product = device.type not in ("cpu", "mps")

    @property
    def nbytes(self) -> int:
        """Size of bits and scales."""
        return self._bits.nbytes + self._scales.nbytes

    @property
    def matrix(self) -> torch.Tensor:
        """The stored values, (rows, columns) of `dtype`."""
        return self._bits.view(self.shape)

    def dequantize_into(self, target: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Write the float32 values of `quantize.dequantize` into `target`; return `target`.

        Args:
            target: float32, (rows, columns), with the number of rows to write.
            start: The first row.
        """
        return self.convert_into(target, target, start)

    def convert_into(
        self, target: torch.Tensor, wide: torch.Tensor, start: int = 0
    ) -> torch.Tensor:
        """Write the dequantized values into `target`, of any floating-point type; return `target`.

        Args:
            target: (rows, columns), with the number of rows to write.
            wide: Memory of the same shape in float32, which is overwritten; may be `target`.
            start: The first row.
        """
        bits_per_row = len(self._bits) // self.shape[0]
        bits = self._bits[start * bits_per_row : (start + len(target)) * bits_per_row]
        if self.dtype is not None:
            target.view(-1).copy_(bits)
            return target
        groups = self.shape[1] // self._group
        scales = self._scales[start * groups : (start + len(target)) * groups][:, None]
        if self._has_fused_product:
            numbers = bits if self._storage == "int8" else self._decode_pairs(bits, wide)
            numbers = numbers.view(-1, self._group)
            torch.mul(numbers, scales, out=target.view(-1, self._group))
            return target
        if self._storage == "int8":
            wide.view(-1).copy_(bits)
        elif self._storage == "nf4":
            self._decode_pairs(bits, wide)
        else:  # the lower half of a byte comes first
            pairs = wide.view(-1, 2)
            pairs[:, 0] = bits & 15
            pairs[:, 1] = bits >> 4
            wide.sub_(8)
        wide.view(-1, self._group).mul_(scales)
        return target if target is wide else target.copy_(wide)

    def _decode_pairs(self, bits: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        """Write the two numbers of each byte into `wide`, not yet multiplied by their scale."""
        pairs, table = wide.view(-1, 2), _pairs_on(self.device, self._storage)
        at_once = _INDICES_AT_ONCE if self.device.type == "cpu" else len(bits)
        for lo in range(0, len(bits), at_once):
            part = slice(lo, lo + at_once)
            torch.index_select(table, 0, bits[part].int(), out=pairs[part])
        return wide


class ScratchBuffer:
    """Reused memory for one converted weight at a time.

    New memory for each layer would fragment the allocator's memory, since tensors that autograd
    keeps would fill the gaps.

    Args:
        elements: Size of the largest weight.
        device: The device.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._elements = elements
        self._device = device
        self._part = PART_ELEMENTS if device.type != "cpu" else _PART_ELEMENTS_OF_CPU
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def operand(self, weight: QuantizedWeight | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight's values as (rows, columns) of `dtype`, valid until the next call."""
        rows, columns = weight.shape
        if isinstance(weight, torch.Tensor):
            if dtype == weight.dtype:
                return weight
            return self._memory(dtype, rows, columns, self._elements).copy_(weight)
        if dtype == weight.dtype:
            return weight.matrix
        converted = self._memory(dtype, rows, columns, self._elements)
        if dtype == torch.float32:
            return weight.dequantize_into(converted)
        # Converting in parts avoids writing and reading a float32 copy of the whole weight.
        rows_per_part = max(1, self._part // columns)
        for start in range(0, rows, rows_per_part):
            part = converted[start : start + rows_per_part]
            capacity = min(max(self._part, columns), self._elements)
            wide = self._memory(torch.float32, len(part), columns, capacity)
            weight.convert_into(part, wide, start)
        return converted

    def _memory(self, dtype: torch.dtype, rows: int, columns: int, capacity: int) -> torch.Tensor:
        elements = rows * columns
        if dtype not in self._flat or len(self._flat[dtype]) < elements:
            self._flat[dtype] = torch.empty(capacity, dtype=dtype, device=self._device)
        return self._flat[dtype][:elements].view(rows, columns)


class QuantizedLinear(nn.Linear):
    """A frozen `nn.Linear` with a quantized weight; see `backends.eager.quantized_base`."""

    quantized_weight: QuantizedWeight
    scratch: ScratchBuffer

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight in float32, for code that inspects it; each access converts it again."""
        return self.quantized_weight.dequantize_into(
            torch.empty(self.quantized_weight.shape, device=self.quantized_weight.device)
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- torch's name
        """Compute as `nn.Linear`; the weight is dequantized again in backward."""
        return linear(input, self.quantized_weight, self.bias, self.scratch)


class ConvertedLinear(nn.Linear):
    """A frozen float32 `nn.Linear` of a model that computes in half precision."""

    scratch: ScratchBuffer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 -- torch's name
        """Compute as `nn.Linear`; the weight is converted again in backward."""
        if _compute_dtype(input) == self.weight.dtype:
            return super().forward(input)
        return linear(input, self.weight.detach(), self.bias, self.scratch)


def linear(
    input_: torch.Tensor,
    weight: QuantizedWeight | torch.Tensor,
    bias: torch.Tensor | None,
    scratch: ScratchBuffer,
) -> torch.Tensor:
    """Return a linear layer's output; autograd keeps no copy of the weight."""
    dtype = _compute_dtype(input_)
    operand = scratch.operand(weight, dtype)
    address = operand.untyped_storage().data_ptr()

    def pack(tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != address:
            return tensor
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(stored: Any) -> torch.Tensor:
        if isinstance(stored, torch.Tensor):
            return stored
        return scratch.operand(weight, dtype).as_strided(*stored)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return nn.functional.linear(input_, operand, bias)


def convert_again_in_backward(module: nn.Module, device: torch.device) -> None:
    """Make frozen float32 layers convert their weights again in backward under autocast."""
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.Linear) and is_plain(layer) and not layer.weight.requires_grad
    ]
    scratch = ScratchBuffer(max((layer.weight.numel() for layer in layers), default=0), device)
    for layer in layers:
        layer.__class__ = ConvertedLinear
        layer.scratch = scratch  # type: ignore[assignment]


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer computes as `nn.Linear` does."""
    return type(layer) is nn.Linear and "forward" not in vars(layer)


def _compute_dtype(input_: torch.Tensor) -> torch.dtype:
    """Return the type to which autocast would convert the weight."""
    device_type = input_.device.type
    if not torch.is_autocast_enabled(device_type):
        return torch.float32
    return torch.get_autocast_dtype(device_type)
