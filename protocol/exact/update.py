"""The exact update: from averaged gradients to new parameters, the same bits on every machine.

It uses only elementwise float32 `+ - * / sqrt`, one operation at a time, which IEEE 754 defines to
the last bit. It never divides by a scalar: the coordinator computes reciprocals once, in float64,
rounds them to float32 and sends them as `StepScalars`. torch's optimizers are not used: their bits
depend on the instruction set, and their CPU square root is not correctly rounded.

The coordinator also computes the reductions that scale the update (`square_sum`) once, in float64;
each documents its order.

With g the clipped gradient, p a parameter and d the weight decay:

    sgd        g += d p;  p -= lr g
    momentum   g += d p;  v = mu v + g;  p -= lr v
    nesterov   g += d p;  v = mu v + g;  p -= lr (g + mu v)
    adamw      p *= 1 - lr d;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
               p -= (lr / (1 - beta1^t)) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    adam       g += d p; then as adamw, without its decay
               with amsgrad: w = max(w, v), and sqrt(w) for sqrt(v)
    rmsprop    g += d p;  v = alpha v + (1 - alpha) g^2;  u = g / (sqrt(v) + eps);  p -= lr u
               centered: a = alpha a + (1 - alpha) g, and v - a^2, at least 0, for v
               with momentum: b = mu b + u;  p -= lr b
    adagrad    g += d p;  v += g^2;  p -= lr (g / (sqrt(v) + eps))
    lion       p *= 1 - lr d;  p -= lr sign(beta1 m + (1 - beta1) g)
               m = beta2 m + (1 - beta2) g
    schedule-free
               v = beta2 v + (1 - beta2) g^2;  u = g / (sqrt(v) / sqrt(1 - beta2^t) + eps) + d p
               p += c m;  p -= lr (1 - beta1 (1 - c)) u;  m = (1 - c) (m - lr beta1 u)

sgd, momentum and nesterov are torch.optim.SGD (coupled decay, dampening 0); adam, rmsprop and
adagrad are torch.optim.Adam, RMSprop and Adagrad (coupled decay too); adamw is
torch.optim.AdamW (decoupled decay, Loshchilov and Hutter, arXiv:1711.05101); lion is Chen et
al., arXiv:2302.06675. schedule-free is the AdamW variant of Defazio et al., arXiv:2405.15682: p is
their y, where gradients are taken; m is their z - y, which begins as zero; c is `averaging_share`;
`average_weights` gives their x. adafactor is in `protocol.exact.adafactor`.

The average of the weights is kept as its distance e from them: if p moves from p to p',
e = k (e + (p - p')), k being `average_keep`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

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

from protocol.base import limits
from protocol.exact.digest import write_piece_hashes
from protocol.exact.kernels.library import library_for
from protocol.exact.reduction.average import Array, is_finite, nearest_float32
from protocol.exact.schedule import learning_rate
from protocol.spec.sections.optimizer import EmaSpec, OptimizerSpec, SwaSpec

Moments = tuple[Array, ...]

UPDATE_CHUNK_ELEMENTS: Final = 32_768
"""A chunk's arrays (for adamw six of 128 KiB) fit a level-2 cache. No bit depends on the size."""

_MOMENTS: Final = {
    "sgd": 0, "momentum": 1, "nesterov": 1, "adamw": 2, "lion": 1, "schedule-free": 2,
    "adam": 2, "rmsprop": 1, "adagrad": 1, "adafactor": 0, "adam-amsgrad": 3, "adamw-amsgrad": 3,
    "rmsprop-momentum": 2, "rmsprop-centered": 2, "rmsprop-centered-momentum": 3,
}  # fmt: skip
_SCHEDULE_FREE_SCALARS: Final = ("averaging", "one_minus_averaging", "drift")


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
    """Factor that gradients are multiplied by first; 1 if they are not clipped."""
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
    clip_value: _Float32 | None = None
    """Magnitude that each element is clipped to; None if elements are not clipped."""
    group_clips: tuple[_Float32, ...] = Field((), max_length=limits.CLIPPED_GROUPS)
    """`clip` for each of `OptimizerSpec.clipped_groups`."""
    group_scales: tuple[_Float32, ...] = Field((), max_length=limits.SCHEDULED_GROUPS)
    """Factor of the learning rate for each of `OptimizerSpec.scheduled_scales`."""
    average_keep: _Float32 | None = None
    """Share of the distance from the new weights that the average keeps; None without an
    average."""

    @model_serializer(mode="wrap")
    def _without_unused(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit scalars that the optimizer does not use, as logs of earlier releases do."""
        document: dict[str, Any] = inner(self)
        if not self.averaging:
            for name in _SCHEDULE_FREE_SCALARS:
                del document[name]
        if not self.loss_scale:
            del document["loss_scale"]
        for name in ("clip_value", "average_keep"):
            if document[name] is None:
                del document[name]
        for name in ("group_clips", "group_scales"):
            if not document[name]:
                del document[name]
        return document


class GradientNorms(NamedTuple):
    """Norms of a step's averaged gradients.

    Attributes:
        whole: Norm of all tensors.
        others: Norm of all tensors outside of `OptimizerSpec.clipped_groups`.
        groups: Norm of each group in `OptimizerSpec.clipped_groups`.
    """

    whole: float
    others: float
    groups: tuple[float, ...] = ()

    @classmethod
    def of(cls, whole: float) -> GradientNorms:
        """Return the norms of a run without groups that are clipped separately."""
        return cls(whole, whole)


def step_scalars(
    spec: OptimizerSpec,
    optimizer_step: int,
    step: int,
    steps: int,
    norms: GradientNorms | float,
    *,
    loss_scale: float = 0.0,
    rate_factor: float = 1.0,
) -> StepScalars:
    """Compute the scalars of one update in float64, and round each to float32 once.

    Args:
        spec: The optimizer.
        optimizer_step: t, the number of updates including this one, from 1.
        step: Position in the schedule, from 0, including skipped steps.
        steps: Length of the run.
        norms: Finite norms of the averaged gradients; a number stands for `GradientNorms.of`.
        loss_scale: The loss scale with float16, to be recorded; 0 otherwise.
        rate_factor: `Plateau.factor_at` the step.

    Raises:
        pydantic.ValidationError: A setting of the optimizer is outside float32.
    """
    assert optimizer_step >= 1
    norms = norms if isinstance(norms, GradientNorms) else GradientNorms.of(norms)
    assert math.isfinite(norms.whole)
    is_schedule_free = spec.name == "schedule-free"
    # The average weights its steps, so a skipped step must not count.
    position = optimizer_step - 1 if is_schedule_free else step
    rate = learning_rate(spec, position, steps) * rate_factor
    if spec.relative_step:
        rate = min(rate, 1.0 / math.sqrt(optimizer_step))
    beta1 = _entry_at(spec.momenta or spec.betas[:1], step)
    beta2, one_minus_beta2 = _second_moment_decay(spec, optimizer_step)
    share = averaging_share(optimizer_step, spec.warmup_steps) if is_schedule_free else 0.0
    float64_values = {
        "learning_rate": rate,
        "clip": clip_factor(spec.clip_norm, norms.others),
        "weight_decay": spec.weight_decay,
        "decay_factor": 1.0 - rate * spec.weight_decay,
        "momentum": beta1 if spec.momenta else spec.momentum,
        "beta1": beta1,
        "one_minus_beta1": 1.0 - beta1,
        "beta2": beta2,
        "one_minus_beta2": one_minus_beta2,
        "step_size": rate * (1.0 - beta1 * (1.0 - share))
        if is_schedule_free
        else rate / (1.0 - beta1**optimizer_step),
        "root_correction": 1.0 / math.sqrt(1.0 - beta2**optimizer_step),
        "epsilon": spec.eps,
        "averaging": share,
        "one_minus_averaging": 1.0 - share,
        "drift": rate * beta1 if is_schedule_free else 0.0,
        "loss_scale": loss_scale,
    }
    float64_values |= _optional_scalars(spec, optimizer_step)
    clips = _group_clips(spec, norms)
    float32_values = {name: nearest_float32(value) for name, value in float64_values.items()}
    return StepScalars(**float32_values, group_clips=clips, group_scales=_group_scales(spec, step))


def _group_clips(spec: OptimizerSpec, norms: GradientNorms) -> tuple[float, ...]:
    groups = zip(spec.clipped_groups, norms.groups, strict=True)
    return tuple(nearest_float32(clip_factor(group.clip_norm, norm)) for group, norm in groups)


def _group_scales(spec: OptimizerSpec, step: int) -> tuple[float, ...]:
    return tuple(nearest_float32(_entry_at(scales, step)) for scales in spec.scheduled_scales)


def _entry_at(values: tuple[float, ...], step: int) -> float:
    """Return a step's entry of a list with one entry per step; later steps have the last entry."""
    return values[min(step, len(values) - 1)]


def _optional_scalars(spec: OptimizerSpec, optimizer_step: int) -> dict[str, float]:
    scalars = {} if spec.clip_value is None else {"clip_value": spec.clip_value}
    if spec.average is not None:
        scalars["average_keep"] = average_keep(spec.average, optimizer_step)
    return scalars


def _second_moment_decay(spec: OptimizerSpec, optimizer_step: int) -> tuple[float, float]:
    """Return beta2, the decay rate of the squared gradients, and 1 - beta2."""
    if spec.name == "adafactor":
        one_minus_beta2 = math.pow(optimizer_step, spec.beta2_decay)
        return 1.0 - one_minus_beta2, one_minus_beta2
    beta2 = spec.alpha if spec.name == "rmsprop" else spec.betas[1]
    return beta2, 1.0 - beta2


def average_keep(average: EmaSpec | SwaSpec, update: int) -> float:
    """Return the share of the distance from the new weights that the average keeps.

    The share is 0 up to the first averaging, so that the average equals the weights, and 1 in an
    update that is not averaged.

    Args:
        average: The average.
        update: Number of the update, from 1.
    """
    counts_initial = isinstance(average, EmaSpec) and average.count_initial
    skipped = average.start_step // average.every  # averagings before `start_step`
    averagings = update // average.every - skipped
    if averagings <= 0 and not counts_initial:
        return 0.0
    if update % average.every:
        return 1.0
    earlier = averagings - 1
    if isinstance(average, SwaSpec):
        return earlier / averagings
    if not earlier and not counts_initial:
        return 0.0
    warmup_limit = (1 + earlier) / (10 + earlier) if average.warmup else 1.0
    return min(average.decay, warmup_limit)


def adapt_scalars(spec: OptimizerSpec, scalars: StepScalars, updates: int) -> StepScalars:
    """Adapt a step's scalars to a tensor that has missed updates.

    Like torch, adam and adamw correct their bias by the number of updates of each tensor. Powers
    are computed as products in a fixed order, since libraries round `pow` differently.

    Args:
        spec: The optimizer: adam or adamw; other scalars do not depend on the count.
        scalars: The scalars of a tensor that has missed no update.
        updates: Number of the tensor's updates including this one, from 1.
    """
    assert counts_updates(spec)
    assert updates >= 1, f"expected at least one update of the tensor, got {updates}"
    beta1, beta2 = scalars.beta1 if spec.momenta else spec.betas[0], spec.betas[1]
    float64_values = {
        "step_size": scalars.learning_rate / (1.0 - _power(beta1, updates)),
        "root_correction": 1.0 / math.sqrt(1.0 - _power(beta2, updates)),
    }
    return scalars.model_copy(
        update={name: nearest_float32(value) for name, value in float64_values.items()}
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
    """Return whether an update depends on the number of the tensor's earlier updates."""
    return spec.name in {"adam", "adamw"}


def rule_name(spec: OptimizerSpec) -> str:
    """Return the update rule: the optimizer's name and its variant."""
    if spec.name in {"adam", "adamw"} and spec.amsgrad:
        return f"{spec.name}-amsgrad"
    if spec.name == "rmsprop":
        centered = "-centered" if spec.centered else ""
        return f"rmsprop{centered}{'-momentum' if spec.momentum else ''}"
    return spec.name


def averaging_share(optimizer_step: int, warmup_steps: int) -> float:
    """Return the share of step t in the average of steps 1 to t, weighted by squared rates.

    The rate is min(1, t / warmup), so the sum of squares is exact in integers.
    """
    t, w = optimizer_step, max(1, warmup_steps)
    rising = min(t, w)
    total = rising * (rising + 1) * (2 * rising + 1) + 6 * w * w * (t - rising)
    return 6 * rising * rising / total


def moment_count(spec: OptimizerSpec) -> int:
    """Return the number of moments of the parameters' shape that the optimizer has."""
    return _MOMENTS[rule_name(spec)]


def state_arrays(spec: OptimizerSpec) -> int:
    """Return the number of arrays of the parameters' shape in a state: parameters, moments, and
    the average if there is one."""
    return 1 + moment_count(spec) + (spec.average is not None)


def apply_update(
    spec: OptimizerSpec,
    scalars: StepScalars,
    parameters: Array,
    gradient: Array,
    moments: Moments,
    *,
    decay: bool,
    average: Array | None = None,
    chunk_elements: int = UPDATE_CHUNK_ELEMENTS,
    hashes: NDArray[np.uint8] | None = None,
) -> bool:
    """Apply one step, as the module's docstring defines it, in place to a flat array.

    Args:
        spec: The optimizer.
        scalars: The step's scalars, from `step_scalars`.
        parameters: Flat float32, shape (n,); changed.
        gradient: Averaged gradient, shape (n,); not changed.
        moments: `moment_count(spec)` arrays of shape (n,), in the order m, v, w and v, b, a;
            changed.
        decay: Whether weight decay applies to these parameters.
        average: e, of shape (n,), if `spec.average` is set; changed.
        chunk_elements: Elements computed at a time; no bit depends on it.
        hashes: Receives the `digest.piece_hashes` of parameters, moments and average, shape
            (k, pieces, 16).

    Returns:
        Whether all new values of parameters, moments and average are finite.
    """
    assert (average is None) is (scalars.average_keep is None)
    state = moments if average is None else (*moments, average)
    _check_flat(state_arrays(spec), gradient, parameters, *state)
    constants = _Constants(scalars, decay=decay)
    if (library := library_for(gradient, writes=(parameters, *state))) is not None:
        values = (constants.array(), parameters, gradient, moments)
        return library.update(rule_name(spec), *values, average=average, hashes=hashes)
    rule = partial(_RULES[rule_name(spec)], constants)
    if average is not None:
        rule = partial(_with_average, constants, rule)
    finite = _in_chunks(rule, parameters, gradient, state, chunk_elements)
    if hashes is not None:
        for number, array in enumerate((parameters, *state)):
            write_piece_hashes(array, hashes[number])
    return finite


def _check_flat(state: int, *arrays: Array) -> None:
    assert len(arrays) == 1 + state
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
        value, keep = scalars.clip_value, scalars.average_keep
        self.clip_value = np.float32(np.inf if value is None else value)
        self.average_keep = np.float32(0.0 if keep is None else keep)

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


def _with_average(c: _Constants, rule: Callable[[_Chunk], None], chunk: _Chunk) -> None:
    """Apply the rule, then e = k (e + (p - p')); the average is the last moment."""
    earlier_parameters, average = chunk.parameters.copy(), chunk.moments[-1]
    rule(replace(chunk, moments=chunk.moments[:-1]))
    np.subtract(earlier_parameters, chunk.parameters, out=earlier_parameters)
    np.add(average, earlier_parameters, out=average)
    np.multiply(average, c.average_keep, out=average)


def _clip_gradient(c: _Constants, chunk: _Chunk) -> Array:
    clipped = chunk.gradient
    if c.clip != 1.0:
        clipped = np.multiply(clipped, c.clip, out=chunk.g)
    if c.clip_value < np.inf:
        clipped = np.clip(clipped, -c.clip_value, c.clip_value, out=chunk.g)
    return clipped


def _with_decay(c: _Constants, chunk: _Chunk) -> Array:
    clipped = _clip_gradient(c, chunk)
    if c.weight_decay == 0.0:
        return clipped
    np.multiply(chunk.parameters, c.weight_decay, out=chunk.t)
    return np.add(clipped, chunk.t, out=chunk.g)


def _descend(c: _Constants, chunk: _Chunk, direction: Array) -> None:
    """Update the parameters: p -= lr direction."""
    np.multiply(direction, c.learning_rate, out=chunk.t)
    np.subtract(chunk.parameters, chunk.t, out=chunk.parameters)


def _decay_parameters(c: _Constants, chunk: _Chunk) -> None:
    """Decay the parameters: p *= 1 - lr d."""
    if c.decay_factor != 1.0:
        np.multiply(chunk.parameters, c.decay_factor, out=chunk.parameters)


def _update_velocity(c: _Constants, chunk: _Chunk, direction: Array) -> Array:
    """Update the momentum: v = mu v + direction."""
    (velocity,) = chunk.moments
    np.multiply(velocity, c.momentum, out=velocity)
    return np.add(velocity, direction, out=velocity)


def _add_square(c: _Constants, chunk: _Chunk, v: Array, direction: Array) -> None:
    """Update the second moment: v = beta2 v + (1 - beta2) direction^2."""
    t = chunk.t
    np.multiply(direction, c.one_minus_beta2, out=t)
    np.multiply(t, direction, out=t)
    np.multiply(v, c.beta2, out=v)
    np.add(v, t, out=v)


def _interpolate(
    moment: Array, direction: Array, share: np.float32, keep: np.float32, t: Array
) -> None:
    """Interpolate: moment += share (direction - moment), share being 1 - keep.

    A sum of two products would differ: in float32, share and keep do not add up to 1. Interpolation
    starts from the nearer end, so keep = 0 gives the direction itself.
    """
    np.subtract(direction, moment, out=t)
    if share < 0.5:
        np.multiply(t, share, out=t)
        np.add(moment, t, out=moment)
    else:
        np.multiply(t, keep, out=t)
        np.subtract(direction, t, out=moment)


def _update_denominator(c: _Constants, chunk: _Chunk, direction: Array) -> Array:
    """Update the second moment, and with amsgrad the third: the second's largest value so far.

    Returns:
        sqrt(v) / sqrt(1 - beta2^t) + eps, in t.
    """
    v, t = chunk.moments[1], chunk.t
    _add_square(c, chunk, v, direction)
    if len(chunk.moments) > 2:
        largest = chunk.moments[2]
        np.copyto(largest, v, where=v > largest)
        v = largest
    np.sqrt(v, out=t)
    np.multiply(t, c.root_correction, out=t)
    return np.add(t, c.epsilon, out=t)


def _sgd(c: _Constants, chunk: _Chunk) -> None:
    _descend(c, chunk, _with_decay(c, chunk))


def _momentum(c: _Constants, chunk: _Chunk) -> None:
    _descend(c, chunk, _update_velocity(c, chunk, _with_decay(c, chunk)))


def _nesterov(c: _Constants, chunk: _Chunk) -> None:
    direction = _with_decay(c, chunk)
    np.multiply(_update_velocity(c, chunk, direction), c.momentum, out=chunk.t)
    _descend(c, chunk, np.add(direction, chunk.t, out=chunk.t))


def _adamw(c: _Constants, chunk: _Chunk) -> None:
    direction = _clip_gradient(c, chunk)
    _decay_parameters(c, chunk)
    _adam_step(c, chunk, direction)


def _adam(c: _Constants, chunk: _Chunk) -> None:
    _adam_step(c, chunk, _with_decay(c, chunk))


def _adam_step(c: _Constants, chunk: _Chunk, direction: Array) -> None:
    p, m, t = chunk.parameters, chunk.moments[0], chunk.t
    _interpolate(m, direction, c.one_minus_beta1, c.beta1, t)
    np.divide(m, _update_denominator(c, chunk, direction), out=t)
    np.multiply(t, c.step_size, out=t)
    np.subtract(p, t, out=p)


def _rmsprop(c: _Constants, chunk: _Chunk, *, centered: bool, momentum: bool) -> None:
    v, t = chunk.moments[0], chunk.t
    direction = _with_decay(c, chunk)
    _add_square(c, chunk, v, direction)
    if centered:
        mean = chunk.moments[-1]
        _interpolate(mean, direction, c.one_minus_beta2, c.beta2, t)
        np.multiply(mean, mean, out=t)
        np.subtract(v, t, out=t)
        np.copyto(t, np.float32(0.0), where=t < 0)
        np.sqrt(t, out=t)
    else:
        np.sqrt(v, out=t)
    np.add(t, c.epsilon, out=t)
    np.divide(direction, t, out=t)
    if momentum:
        velocity = chunk.moments[1]
        np.multiply(velocity, c.momentum, out=velocity)
        t = np.add(velocity, t, out=velocity)
    _descend(c, chunk, t)


def _adagrad(c: _Constants, chunk: _Chunk) -> None:
    (v,), t = chunk.moments, chunk.t
    direction = _with_decay(c, chunk)
    np.multiply(direction, direction, out=t)
    np.add(v, t, out=v)
    np.sqrt(v, out=t)
    np.add(t, c.epsilon, out=t)
    np.divide(direction, t, out=t)
    _descend(c, chunk, t)


def _adafactor(c: _Constants, chunk: _Chunk) -> None:
    """Apply a direction from `apply_adafactor`, which replaces the gradient."""
    _decay_parameters(c, chunk)
    _descend(c, chunk, chunk.gradient)


def _lion(c: _Constants, chunk: _Chunk) -> None:
    p, g, t = chunk.parameters, chunk.g, chunk.t
    (m,) = chunk.moments
    direction = _clip_gradient(c, chunk)
    _decay_parameters(c, chunk)
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
    direction = _clip_gradient(c, chunk)
    np.divide(direction, _update_denominator(c, chunk, direction), out=g)
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
    "schedule-free": _schedule_free, "adam": _adam, "adagrad": _adagrad,
    "rmsprop": partial(_rmsprop, centered=False, momentum=False),
    "adafactor": _adafactor, "adam-amsgrad": _adam, "adamw-amsgrad": _adamw,
    "rmsprop-momentum": partial(_rmsprop, centered=False, momentum=True),
    "rmsprop-centered": partial(_rmsprop, centered=True, momentum=False),
    "rmsprop-centered-momentum": partial(_rmsprop, centered=True, momentum=True),
}  # fmt: skip


def decay_average(average: Array, keep: float) -> None:
    """Move the average one step toward weights that do not change: e = k e."""
    np.multiply(average, np.float32(keep), out=average)


def has_averaged_weights(spec: OptimizerSpec) -> bool:
    """Return whether an average is evaluated and saved in place of the parameters."""
    return spec.name == "schedule-free" or spec.average is not None


def average_weights(
    spec: OptimizerSpec, parameters: Array, moments: Moments, average: Array | None = None
) -> Array:
    """Return the weights to evaluate and save: the parameters, or a new array with their average.

    The average is p + e with `spec.average`, and x = y - (1 / beta1 - 1) (z - y) for schedule-free.
    """
    if not has_averaged_weights(spec):
        return parameters
    with np.errstate(all="ignore"):
        if average is not None:
            return np.add(parameters, average)
        distance = np.multiply(moments[0], np.float32(1.0 / spec.betas[0] - 1.0))
        return np.subtract(parameters, distance, out=distance)


def global_norm(square_sums: Iterable[float]) -> float:
    """Return the gradient's Euclidean norm from the `square_sum` of each block, in block order."""
    total = 0.0
    for square_sum in square_sums:
        total += square_sum
    return math.sqrt(total)


def clip_factor(clip_norm: float | None, gradient_norm: float) -> float:
    """Return the factor, at most 1, that clips the norm, as torch.nn.utils.clip_grad_norm_ does."""
    if clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (gradient_norm + 1e-6))
