"""Replace torch's random numbers and attention during a trace.

Random numbers become a function of (seed, site, element): see `draws`. Attention becomes a custom
operator if that is faster, and is expanded into core operators otherwise, because torch's fused
kernels have no decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from backends.wgpu.capture.attention import AttentionPolicy, fused_attention, sizes_of
from backends.wgpu.capture.draws import Draws
from backends.wgpu.capture.half_products import stand_in_function

_CHECKS: Final = frozenset({
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
})  # fmt: skip
"""Functions by which torch's Python functions check whether to dispatch to a mode."""


class Rewrites(TorchFunctionMode):
    """Mode in which random functions draw from `seed`, a (2,) int32 tensor of random words.

    Composite functions such as `multi_head_attention_forward` run with the mode enabled, so that
    the functions that they call are replaced, too.

    Attributes:
        draws: Replaces random functions, and counts the draws.
    """

    def __init__(self, seed: torch.Tensor, fuses: AttentionPolicy) -> None:
        super().__init__()
        self.draws = Draws(seed)
        self._fuses = fuses
        self._composites_in_progress: list[FunctionType] = []
        """Running composites: a nested call of the same composite would recurse without end."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace random functions and attention; run all other functions unchanged."""
        kwargs = kwargs or {}
        if stand_in := stand_in_function(types):
            with self:
                return stand_in(func, types, args, kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        draw = self.draws.replacement(func)
        if draw is not None:
            return draw(*args, **kwargs)
        body = _without_mode_check(func) if isinstance(func, FunctionType) else None
        if body is None or body in self._composites_in_progress:
            return func(*args, **kwargs)
        self._composites_in_progress.append(body)
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self._composites_in_progress.pop()

    def _attention(  # noqa: PLR0917
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> torch.Tensor:
        """Replace `scaled_dot_product_attention`; same parameters."""
        scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        sizes = sizes_of(query, key, value, attn_mask)
        if sizes is not None and dropout_p == 0.0 and self._fuses(sizes):
            return fused_attention(query, key, value, attn_mask, scale, causal=is_causal)
        # The formula in the documentation of torch's `scaled_dot_product_attention`.
        if enable_gqa:
            key, value = (_repeat_groups(x, query.size(-3) // x.size(-3)) for x in (key, value))
        scores = query @ key.transpose(-2, -1)  # (..., queries, keys)
        scores = scores * scale
        if is_causal:  # every query has at least one visible key
            is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
            weights = torch.softmax(scores.masked_fill(is_later, -torch.inf), dim=-1)
        else:
            weights = _masked_softmax(scores, attn_mask)
        weights = self.draws.dropout(weights, dropout_p, dropout_p > 0)
        return weights @ value


@cache
def _without_mode_check(func: FunctionType) -> FunctionType | None:
    """Return a copy of the function without its check for a mode, which would recurse; None if it
    has no check."""
    if not _CHECKS & {*func.__code__.co_names} & func.__globals__.keys():
        return None
    names = func.__globals__ | dict.fromkeys(_CHECKS, _return_false)
    body = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _return_false(*_: object) -> bool:
    return False


def _repeat_groups(x: torch.Tensor, times: int) -> torch.Tensor:
    """Expand (..., G, S, D) to (..., G * times, S, D): each group serves all of its heads."""
    expanded = x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:])
    return expanded.flatten(-4, -3)


def _masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Compute softmax over keys; as in torch, a fully masked row gives zeros."""
    if mask is None:
        return torch.softmax(scores, dim=-1)
    if mask.dtype == torch.bool:
        is_masked = mask.logical_not()
    else:
        scores = scores + mask
        is_masked = scores == -torch.inf
    lowest_value = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(is_masked, lowest_value), dim=-1).masked_fill(
        is_masked, 0.0
    )
