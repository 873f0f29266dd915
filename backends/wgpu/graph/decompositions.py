"""Which of torch's operators a trace splits into smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    _aten.hardtanh,
    _aten.hardtanh_backward,
    _aten.elu,
    _aten.elu_backward,
    _aten.leaky_relu,
    _aten.leaky_relu_backward,
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
    table[_aten.softshrink.default] = _softshrink
    table[_aten.index.Tensor] = _index
    table[_aten.index_put.default] = _index_put
    return table


def _softshrink(x: torch.Tensor, lambd: float = 0.5) -> torch.Tensor:
    """What is no number stays so, which torch's own turns into zero."""
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0.0))


def _copy(
    target: torch.Tensor,
    source: torch.Tensor,
    non_blocking: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    """All of the target is written: what it held does not matter, only its shape and type."""
    del non_blocking
    return source.to(target.dtype).expand(target.shape).clone()


def _index(source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """Of neighbouring dimensions that are not the first: as of the first ones, turned."""
    turned = _first_ones(source.dim(), indices)
    if turned is None:
        return NotImplemented
    order, given, back = turned
    return source.permute(order)[tuple(given)].permute(back)


def _index_put(
    under: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """As `_index`."""
    turned = _first_ones(under.dim(), indices)
    if turned is None:
        return NotImplemented
    order, given, back = turned
    laid = under.permute(order)
    shape = [*_made_by(given), *laid.shape[len(given) :]]
    values = values.expand([shape[dim] for dim in back]).permute(_inverse(back))
    placed = _aten.index_put(laid, given, values, accumulate)
    return placed.permute(_inverse(order))


def _made_by(indices: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The shape of the places that they name together."""
    shape: tuple[int, ...]
    shape = torch.broadcast_shapes(*(each.shape for each in indices))  # type: ignore[no-untyped-call]
    return shape


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _first_ones(
    dims: int, indices: Sequence[torch.Tensor | None]
) -> tuple[list[int], list[torch.Tensor], list[int]] | None:
    """The order of dimensions that puts the indexed ones first, their indices, and the order that
    puts what they make back; None where they are the first, not neighbours, or truth values."""
    places = [place for place, each in enumerate(indices) if each is not None]
    given = [each for each in indices if each is not None]
    first = places[0] if places else 0
    beside = places == list(range(first, first + len(places)))
    if not first or not beside or any(each.dtype == torch.bool for each in given):
        return None
    made = len(_made_by(given))
    order = [*places, *(dim for dim in range(dims) if dim not in places)]
    rest = dims - len(places)
    back = [*range(made, made + first), *range(made), *range(made + first, made + rest)]
    return order, given, back
