"""The exact update: from averaged gradients to new parameters, the same bits on every machine.

It uses only elementwise float32 `+ - * / sqrt`, one operation at a time, which IEEE 754 defines to
the last bit. It never divides by a scalar: the coordinator computes reciprocals once, in float64,
rounds them to float32 and sends them as `StepScalars`. torch's optimizers are not used: their bits
depend on the instruction set, and their CPU square root is not correctly rounded.

The coordinator also computes the reductions that scale the update (`square_sum`) once, in float64;
each documents its order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from protocol.exact.absent import keep_absent
from protocol.exact.digest import write_piece_hashes
from protocol.exact.kernels.library import library_for
from protocol.exact.schedule import learning_rate
from protocol.spec.sections.optimizer import OptimizerSpec

Array = NDArray[np.float32]
Moments = tuple[Array, ...]

UPDATE_CHUNK_ELEMENTS: Final = 32_768
"""A chunk's arrays (six of 128 KiB for adamw) fit a level-2 cache. No bit depends on the size."""
SQUARE_SUM_CHUNK_ELEMENTS: Final = 65_536
"""Part of the definition of `square_sum`: another value may give other bits."""

_FLOAT32: Final = struct.Struct("<f")
_MOMENTS: Final = {
    "sgd": 0, "momentum": 1, "nesterov": 1, "adamw": 2, "lion": 1, "schedule-free": 2,
    "adam": 2, "rmsprop": 1, "adagrad": 1,
}  # fmt: skip
_SCHEDULE_FREE: Final = ("averaging", "one_minus_averaging", "drift")


def _float32_value(value: float) -> float:
    if nearest_float32(value) != value:
        raise ValueError("expected a value that float32 represents exactly")
    return value


_Float32 = Annotated[float, AfterValidator(_float32_value)]


class StepScalars(BaseModel):
    """The scalars of one step's update; each is finite and exactly a float32."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    learning_rate: _Float32
    clip: _Float32
    """Factor that gradients are multiplied by first; 1 for none."""
    weight_decay: _Float32
    decay_factor: _Float32
    """adamw: 1 - learning rate * weight decay."""
    momentum: _Float32
    beta1: _Float32
    one_minus_beta1: _Float32
    beta2: _Float32
    one_minus_beta2: _Float32
    step_size: _Float32
    """adamw: learning rate / (1 - beta1^t), t being the optimizer step."""
    root_correction: _Float32
    """adamw: 1 / sqrt(1 - beta2^t)."""
    epsilon: Annotated[_Float32, Field(gt=0)]
    averaging: _Float32 = 0.0
    """schedule-free: c, the newest step's share of the average; 0 for other optimizers."""
    one_minus_averaging: _Float32 = 1.0
    drift: _Float32 = 0.0
    """schedule-free: learning rate * beta1, by which the step moves z relative to y."""
    loss_scale: _Float32 = 0.0
    """float16: the loss scale of this step; gradients are already divided by it."""

    @model_serializer(mode="wrap")
    def _without_unused(self, inner: SerializerFunctionWrapHandler) -> dict[str, float]:
        """Omit scalars that the optimizer does not use, as logs of earlier releases do."""
        document: dict[str, float] = inner(self)
        if not self.averaging:
            for name in _SCHEDULE_FREE:
                del document[name]
        if not self.loss_scale:
            del document["loss_scale"]
        return document


def step_scalars(
    spec: OptimizerSpec,
    optimizer_step: int,
    step: int,
    steps: int,
    gradient_norm: float,
    *,
    loss_scale: float = 0.0,
) -> StepScalars:
    """Compute the scalars of one update in float64, and round each to float32 once.

    Args:
        spec: The optimizer.
        optimizer_step: t, the number of updates including this one, from 1.
        step: Position in the schedule, from 0, including skipped steps.
        steps: Length of the run.
        gradient_norm: `global_norm` of the averaged gradients, finite.
        loss_scale: The loss scale with float16; recorded only.

    Raises:
        pydantic.ValidationError: A setting of the optimizer is outside float32.
    """
    assert optimizer_step >= 1
    assert math.isfinite(gradient_norm)
    free = spec.name == "schedule-free"
    # The average weighs its steps, so a skipped step must not count.
    rate = learning_rate(spec, optimizer_step - 1 if free else step, steps)
    beta1, beta2 = spec.betas
    if spec.name == "rmsprop":
        beta2 = spec.alpha
    share = averaging_share(optimizer_step, spec.warmup_steps) if free else 0.0
    exact = {
        "learning_rate": rate,
        "clip": clip_factor(spec.clip_norm, gradient_norm),
        "weight_decay": spec.weight_decay,
        "decay_factor": 1.0 - rate * spec.weight_decay,
        "momentum": spec.momentum,
        "beta1": beta1,
        "one_minus_beta1": 1.0 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1.0 - beta2,
        "step_size": rate * (1.0 - beta1 * (1.0 - share))
        if free
        else rate / (1.0 - beta1**optimizer_step),
        "root_correction": 1.0 / math.sqrt(1.0 - beta2**optimizer_step),
        "epsilon": spec.eps,
        "averaging": share,
        "one_minus_averaging": 1.0 - share,
        "drift": rate * beta1 if free else 0.0,
        "loss_scale": loss_scale,
    }
    return StepScalars(**{name: nearest_float32(value) for name, value in exact.items()})


def scalars_after(spec: OptimizerSpec, scalars: StepScalars, updates: int) -> StepScalars:
    """Adapt a step's scalars to a tensor that has missed updates.

    Like torch, adam and adamw correct their bias by the number of updates of each tensor. Powers
    are computed as products in a fixed order, since libraries round `pow` differently.

    Args:
        spec: The optimizer; only adam's and adamw's scalars depend on the count.
        scalars: The scalars of a tensor that has missed no update.
        updates: Number of the tensor's updates including this one, from 1.
    """
    assert counts_updates(spec)
    assert updates >= 1, f"expected fewer missed updates than the replica's, got {updates} left"
    beta1, beta2 = spec.betas
    exact = {
        "step_size": scalars.learning_rate / (1.0 - _power(beta1, updates)),
        "root_correction": 1.0 / math.sqrt(1.0 - _power(beta2, updates)),
    }
    return scalars.model_copy(
        update={name: nearest_float32(value) for name, value in exact.items()}
    )


def _power(base: float, exponent: int) -> float:
    product = 1.0
    while exponent:
        if exponent & 1:
            product *= base
        base *= base
        exponent >>= 1
    return product


def counts_updates(spec: OptimizerSpec) -> bool:
    """Whether an update depends on the number of the tensor's earlier updates."""
    return spec.name in {"adam", "adamw"}


def averaging_share(optimizer_step: int, warmup_steps: int) -> float:
    """Return the share of step t in the average of steps 1 to t, weighted by squared rates.

    The rate is min(1, t / warmup), so the sum of squares is exact in integers.
    """
    t, w = optimizer_step, max(1, warmup_steps)
    rising = min(t, w)
    total = rising * (rising + 1) * (2 * rising + 1) + 6 * w * w * (t - rising)
    return 6 * rising * rising / total


def moment_count(spec: OptimizerSpec) -> int:
    """Return the number of arrays of the parameters' shape that the optimizer keeps."""
    return _MOMENTS[spec.name]


def apply_update(
    spec: OptimizerSpec,
    scalars: StepScalars,
    parameters: Array,
    gradient: Array,
    moments: Moments,
    *,
    decay: bool,
    chunk_elements: int = UPDATE_CHUNK_ELEMENTS,
    hashes: NDArray[np.uint8] | None = None,
) -> bool:
    """Apply one step in place to a flat array of parameters.

    With g the clipped gradient, p a parameter and d the weight decay:

        sgd        g += d p;  p -= lr g
        momentum   g += d p;  v = mu v + g;  p -= lr v
        nesterov   g += d p;  v = mu v + g;  p -= lr (g + mu v)
        adamw      p *= 1 - lr d;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
                   p -= (lr / (1 - beta1^t)) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        adam       g += d p; then as adamw, without its decay
        rmsprop    g += d p;  v = alpha v + (1 - alpha) g^2;  p -= lr (g / (sqrt(v) + eps))
        adagrad    g += d p;  v += g^2;  p -= lr (g / (sqrt(v) + eps))
        lion       p *= 1 - lr d;  p -= lr sign(beta1 m + (1 - beta1) g)
                   m = beta2 m + (1 - beta2) g
        schedule-free
                   v = beta2 v + (1 - beta2) g^2;  u = g / (sqrt(v) / sqrt(1 - beta2^t) + eps) + d p
                   p += c m;  p -= lr (1 - beta1 (1 - c)) u;  m = (1 - c) (m - lr beta1 u)

    sgd, momentum and nesterov are torch.optim.SGD (coupled decay, dampening 0); adam, rmsprop and
    adagrad are torch.optim.Adam, RMSprop and Adagrad (coupled decay too); adamw is
    torch.optim.AdamW (decoupled decay, Loshchilov and Hutter, arXiv:1711.05101); lion is Chen et
    al., arXiv:2302.06675. schedule-free is AdamW of Defazio et al., arXiv:2405.15682: p is their y,
    where gradients are taken; m is their z - y, which begins as zero; c is `averaging_share`;
    `averaged` gives their x.

    Args:
        spec: Which rule.
        scalars: The step's scalars, from `step_scalars`.
        parameters: Flat float32, shape (n,); changed.
        gradient: Averaged gradient, shape (n,); not changed.
        moments: `moment_count(spec)` arrays of shape (n,); changed.
        decay: Whether weight decay applies to these parameters.
        chunk_elements: Elements computed at a time; no bit depends on it.
        hashes: Receives the `digest.piece_hashes` of parameters and moments, shape (k, pieces, 16).

    Returns:
        Whether all new values of parameters and moments are finite.
    """
    _check_flat(moment_count(spec), parameters, gradient, *moments)
    constants = _Constants(scalars, decay=decay)
    if (library := library_for(gradient, writes=(parameters, *moments))) is not None:
        values = (constants.array(), parameters, gradient, moments)
        return library.update(spec.name, *values, hashes=hashes)
    rule = partial(_RULES[spec.name], constants)
    finite = _in_chunks(rule, parameters, gradient, moments, chunk_elements)
    if hashes is not None:
        for number, array in enumerate((parameters, *moments)):
            write_piece_hashes(array, hashes[number])
    return finite


def _check_flat(moments: int, *arrays: Array) -> None:
    assert len(arrays) == 2 + moments
    for array in arrays:
        assert array.dtype == np.float32
        assert array.shape == arrays[0].shape
        assert array.ndim == 1


def _in_chunks(
    rule: Callable[[_Chunk], None],
    parameters: Array,
    gradient: Array,
    moments: Moments,
    chunk_elements: int,
) -> bool:
    finite = True
    scratch = np.empty((2, min(chunk_elements, parameters.size)), np.float32)
    # Non-finite values are detected below; warnings would only repeat that.
    with np.errstate(all="ignore"):
        for lo in range(0, parameters.size, chunk_elements):
            part = slice(lo, min(lo + chunk_elements, parameters.size))
            size = part.stop - lo
            inner = tuple(moment[part] for moment in moments)
            g, t = scratch[0, :size], scratch[1, :size]
            rule(_Chunk(parameters[part], gradient[part], inner, g, t))
            finite = finite and all(is_finite(array) for array in (parameters[part], *inner))
    return finite


class _Constants:
    """The scalars as numpy float32, so that every operation is in float32."""

    def __init__(self, scalars: StepScalars, *, decay: bool) -> None:
        self.learning_rate = np.float32(scalars.learning_rate)
        self.clip = np.float32(scalars.clip)
        self.weight_decay = np.float32(scalars.weight_decay if decay else 0.0)
        self.decay_factor = np.float32(scalars.decay_factor if decay else 1.0)
        self.momentum = np.float32(scalars.momentum)
        self.beta1 = np.float32(scalars.beta1)
        self.one_minus_beta1 = np.float32(scalars.one_minus_beta1)
        self.beta2 = np.float32(scalars.beta2)
        self.one_minus_beta2 = np.float32(scalars.one_minus_beta2)
        self.step_size = np.float32(scalars.step_size)
        self.root_correction = np.float32(scalars.root_correction)
        self.epsilon = np.float32(scalars.epsilon)
        self.averaging = np.float32(scalars.averaging)
        self.one_minus_averaging = np.float32(scalars.one_minus_averaging)
        self.drift = np.float32(scalars.drift)

    def array(self) -> Array:
        """Return all scalars in the order above, which kernels/update.c shares."""
        return np.array(list(vars(self).values()), np.float32)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The arrays of a rule: views of shape (k,); g and t are scratch."""

    parameters: Array
    gradient: Array
    moments: Moments
    g: Array
    t: Array


_Rule = Callable[[_Constants, _Chunk], None]


def _clipped(c: _Constants, chunk: _Chunk) -> Array:
    if c.clip == 1.0:
        return chunk.gradient
    return np.multiply(chunk.gradient, c.clip, out=chunk.g)


def _with_decay(c: _Constants, chunk: _Chunk) -> Array:
    clipped = _clipped(c, chunk)
    if c.weight_decay == 0.0:
        return clipped
    np.multiply(chunk.parameters, c.weight_decay, out=chunk.t)
    return np.add(clipped, chunk.t, out=chunk.g)


def _descend(c: _Constants, chunk: _Chunk, direction: Array) -> None:
    """Parameters: p -= lr direction."""
    np.multiply(direction, c.learning_rate, out=chunk.t)
    np.subtract(chunk.parameters, chunk.t, out=chunk.parameters)


def _decay_first(c: _Constants, chunk: _Chunk) -> None:
    """Parameters: p *= 1 - lr d."""
    if c.decay_factor != 1.0:
        np.multiply(chunk.parameters, c.decay_factor, out=chunk.parameters)


def _velocity(c: _Constants, chunk: _Chunk, direction: Array) -> Array:
    """Momentum: v = mu v + direction."""
    (velocity,) = chunk.moments
    np.multiply(velocity, c.momentum, out=velocity)
    return np.add(velocity, direction, out=velocity)


def _root(c: _Constants, chunk: _Chunk, direction: Array) -> Array:
    """Second moment: v = beta2 v + (1 - beta2) direction^2.

    Returns:
        sqrt(v) / sqrt(1 - beta2^t) + eps, in t.
    """
    v, t = chunk.moments[1], chunk.t
    np.multiply(direction, c.one_minus_beta2, out=t)
    np.multiply(t, direction, out=t)
    np.multiply(v, c.beta2, out=v)
    np.add(v, t, out=v)
    np.sqrt(v, out=t)
    np.multiply(t, c.root_correction, out=t)
    return np.add(t, c.epsilon, out=t)


def _sgd(c: _Constants, chunk: _Chunk) -> None:
    _descend(c, chunk, _with_decay(c, chunk))


def _momentum(c: _Constants, chunk: _Chunk) -> None:
    _descend(c, chunk, _velocity(c, chunk, _with_decay(c, chunk)))


def _nesterov(c: _Constants, chunk: _Chunk) -> None:
    direction = _with_decay(c, chunk)
    np.multiply(_velocity(c, chunk, direction), c.momentum, out=chunk.t)
    _descend(c, chunk, np.add(direction, chunk.t, out=chunk.t))


def _adamw(c: _Constants, chunk: _Chunk) -> None:
    direction = _clipped(c, chunk)
    _decay_first(c, chunk)
    _adam_step(c, chunk, direction)


def _adam(c: _Constants, chunk: _Chunk) -> None:
    _adam_step(c, chunk, _with_decay(c, chunk))


def _adam_step(c: _Constants, chunk: _Chunk, direction: Array) -> None:
    p, m, t = chunk.parameters, chunk.moments[0], chunk.t
    # Interpolate instead of adding two products: float32 beta1 and 1 - beta1 do not add up to 1.
    # Start from the nearer end, so that beta1 = 0 gives the gradient itself.
    np.subtract(direction, m, out=t)
    if c.one_minus_beta1 < 0.5:
        np.multiply(t, c.one_minus_beta1, out=t)
        np.add(m, t, out=m)
    else:
        np.multiply(t, c.beta1, out=t)
        np.subtract(direction, t, out=m)
    np.divide(m, _root(c, chunk, direction), out=t)
    np.multiply(t, c.step_size, out=t)
    np.subtract(p, t, out=p)


def _rmsprop(c: _Constants, chunk: _Chunk) -> None:
    (v,), t = chunk.moments, chunk.t
    direction = _with_decay(c, chunk)
    np.multiply(direction, c.one_minus_beta2, out=t)
    np.multiply(t, direction, out=t)
    np.multiply(v, c.beta2, out=v)
    np.add(v, t, out=v)
    _descend_by_root(c, chunk, direction)


def _adagrad(c: _Constants, chunk: _Chunk) -> None:
    (v,), t = chunk.moments, chunk.t
    direction = _with_decay(c, chunk)
    np.multiply(direction, direction, out=t)
    np.add(v, t, out=v)
    _descend_by_root(c, chunk, direction)


def _descend_by_root(c: _Constants, chunk: _Chunk, direction: Array) -> None:
    """Parameters: p -= lr (direction / (sqrt(v) + eps)), v being the only moment."""
    (v,), t = chunk.moments, chunk.t
    np.sqrt(v, out=t)
    np.add(t, c.epsilon, out=t)
    np.divide(direction, t, out=t)
    _descend(c, chunk, t)


def _lion(c: _Constants, chunk: _Chunk) -> None:
    p, g, t = chunk.parameters, chunk.g, chunk.t
    (m,) = chunk.moments
    direction = _clipped(c, chunk)
    _decay_first(c, chunk)
    np.multiply(direction, c.one_minus_beta2, out=t)  # for the update of m below
    mixed = np.multiply(direction, c.one_minus_beta1, out=g)
    scaled = m * c.beta1
    np.add(mixed, scaled, out=g)
    np.sign(g, out=g)
    np.multiply(g, c.learning_rate, out=g)
    # Libraries disagree on the sign of sign(-0.0); adding 0.0 makes it +0.0.
    np.add(g, np.float32(0.0), out=g)
    np.subtract(p, g, out=p)
    np.multiply(m, c.beta2, out=m)
    np.add(m, t, out=m)


def _schedule_free(c: _Constants, chunk: _Chunk) -> None:
    p, m, g, t = chunk.parameters, chunk.moments[0], chunk.g, chunk.t
    direction = _clipped(c, chunk)
    np.divide(direction, _root(c, chunk, direction), out=g)
    if c.weight_decay != 0.0:
        np.multiply(p, c.weight_decay, out=t)
        np.add(g, t, out=g)
    np.multiply(m, c.averaging, out=t)
    np.add(p, t, out=p)
    np.multiply(g, c.step_size, out=t)
    np.subtract(p, t, out=p)
    np.multiply(g, c.drift, out=t)
    np.subtract(m, t, out=m)
    np.multiply(m, c.one_minus_averaging, out=m)


_RULES: Final[dict[str, _Rule]] = {
    "sgd": _sgd, "momentum": _momentum, "nesterov": _nesterov, "adamw": _adamw, "lion": _lion,
    "schedule-free": _schedule_free, "adam": _adam, "rmsprop": _rmsprop, "adagrad": _adagrad,
}  # fmt: skip


def averages(spec: OptimizerSpec) -> bool:
    """Whether `averaged` is evaluated and saved instead of the parameters."""
    return spec.name == "schedule-free"


def averaged(spec: OptimizerSpec, parameters: Array, moments: Moments) -> Array:
    """Return what is evaluated and saved: the parameters, or for schedule-free a new array.

    The latter is x = y - (1 / beta1 - 1) (z - y).
    """
    if not averages(spec):
        return parameters
    with np.errstate(all="ignore"):
        back = np.multiply(moments[0], np.float32(1.0 / spec.betas[0] - 1.0))
        return np.subtract(parameters, back, out=back)


def is_finite(array: Array) -> bool:
    """Whether all values are finite, without the temporary array of numpy.isfinite."""
    if (library := library_for(array)) is not None:
        return library.is_finite(array)
    return not array.size or bool(array.min() > -np.inf and array.max() < np.inf)


def square_sum(array: Array) -> float:
    """Return the sum of squares of an array, in float64.

    Each square is exact. Chunks of `SQUARE_SUM_CHUNK_ELEMENTS` are summed by `np.add.reduce`, and
    their sums are added in order. BLAS is not used: its bits depend on the number of threads.
    """
    flat = array.reshape(-1)
    if (library := library_for(flat)) is not None:
        return sum(library.square_sums(flat).tolist(), 0.0)
    scratch = np.empty(min(flat.size, SQUARE_SUM_CHUNK_ELEMENTS), np.float64)
    total = 0.0
    with np.errstate(all="ignore"):
        for lo in range(0, flat.size, SQUARE_SUM_CHUNK_ELEMENTS):
            part = flat[lo : lo + SQUARE_SUM_CHUNK_ELEMENTS]
            squares = scratch[: part.size]
            np.copyto(squares, part)
            np.multiply(squares, squares, out=squares)
            total += float(np.add.reduce(squares))
    return total


def global_norm(square_sums: Iterable[float]) -> float:
    """Return the gradient's Euclidean norm from the `square_sum` of each block, in block order."""
    total = 0.0
    for block in square_sums:
        total += block
    return math.sqrt(total)


def clip_factor(clip_norm: float | None, gradient_norm: float) -> float:
    """Return the factor, at most 1, that clips the norm, as torch.nn.utils.clip_grad_norm_ does."""
    if clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (gradient_norm + 1e-6))


def average(sums: Array, total_weight: float, out: Array) -> bool:
    """Divide gradient sums by their weight and write the averages to `out`, which may be `sums`.

    It multiplies by the reciprocal, computed in float64 and rounded to float32. A step without
    weight (no sample, no token) has a gradient of zero. Absent gradients stay absent.

    Returns:
        Whether all averages are finite.
    """
    assert math.isfinite(total_weight)
    assert total_weight >= 0
    if total_weight == 0:
        keep_absent(sums, out)
        return True
    with np.errstate(all="ignore"):
        factor = np.float32(1.0 / total_weight)
        if (library := library_for(sums, writes=(out,))) is not None:
            return library.scale(sums, float(factor), out)
        np.multiply(sums, factor, out=out)
    return is_finite(out)


def nearest_float32(value: float) -> float:
    """Round to the nearest float32; out of range gives infinity, which validation refuses.

    Like `np.float32(value)` in a tenth of the time: every commit that is read has twelve.
    """
    try:
        (nearest,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(nearest)
