"""What a trace sees in place of torch's own random numbers and attention.

Random numbers are a function of (seed, site, element): see `draws`. Attention becomes an operator
of our own where that pays, and is written out elsewhere: torch's fused kernels have no rule in
other operators.
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

from backends.wgpu.capture.attention import Fuses, fused_attention, sizes_of
from backends.wgpu.capture.draws import Draws

_CHECKS: Final = frozenset({
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
})  # fmt: skip
"""By these a function of torch's, written in Python, asks whether a mode shall have the call."""


class Rewrites(TorchFunctionMode):
    """While it is entered, what is random draws from `seed`, a (2,) int32 tensor of random words.

    Functions that torch composes of others, `multi_head_attention_forward` say, are run with the
    mode on, so that it sees the others.

    Attributes:
        draws: What was drawn.
    """

    def __init__(self, seed: torch.Tensor, fuses: Fuses) -> None:
        super().__init__()
        self.draws = Draws(seed)
        self._fuses = fuses
        self._running: list[FunctionType] = []
        """Composites: one that comes again asks in a way of its own, and would ask for ever."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace what is known here; leave the rest."""
        del types
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        drawn = self.draws.known(func)
        if drawn is not None:
            return drawn(*args, **kwargs)
        inside = _inside(func) if isinstance(func, FunctionType) else None
        if inside is None or inside in self._running:
            return func(*args, **kwargs)
        self._running.append(inside)
        try:
            with self:
                return inside(*args, **kwargs)
        finally:
            self._running.pop()

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
        """With the parameters of torch's own."""
        scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        sizes = sizes_of(query, key, value, attn_mask)
        if sizes is not None and dropout_p == 0.0 and self._fuses(sizes):
            return fused_attention(query, key, value, attn_mask, scale, causal=is_causal)
        # The formula in the documentation of torch's `scaled_dot_product_attention`.
        if enable_gqa:
            key, value = (_repeated(x, query.size(-3) // x.size(-3)) for x in (key, value))
        scores = query @ key.transpose(-2, -1)  # (..., queries, keys)
        scores = scores * scale
        if is_causal:  # every query sees a key
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
            weights = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
        else:
            weights = _softmax(scores, attn_mask)
        weights = self.draws.dropout(weights, dropout_p, dropout_p > 0)
        return weights @ value


@cache
def _inside(func: FunctionType) -> FunctionType | None:
    """The function without its question for a mode, which would ask again and again; None if it
    asks none."""
    if not _CHECKS & {*func.__code__.co_names} & func.__globals__.keys():
        return None
    names = func.__globals__ | dict.fromkeys(_CHECKS, _no)
    made = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _no(*_: object) -> bool:
    return False


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """(..., G, S, D) as (..., G * times, S, D): each group for all of its heads."""
    wide = x.unsqueeze(-3).expand(*x.shape[:-2], times, *x.shape[-2:])
    return wide.flatten(-4, -3)


def _softmax(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Over the keys; as torch's, it gives zeros for a row that is masked as a whole."""
    if mask is None:
        return torch.softmax(scores, dim=-1)
    if mask.dtype == torch.bool:
        hidden = mask.logical_not()
    else:
        scores = scores + mask
        hidden = scores == -torch.inf
    lowest = torch.finfo(scores.dtype).min
    return torch.softmax(scores.masked_fill(hidden, lowest), dim=-1).masked_fill(hidden, 0.0)
