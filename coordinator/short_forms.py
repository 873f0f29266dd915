"""Make a run spec from the few options of a one-line command.

`coordinator --task classify --model DIR --data train.jsonl --num-classes 2` is a whole job; with
`--run RUN.yaml` the same options override that file's keys.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.base.errors import UsageError
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.run_spec import RunSpec, parse_run_spec

_LOG: Final = logging.getLogger(__name__)

DEFAULT_STEPS = 100


@dataclass(frozen=True, slots=True)
class ShortForms:
    """Options that stand for keys of a run spec; None if an option is absent."""

    task: str | None = None
    model: str | None = None
    data: str | None = None
    num_classes: int | None = None
    steps: int | None = None
    epochs: int | None = None

    def overrides(self) -> list[str]:
        """Return the options as `--set` overrides."""
        keys = {
            "task": self.task,
            "model.source": self.model,
            "data.train": self.data,
            "data.num_classes": self.num_classes,
            "steps": self.steps,
            "epochs": self.epochs,
        }
        overrides = [f"{key}={_yaml(value)}" for key, value in keys.items() if value is not None]
        # An option replaces the other key of the file: a run spec has either steps or epochs.
        if self.steps is not None and self.epochs is None:
            overrides.append("epochs=null")
        return (
            [*overrides, "steps=null"]
            if self.epochs is not None and self.steps is None
            else overrides
        )


def run_spec_from(
    run: Path | None, short_forms: ShortForms, overrides: list[str]
) -> RunSpec | None:
    """Return the run spec of the command line; None if it names no run.

    Raises:
        UsageError: A short form without a task or a run spec.
        RunSpecError: The run spec is not valid.
    """
    all_overrides = [*short_forms.overrides(), *overrides]
    if run is not None and short_forms.task is not None:
        raise UsageError(
            f"expected --run {run} or --task {short_forms.task}, got both: the run spec sets the "
            "task"
        )
    if run is not None:
        return load_run_spec(run, all_overrides)
    if short_forms.task is None:
        if all_overrides:
            raise UsageError("expected --run RUN.yaml or --task with the options of a run")
        return None
    document: dict[str, object] = {"name": _name_of(short_forms.task)}
    if not any(override.startswith(("steps=", "epochs=")) for override in all_overrides):
        document["steps"] = DEFAULT_STEPS
    return parse_run_spec(document, all_overrides, "the command line", _LOG.warning)


def run_spec_or_changes(
    run: Path | None, short_forms: ShortForms, overrides: list[str], *, resume: bool
) -> tuple[RunSpec | None, tuple[str, ...]]:
    """Return the run spec of the command line, or the `key=value` pairs that change the run spec of
    the resumed run.

    Raises:
        UsageError: A short form without a task or a run spec.
        RunSpecError: The run spec is not valid.
    """
    if resume and run is None and short_forms.task is None:
        return None, (*short_forms.overrides(), *overrides)
    return run_spec_from(run, short_forms, overrides), ()


def _name_of(task: str) -> str:
    """Return a task's name, or that of a user's class, reduced to characters of a directory
    name."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", task.rpartition(":")[2])
    return name.strip("_.-")[:54] or "run"


def _yaml(value: str | int) -> str:
    """Quote a value so that YAML reads any path unchanged."""
    return f"'{value.replace(chr(39), chr(39) * 2)}'" if isinstance(value, str) else str(value)
