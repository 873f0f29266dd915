"""The result of `fit`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

OnLog = Callable[[Mapping[str, float]], object]
"""Called with each new row of the history."""


@dataclass(frozen=True, slots=True)
class FitResult:
    """The result of a finished or interrupted run.

    Attributes:
        module: The module that `build` made, trained, on the CPU, in evaluation mode.
        history: A row for each step: `step`, `loss`, `learning_rate`, `grad_norm` (before
            clipping), and after an evaluation its metrics as `held_out_...`. If `joined`, only
            the steps in which this process took part, without `grad_norm` and evaluations.
        metrics: Evaluation metrics at the end, by name.
        digest: Digest of the trained tensors, 64 hex digits: the same on every machine.
        steps: Number of steps taken.
        outcome: `finished`, or `drained` if the run was interrupted: `fit(resume=True,
            directory=...)` resumes it.
        directory: The run's directory, with checkpoints, journal and the trained tensors; None if
            `joined`.
        joined: Whether this process has no access to the run's directory: it joined a run that
            another process started, or submitted the run to a coordinator on another machine.
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
    """Read losses and evaluation metrics by step from a journal; a repeated step counts once."""
    rows: dict[int, dict[str, float]] = {}
    for line in (directory / "journal.jsonl").read_text(encoding="utf-8").splitlines():
        row = row_of_record(json.loads(line)["record"])
        if row is None:
            continue
        step = int(row["step"])
        if "loss" in row:
            rows[step] = row
        elif step in rows:
            rows[step] |= row
    return tuple(rows[step] for step in sorted(rows))


def row_of_record(record: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the row that a record of the journal adds to the history; None for most records."""
    match record.get("kind"):
        case "commit":
            row: dict[str, float] = {"step": record["step"] + 1, "loss": _number(record["loss"])}
            scalars = {"learning_rate": record.get("rate"), "grad_norm": record.get("norm")}
            return row | {name: value for name, value in scalars.items() if value is not None}
        case "evaluation":
            metrics = record["metrics"].items()
            values = {f"held_out_{name}": _number(value) for name, value in metrics}
            return {"step": record["step"], **values}
    return None


def _number(value: float | None) -> float:
    """Return NaN for null, which stands for a non-finite value in the journal."""
    return math.nan if value is None else value
