"""The decompositions of torch's operators that a trace applies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from backends.wgpu.graph import windows

_aten = torch.ops.aten

_FURTHER_OPERATORS = (
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


_WINDOWED = (
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.avg_pool2d.default,
    _aten.avg_pool2d_backward.default,
)


@cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return torch's core decompositions, with changes, by operator."""
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    table.update(get_decompositions(_FURTHER_OPERATORS))
    table[_aten.copy.default] = _copy
    for target in _WINDOWED:
        table[target] = getattr(windows, str(target).split(".")[1])
    table[_aten.max.dim] = partial(_extreme, _aten.amax, _aten.argmax)
    table[_aten.min.dim] = partial(_extreme, _aten.amin, _aten.argmin)
    table[_aten.softshrink.default] = _softshrink
    table[_aten.softshrink_backward.default] = _shrink_backward
    table[_aten.hardshrink_backward.default] = _shrink_backward
    table[_aten.native_group_norm.default] = _group_norm
    table[_aten.native_batch_norm.default] = _stateless_batch_norm
    table[_aten.index.Tensor] = _index
    table[_aten.index_put.default] = _index_put
    return table


def _extreme(
    reduce: Callable[..., torch.Tensor],
    find_index: Callable[..., torch.Tensor],
    x: torch.Tensor,
    dim: int,
    keepdim: bool = False,  # noqa: FBT001, FBT002
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the extreme along a dimension, and the index where it first occurs."""
    return reduce(x, [dim], keepdim), find_index(x, dim, keepdim)


def _softshrink(x: torch.Tensor, lambd: float = 0.5) -> torch.Tensor:
    """Compute softshrink with NaN, which torch's decomposition turns into zero."""
    return torch.where(x > lambd, x - lambd, torch.where(x < -lambd, x + lambd, x * 0.0))


def _shrink_backward(grad_output: torch.Tensor, x: torch.Tensor, lambd: float) -> torch.Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), 0.0, grad_output)


def _normalize(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalize over the last dimension; return also the mean and the reciprocal deviation."""
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    return (x - mean) * scale, mean, scale


def _scale_channels(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> Any:
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _group_norm(  # noqa: PLR0917
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: int,
    channels: int,
    spatial: int,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Compute torch's group norm without strided views."""
    grouped = x.reshape(count, groups, channels // groups * spatial)
    result, mean, scale = _normalize(grouped, eps)
    result = _scale_channels(result.reshape(x.shape), weight, bias)
    return result, mean.view(count, groups), scale.view(count, groups)


def _stateless_batch_norm(  # noqa: PLR0917
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_variance: torch.Tensor | None,
    training: bool,  # noqa: FBT001
    momentum: float,
    eps: float,
) -> Any:
    """Decompose batch norms without running statistics (instance norm) or in evaluation mode; leave
    others as they are."""
    del momentum
    if not training and running_mean is not None and running_variance is not None:
        shape = [1, -1] + [1] * (x.dim() - 2)
        scale = (running_variance + eps).rsqrt()
        result = (x - running_mean.view(shape)) * scale.view(shape)
        return _scale_channels(result, weight, bias), x.new_zeros(0), x.new_zeros(0)
    if running_mean is not None or not training:
        return NotImplemented
    channels_first = x.transpose(0, 1).flatten(1)
    result, mean, scale = _normalize(channels_first, eps)
    transposed_shape = x.transpose(0, 1).shape
    result = _scale_channels(result.reshape(transposed_shape).transpose(0, 1), weight, bias)
    return result, mean[:, 0], scale[:, 0]


def _copy(
    target: torch.Tensor,
    source: torch.Tensor,
    non_blocking: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    """Return the source with the target's shape and dtype: the whole target is overwritten."""
    del non_blocking
    return source.to(target.dtype).expand(target.shape).clone()


def _index(source: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """Move indexed dimensions to the front, index there, and move the result back."""
    reordered = _move_indexed_dims_first(source.dim(), indices)
    if reordered is None:
        return NotImplemented
    order, leading, back = reordered
    return source.permute(order)[tuple(leading)].permute(back)


def _index_put(
    target: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Move indexed dimensions to the front, put values there, and move the result back."""
    reordered = _move_indexed_dims_first(target.dim(), indices)
    if reordered is None:
        return NotImplemented
    order, leading, back = reordered
    permuted = target.permute(order)
    shape = [*_index_shape(leading), *permuted.shape[len(leading) :]]
    values = values.expand([shape[dim] for dim in back]).permute(_inverse(back))
    result = _aten.index_put(permuted, leading, values, accumulate)
    return result.permute(_inverse(order))


def _index_shape(indices: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the shape of index tensors that are broadcast against each other."""
    shape: tuple[int, ...]
    shape = torch.broadcast_shapes(*(index.shape for index in indices))  # type: ignore[no-untyped-call]
    return shape


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _move_indexed_dims_first(
    dims: int, indices: Sequence[torch.Tensor | None]
) -> tuple[list[int], list[torch.Tensor], list[int]] | None:
    """Return the permutation that moves indexed dimensions to the front, the indices, and the
    permutation that moves the result back.

    None if the indexed dimensions come first or are not adjacent, or an index is boolean.
    """
    indexed_dims = [number for number, index in enumerate(indices) if index is not None]
    present = [index for index in indices if index is not None]
    first_dim = indexed_dims[0] if indexed_dims else 0
    is_adjacent = indexed_dims == list(range(first_dim, first_dim + len(indexed_dims)))
    if not first_dim or not is_adjacent or any(index.dtype == torch.bool for index in present):
        return None
    index_dims = len(_index_shape(present))
    order = [*indexed_dims, *(dim for dim in range(dims) if dim not in indexed_dims)]
    other_dims = dims - len(indexed_dims)
    back = [
        *range(index_dims, index_dims + first_dim),
        *range(index_dims),
        *range(index_dims + first_dim, index_dims + other_dims),
    ]
    return order, present, back
