"""Choices that IEEE 754 leaves to an implementation of float32, and that a canonical run fixes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Convention:
    """A convention: devices that follow the same convention compute the same bits.

    Attributes:
        fused: Whether fma(a, b, c) rounds once; otherwise the product is rounded, too.
        flushes: Whether subnormal inputs and results are flushed to zero.
    """

    fused: bool = True
    flushes: bool = False

    def __str__(self) -> str:
        subnormals = "flushed" if self.flushes else "kept"
        return f"{'fused' if self.fused else 'separate'}, subnormals {subnormals}"


CONVENTIONS = tuple(
    Convention(fused, flushes) for flushes in (False, True) for fused in (True, False)
)
