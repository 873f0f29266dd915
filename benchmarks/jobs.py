"""The jobs of deploy/runs, shortened for measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

_RUNS: Final = Path(__file__).parents[1] / "deploy" / "runs"


def short_job(name: str, steps: int) -> dict[str, Any]:
    """Return a run spec of deploy/runs with another number of steps and a tiny evaluation.

    The schedule of the learning rate fits this number of steps.
    """
    document: dict[str, Any] = yaml.safe_load((_RUNS / f"{name}.yaml").read_text(encoding="utf-8"))
    document |= {"steps": steps, "evaluate_every": 0}
    if "data" in document:
        document["data"]["holdout_samples"] = 1
    return document
