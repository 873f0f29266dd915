"""What a trace sees in place of torch's own dropout and attention.

Dropout becomes a product with a mask that is a function of (seed, site, element); attention is
written out, since its fused kernels have no rule in other operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from backends.wgpu.opaque import KEEP


class Rewrites(TorchFunctionMode):
    """While it is entered, dropout draws from `seed`, a (2,) int32 tensor of two random words.

    Attributes:
        sites: How many draws there were: each has a number of its own.
    """

    def __init__(self, seed: torch.Tensor) -> None:
        super().__init__()
        self.seed = seed
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
        """The formula in the documentation of torch's `scaled_dot_product_attention`."""
        if enable_gqa:
            key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
            value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
        scores = query @ key.transpose(-2, -1)  # (..., queries, keys)
        scores = scores * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(attn_mask.logical_not(), -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = self._dropout(torch.softmax(scores, dim=-1), dropout_p, dropout_p > 0)
        return weights @ value
