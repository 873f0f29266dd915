"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): a rule that reads each tensor as a whole.

The second moment is a mean for each row and one for each column; the update sums over whole
tensors. Every machine applies the update to its whole replica, however gradients were averaged, so
every machine has whole tensors. The order of every sum is defined below, and all sums are in
float64.

    g = clipped gradient, n = row and column means of g^2 + eps, b = t^beta2_decay
    r += b (n_rows - r);  c += b (n_columns - c)           vectors: v += b (g^2 + eps - v)
    u = g / sqrt(r / mean(r)) / sqrt(c)                    vectors: u = g / sqrt(v)
    u /= max(1, rms(u) / clip_threshold)
    p *= 1 - lr d;  p -= lr max(min_parameter_rms, rms(p)) u

A tensor of more than two dimensions is a stack of matrices of its last two. With `relative_step`,
lr is at most 1 / sqrt(t); without `scale_parameter` it is not multiplied by max(min_parameter_rms,
rms(p)). t counts the updates of the run, even for a tensor that has missed some.

A column is summed from the first row to the last. A row is cut into pieces of `PIECE_COLUMNS`
columns. In a piece, column j belongs to lane j % `LANES`, and a lane is summed from first to last.
Then the lanes are halved until one is left: lane i + half is added to lane i. Pieces are added from
first to last. The mean of r is halved in the same way.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.exact.kernels.library import library_for
from protocol.exact.reduction.average import Array, is_finite, nearest_float32, square_sum
from protocol.exact.update import StepScalars, apply_update
from protocol.spec.sections.optimizer import OptimizerSpec

PIECE_COLUMNS: Final = 1024
LANES: Final = 16
"""Both are part of the definition of a row's sum; kernels/adafactor.c repeats them."""
_STRIP_ELEMENTS: Final = 65_536
"""Elements that numpy computes at a time; no bit depends on it."""
Float64Array = NDArray[np.float64]


def factor_elements(shape: tuple[int, ...]) -> int:
    """Return the number of values that represent a tensor's second moment: rows, then columns."""
    if len(shape) < 2:
        return math.prod(shape)
    *stack, rows, columns = shape
    return math.prod(stack) * (rows + columns)


def apply_adafactor(
    spec: OptimizerSpec,
    scalars: StepScalars,
    parameters: Array,
    gradient: Array,
    factors: Array,
    *,
    decay: bool,
    average: Array | None = None,
) -> bool:
    """Apply one step in place to a tensor.

    Args:
        spec: The optimizer, adafactor.
        scalars: The step's scalars, from `step_scalars`.
        parameters: A contiguous view, in the tensor's shape; changed.
        gradient: Averaged gradient in the same shape; not changed.
        factors: Flat, of `factor_elements`; changed.
        decay: Whether weight decay applies to this tensor.
        average: Flat, if `spec.average` is set; changed.

    Returns:
        Whether all new values are finite.
    """
    if not parameters.size:
        return True
    with np.errstate(all="ignore"):
        update = _normalize(scalars, _clip_gradient(scalars, gradient), factors)
        rate = scalars.learning_rate / max(1.0, _rms(update) / spec.clip_threshold)
        if spec.scale_parameter:
            rate *= max(spec.min_parameter_rms, _rms(parameters))
        direction = scalars.model_copy(
            update={"learning_rate": nearest_float32(rate), "clip": 1.0, "clip_value": None}
        )
    finite = is_finite(factors)
    flat = parameters.reshape(-1), update.reshape(-1)
    return apply_update(spec, direction, *flat, (), decay=decay, average=average) and finite


def _rms(values: Array) -> float:
    return math.sqrt(square_sum(values) / values.size)


def _clip_gradient(scalars: StepScalars, gradient: Array) -> Array:
    if scalars.clip != 1.0:
        gradient = gradient * np.float32(scalars.clip)
    if scalars.clip_value is not None:
        clip_value = np.float32(scalars.clip_value)
        gradient = np.clip(gradient, -clip_value, clip_value)
    return gradient


def _normalize(scalars: StepScalars, gradient: Array, factors: Array) -> Array:
    """Update the means, and return g divided by the root of the second moment."""
    update, shape = np.empty_like(gradient), gradient.shape
    if len(shape) < 2:
        flat, out = gradient.reshape(-1), update.reshape(-1)
        for lo in range(0, flat.size, _STRIP_ELEMENTS):
            part = slice(lo, lo + _STRIP_ELEMENTS)
            _update_means(scalars, factors[part], _squares(scalars, flat[part]))
            np.divide(flat[part], np.sqrt(factors[part]), out=out[part])
        return update
    *_, rows, columns = shape
    stack = gradient.reshape(-1, rows, columns)
    count = len(stack)
    row_means = factors[: count * rows].reshape(count, rows)
    column_means = factors[count * rows :].reshape(count, columns)
    matrices = max(1, _STRIP_ELEMENTS // (rows * columns))
    for lo in range(0, count, matrices):
        part = slice(lo, lo + matrices)
        row_sums, column_sums = _square_sums(scalars, stack[part])
        _update_means(scalars, row_means[part], row_sums / columns)
        _update_means(scalars, column_means[part], column_sums / rows)
    out = update.reshape(stack.shape)
    float64_means = row_means.astype(np.float64)
    mean = _sum_in_halves(float64_means.copy())[:, None] / rows
    row_factors = (1.0 / np.sqrt(float64_means / mean)).astype(np.float32)
    column_factors = (1.0 / np.sqrt(column_means.astype(np.float64))).astype(np.float32)
    np.multiply(stack, row_factors[:, :, None], out=out)
    np.multiply(out, column_factors[:, None, :], out=out)
    return update


def _squares(scalars: StepScalars, gradient: Array) -> Float64Array:
    squares = gradient.astype(np.float64)
    np.multiply(squares, squares, out=squares)
    return np.add(squares, scalars.epsilon, out=squares)


def _update_means(scalars: StepScalars, means: Array, new: Float64Array) -> None:
    """Move means toward the new means, in float64, and round once."""
    float64_means = means.astype(np.float64)
    np.subtract(new, float64_means, out=new)
    np.multiply(new, scalars.one_minus_beta2, out=new)
    np.copyto(means, np.add(float64_means, new, out=float64_means), casting="same_kind")


def _square_sums(scalars: StepScalars, matrices: Array) -> tuple[Float64Array, Float64Array]:
    """Return the sums of squares by row and by column, shapes (n, rows) and (n, columns)."""
    count, rows, columns = matrices.shape
    pieces = np.empty((count, -(-columns // PIECE_COLUMNS), rows))
    if (library := library_for(matrices)) is not None:
        column_sums = library.factor_sums(matrices, scalars.epsilon, pieces)
    else:
        column_sums = _square_sums_by_numpy(scalars, matrices, pieces)
    row_sums = pieces[:, 0].copy()
    for number in range(1, pieces.shape[1]):
        row_sums += pieces[:, number]
    return row_sums, column_sums


def _square_sums_by_numpy(
    scalars: StepScalars, matrices: Array, pieces: Float64Array
) -> Float64Array:
    """Write the row sums of each piece to `pieces`, and return the sums by column."""
    count, rows, columns = matrices.shape
    column_sums = np.zeros((count, columns))
    for number, lo in enumerate(range(0, columns, PIECE_COLUMNS)):
        part = slice(lo, lo + PIECE_COLUMNS)
        width = min(PIECE_COLUMNS, columns - lo)
        strip = max(1, _STRIP_ELEMENTS // width)
        for row in range(0, rows, strip):
            squares = _squares(scalars, matrices[:, row : row + strip, part])
            pieces[:, number, row : row + strip] = _row_sums(squares)
            terms = np.concatenate((column_sums[:, None, part], squares), axis=1)
            column_sums[:, part] = np.add.accumulate(terms, axis=1)[:, -1]
    return column_sums


def _row_sums(squares: Float64Array) -> Float64Array:
    """Return the sum of each row of a piece."""
    count, rows, width = squares.shape
    steps = -(-width // LANES)
    padded = np.zeros((count, rows, steps * LANES))
    padded[:, :, :width] = squares
    lanes = np.add.accumulate(padded.reshape(count, rows, steps, LANES), axis=2)[:, :, -1]
    half = LANES // 2
    while half:
        lanes[..., :half] += lanes[..., half : 2 * half]
        half //= 2
    first_lane: Float64Array = lanes[..., 0]
    return first_lane


def _sum_in_halves(values: Float64Array) -> Float64Array:
    """Return the sum of each row: value i + half is added to value i until one is left."""
    n = values.shape[1]
    while n > 1:
        half = -(-n // 2)
        values[:, : n - half] += values[:, half:n]
        n = half
    first: Float64Array = values[:, 0]
    return first
