"""One operand of a product as both kernels read it: an outer dimension (m or n) and k.

Where the outer dimension or k is contiguous and everything is aligned, four elements are read at
once. Stored types narrower than float32 are widened as they are read: element i of an int8 or
int4 buffer is its whole number times the scale of group `i / group`, in float32; the scales lie
behind the whole numbers in the same buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.quantise import Storage
from backends.wgpu.matmul_problem import MatmulProblem

_PER_WORD: dict[Storage, int] = {"f32": 1, "bf16": 2, "f16": 2, "int8": 4, "int4": 8}


@dataclass(frozen=True, slots=True)
class Side:
    """An operand seen from its outer dimension.

    Attributes:
        name: Of its binding: a or b.
        extent: Of the outer dimension.
        k: Of the inner one.
        batch: Stride of the batch.
        outer: Stride of the outer dimension.
        inner: Stride of k.
        offset: Of the first element.
        storage: How an element is stored.
        group: Elements per scale.
        scales: The word at which they begin.
    """

    name: str
    extent: int
    k: int
    batch: int
    outer: int
    inner: int
    offset: int
    storage: Storage = "f32"
    group: int = 0
    scales: int = 0

    def along_k(self, elements: int) -> bool:
        """Whether so many consecutive elements along k lie side by side, aligned."""
        return self.inner == 1 and self._aligned(elements, self.outer, self.k)

    def along_outer(self, elements: int) -> bool:
        """Whether so many consecutive elements along the outer dimension do."""
        return self.outer == 1 and self._aligned(elements, self.inner, self.extent)

    def _aligned(self, elements: int, *numbers: int) -> bool:
        return all(number % elements == 0 for number in (*numbers, self.batch, self.offset))

    def base(self, batch: str) -> str:
        """WGSL of the index of the batch's first element."""
        if not self.batch:
            return f"{self.offset}u"
        return f"{batch} * {self.batch}u + {self.offset}u"

    def index(self, base: str, outer: str, inner: str) -> str:
        """WGSL of an element's index."""
        return f"{base} + ({outer}) * {self.outer}u + ({inner}) * {self.inner}u"

    def element_type(self, *, vector: bool) -> str:
        """WGSL type of the binding's array."""
        if self.storage != "f32":
            return "u32"
        return "vec4f" if vector else "f32"

    def functions(self, *, vector: bool) -> str:
        """WGSL: `NAME1(i)`, element i; where `vector`, `NAME4(i)`, elements i to i + 3."""
        name, per = self.name, _PER_WORD[self.storage]
        place = f"{name}[{self.scales}u + i / {self.group}u]"
        scale = f" * bitcast<f32>({place})" if self.group else ""
        one, four = _DECODERS[self.storage]
        text = ""
        if self.storage != "f32" or not vector:
            word = f"{name}[i / {per}u]" if per > 1 else f"{name}[i]"
            text += f"fn {name}1(i: u32) -> f32 {{ let w = {word}; return {one}{scale}; }}\n"
        if vector:
            words = f"let w = {name}[i / {min(per, 4) if self.storage != 'int4' else 8}u];"
            if self.storage == "f32":
                words = f"let w = {name}[i / 4u];"
            if per == 2:
                words = f"let w = {name}[i / 2u]; let v = {name}[i / 2u + 1u];"
            text += f"fn {name}4(i: u32) -> vec4f {{ {words} return {four}{scale}; }}\n"
        return text


_DECODERS: dict[Storage, tuple[str, str]] = {
    "f32": ("w", "w"),
    "bf16": (
        "bitcast<f32>((w >> ((i % 2u) * 16u)) << 16u)",
        "bitcast<vec4f>(vec4u(w << 16u, w & 0xffff0000u, v << 16u, v & 0xffff0000u))",
    ),
    "f16": ("unpack2x16float(w)[i % 2u]", "vec4f(unpack2x16float(w), unpack2x16float(v))"),
    "int8": (
        "f32(extractBits(i32(w), (i % 4u) * 8u, 8u))",
        "vec4f(unpack4xI8(w))",
    ),
    "int4": (
        "f32(i32(extractBits(w, (i % 8u) * 4u, 4u)) - 8)",
        "vec4f((vec4i(vec4u(w >> ((i % 8u) * 4u)) >> vec4u(0u, 4u, 8u, 12u)) & vec4i(15)) - 8)",
    ),
}


def sides(problem: MatmulProblem) -> tuple[Side, Side]:
    """The left operand, whose outer dimension is m, and the right one, whose outer one is n."""
    a_batch, a_m, a_k = problem.a.strides
    b_batch, b_k, b_n = problem.b.strides
    left = Side("a", problem.m, problem.k, a_batch, a_m, a_k, problem.a.offset)
    right = Side(
        "b",
        problem.n,
        problem.k,
        b_batch,
        b_n,
        b_k,
        problem.b.offset,
        problem.b_storage,
        problem.group,
        problem.scales,
    )
    return left, right
