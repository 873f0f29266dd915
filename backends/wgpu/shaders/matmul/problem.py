"""What a matrix product is: shapes, strided operands and how the right one is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from backends.wgpu.shaders.dispatch import WORKGROUPS_PER_DIMENSION
from backends.wgpu.shaders.narrow import Narrow

MOST_TERMS: Final = 1 << 15
"""Of one dispatch, for every kernel. Whatever its tiles, its loops then take fewer than 60,000
rounds in all: Mesa's software Vulkan ends them after 65,535, without a word."""
_ALIGNMENT: Final = 8
"""Elements: what matters of an offset is whether so many can be read at once."""

ZERO: Final = "let zero = bitcast<f32>(select(0u, 1u, arrayLength(&a) == 0u));"
"""What sums begin with, and no compiler knows to be 0: where one unrolls a short loop, it makes
`x * y` of `fma(x, y, 0.0)`, and -0 of what is +0, so that kernels of other sizes had other bits."""

Held = Literal["f32", "f16", "rounded"]
"""How an operand's elements lie in memory, and whether they are rounded to float16 when they are
read."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A strided view of a buffer, in elements.

    Attributes:
        strides: Of (batch, m, k) for the left operand, (batch, k, n) for the right one; 0 where
            one value stands for all.
        offset: Of element (0, 0, 0).
        held: As what.
    """

    strides: tuple[int, int, int]
    offset: int = 0
    held: Held = "f32"


@dataclass(frozen=True, slots=True)
class Result:
    """Where a product's rows lie in the output's buffer, in elements.

    Attributes:
        row: From one row to the next.
        offset: Of the first element; a multiple of 4 elements is stored quicker.
        onto: Whether the sums are added to what is there.
    """

    row: int
    offset: int = 0
    onto: bool = False

    def aligned(self, elements: int) -> bool:
        """Whether so many elements of a row that lie side by side can be stored at once."""
        return self.row % elements == 0 and self.offset % elements == 0


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What is computed of each output as soon as it is there, and stored at the same place.

    Attributes:
        bindings: WGSL types of what is read besides the operands, `b0`, `b1` and so on.
        helpers: WGSL functions that the body calls.
        writes: WGSL types of what is written, `e0`, `e1` and so on.
        body: WGSL over `i`, the output's place, and `product`, its value.
        stored: Whether the output itself is stored as well.
        looks_up: Whether an index is a number that a buffer holds.
    """

    bindings: tuple[str, ...]
    helpers: str
    writes: tuple[str, ...]
    body: str
    stored: bool
    looks_up: bool = False


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """out[b, m, n] = sum over k of a[b, m, k] * b[b, k, n], in float32.

    Attributes:
        batch: How many products.
        m: Rows of the left operand.
        k: What is summed over.
        n: Columns of the right operand.
        a: The left operand.
        b: The right operand.
        b_form: How the right operand is stored, if in few bits; it is not rounded then.
        into: Where the output goes, if it is not a buffer of its own, (batch, m, n).
        finish: What is computed of it besides.
    """

    batch: int
    m: int
    k: int
    n: int
    a: Operand
    b: Operand
    b_form: Narrow | None = None
    into: Result | None = None
    finish: Epilogue | None = None

    @property
    def result(self) -> Result:
        """Where the output goes; products of a batch lie one after the other."""
        return self.into or Result(self.n)

    @property
    def in_float32(self) -> bool:
        """Whether no operand has to do with float16."""
        return self.a.held == self.b.held == "f32"

    @property
    def alike(self) -> MatmulProblem:
        """One for all that take the same time: what counts of an offset is how it is aligned."""
        a, b = (replace(x, offset=x.offset % _ALIGNMENT) for x in (self.a, self.b))
        into = None
        if self.into is not None and self.into != Result(self.n, onto=self.into.onto):
            into = Result(self.into.row, self.into.offset % _ALIGNMENT)
        return replace(self, a=a, b=b, into=into, finish=None)


def _some(problem: MatmulProblem, first: int) -> MatmulProblem:
    """As many products of a batch as a grid has room for, from one on."""
    a = replace(problem.a, offset=problem.a.offset + first * problem.a.strides[0])
    b = replace(problem.b, offset=problem.b.offset + first * problem.b.strides[0])
    into = problem.result
    into = replace(into, offset=into.offset + first * problem.m * problem.n)
    batch = min(WORKGROUPS_PER_DIMENSION, problem.batch - first)
    return replace(problem, batch=batch, a=a, b=b, into=into)


def dispatched(problem: MatmulProblem) -> Iterator[MatmulProblem]:
    """The same product in as many dispatches as its sums are too long for one, in their order.

    Each adds its sums to those of the ones before it. One running sum over a vocabulary would lose
    more than that: 9e-6 of the norm at 151,936 terms, against 4e-6 to 6e-6.
    """
    if problem.batch > WORKGROUPS_PER_DIMENSION:
        for first in range(0, problem.batch, WORKGROUPS_PER_DIMENSION):
            yield from dispatched(_some(problem, first))
        return
    into = problem.result
    for first in range(0, max(problem.k, 1), MOST_TERMS):
        a = replace(problem.a, offset=problem.a.offset + first * problem.a.strides[2])
        b = replace(problem.b, offset=problem.b.offset + first * problem.b.strides[1])
        k = min(MOST_TERMS, problem.k - first)
        onto = replace(into, onto=into.onto or first > 0)
        yield replace(problem, k=k, a=a, b=b, into=onto)
