"""Description of a matrix product: shapes, strided operands, and the right operand's storage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from backends.wgpu.shaders.dispatch import WORKGROUPS_PER_DIMENSION
from backends.wgpu.shaders.quantized_layout import QuantizedLayout

MOST_TERMS: Final = 1 << 15
"""Limit on terms per dispatch. A kernel's loops then take fewer than 60,000 iterations: Mesa's
software Vulkan silently ends them after 65,535."""
_ALIGNMENT: Final = 8
"""Number of elements: kernels depend on an offset only modulo this."""

ZERO: Final = "let zero = bitcast<f32>(select(0u, 1u, arrayLength(&a) == 0u));"
"""Initial value of sums: a zero that the compiler cannot fold. When unrolling a short loop, the
compiler would turn `fma(x, y, 0.0)` into `x * y`, which is -0 where the sum is +0, and bits would
depend on sizes."""

ElementForm = Literal["f32", "f16", "rounded"]
"""An operand's element type in memory; "rounded" is float32 rounded to float16 on loading."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A strided view of a buffer, in elements.

    Attributes:
        strides: Strides of (batch, m, k) for the left operand, (batch, k, n) for the right operand;
            0 for a broadcast dimension.
        offset: Offset of element (0, 0, 0).
        element_form: Element type.
    """

    strides: tuple[int, int, int]
    offset: int = 0
    element_form: ElementForm = "f32"


@dataclass(frozen=True, slots=True)
class Result:
    """Layout of a product in the output's buffer, in elements.

    Attributes:
        row: Distance between rows.
        offset: Offset of the first element; multiples of 4 are stored faster.
        accumulates: Whether the sums are added to the buffer's content.
    """

    row: int
    offset: int = 0
    accumulates: bool = False

    def is_aligned(self, elements: int) -> bool:
        """Whether groups of `elements` consecutive elements can be stored at once."""
        return self.row % elements == 0 and self.offset % elements == 0


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Computation on each output, fused into the product's kernel.

    Attributes:
        bindings: WGSL types of further inputs `b0`, `b1` and so on.
        helpers: WGSL functions that the body calls.
        writes: WGSL types of further outputs `e0`, `e1` and so on.
        body: WGSL that uses `i`, the output's index, and `product`, its value.
        is_product_stored: Whether the product itself is stored, too.
        reads_indices: Whether an index is read from a buffer.
    """

    bindings: tuple[str, ...]
    helpers: str
    writes: tuple[str, ...]
    body: str
    is_product_stored: bool
    reads_indices: bool = False


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """out[b, m, n] = sum over k of a[b, m, k] * b[b, k, n], in float32.

    Attributes:
        batch: Number of products.
        m: Rows of the left operand.
        k: The dimension that is summed over.
        n: Columns of the right operand.
        a: The left operand.
        b: The right operand.
        b_form: Layout of the right operand if quantized; a quantized operand is not rounded.
        into: Layout of the output; by default a dense buffer (batch, m, n).
        finish: Computation fused into the kernel.
    """

    batch: int
    m: int
    k: int
    n: int
    a: Operand
    b: Operand
    b_form: QuantizedLayout | None = None
    into: Result | None = None
    finish: Epilogue | None = None

    @property
    def result(self) -> Result:
        """Layout of the output; the products of a batch are consecutive."""
        return self.into or Result(self.n)

    @property
    def is_float32(self) -> bool:
        """Whether both operands are float32."""
        return self.a.element_form == self.b.element_form == "f32"

    @property
    def tuning_key(self) -> MatmulProblem:
        """A representative of all problems with the same speed: offsets are reduced to
        alignment."""
        a, b = (replace(x, offset=x.offset % _ALIGNMENT) for x in (self.a, self.b))
        into = None
        if self.into is not None and self.into != Result(self.n, accumulates=self.into.accumulates):
            into = Result(self.into.row, self.into.offset % _ALIGNMENT)
        return replace(self, a=a, b=b, into=into, finish=None)


def _part_of_batch(problem: MatmulProblem, start: int) -> MatmulProblem:
    """Return the products of a batch from `start`, as many as fit in a grid."""
    a = replace(problem.a, offset=problem.a.offset + start * problem.a.strides[0])
    b = replace(problem.b, offset=problem.b.offset + start * problem.b.strides[0])
    result = problem.result
    result = replace(result, offset=result.offset + start * problem.m * problem.n)
    batch = min(WORKGROUPS_PER_DIMENSION, problem.batch - start)
    return replace(problem, batch=batch, a=a, b=b, into=result)


def split_into_dispatches(problem: MatmulProblem) -> Iterator[MatmulProblem]:
    """Split a product into dispatches with at most `MOST_TERMS` terms per sum, in order.

    Each dispatch adds to the previous sums. This is also more accurate than one running sum: an
    error of 4e-6 to 6e-6 of the norm at 151,936 terms, a vocabulary, instead of 9e-6.
    """
    if problem.batch > WORKGROUPS_PER_DIMENSION:
        for start in range(0, problem.batch, WORKGROUPS_PER_DIMENSION):
            yield from split_into_dispatches(_part_of_batch(problem, start))
        return
    result = problem.result
    for start in range(0, max(problem.k, 1), MOST_TERMS):
        a = replace(problem.a, offset=problem.a.offset + start * problem.a.strides[2])
        b = replace(problem.b, offset=problem.b.offset + start * problem.b.strides[1])
        k = min(MOST_TERMS, problem.k - start)
        part_result = replace(result, accumulates=result.accumulates or start > 0)
        yield replace(problem, k=k, a=a, b=b, into=part_result)
