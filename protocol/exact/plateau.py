"""The schedule plateau: the rate falls whenever an evaluation metric stops improving. Pure.

The schedule is torch's ReduceLROnPlateau. The factor of a step follows from the evaluations of
states up to that step, so a restart changes nothing and an audit can repeat the decisions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from protocol.spec.sections.optimizer import OptimizerSpec, PlateauSpec

_MIN_RATE_CHANGE: Final = 1e-8
"""The rate does not fall by a smaller amount, as in torch (`eps`)."""


class Plateau:
    """Derives the factor of the learning rate from evaluations.

    Args:
        spec: The optimizer; the factor is 1 unless its schedule is plateau.
        earlier: Metrics from before a restart, by step.
    """

    def __init__(self, spec: OptimizerSpec, earlier: Mapping[int, Mapping[str, float]]) -> None:
        self._spec = spec
        self._values: dict[int, float] = {}
        for step, metrics in earlier.items():
            self.add_evaluation(step, metrics)

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics after `step` steps; they replace earlier metrics of the same step."""
        plateau = self._spec.plateau
        if plateau is not None and plateau.metric in metrics:
            self._values[step] = metrics[plateau.metric]

    def factor_at(self, step: int) -> float:
        """Return the factor of the rate of step number `step`, from evaluations up to that step."""
        plateau = self._spec.plateau
        if plateau is None:
            return 1.0
        factor, best, bad_evaluations, cooldown = 1.0, math.nan, 0, 0
        for _, value in sorted(item for item in self._values.items() if item[0] <= step):
            if _is_better(plateau, value, best):
                best, bad_evaluations = value, 0
            else:
                bad_evaluations += 1
            if cooldown:
                cooldown, bad_evaluations = cooldown - 1, 0
            if bad_evaluations > plateau.patience:
                factor, cooldown, bad_evaluations = self._lower(factor), plateau.cooldown, 0
        return factor

    def _lower(self, factor: float) -> float:
        assert self._spec.plateau is not None
        lower = max(factor * self._spec.plateau.factor, self._spec.min_lr_ratio)
        return lower if self._spec.lr * (factor - lower) > _MIN_RATE_CHANGE else factor


def _is_better(plateau: PlateauSpec, value: float, best: float) -> bool:
    """Return whether a value is better than `best`, which is NaN before the first evaluation."""
    if math.isnan(best):
        return not math.isnan(value)
    sign = 1.0 if plateau.better == "higher" else -1.0
    threshold = plateau.threshold
    if plateau.threshold_mode == "rel":
        return value > best * (1.0 + threshold) if sign > 0 else value < best * (1.0 - threshold)
    return sign * value > sign * best + threshold
