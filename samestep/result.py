"""What `fit` gives back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class FitResult:
    """A run that is over.

    Attributes:
        module: The module that `build` made, trained, on the CPU, in evaluation mode.
        history: A row for each step: `step`, `loss`, `learning_rate` and `grad_norm` (before it is
            cut; a worker that joined is not told), and the held-out figures after it where they
            were measured, as `held_out_...`.
        metrics: The held-out figures at the end, by name.
        digest: Of the trained tensors, 64 hex digits: the same on every machine.
        steps: How many were taken.
        outcome: `finished`, or `drained` if it was interrupted; `fit(resume=True, directory=...)`
            goes on with that.
        directory: The run's, with checkpoints, journal and the trained tensors; None on a worker
            that joined.
        joined: Whether this process joined a run that another one started.
    """

    module: nn.Module
    history: tuple[Mapping[str, float], ...]
    metrics: Mapping[str, float]
    digest: str
    steps: int
    outcome: str
    directory: Path | None
    joined: bool


def read_history(directory: Path) -> tuple[Mapping[str, float], ...]:
    """Losses and held-out figures by step, from a journal; what was done again counts once."""
    rows: dict[int, dict[str, float]] = {}
    for line in (directory / "journal.jsonl").read_text(encoding="utf-8").splitlines():
        document: dict[str, Any] = json.loads(line)["record"]
        step = document.get("step")
        if document.get("kind") == "commit" and isinstance(step, int):
            loss = document["loss"]
            rows[step + 1] = {"step": step + 1, "loss": float("nan") if loss is None else loss}
            told = {"learning_rate": document.get("rate"), "grad_norm": document.get("norm")}
            rows[step + 1] |= {name: value for name, value in told.items() if value is not None}
        if document.get("kind") == "evaluation" and step in rows:
            rows[step] |= {
                f"held_out_{name}": float("nan") if value is None else value
                for name, value in document["metrics"].items()
            }
    return tuple(rows[step] for step in sorted(rows))
