"""Description of an attention kernel: its result, and the memory layout of its operands.

Sizes as in `backends.wgpu.capture.attention`: B batch, H heads of queries, G heads of keys and
values, T queries, S keys, D the size of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["forward", "queries", "keys"]
"""The result of a kernel: the output with the statistics of its rows (`forward`), the gradient of
the queries (`queries`), or the gradients of keys and values (`keys`)."""


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The sizes B, H, G, T, S and D, in this order."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    head_size: int

    @property
    def score_bytes(self) -> int:
        """Size of the score matrix in float32, if it were stored."""
        return 4 * self.batch * self.heads * self.queries * self.keys


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in a buffer: strides and offset in elements; `is_half` for float16."""

    strides: tuple[int, ...]
    offset: int
    is_half: bool = False

    def index(self, *indices: str) -> str:
        """Return the index of an element, as a WGSL expression of type u32."""
        terms = [
            index if stride == 1 else f"{index} * {stride}u"
            for index, stride in zip(indices, self.strides, strict=True)
            if stride
        ]
        if self.offset:
            terms.append(f"{self.offset}u")
        return " + ".join(terms) or "0u"

    @property
    def is_vec4_readable(self) -> bool:
        """Whether aligned groups of four along the last dimension can be read as a vec4f."""
        *outer, last_stride = self.strides
        return last_stride == 1 and all(x % 4 == 0 for x in (*outer, self.offset))


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One attention kernel.

    Attributes:
        kernel: The kernel's result.
        sizes: Sizes of the operands.
        query: (B, H, T, D).
        key: (B, G, S, D).
        value: (B, G, S, D).
        mask: (B, H, T, S), or None.
        is_mask_boolean: Whether the mask is boolean; otherwise it is added.
        grad_output: (B, H, T, D), the gradient of the output; None in the forward pass.
        delta: (B, H, T), the sums of output times its gradient; None in the forward pass.
        scale: Factor of the scores.
        causal: Whether query t sees only keys up to t.
    """

    kernel: AttentionKernel
    sizes: AttentionSizes
    query: View
    key: View
    value: View
    mask: View | None
    is_mask_boolean: bool
    grad_output: View | None
    delta: View | None
    scale: float
    causal: bool
