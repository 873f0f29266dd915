"""Read quantized weights in shaders.

A buffer has the layout of `QuantizedMatrix.pack`: words, then scales. Element i of an int8, int4 or
nf4 buffer is its number times the scale of group `i / group`, one float32 product; bf16 and f16 are
converted to float32. The bits equal those of `backends.quantization.quantize.dequantize`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from backends.quantization.quantize import BITS, NF4, QuantizedMatrix, Storage, group_size
from protocol.base.errors import SamestepError

_META = "quantized_layout"


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """How a buffer stores quantized float32 values.

    Attributes:
        storage: bf16, f16, int8, int4 or nf4.
        group: Elements per scale; 0 without scales.
        scales: Index of the word that holds the first scale.
    """

    storage: Storage
    group: int = 0
    scales: int = 0

    @staticmethod
    def of(stored: QuantizedMatrix) -> QuantizedLayout:
        """Return the layout of a quantized matrix."""
        return QuantizedLayout(stored.storage, stored.group, len(stored.words))

    @staticmethod
    def of_shape(rows: int, columns: int, storage: Storage) -> QuantizedLayout:
        """Return the layout of a matrix of this shape."""
        if storage in {"bf16", "f16"}:
            return QuantizedLayout(storage, 0, rows * columns // 2)
        packed_storage: Storage = (
            "nf4" if storage == "nf4" else "int8" if BITS[storage] == 8 else "int4"
        )
        words = rows * columns * BITS[storage] // 32
        return QuantizedLayout(packed_storage, group_size(columns, storage), words)

    @property
    def uses_table(self) -> bool:
        """Whether elements are indices into a table."""
        return self.storage == "nf4"

    def scalar_reader(self, function: str, buffer: str) -> str:
        """Return WGSL of `function(i: u32) -> f32`, which reads element i."""
        per, value = _SCALAR[self.storage]
        value = value.replace("NF4", f"{function}_nf4")
        return self._table(function) + (
            f"fn {function}(i: u32) -> f32 {{ let w = {buffer}[i / {per}u]; "
            f"return {value}{self._scale(buffer)}; }}\n"
        )

    def vector_reader(self, function: str, buffer: str) -> str:
        """Return WGSL of `function(i: u32) -> vec4f`, which reads elements i to i + 3.

        `i` is a multiple of 4.
        """
        words, value = _VECTOR[self.storage]
        value = value.replace("NF4", f"{function}_nf4")
        return self._table(function) + (
            f"fn {function}(i: u32) -> vec4f {{ {words.replace('BUFFER', buffer)} "
            f"return {value}{self._scale(buffer)}; }}\n"
        )

    def _table(self, function: str) -> str:
        if not self.uses_table:
            return ""
        values = ", ".join(repr(float(value)) for value in NF4)
        return f"var<private> {function}_nf4 = array<f32, 16>({values});\n"

    def _scale(self, buffer: str) -> str:
        if not self.group:
            return ""
        return f" * bitcast<f32>({buffer}[{self.scales}u + i / {self.group}u])"


_SCALAR: dict[Storage, tuple[int, str]] = {
    "bf16": (2, "bitcast<f32>((w >> ((i % 2u) * 16u)) << 16u)"),
    "f16": (2, "unpack2x16float(w)[i % 2u]"),
    "int8": (4, "f32(extractBits(i32(w), (i % 4u) * 8u, 8u))"),
    "int4": (8, "f32(i32(extractBits(w, (i % 8u) * 4u, 4u)) - 8)"),
    "nf4": (8, "NF4[extractBits(w, (i % 8u) * 4u, 4u)]"),
}
"""Elements per word, and WGSL that extracts one."""

_TWO_WORDS = "let w = BUFFER[i / 2u]; let v = BUFFER[i / 2u + 1u];"
_VECTOR: dict[Storage, tuple[str, str]] = {
    "bf16": (
        _TWO_WORDS,
        "bitcast<vec4f>(vec4u(w << 16u, w & 0xffff0000u, v << 16u, v & 0xffff0000u))",
    ),
    "f16": (_TWO_WORDS, "vec4f(unpack2x16float(w), unpack2x16float(v))"),
    "int8": ("let w = BUFFER[i / 4u];", "vec4f(unpack4xI8(w))"),
    "int4": (
        "let w = vec4u(BUFFER[i / 8u] >> ((i % 8u) * 4u));",
        "vec4f((vec4i(w >> vec4u(0u, 4u, 8u, 12u)) & vec4i(15)) - 8)",
    ),
    "nf4": (
        "let w = BUFFER[i / 8u] >> ((i % 8u) * 4u);",
        "vec4f(NF4[w & 15u], NF4[(w >> 4u) & 15u], NF4[(w >> 8u) & 15u], NF4[(w >> 12u) & 15u])",
    ),
}
"""WGSL that loads the words of four elements, and that converts them to a vector."""


def set_quantized_layout(node: fx.Node, form: QuantizedLayout | None) -> None:
    """Set the quantized layout of an input's buffer; None for plain storage."""
    if form is not None:
        node.meta[_META] = form


def quantized_layout_of(node: fx.Node) -> QuantizedLayout | None:
    """Return the quantized layout of a value's buffer, or None for plain storage."""
    form = node.meta.get(_META)
    assert form is None or isinstance(form, QuantizedLayout)
    return form


def refuse_on_the_left(base: fx.Node, label: str) -> None:
    """Refuse a quantized left operand: only the right operand of a product is dequantized on
    loading.

    Raises:
        SamestepError: The operand is quantized.
    """
    layout = quantized_layout_of(base)
    if layout is not None:
        raise SamestepError(
            f"expected model.base_dtype float32, got {layout.storage}: {label} multiplies by a "
            "frozen weight from the left, which quantized storage does not support"
        )
