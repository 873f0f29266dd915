"""The jobs of deploy/runs, cut short for measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

_RUNS: Final = Path(__file__).parents[1] / "deploy" / "runs"


def short(name: str, steps: int) -> dict[str, Any]:
    """The run spec of that name with so many steps, and next to nothing to evaluate at its end.

    The learning rate's schedule is that of a run of this length.
    """
    document: dict[str, Any] = yaml.safe_load((_RUNS / f"{name}.yaml").read_text(encoding="utf-8"))
    document |= {"steps": steps, "evaluate_every": 0}
    if "data" in document:
        document["data"]["holdout_samples"] = 1
    return document
