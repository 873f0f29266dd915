"""The exact update: from averaged gradients to new parameters, the same bits on every machine.

Only separate float32 `+ - * / sqrt` of numpy, which IEEE 754 fixes to the last bit, element by
element. No division by a scalar: reciprocals are taken once, by the coordinator, in float64,
rounded to float32 and shipped as `StepScalars`. torch's optimizers are not used: their bits
depend on the instruction set, and their CPU square root is not correctly rounded.

Reductions that steer the update (`square_sum`) are float64 and also taken once, by the
coordinator; each states its order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
from protocol.exact.schedule import learning_rate
from protocol.spec.run_spec import OptimizerSpec

Array = NDArray[np.float32]
Moments = tuple[Array, ...]

UPDATE_CHUNK_ELEMENTS: Final = 32_768
"""All arrays of a chunk (six of 128 KiB for adamw) fit a level-2 cache. No bit depends on it."""
SQUARE_SUM_CHUNK_ELEMENTS: Final = 65_536
"""Part of the definition of `square_sum`: another value may give other bits."""

_FLOAT32: Final = struct.Struct("<f")
_MOMENTS: Final = {
    "sgd": 0, "momentum": 1, "nesterov": 1, "adamw": 2, "lion": 1, "schedule-free": 2,
}  # fmt: skip
_SCHEDULE_FREE: Final = ("averaging", "one_minus_averaging", "drift")


def _float32_value(value: float) -> float:
    if _rounded(value) != value:
        raise ValueError("expected a value that float32 holds exactly")
    return value


_Float32 = Annotated[float, AfterValidator(_float32_value)]


class StepScalars(BaseModel):
    """Every scalar of one step's update; each is finite and exactly a float32."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    learning_rate: _Float32
    clip: _Float32
    """What gradients are multiplied by first; 1 leaves them as they are."""
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
    """schedule-free: c, the newest step's share of the average; 0 for the others."""
    one_minus_averaging: _Float32 = 1.0
    drift: _Float32 = 0.0
    """schedule-free: learning rate * beta1, what the newest step moves against the average."""
    loss_scale: _Float32 = 0.0
    """float16: what losses were multiplied by in this step; gradients were divided by it."""

    @model_serializer(mode="wrap")
    def _as_ever(self, inner: SerializerFunctionWrapHandler) -> dict[str, float]:
        """Without what an optimizer has not: logs and messages of the others stay as they were."""
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
    """The scalars of one update, in float64, each rounded to float32 once.

    Args:
        spec: The optimizer.
        optimizer_step: t, how many updates there are with this one; counts from 1.
        step: Where the schedule is, from 0, skipped steps included.
        steps: Length of the run.
        gradient_norm: `global_norm` of the averaged gradients, finite.
        loss_scale: Of a task that computes in float16; changes nothing.

    Raises:
        pydantic.ValidationError: A setting of the optimizer is outside float32.
    """
    assert optimizer_step >= 1
    assert math.isfinite(gradient_norm)
    free = spec.name == "schedule-free"
    # Its steps have weights in the average, so a step that is skipped is none.
    rate = learning_rate(spec, optimizer_step - 1 if free else step, steps)
    beta1, beta2 = spec.betas
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
    return StepScalars(**{name: _rounded(value) for name, value in exact.items()})


def scalars_after(spec: OptimizerSpec, scalars: StepScalars, updates: int) -> StepScalars:
    """The same step's scalars for a tensor that has had fewer updates, with this one.

    torch counts the steps of each parameter, and adamw corrects its bias by that count. Powers are
    products in a fixed order, since not every library rounds `pow` alike.

    Args:
        spec: The optimizer; of adamw alone do scalars depend on the count.
        scalars: Of a tensor that has had all of them.
        updates: How many the tensor has had, from 1.
    """
    assert counts_updates(spec)
    beta1, beta2 = spec.betas
    exact = {
        "step_size": scalars.learning_rate / (1.0 - _power(beta1, updates)),
        "root_correction": 1.0 / math.sqrt(1.0 - _power(beta2, updates)),
    }
    return scalars.model_copy(update={name: _rounded(value) for name, value in exact.items()})


def _power(base: float, exponent: int) -> float:
    product = 1.0
    while exponent:
        if exponent & 1:
            product *= base
        base *= base
        exponent >>= 1
    return product


def counts_updates(spec: OptimizerSpec) -> bool:
    """Whether an update depends on how many there were of that tensor."""
    return spec.name == "adamw"


def averaging_share(optimizer_step: int, warmup_steps: int) -> float:
    """The share of a step t in the average of steps 1 to t, each weighed by its rate squared.

    The rate rises linearly over the warmup and stays: min(1, t / warmup), of which the sum of
    squares is known in whole numbers.
    """
    t, w = optimizer_step, max(1, warmup_steps)
    rising = min(t, w)
    total = rising * (rising + 1) * (2 * rising + 1) + 6 * w * w * (t - rising)
    return 6 * rising * rising / total


def moment_count(spec: OptimizerSpec) -> int:
    """How many arrays of the parameters' shape the optimizer keeps."""
    return _MOMENTS[spec.name]


def decays(tensor_name: str, spec: OptimizerSpec) -> bool:
    """Whether weight decay applies: no part in `no_decay` is in the name, whatever its case."""
    name = tensor_name.lower()
    return not any(part.lower() in name for part in spec.no_decay)


def apply_update(
    spec: OptimizerSpec,
    scalars: StepScalars,
    parameters: Array,
    gradient: Array,
    moments: Moments,
    *,
    decay: bool,
    chunk_elements: int = UPDATE_CHUNK_ELEMENTS,
) -> None:
    """Take one step in place, on a flat stretch of parameters.

    With g the clipped gradient, p a parameter and d the weight decay:

        sgd        g += d p;  p -= lr g
        momentum   g += d p;  v = mu v + g;  p -= lr v
        nesterov   g += d p;  v = mu v + g;  p -= lr (g + mu v)
        adamw      p *= 1 - lr d;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
                   p -= (lr / (1 - beta1^t)) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        lion       p *= 1 - lr d;  p -= lr sign(beta1 m + (1 - beta1) g)
                   m = beta2 m + (1 - beta2) g
        schedule-free
                   v = beta2 v + (1 - beta2) g^2;  u = g / (sqrt(v) / sqrt(1 - beta2^t) + eps) + d p
                   p += c m;  p -= lr (1 - beta1 (1 - c)) u;  m = (1 - c) (m - lr beta1 u)

    sgd, momentum and nesterov are torch.optim.SGD (coupled decay, dampening 0); adamw is
    torch.optim.AdamW (decoupled decay, Loshchilov and Hutter, arXiv:1711.05101); lion is Chen et
    al., arXiv:2302.06675. schedule-free is AdamW of Defazio et al., arXiv:2405.15682: p is their y,
    where gradients are taken; m is their z - y, which begins as zero; c is `averaging_share`;
    `averaged` gives their x.

    Args:
        spec: Which rule.
        scalars: This step's, from `step_scalars`.
        parameters: Flat float32, shape (n,); changed.
        gradient: Averaged gradient, shape (n,); left as it is.
        moments: `moment_count(spec)` arrays of shape (n,); changed.
        decay: Whether weight decay applies to these parameters.
        chunk_elements: How much is done at a time; no bit depends on it.
    """
    assert len(moments) == moment_count(spec)
    for array in (parameters, gradient, *moments):
        assert array.dtype == np.float32
        assert array.shape == parameters.shape
        assert array.ndim == 1
    rule = _RULES[spec.name]
    constants = _Constants(scalars, decay=decay)
    scratch = np.empty((2, min(chunk_elements, parameters.size)), np.float32)
    # Divergence shows in the values and is judged there; warnings would only repeat it.
    with np.errstate(all="ignore"):
        for lo in range(0, parameters.size, chunk_elements):
            part = slice(lo, min(lo + chunk_elements, parameters.size))
            size = part.stop - lo
            inner = tuple(moment[part] for moment in moments)
            g, t = scratch[0, :size], scratch[1, :size]
            rule(constants, _Chunk(parameters[part], gradient[part], inner, g, t))


class _Constants:
    """The scalars as numpy float32, so that no operation is ever taken in another type."""

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


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a rule works on: views of shape (k,), the last two scratch."""

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
    p, m, t = chunk.parameters, chunk.moments[0], chunk.t
    direction = _clipped(c, chunk)
    _decay_first(c, chunk)
    # Interpolation, not two products: float32 beta1 and 1 - beta1 do not add up to 1. From the
    # nearer end, so that beta1 = 0 gives the gradient itself.
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


def _lion(c: _Constants, chunk: _Chunk) -> None:
    p, g, t = chunk.parameters, chunk.g, chunk.t
    (m,) = chunk.moments
    direction = _clipped(c, chunk)
    _decay_first(c, chunk)
    np.multiply(direction, c.one_minus_beta2, out=t)  # for m, which is still needed as it is
    mixed = np.multiply(direction, c.one_minus_beta1, out=g)
    scaled = m * c.beta1
    np.add(mixed, scaled, out=g)
    np.sign(g, out=g)
    np.multiply(g, c.learning_rate, out=g)
    # The sign of zero is libraries' own: 0 - 0 and 0 + 0 are not.
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
    "schedule-free": _schedule_free,
}  # fmt: skip


def averages(spec: OptimizerSpec) -> bool:
    """Whether what is evaluated and saved is not the parameters themselves, but `averaged`."""
    return spec.name == "schedule-free"


def averaged(spec: OptimizerSpec, parameters: Array, moments: Moments) -> Array:
    """What is evaluated and saved: of schedule-free x = y - (1 / beta1 - 1) (z - y), a new array;
    else the parameters themselves."""
    if not averages(spec):
        return parameters
    with np.errstate(all="ignore"):
        back = np.multiply(moments[0], np.float32(1.0 / spec.betas[0] - 1.0))
        return np.subtract(parameters, back, out=back)


def is_finite(array: Array) -> bool:
    """Whether all values are; without the array of truths that numpy.isfinite would fill."""
    return not array.size or bool(array.min() > -np.inf and array.max() < np.inf)


def square_sum(array: Array) -> float:
    """Sum of squares in float64, of a flat array.

    Each square is exact. `np.add.reduce` within chunks of `SQUARE_SUM_CHUNK_ELEMENTS`, and the
    chunks' sums added from the first to the last. Not BLAS: its bits change with threads.
    """
    flat = array.reshape(-1)
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
    """The gradient's Euclidean norm from `square_sum` of each block, added in block order."""
    total = 0.0
    for block in square_sums:
        total += block
    return math.sqrt(total)


def clip_factor(clip_norm: float | None, gradient_norm: float) -> float:
    """What brings the norm down to `clip_norm`, at most 1; torch.nn.utils.clip_grad_norm_'s."""
    if clip_norm is None:
        return 1.0
    return min(1.0, clip_norm / (gradient_norm + 1e-6))


def average(sums: Array, total_weight: float, out: Array) -> None:
    """Turn gradient sums into averages, written to `out` (which may be `sums`).

    A multiplication by the reciprocal, taken in float64 and rounded to float32. A step without
    any weight (no sample, no token) has a gradient of zero. What is absent stays absent.
    """
    assert math.isfinite(total_weight)
    assert total_weight >= 0
    if total_weight == 0:
        keep_absent(sums, out)
        return
    with np.errstate(all="ignore"):
        np.multiply(sums, np.float32(1.0 / total_weight), out=out)


def _rounded(value: float) -> float:
    """The nearest float32; out of range it is infinite, which validation refuses.

    As `np.float32(value)` does, in a tenth of its time: every commit that is read has twelve.
    """
    try:
        (nearest,) = _FLOAT32.unpack(_FLOAT32.pack(value))
    except OverflowError:
        return math.copysign(math.inf, value)
    return float(nearest)
