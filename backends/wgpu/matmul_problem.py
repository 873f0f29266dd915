"""What a matrix product is: shapes, strided operands and how the right one is stored."""

from __future__ import annotations

from dataclasses import dataclass

from backends.wgpu.narrow import Narrow


@dataclass(frozen=True, slots=True)
class Operand:
    """A strided view of a buffer, in elements.

    Attributes:
        strides: Of (batch, m, k) for the left operand, (batch, k, n) for the right one; 0 where
            one value stands for all.
        offset: Of element (0, 0, 0).
    """

    strides: tuple[int, int, int]
    offset: int = 0


@dataclass(frozen=True, slots=True)
class MatmulProblem:
    """out[b, m, n] = sum over k of a[b, m, k] * b[b, k, n]; out contiguous, float32.

    Attributes:
        batch: How many products.
        m: Rows of the left operand.
        k: What is summed over.
        n: Columns of the right operand.
        a: The left operand, float32.
        b: The right operand.
        b_form: How the right operand is stored, if not as float32.
    """

    batch: int
    m: int
    k: int
    n: int
    a: Operand
    b: Operand
    b_form: Narrow | None = None
