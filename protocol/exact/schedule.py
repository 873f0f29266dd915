"""The learning rate of a step. Computed by the coordinator alone, in float64, and shipped.

With w = warmup_steps and n = steps, both counted from the first step (step 0):

    step <  w    lr * ((step + 1) / w)                full at step w - 1, never zero
                 lr * (step / w)                      with warmup_from_zero, as transformers has it
    step >= w    lr * f(t),  t = min(1, (step - w) / max(1, n - w))

    constant     f(t) = 1
    linear       f(t) = 1 - t
    cosine       f(t) = (1 + cos(pi t)) / 2           Loshchilov and Hutter, arXiv:1608.03983
    wsd          f = 1 before the last d = max(1, round(decay_ratio n)) steps, or those after the
                 warmup; from there on t = (step - (n - d)) / d, and f(t) as above by `decay`, or
                 1-sqrt: 1 - sqrt(t)                  Hu et al., arXiv:2404.06395; Haegele et al.,
                                                      arXiv:2405.18392

With m = min_lr_ratio it is m + (1 - m) f. So the last step still moves: linear ends at
lr / (n - w). `step` counts steps that were skipped
too: a skip advances the schedule, and a run's length is the same with and without skips.
"""

from __future__ import annotations

import math

from protocol.spec.run_spec import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int, steps: int) -> float:
    """The learning rate at `step` (from 0) of a run of `steps` steps; see the module's text."""
    assert step >= 0
    warmup = spec.warmup_steps
    if step < warmup:
        return spec.lr * ((step if spec.warmup_from_zero else step + 1) / warmup)
    if spec.schedule == "constant":
        return spec.lr
    falling, shape = steps - warmup, "linear"
    if spec.schedule == "wsd":
        falling = min(falling, max(1, round(spec.decay_ratio * steps)))
        shape = spec.decay
    elif spec.schedule == "cosine":
        shape = "cosine"
    t = min(1.0, max(0, step - (steps - falling)) / max(1, falling))
    if spec.min_lr_ratio:
        return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * _share(shape, t))
    return spec.lr * _share(shape, t)


def _share(shape: str, t: float) -> float:
    match shape:
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * t))
        case "1-sqrt":
            return 1.0 - math.sqrt(t)
        case _:
            return 1.0 - t
