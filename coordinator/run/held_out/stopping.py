"""Whether a run stops early: by a figure on held-out data that gets no better. Pure.

It is decided from the figures of all evaluations so far, by step, so after a restart as before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from coordinator.run.outputs.restart import Figures
from protocol.spec.run_spec import StopSpec


class Stopping:
    """Follows one figure.

    Args:
        spec: Which one; None never stops.
        known: What was measured before a restart.
    """

    def __init__(self, spec: StopSpec | None, known: Figures) -> None:
        self._spec = spec
        self._figures: dict[int, float] = {}
        for step, figures in known.items():
            self._keep(step, figures)

    def measured(self, step: int, figures: Mapping[str, float]) -> str:
        """Take the figures after so many steps.

        Returns:
            Why the run stops; empty if it goes on.
        """
        if self._spec is None:
            return ""
        self._keep(step, figures)
        best, since = self._best()
        if since < self._spec.patience:
            return ""
        figure = self._figures.get(best, math.nan)
        return (
            f"stopped early: {self._spec.figure} was best after {best} steps ({figure:.6g}), and "
            f"no better in {since} evaluations since"
        )

    def is_best(self, step: int) -> bool:
        """Whether the state after so many steps is the best so far."""
        return self._spec is not None and bool(self._figures) and self._best()[0] == step

    def _keep(self, step: int, figures: Mapping[str, float]) -> None:
        if self._spec is not None and self._spec.figure in figures:
            self._figures[step] = figures[self._spec.figure]

    def _best(self) -> tuple[int, int]:
        """After which step, and how many evaluations there are since."""
        assert self._spec is not None
        sign = 1.0 if self._spec.better == "higher" else -1.0
        best, highest, since = 0, -math.inf, 0
        for step in sorted(self._figures):
            figure = sign * self._figures[step]
            if figure > highest + (self._spec.min_delta if highest > -math.inf else 0.0):
                best, highest, since = step, figure, 0
            else:
                since += 1
        return best, since
