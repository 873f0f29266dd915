"""Which of torch's operators a trace splits into smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

_aten = torch.ops.aten

_ALSO = (
    _aten._log_softmax,  # noqa: SLF001
    _aten._log_softmax_backward_data,  # noqa: SLF001
    _aten._softmax,  # noqa: SLF001
    _aten._softmax_backward_data,  # noqa: SLF001
    _aten.addmm,
    _aten.baddbmm,
    _aten.embedding_dense_backward,
    _aten.gelu,
    _aten.gelu_backward,
    _aten.native_layer_norm,
    _aten.native_layer_norm_backward,
    _aten.nll_loss_backward,
    _aten.nll_loss_forward,
    _aten.silu,
    _aten.silu_backward,
    _aten.t,
)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """By operator: torch's own, to the core operators."""
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    table.update(get_decompositions(_ALSO))
    table[_aten.copy.default] = _copy
    return table


def _copy(
    target: torch.Tensor,
    source: torch.Tensor,
    non_blocking: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    """All of the target is written: what it held does not matter, only its shape and type."""
    del non_blocking
    return source.to(target.dtype).expand(target.shape).clone()
