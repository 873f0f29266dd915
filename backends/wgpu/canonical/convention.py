"""What an implementation of float32 is left free to choose, and a canonical run fixes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Convention:
    """Two devices of one convention give the same bits.

    Attributes:
        fused: Whether fma(a, b, c) is rounded once; else the product is rounded too.
        flushes: Whether subnormal numbers count as zeros, taken and given; else they are kept.
    """

    fused: bool = True
    flushes: bool = False

    def __str__(self) -> str:
        subnormals = "flushed" if self.flushes else "kept"
        return f"{'fused' if self.fused else 'separate'}, subnormals {subnormals}"


CONVENTIONS = tuple(
    Convention(fused, flushes) for flushes in (False, True) for fused in (True, False)
)
