"""Which of torch's operators a trace splits into smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from backends.wgpu.graph import windows

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
    _aten.hardshrink,
    _aten.index_select,
    _aten.linalg_vector_norm,
    _aten.repeat,
    _aten.gelu_backward,
    _aten.native_layer_norm,
    _aten.native_layer_norm_backward,
    _aten.nll_loss_backward,
    _aten.nll_loss_forward,
    _aten.silu,
    _aten.silu_backward,
    _aten.t,
)


_OF_WINDOWS = (
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.avg_pool2d.default,
    _aten.avg_pool2d_backward.default,
)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """By operator: torch's own, to the core operators."""
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    table.update(get_decompositions(_ALSO))
    table[_aten.copy.default] = _copy
    for target in _OF_WINDOWS:
        table[target] = getattr(windows, str(target).split(".")[1])
    table[_aten.max.dim] = partial(_extreme, _aten.amax, _aten.argmax)
    table[_aten.min.dim] = partial(_extreme, _aten.amin, _aten.argmin)
    table[_aten.softshrink.default] = _softshrink
    table[_aten.softshrink_backward.default] = _shrink_backward
    table[_aten.hardshrink_backward.default] = _shrink_backward
    table[_aten.native_group_norm.default] = _group_norm
    table[_aten.native_batch_norm.default] = _norm_of_inputs
    table[_aten.index.Tensor] = _index
    table[_aten.index_put.default] = _index_put
    return table


def _extreme(
    fold: Callable[..., torch.Tensor],
    place: Callable[..., torch.Tensor],
    x: torch.Tensor,
    dim: int,
    keepdim: bool = False,  # noqa: FBT001, FBT002
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest or least along a dimension, and the first place of it."""
    return fold(x, [dim], keepdim), place(x, dim, keepdim)


def _softshrink(x: torch.Tensor, lambd: float = 0.5) -> torch.Tensor:
    """What is no number stays so, which torch's own turns into zero."""
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0.0))


def _shrink_backward(tangent: torch.Tensor, x: torch.Tensor, lambd: float) -> torch.Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, tangent)


def _normed(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over the last dimension, and the mean and the reciprocal of the deviation."""
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    return (x - mean) * scale, mean, scale


def _by_channel(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _group_norm(  # noqa: PLR0917
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    channels: int,
    places: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """As torch's, without strided views."""
    given = x.reshape(count, groups, channels // groups * places)
    result, mean, scale = _normed(given, eps)
    result = _by_channel(result.reshape(x.shape), weight, bias)
    return result, mean.view(count, groups), scale.view(count, groups)


def _norm_of_inputs(  # noqa: PLR0917
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    training: bool,  # noqa: FBT001
    momentum: float,
    eps: float,
) -> Any:
    """One that keeps nothing, as an instance norm, or in evaluation mode; others have no rule."""
    del momentum
    if not training and running_mean is not None and running_variance is not None:
        places = [1, -1] + [1] * (x.dim() - 2)
        scale = (running_variance + eps).rsqrt()
        result = (x - running_mean.view(places)) * scale.view(places)
        return _by_channel(result, weight, bias), x.new_zeros(0), x.new_zeros(0)
    if running_mean is not None or not training:
        return NotImplemented
    by_channel = x.transpose(0, 1).flatten(1)
    result, mean, scale = _normed(by_channel, eps)
    turned = x.transpose(0, 1).shape
    result = _by_channel(result.reshape(turned).transpose(0, 1), weight, bias)
    return result, mean[:, 0], scale[:, 0]


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
