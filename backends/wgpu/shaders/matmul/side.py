"""An operand of a product as both kernels see it: an outer dimension (m or n) and k.

If the outer dimension or k is contiguous and aligned, four elements are loaded at once. Quantized
operands are dequantized on loading (`backends.wgpu.shaders.quantized_layout`).
"""

from __future__ import annotations

from dataclasses import dataclass

from backends.wgpu.shaders.functions import to_float16
from backends.wgpu.shaders.matmul.problem import ElementForm, MatmulProblem
from backends.wgpu.shaders.quantized_layout import QuantizedLayout


@dataclass(frozen=True, slots=True)
class Side:
    """An operand, described by its outer dimension and k.

    Attributes:
        name: Name of the operand's binding: a or b.
        extent: Size of the outer dimension.
        k: Size of the inner dimension.
        batch: Stride of the batch.
        outer: Stride of the outer dimension.
        inner: Stride of k.
        offset: Offset of the first element.
        form: Layout of a quantized operand.
        element_form: Element type otherwise.
    """

    name: str
    extent: int
    k: int
    batch: int
    outer: int
    inner: int
    offset: int
    form: QuantizedLayout | None = None
    element_form: ElementForm = "f32"

    def along_k(self, elements: int) -> bool:
        """Whether groups of `elements` along k are contiguous and aligned."""
        return self.inner == 1 and self._are_aligned(elements, self.outer, self.k)

    def along_outer(self, elements: int) -> bool:
        """Whether groups of `elements` along the outer dimension are contiguous and aligned."""
        return self.outer == 1 and self._are_aligned(elements, self.inner, self.extent)

    def _are_aligned(self, elements: int, *numbers: int) -> bool:
        return all(number % elements == 0 for number in (*numbers, self.batch, self.offset))

    def base(self, batch: str) -> str:
        """Return the index of the batch's first element."""
        if not self.batch:
            return f"{self.offset}u"
        return f"{batch} * {self.batch}u + {self.offset}u"

    def index(self, base: str, outer: str, inner: str) -> str:
        """Return an element's index."""
        return f"{base} + ({outer}) * {self.outer}u + ({inner}) * {self.inner}u"

    def element_type(self, *, vector: bool) -> str:
        """Return the WGSL type of the binding's elements."""
        if self.form is not None:
            return "u32"
        if self.element_form == "f16":
            return "vec4<f16>" if vector else "f16"
        return "vec4f" if vector else "f32"

    def functions(self, *, vector: bool) -> str:
        """Return WGSL of `NAME_one(i)`, which reads element i.

        With `vector`, also of `NAME_four(i)`, which reads elements i to i + 3.

        Names of a letter and a number are reserved for a kernel's other buffers.
        """
        scalar_name, vector_name = f"{self.name}_one", f"{self.name}_four"
        if self.form is not None:
            text = self.form.scalar_reader(scalar_name, self.name)
            return text + self.form.vector_reader(vector_name, self.name) if vector else text
        value = f"{self.name}[i / 4u]" if vector else f"{self.name}[i]"
        text = ""
        if self.element_form == "f16":
            value = f"vec4f({value})" if vector else f"f32({value})"
        elif self.element_form == "rounded":
            round_function = f"{self.name}_rounded"
            text = to_float16(round_function)
            parts = ", ".join(f"{round_function}(x[{n}])" for n in range(4))
            value = f"vec4f({parts})" if vector else f"{round_function}({value})"
        rounded_read = (
            f"let x = {self.name}[i / 4u]; " if self.element_form == "rounded" and vector else ""
        )
        kind, name = ("vec4f", vector_name) if vector else ("f32", scalar_name)
        return f"{text}fn {name}(i: u32) -> {kind} {{ {rounded_read}return {value}; }}\n"


def sides(problem: MatmulProblem) -> tuple[Side, Side]:
    """Return the left operand, with outer dimension m, and the right operand, with n."""
    a_batch, a_m, a_k = problem.a.strides
    b_batch, b_k, b_n = problem.b.strides
    left = Side(
        "a",
        problem.m,
        problem.k,
        a_batch,
        a_m,
        a_k,
        problem.a.offset,
        element_form=problem.a.element_form,
    )
    right = Side(
        "b",
        problem.n,
        problem.k,
        b_batch,
        b_n,
        b_k,
        problem.b.offset,
        problem.b_form,
        problem.b.element_form,
    )
    return left, right
