"""Convolutions and pooling as gathers of windows and matrix products.

Letters: N batch, C channels, P positions of the input (all spatial dimensions flattened), K
positions of a window, L positions of the output, G groups, O channels of the output. Positions of a
window outside the input have index P, a single element of padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def _window_indices(
    input_sizes: Sequence[int], output_sizes: Sequence[int], window: Sequence[int], geometry: Any
) -> torch.Tensor:
    """Return (K, L): the input positions that each output's window reads."""
    stride, padding, dilation = geometry
    indices: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    dims = len(input_sizes)
    for d in range(dims):
        taps = torch.arange(window[d]) * dilation[d] - padding[d]
        shape = [1] * (2 * dims)
        shape[d], shape[dims + d] = window[d], output_sizes[d]
        positions = (taps[:, None] + torch.arange(output_sizes[d]) * stride[d]).view(shape)
        in_range = (positions >= 0) & (positions < input_sizes[d])
        indices = positions if indices is None else indices * input_sizes[d] + positions
        valid = in_range if valid is None else valid & in_range
    assert indices is not None
    assert valid is not None
    indices_or_padding = torch.where(valid, indices, math.prod(input_sizes))
    return indices_or_padding.reshape(math.prod(window), math.prod(output_sizes))


def _reader_indices(
    input_sizes: Sequence[int], output_sizes: Sequence[int], window: Sequence[int], geometry: Any
) -> torch.Tensor:
    """Return (K, P): for each position in a window and each input position, the output that
    reads the input there, or L if none does."""
    stride, padding, dilation = geometry
    indices: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    dims = len(input_sizes)
    for d in range(dims):
        taps = padding[d] - torch.arange(window[d]) * dilation[d]
        shape = [1] * (2 * dims)
        shape[d], shape[dims + d] = window[d], input_sizes[d]
        offsets = (taps[:, None] + torch.arange(input_sizes[d])).view(shape)
        outputs = offsets // stride[d]
        in_range = (offsets >= 0) & (offsets % stride[d] == 0) & (outputs < output_sizes[d])
        indices = outputs if indices is None else indices * output_sizes[d] + outputs
        valid = in_range if valid is None else valid & in_range
    assert indices is not None
    assert valid is not None
    indices_or_padding = torch.where(valid, indices, math.prod(output_sizes))
    return indices_or_padding.reshape(math.prod(window), math.prod(input_sizes))


def _gather(x: torch.Tensor, indices: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """Gather (N, C, ...) at (K, L) into (N, C, K, L)."""
    flat = _aten.constant_pad_nd(x.flatten(2), [0, 1], value)
    windows: torch.Tensor = flat[:, :, indices]
    return windows


def _products(weight: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """Multiply (G, M, R) with (N, G, R, L) into (N, G * M, L)."""
    batch, groups, _, positions = windows.shape
    channels = weight.shape[1]
    product = weight.expand(batch, *weight.shape) @ windows
    return product.reshape(batch, groups * channels, positions)


def _transposed_convolution(
    x: torch.Tensor, weight: torch.Tensor, shape: Sequence[int], geometry: Any, groups: int
) -> torch.Tensor:
    """Apply the transpose of a convolution with (O, C / G, K...) to (N, O, L...)."""
    input_sizes, output_sizes, window = shape[2:], x.shape[2:], weight.shape[2:]
    windows = _gather(
        x, _reader_indices(input_sizes, output_sizes, window, geometry)
    )  # (N, O, K, P)
    batch, channels, taps, positions = windows.shape
    transposed_weight = weight.reshape(groups, channels // groups, -1, taps).transpose(
        1, 2
    )  # (G, C/G, O/G, K)
    transposed_weight = transposed_weight.reshape(groups, -1, channels // groups * taps)
    product = _products(
        transposed_weight, windows.reshape(batch, groups, channels // groups * taps, positions)
    )
    return product.reshape(shape)


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, output_sizes: Sequence[int], geometry: Any, groups: int
) -> torch.Tensor:
    """Convolve (N, C, P...) with (O, C / G, K...)."""
    window = weight.shape[2:]
    windows = _gather(
        x, _window_indices(x.shape[2:], output_sizes, window, geometry)
    )  # (N, C, K, L)
    batch, channels, taps, positions = windows.shape
    windows = windows.reshape(batch, groups, channels // groups * taps, positions)
    product = _products(weight.reshape(groups, weight.shape[0] // groups, -1), windows)
    return product.reshape(batch, weight.shape[0], *output_sizes)


def _weight_gradient(
    x: torch.Tensor, grad_output: torch.Tensor, weight: torch.Tensor, geometry: Any, groups: int
) -> torch.Tensor:
    """Return the weight gradient (O, C / G, K...) of a convolution from (N, C, P...) to (N, O,
    L...)."""
    indices = _window_indices(x.shape[2:], grad_output.shape[2:], weight.shape[2:], geometry)
    windows = _gather(x, indices)
    batch, channels, taps, _ = windows.shape
    windows = windows.reshape(batch, groups, channels // groups * taps, -1)
    grad_outputs = grad_output.reshape(batch, groups, grad_output.shape[1] // groups, -1)
    left = grad_outputs.permute(1, 2, 0, 3).reshape(groups, grad_outputs.shape[2], -1)
    right = windows.permute(1, 0, 3, 2).reshape(groups, left.shape[2], -1)
    return (left @ right).reshape(weight.shape)


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
    """Decompose `aten.convolution`."""
    geometry = stride, padding, dilation
    input_sizes, window = x.shape[2:], weight.shape[2:]
    span = [dilation[d] * (window[d] - 1) + 1 for d in range(len(window))]
    if transposed:
        sizes = [
            (input_sizes[d] - 1) * stride[d] - 2 * padding[d] + span[d] + output_padding[d]
            for d in range(len(window))
        ]
        shape = [x.shape[0], weight.shape[1] * groups, *sizes]
        result = _transposed_convolution(x, weight, shape, geometry, groups)
    else:
        sizes = [
            (input_sizes[d] + 2 * padding[d] - span[d]) // stride[d] + 1 for d in range(len(window))
        ]
        result = _convolution(x, weight, sizes, geometry, groups)
    return result if bias is None else result + bias.view(-1, *(1 for _ in window))


def convolution_backward(  # noqa: PLR0917
    grad_output: torch.Tensor,
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
    """Decompose `aten.convolution_backward`."""
    del bias_sizes, output_padding
    geometry = stride, padding, dilation
    grad_x = grad_weight = grad_bias = None
    if output_mask[0] and transposed:
        grad_x = _convolution(grad_output, weight, x.shape[2:], geometry, groups)
    elif output_mask[0]:
        grad_x = _transposed_convolution(grad_output, weight, x.shape, geometry, groups)
    if output_mask[1]:
        pair = (grad_output, x) if transposed else (x, grad_output)
        grad_weight = _weight_gradient(*pair, weight, geometry, groups)
    if output_mask[2]:
        grad_bias = grad_output.sum([0, *range(2, grad_output.dim())])
    return grad_x, grad_weight, grad_bias


def _geometry(window: Sequence[int], stride: Sequence[int], padding: Any, dilation: Any) -> Any:
    return [
        [*setting] * 2 if len(setting) == 1 else [*setting]
        for setting in (stride or window, padding or [0], dilation or [1])
    ]


def max_pool2d_with_indices(  # noqa: PLR0917
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Decompose max pooling.

    As in torch, ties go to the first maximum, and NaN counts as larger than any number.
    """
    if x.dim() != 4:
        return NotImplemented
    window = [*kernel_size] * (2 if len(kernel_size) == 1 else 1)
    geometry = _geometry(window, stride, padding, dilation)
    output_sizes = _pooled_sizes(x.shape[2:], window, geometry, ceil=ceil_mode)
    indices = _window_indices(x.shape[2:], output_sizes, window, geometry)
    windows = _gather(x, indices, -math.inf)  # (N, C, K, L)
    argmax = windows.argmax(2)
    shape = [*x.shape[:2], *output_sizes]
    max_positions = indices.expand(*x.shape[:2], *indices.shape).gather(2, argmax[:, :, None])
    return windows.amax(2).reshape(shape), max_positions.reshape(shape)


def _pooled_sizes(
    input_sizes: Sequence[int], window: Sequence[int], geometry: Any, *, ceil: bool
) -> list[int]:
    stride, padding, dilation = geometry
    sizes = []
    for d in range(2):
        span = input_sizes[d] + 2 * padding[d] - dilation[d] * (window[d] - 1) - 1
        count = (span + (stride[d] - 1 if ceil else 0)) // stride[d] + 1
        if ceil and (count - 1) * stride[d] >= input_sizes[d] + padding[d]:
            count -= 1  # a window that starts in the padding
        sizes.append(count)
    return sizes


def max_pool2d_with_indices_backward(  # noqa: PLR0917
    grad_output: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,  # noqa: FBT001
    indices: torch.Tensor,
) -> Any:
    """Sum for each input position the gradients of the outputs whose maximum is there."""
    del ceil_mode
    if x.dim() != 4:
        return NotImplemented
    window = [*kernel_size] * (2 if len(kernel_size) == 1 else 1)
    geometry = _geometry(window, stride, padding, dilation)
    output_indices = _reader_indices(x.shape[2:], grad_output.shape[2:], window, geometry)  # (K, P)
    grad_outputs, max_positions = (
        _gather(grad_output, output_indices),
        _gather(indices, output_indices, -1),
    )
    is_max = max_positions == torch.arange(output_indices.shape[1])
    return torch.where(is_max, grad_outputs, 0.0).sum(2).reshape(x.shape)


def avg_pool2d(  # noqa: PLR0917
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,  # noqa: FBT001, FBT002
    count_include_pad: bool = True,  # noqa: FBT001, FBT002
    divisor_override: int | None = None,
) -> Any:
    """Decompose average pooling, without `ceil_mode`."""
    if x.dim() != 4 or ceil_mode:
        return NotImplemented
    window = [*kernel_size] * (2 if len(kernel_size) == 1 else 1)
    geometry = _geometry(window, stride, padding, (1,))
    output_sizes = _pooled_sizes(x.shape[2:], window, geometry, ceil=False)
    indices = _window_indices(x.shape[2:], output_sizes, window, geometry)
    term_weights = _term_weights(x, indices, count_include_pad, divisor_override)
    return (_gather(x, indices).sum(2) * term_weights).reshape(*x.shape[:2], *output_sizes)


def avg_pool2d_backward(  # noqa: PLR0917
    grad_output: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,  # noqa: FBT001
    count_include_pad: bool,  # noqa: FBT001
    divisor_override: int | None,
) -> Any:
    """Sum for each input position the weighted gradients of the outputs that read it."""
    if x.dim() != 4 or ceil_mode:
        return NotImplemented
    window = [*kernel_size] * (2 if len(kernel_size) == 1 else 1)
    geometry = _geometry(window, stride, padding, (1,))
    indices = _window_indices(x.shape[2:], grad_output.shape[2:], window, geometry)
    term_weights = _term_weights(x, indices, count_include_pad, divisor_override)
    output_indices = _reader_indices(x.shape[2:], grad_output.shape[2:], window, geometry)
    return _gather(grad_output.flatten(2) * term_weights, output_indices).sum(2).reshape(x.shape)


def _term_weights(
    x: torch.Tensor,
    indices: torch.Tensor,
    counts_padding: bool,  # noqa: FBT001
    divisor: int | None,
) -> torch.Tensor:
    """Return (L,): the weight of each term in an output."""
    if divisor is not None or counts_padding:
        return torch.full((indices.shape[1],), 1.0 / (divisor or indices.shape[0]))
    return 1.0 / (indices < math.prod(x.shape[2:])).sum(0).float()
