"""Convolutions and pooling as gathers of windows and matrix products.

Letters: N batch, C channels, P places of the input (all its spatial dimensions as one), K places of
a window, L places of the output, G groups, O channels of the output. A window's place outside of
the input is place P, of which there is one: what pads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def _places(
    inside: Sequence[int], outside: Sequence[int], window: Sequence[int], geometry: Any
) -> torch.Tensor:
    """(K, L): where in the input each output's window reads."""
    stride, padding, dilation = geometry
    found: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    dims = len(inside)
    for d in range(dims):
        taps = torch.arange(window[d]) * dilation[d] - padding[d]
        shape = [1] * (2 * dims)
        shape[d], shape[dims + d] = window[d], outside[d]
        at = (taps[:, None] + torch.arange(outside[d]) * stride[d]).view(shape)
        there = (at >= 0) & (at < inside[d])
        found = at if found is None else found * inside[d] + at
        valid = there if valid is None else valid & there
    assert found is not None
    assert valid is not None
    placed = torch.where(valid, found, math.prod(inside))
    return placed.reshape(math.prod(window), math.prod(outside))


def _readers(
    inside: Sequence[int], outside: Sequence[int], window: Sequence[int], geometry: Any
) -> torch.Tensor:
    """(K, P): the output that reads each place of the input by each place of its window, or L."""
    stride, padding, dilation = geometry
    found: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    dims = len(inside)
    for d in range(dims):
        taps = padding[d] - torch.arange(window[d]) * dilation[d]
        shape = [1] * (2 * dims)
        shape[d], shape[dims + d] = window[d], inside[d]
        first = (taps[:, None] + torch.arange(inside[d])).view(shape)
        at = first // stride[d]
        there = (first >= 0) & (first % stride[d] == 0) & (at < outside[d])
        found = at if found is None else found * outside[d] + at
        valid = there if valid is None else valid & there
    assert found is not None
    assert valid is not None
    placed = torch.where(valid, found, math.prod(outside))
    return placed.reshape(math.prod(window), math.prod(inside))


def _gathered(x: torch.Tensor, places: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """(N, C, ...) at (K, L), as (N, C, K, L)."""
    flat = _aten.constant_pad_nd(x.flatten(2), [0, 1], value)
    picked: torch.Tensor = flat[:, :, places]
    return picked


def _products(weight: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """(G, M, R) with (N, G, R, L): (N, G * M, L)."""
    count, groups, _, places = windows.shape
    rows = weight.shape[1]
    both = weight.expand(count, *weight.shape) @ windows
    return both.reshape(count, groups * rows, places)


def _spread(
    x: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], geometry: Any, groups: int
) -> torch.Tensor:
    """Of (N, O, L...) by (O, C / G, K...): what a convolution of these gives its input."""
    inside, outside, window = shape[2:], x.shape[2:], weight.shape[2:]
    windows = _gathered(x, _readers(inside, outside, window, geometry))  # (N, O, K, P)
    count, rows, taps, places = windows.shape
    turned = weight.reshape(groups, rows // groups, -1, taps).transpose(1, 2)  # (G, C/G, O/G, K)
    turned = turned.reshape(groups, -1, rows // groups * taps)
    found = _products(turned, windows.reshape(count, groups, rows // groups * taps, places))
    return found.reshape(shape)


def _read(
    x: torch.Tensor, weight: torch.Tensor, outside: Sequence[int], geometry: Any, groups: int
) -> torch.Tensor:
    """Of (N, C, P...) by (O, C / G, K...): a convolution."""
    window = weight.shape[2:]
    windows = _gathered(x, _places(x.shape[2:], outside, window, geometry))  # (N, C, K, L)
    count, rows, taps, places = windows.shape
    windows = windows.reshape(count, groups, rows // groups * taps, places)
    found = _products(weight.reshape(groups, weight.shape[0] // groups, -1), windows)
    return found.reshape(count, weight.shape[0], *outside)


def _weight_gradient(
    x: torch.Tensor, tangent: torch.Tensor, like: torch.Tensor, geometry: Any, groups: int
) -> torch.Tensor:
    """Of a convolution of (N, C, P...) that gives (N, O, L...): (O, C / G, K...)."""
    places = _places(x.shape[2:], tangent.shape[2:], like.shape[2:], geometry)
    windows = _gathered(x, places)
    count, rows, taps, _ = windows.shape
    windows = windows.reshape(count, groups, rows // groups * taps, -1)
    given = tangent.reshape(count, groups, tangent.shape[1] // groups, -1)
    left = given.permute(1, 2, 0, 3).reshape(groups, given.shape[2], -1)
    right = windows.permute(1, 0, 3, 2).reshape(groups, left.shape[2], -1)
    return (left @ right).reshape(like.shape)


def convolution(  # noqa: PLR0917
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,  # noqa: FBT001
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """As `aten.convolution`."""
    geometry = stride, padding, dilation
    inside, window = x.shape[2:], weight.shape[2:]
    span = [dilation[d] * (window[d] - 1) + 1 for d in range(len(window))]
    if transposed:
        sizes = [
            (inside[d] - 1) * stride[d] - 2 * padding[d] + span[d] + output_padding[d]
            for d in range(len(window))
        ]
        shape = [x.shape[0], weight.shape[1] * groups, *sizes]
        result = _spread(x, weight, shape, geometry, groups)
    else:
        sizes = [
            (inside[d] + 2 * padding[d] - span[d]) // stride[d] + 1 for d in range(len(window))
        ]
        result = _read(x, weight, sizes, geometry, groups)
    return result if bias is None else result + bias.view(-1, *(1 for _ in window))


def convolution_backward(  # noqa: PLR0917
    tangent: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,  # noqa: FBT001
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """As `aten.convolution_backward`."""
    del bias_sizes, output_padding
    geometry = stride, padding, dilation
    by_x = by_weight = by_bias = None
    if output_mask[0] and transposed:
        by_x = _read(tangent, weight, x.shape[2:], geometry, groups)
    elif output_mask[0]:
        by_x = _spread(tangent, weight, x.shape, geometry, groups)
    if output_mask[1]:
        pair = (tangent, x) if transposed else (x, tangent)
        by_weight = _weight_gradient(*pair, weight, geometry, groups)
    if output_mask[2]:
        by_bias = tangent.sum([0, *range(2, tangent.dim())])
    return by_x, by_weight, by_bias


def _geometry(window: Sequence[int], stride: Sequence[int], padding: Any, dilation: Any) -> Any:
    return [
        [*each] * 2 if len(each) == 1 else [*each]
        for each in (stride or window, padding or [0], dilation or [1])
    ]


def max_pool2d_with_indices(  # noqa: PLR0917
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """As torch's; the first of equal ones, and what is no number before all."""
    if x.dim() != 4:
        return NotImplemented
    window = [*kernel_size] * (2 if len(kernel_size) == 1 else 1)
    geometry = _geometry(window, stride, padding, dilation)
    outside = _pooled_sizes(x.shape[2:], window, geometry, ceil=ceil_mode)
    places = _places(x.shape[2:], outside, window, geometry)
    windows = _gathered(x, places, -math.inf)  # (N, C, K, L)
    chosen = windows.argmax(2)
    shape = [*x.shape[:2], *outside]
    numbers = places.expand(*x.shape[:2], *places.shape).gather(2, chosen[:, :, None])
    return windows.amax(2).reshape(shape), numbers.reshape(shape)


def _pooled_sizes(
    inside: Sequence[int], window: Sequence[int], geometry: Any, *, ceil: bool
) -> list[int]:
    stride, padding, dilation = geometry
    found = []
    for d in range(2):
        room = inside[d] + 2 * padding[d] - dilation[d] * (window[d] - 1) - 1
        count = (room + (stride[d] - 1 if ceil else 0)) // stride[d] + 1
        if ceil and (count - 1) * stride[d] >= inside[d] + padding[d]:
            count -= 1  # a window that begins in what pads
        found.append(count)
    return found


def max_pool2d_with_indices_backward(  # noqa: PLR0917
    tangent: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,  # noqa: FBT001
    indices: torch.Tensor,
) -> Any:
    """Each place gets what was chosen from it."""
    del ceil_mode
    if x.dim() != 4:
        return NotImplemented
    window = [*kernel_size] * (2 if len(kernel_size) == 1 else 1)
    geometry = _geometry(window, stride, padding, dilation)
    readers = _readers(x.shape[2:], tangent.shape[2:], window, geometry)  # (K, P)
    given, chosen = _gathered(tangent, readers), _gathered(indices, readers, -1)
    mine = chosen == torch.arange(readers.shape[1])
    return torch.where(mine, given, 0.0).sum(2).reshape(x.shape)


def avg_pool2d(  # noqa: PLR0917
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,  # noqa: FBT001, FBT002
    count_include_pad: bool = True,  # noqa: FBT001, FBT002
    divisor_override: int | None = None,
) -> Any:
    """As torch's, but with windows that hang over the end."""
    if x.dim() != 4 or ceil_mode:
        return NotImplemented
    window = [*kernel_size] * (2 if len(kernel_size) == 1 else 1)
    geometry = _geometry(window, stride, padding, (1,))
    outside = _pooled_sizes(x.shape[2:], window, geometry, ceil=False)
    places = _places(x.shape[2:], outside, window, geometry)
    share = _share(x, places, count_include_pad, divisor_override)
    return (_gathered(x, places).sum(2) * share).reshape(*x.shape[:2], *outside)


def avg_pool2d_backward(  # noqa: PLR0917
    tangent: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,  # noqa: FBT001
    count_include_pad: bool,  # noqa: FBT001
    divisor_override: int | None,
) -> Any:
    """Each place gets its shares."""
    if x.dim() != 4 or ceil_mode:
        return NotImplemented
    window = [*kernel_size] * (2 if len(kernel_size) == 1 else 1)
    geometry = _geometry(window, stride, padding, (1,))
    places = _places(x.shape[2:], tangent.shape[2:], window, geometry)
    share = _share(x, places, count_include_pad, divisor_override)
    readers = _readers(x.shape[2:], tangent.shape[2:], window, geometry)
    return _gathered(tangent.flatten(2) * share, readers).sum(2).reshape(x.shape)


def _share(
    x: torch.Tensor,
    places: torch.Tensor,
    all_count: bool,  # noqa: FBT001
    divisor: int | None,
) -> torch.Tensor:
    """(L,): of each term in an output."""
    if divisor is not None or all_count:
        return torch.full((places.shape[1],), 1.0 / (divisor or places.shape[0]))
    return 1.0 / (places < math.prod(x.shape[2:])).sum(0).float()
