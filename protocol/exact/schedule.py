"""The learning rate of a step. Computed by the coordinator alone, in float64, and shipped.

With w = warmup_steps and n = steps, both counted from the first step (step 0):

    step <  w    lr * ((step + 1) / w)                full at step w - 1, never zero
                 lr * (step / w)                      with warmup_from_zero, as transformers has it
    step >= w    lr * f(t),  t = min(1, (step - w) / max(1, n - w))

    constant     f(t) = 1
    linear       f(t) = 1 - t
    cosine       f(t) = (1 + cos(pi t)) / 2           Loshchilov and Hutter, arXiv:1608.03983

So the last step still moves: linear ends at lr / (n - w). `step` counts steps that were skipped
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
    t = min(1.0, (step - warmup) / max(1, steps - warmup))
    match spec.schedule:
        case "constant":
            return spec.lr
        case "linear":
            return spec.lr * (1.0 - t)
        case "cosine":
            return spec.lr * 0.5 * (1.0 + math.cos(math.pi * t))
