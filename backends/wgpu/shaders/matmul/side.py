"""One operand of a product as both kernels read it: an outer dimension (m or n) and k.

Where the outer dimension or k is contiguous and everything is aligned, four elements are read at
once. Forms narrower than float32 are widened as they are read (`backends.wgpu.shaders.narrow`).
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.wgpu.shaders.functions import to_float16
from backends.wgpu.shaders.matmul.problem import Held, MatmulProblem
from backends.wgpu.shaders.narrow import Narrow


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
        form: How it is stored, if in few bits.
        held: How it lies in memory otherwise, and is read.
    """

    name: str
    extent: int
    k: int
    batch: int
    outer: int
    inner: int
    offset: int
    form: Narrow | None = None
    held: Held = "f32"

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
        if self.form is not None:
            return "u32"
        if self.held == "f16":
            return "vec4<f16>" if vector else "f16"
        return "vec4f" if vector else "f32"

    def functions(self, *, vector: bool) -> str:
        """WGSL: `NAME_one(i)`, element i; where `vector`, `NAME_four(i)`, elements i to i + 3.

        No name here is a letter and a number: a kernel's other buffers are called so.
        """
        one, four = f"{self.name}_one", f"{self.name}_four"
        if self.form is not None:
            text = self.form.one(one, self.name)
            return text + self.form.four(four, self.name) if vector else text
        value = f"{self.name}[i / 4u]" if vector else f"{self.name}[i]"
        text = ""
        if self.held == "f16":
            value = f"vec4f({value})" if vector else f"f32({value})"
        elif self.held == "rounded":
            nearest = f"{self.name}_rounded"
            text = to_float16(nearest)
            parts = ", ".join(f"{nearest}(x[{n}])" for n in range(4))
            value = f"vec4f({parts})" if vector else f"{nearest}({value})"
        read = f"let x = {self.name}[i / 4u]; " if self.held == "rounded" and vector else ""
        kind, name = ("vec4f", four) if vector else ("f32", one)
        return f"{text}fn {name}(i: u32) -> {kind} {{ {read}return {value}; }}\n"


def sides(problem: MatmulProblem) -> tuple[Side, Side]:
    """The left operand, whose outer dimension is m, and the right one, whose outer one is n."""
    a_batch, a_m, a_k = problem.a.strides
    b_batch, b_k, b_n = problem.b.strides
    left = Side("a", problem.m, problem.k, a_batch, a_m, a_k, problem.a.offset, held=problem.a.held)
    right = Side(
        "b",
        problem.n,
        problem.k,
        b_batch,
        b_n,
        b_k,
        problem.b.offset,
        problem.b_form,
        problem.b.held,
    )
    return left, right
