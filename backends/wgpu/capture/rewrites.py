"""What a trace sees in place of torch's own dropout and attention.

Dropout becomes a product with a mask that is a function of (seed, site, element). Attention becomes
an operator of our own where that pays, and is written out elsewhere: torch's fused kernels have no
rule in other operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from backends.wgpu.capture.attention import Fuses, fused_attention, sizes_of
from backends.wgpu.graph.opaque import KEEP


class Rewrites(TorchFunctionMode):
    """While it is entered, dropout draws from `seed`, a (2,) int32 tensor of two random words.

    Attributes:
        sites: How many draws there were: each has a number of its own.
    """

    def __init__(self, seed: torch.Tensor, fuses: Fuses) -> None:
        super().__init__()
        self.seed = seed
        self._fuses = fuses
        self.sites = 0

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
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is torch.dropout:
            x, drop, training = args
            return self._dropout(x, drop, training)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    # The parameters of these two are torch's own.

    def _dropout(
        self,
        x: torch.Tensor,
        p: float = 0.5,
        training: bool = True,  # noqa: FBT001, FBT002
        inplace: bool = False,  # noqa: FBT001, FBT002
    ) -> torch.Tensor:
        del inplace
        if not training or p == 0.0:
            return x
        if p == 1.0:
            return x * 0.0
        site, self.sites = self.sites, self.sites + 1
        noise: torch.Tensor = KEEP(self.seed, list(x.shape), p, site)
        return x * noise

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
        weights = self._dropout(weights, dropout_p, dropout_p > 0)
        return weights @ value


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
