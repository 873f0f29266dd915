"""The schedule plateau: the rate falls whenever an evaluation metric stops improving. Pure.

It is torch's ReduceLROnPlateau, decided from the evaluations so far: the factor of a step follows
from those of states up to it, so a restart changes nothing and an audit can repeat it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from protocol.spec.sections.optimizer import OptimizerSpec, PlateauSpec

_LEAST_CHANGE: Final = 1e-8
"""Of the rate; a smaller one is left out, as in torch (`eps`)."""


class Plateau:
    """The factor of the learning rate by evaluations.

    Args:
        spec: The optimizer; its rate keeps the factor 1 unless its schedule is plateau.
        earlier: Metrics from before a restart.
    """

    def __init__(self, spec: OptimizerSpec, earlier: Mapping[int, Mapping[str, float]]) -> None:
        self._spec = spec
        self._values: dict[int, float] = {}
        for step, metrics in earlier.items():
            self.measured(step, metrics)

    def measured(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics after `step` steps, in place of earlier ones."""
        plateau = self._spec.plateau
        if plateau is not None and plateau.metric in metrics:
            self._values[step] = metrics[plateau.metric]

    def factor_at(self, step: int) -> float:
        """Return the factor of the rate of step number `step`, from evaluations up to it."""
        plateau = self._spec.plateau
        if plateau is None:
            return 1.0
        factor, best, bad_evaluations, cooldown = 1.0, math.nan, 0, 0
        for at in sorted(
            evaluated_step for evaluated_step in self._values if evaluated_step <= step
        ):
            value = self._values[at]
            if _is_better(plateau, value, best):
                best, bad_evaluations = value, 0
            else:
                bad_evaluations += 1
            if cooldown:
                cooldown, bad_evaluations = cooldown - 1, 0
            if bad_evaluations > plateau.patience:
                factor, cooldown, bad_evaluations = self._lowered(factor), plateau.cooldown, 0
        return factor

    def _lowered(self, factor: float) -> float:
        assert self._spec.plateau is not None
        lower = max(factor * self._spec.plateau.factor, self._spec.min_lr_ratio)
        return lower if self._spec.lr * (factor - lower) > _LEAST_CHANGE else factor


def _is_better(plateau: PlateauSpec, value: float, best: float) -> bool:
    """Whether a value is better than the best one, which is NaN before the first."""
    if math.isnan(best):
        return not math.isnan(value)
    sign = 1.0 if plateau.better == "higher" else -1.0
    threshold = plateau.threshold
    if plateau.threshold_mode == "rel":
        return value > best * (1.0 + threshold) if sign > 0 else value < best * (1.0 - threshold)
    return sign * value > sign * best + threshold
