"""What an attention kernel computes, and how its operands lie in memory.

Sizes as in `backends.wgpu.capture.attention`: B batch, H heads of queries, G heads of keys and
values, T queries, S keys, D the size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["forward", "queries", "keys"]
"""Output and its rows' statistics; the gradient of the queries; those of the keys and values."""


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """B, H, G, T, S and D."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    size: int

    @property
    def score_bytes(self) -> int:
        """What the matrix of scores would take."""
        return 4 * self.batch * self.heads * self.queries * self.keys


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in a buffer: strides and offset, in elements; `half`: of float16."""

    strides: tuple[int, ...]
    offset: int
    half: bool = False

    def at(self, *indices: str) -> str:
        """The address of an element, as WGSL of type u32."""
        terms = [
            index if stride == 1 else f"{index} * {stride}u"
            for index, stride in zip(indices, self.strides, strict=True)
            if stride
        ]
        if self.offset:
            terms.append(f"{self.offset}u")
        return " + ".join(terms) or "0u"

    @property
    def in_fours(self) -> bool:
        """Whether four neighbours along the last dimension are a vec4f of the buffer."""
        *outer, last = self.strides
        return last == 1 and all(x % 4 == 0 for x in (*outer, self.offset))


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One kernel.

    Attributes:
        query: (B, H, T, D).
        key: (B, G, S, D).
        value: (B, G, S, D).
        mask: (B, H, T, S), if there is one.
        truth: Whether the mask holds truth values, not what is added.
        tangent: (B, H, T, D); for the gradients.
        delta: (B, H, T); for the gradients.
        scale: Of the scores.
        causal: Query t sees the keys up to t.
    """

    part: Part
    sizes: AttentionSizes
    query: View
    key: View
    value: View
    mask: View | None
    truth: bool
    tangent: View | None
    delta: View | None
    scale: float
    causal: bool
