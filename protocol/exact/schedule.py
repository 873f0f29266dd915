"""The learning rate and the loss scale of a step.

The coordinator computes the learning rate in float64 and sends it to workers.

With w = warmup_steps and n = steps, both counted from the first step (step 0):

    step <  w    lr * ((step + 1) / w)                full at step w - 1, never zero
                 lr * (step / w)                      with warmup_from_zero, as in transformers
    step >= w    lr * f(t),  t = min(1, (step - w) / max(1, n - w))

    constant     f(t) = 1
    linear       f(t) = 1 - t
    cosine       f(t) = (1 + cos(pi t)) / 2           Loshchilov and Hutter, arXiv:1608.03983
    wsd          f = 1 before the last d = max(1, round(decay_ratio n)) steps, or all after the
                 warmup if those are fewer; then t = (step - (n - d)) / d, and f(t) is as above
                 by `decay`, or 1-sqrt: 1 - sqrt(t)   Hu et al., arXiv:2404.06395; Haegele et al.,
                                                      arXiv:2405.18392

    polynomial   f(t) = (1 - t)^power                 transformers
    cosine-restarts  f(t) = (1 + cos(pi (cycles t mod 1))) / 2; 0 from t = 1    transformers, after
                                                      Loshchilov and Hutter
    inverse-sqrt f = sqrt(k / (step - w + k)), k = w, or 10,000 without warmup  transformers, after
                                                      Vaswani et al., arXiv:1706.03762

With m = min_lr_ratio the factor is m + (1 - m) f. For four other schedules this is the factor:

    onecycle     torch's OneCycleLR (Smith and Topin, arXiv:1708.07120): rises from start_lr_ratio
                 to 1 in the first rise_ratio n steps, falls to m at the last step, along a cosine;
                 the momentum does not cycle
    piecewise    gamma^k, k = number of milestones up to step          torch's MultiStepLR
    rates        entry number step // rates_every, or the last entry
    plateau      1; the coordinator lowers the rate after evaluations (`protocol.exact.plateau`)

The rate of the last step is not zero: linear ends at lr / (n - w). `step` includes skipped steps: a
skip advances the schedule, so a run has the same length with and without skips.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Final

from protocol.base import limits
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.optimizer import OptimizerSpec

_DEFAULT_SQRT_STEPS: Final = 10_000
"""k of inverse-sqrt without warmup."""


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """Return the learning rate at `step` (from 0) of `steps`; see the module's docstring."""
    assert step >= 0
    warmup = spec.warmup_steps
    if step < warmup:
        return spec.lr * ((step if spec.warmup_from_zero else step + 1) / warmup)
    match spec.schedule:
        case "constant" | "plateau":
            return spec.lr
        case "onecycle":
            return spec.lr * _one_cycle(spec, step, steps)
        case "piecewise":
            return spec.lr * spec.gamma ** bisect_right(spec.milestones, step)
        case "rates":
            return spec.lr * spec.rates[min(step // spec.rates_every, len(spec.rates) - 1)]
        case "inverse-sqrt":
            scale = warmup or _DEFAULT_SQRT_STEPS
            return spec.lr * math.sqrt(scale / (step - warmup + scale))
    falling, shape = steps - warmup, "linear"
    if spec.schedule == "wsd":
        falling = min(falling, max(1, round(spec.decay_ratio * steps)))
        shape = spec.decay
    elif spec.schedule != "linear":
        shape = spec.schedule
    t = min(1.0, max(0, step - (steps - falling)) / max(1, falling))
    share = _share(spec, shape, t)
    if spec.min_lr_ratio:
        return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * share)
    return spec.lr * share


def _share(spec: OptimizerSpec, shape: str, t: float) -> float:
    match shape:
        case "polynomial":
            return math.pow(1.0 - t, spec.power)
        case "cosine-restarts":
            return 0.0 if t >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * (spec.cycles * t % 1.0)))
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * t))
        case "1-sqrt":
            return 1.0 - math.sqrt(t)
        case _:
            return 1.0 - t


def _one_cycle(spec: OptimizerSpec, step: int, steps: int) -> float:
    top, last = spec.rise_ratio * steps - 1, steps - 1
    if step < top:
        start, end, share = spec.start_lr_ratio, 1.0, step / top
    else:
        start, end, share = 1.0, spec.min_lr_ratio, min(1.0, (step - top) / (last - top))
    return end + (start - end) / 2 * (1.0 + math.cos(math.pi * share))


MIN_LOSS_SCALE: Final = 1.0
"""The smallest loss scale: at this scale, a non-finite value is the model's own."""


def scales_loss(spec: RunSpec) -> bool:
    """Return whether the run scales its loss; it does if it computes in float16."""
    return spec.model is not None and spec.model.precision == "float16"


def initial_loss_scale(spec: RunSpec) -> float:
    """Return the loss scale of step 0; 1 if the run does not scale its loss."""
    return spec.model.loss_scale if spec.model is not None and scales_loss(spec) else MIN_LOSS_SCALE


def next_loss_scale(spec: RunSpec, scale: float, step: int) -> float:
    """Return the loss scale of step number `step`, from the scale of the preceding step.

    The scale starts at `model.loss_scale` and doubles every `model.loss_scale_every` steps. A step
    whose gradients overflow is repeated with half the scale, down to 1. Scales are powers of two,
    so that multiplying and dividing by them changes no bit unless a value over- or underflows.
    Based on Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740, where a batch
    that overflows is skipped.
    """
    if spec.model is None or not scales_loss(spec) or step % spec.model.loss_scale_every:
        return scale
    return min(2.0 * scale, limits.LOSS_SCALE_FACTOR)
