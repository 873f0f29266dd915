"""Attention as custom operators, which never store the score matrix.

Forward returns the output and each row's maximum and sum; backward recomputes the scores block by
block. The algorithm is that of Dao, "FlashAttention-2" (2023), https://arxiv.org/abs/2307.08691.
Maximum and sum are stored separately: if a mask adds the lowest float to a whole row, their
log-sum-exp would lose the sum.

Shapes: B batch, H heads of queries, G heads of keys and values (G divides H), T queries, S keys,
D the size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from backends.wgpu.capture.half_products import computes_in_half, round_to_half
from backends.wgpu.graph.opaque import ATTENTION, ATTENTION_KEYS, ATTENTION_QUERIES
from backends.wgpu.shaders.attention.problem import AttentionSizes
from backends.wgpu.shaders.attention.tiles import loop_iterations
from backends.wgpu.shaders.dispatch import WORKGROUPS_PER_DIMENSION

LARGEST_HEAD: Final = 128
"""Largest size of a head: an invocation's registers do not suffice for the sums of larger heads."""
_LOOP_ITERATIONS: Final = 60_000
"""Limit on loop iterations: software Vulkan silently ends an invocation's loops after 65,535."""
_SOFTWARE_BYTES: Final = 2**28
"""Size of the scores above which a software adapter fuses attention."""


AttentionPolicy = Callable[[AttentionSizes], bool]


def should_fuse(sizes: AttentionSizes, *, cooperative: bool) -> bool:
    """Whether fused attention is preferable.

    It is on a GPU, where memory traffic dominates, which fused kernels minimize. On a software
    adapter workgroup memory is slow, and a step with fused attention takes up to 1.7 times as long
    (`benchmarks.vulkan`), so attention is fused only if a layer's scores would take over 256 MiB.
    """
    if cooperative:
        return True
    return sizes.score_bytes > _SOFTWARE_BYTES and loop_iterations(sizes) <= _LOOP_ITERATIONS


def never_fuses(sizes: AttentionSizes) -> bool:
    """Return False: attention is not fused."""
    del sizes
    return False


def sizes_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> AttentionSizes | None:
    """Return the sizes if there are kernels for these tensors, else None."""
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape:
        return None
    (batch, heads, queries, size), (_, groups, keys, _) = query.shape, key.shape
    if mask is not None and not _is_broadcastable(mask.shape, (batch, heads, queries, keys)):
        return None
    if max(batch, heads) > WORKGROUPS_PER_DIMENSION:
        return None
    dtypes = {torch.float32, torch.float16} if computes_in_half() else {torch.float32}
    has_float_dtypes = {query.dtype, key.dtype, value.dtype} <= dtypes
    if mask is not None and (mask.requires_grad or mask.dtype not in {torch.bool, torch.float32}):
        return None
    is_compatible = key.shape[0] == batch and key.shape[3] == size and heads % groups == 0
    if not (
        has_float_dtypes
        and is_compatible
        and size % 4 == 0
        and size <= LARGEST_HEAD
        and queries
        and keys
    ):
        return None
    return AttentionSizes(batch, heads, groups, queries, keys, size)


def _is_broadcastable(shape: Sequence[int], target_shape: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(target_shape), strict=False)
    return len(shape) <= len(target_shape) and all(size in {1, target} for size, target in pairs)


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool,
) -> torch.Tensor:
    """Compute softmax(scale * query key^T + mask) value; a fully masked row gives zeros.

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D).
        value: (B, G, S, D).
        mask: Broadcastable to (B, H, T, S): boolean, true where unmasked, or added to the scores.
        scale: Factor of the scores.
        causal: Whether query t sees only keys up to t.

    Returns:
        (B, H, T, D).
    """
    if mask is not None:
        mask = mask.expand(*query.shape[:3], key.shape[2])
    if computes_in_half():
        query, key, value = map(round_to_half, (query, key, value))
    result: torch.Tensor = _Fused.apply(query, key, value, mask, scale, causal)  # type: ignore[no-untyped-call]
    return result.half() if computes_in_half() else result


class _Fused(torch.autograd.Function):
    """The fused operators and their gradients."""

    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        causal: bool,  # noqa: FBT001
    ) -> torch.Tensor:
        batch, heads, queries, size = query.shape
        packed = ATTENTION(query, key, value, mask, scale, causal)
        result: torch.Tensor = packed[: query.numel()].view(batch, queries, heads, size)
        result = result.transpose(1, 2)
        ctx.save_for_backward(query, key, value, mask, packed, result)
        ctx.formula = scale, causal
        return result

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        query, key, value, mask, packed, result = ctx.saved_tensors
        (grad_output,) = grad_outputs
        # The softmax's gradient subtracts each row's sum of weights times their gradients.
        delta = (grad_output * result).sum(-1)
        arguments = (query, key, value, mask, packed, grad_output, delta, *ctx.formula)
        grad_query = ATTENTION_QUERIES(*arguments)  # (B, T, H, D)
        grad_key, grad_value = ATTENTION_KEYS(*arguments).unbind()  # each (B, S, G, D)
        gradients = (x.transpose(1, 2) for x in (grad_query, grad_key, grad_value))
        return *gradients, None, None, None
