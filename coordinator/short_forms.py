"""A run spec from the few options of a one-line command.

`coordinator --task classify --model DIR --data train.jsonl --num-classes 2` is a whole job; with
`--run RUN.yaml` the same options override that file's keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from protocol.base.errors import UsageError
from protocol.spec.run_spec import RunSpec, parse_run_spec
from protocol.spec.run_spec_file import load_run_spec

DEFAULT_STEPS = 100


@dataclass(frozen=True, slots=True)
class ShortForms:
    """The options that stand for keys of a run spec; None where not given."""

    task: str | None = None
    model: str | None = None
    data: str | None = None
    num_classes: int | None = None
    steps: int | None = None
    epochs: int | None = None

    def overrides(self) -> list[str]:
        """The options as `--set` would have them."""
        keys = {
            "task": self.task,
            "model.source": self.model,
            "data.train": self.data,
            "data.num_classes": self.num_classes,
            "steps": self.steps,
            "epochs": self.epochs,
        }
        told = [f"{key}={_yaml(value)}" for key, value in keys.items() if value is not None]
        # One of them takes the place of the other in a file.
        if self.steps is not None and self.epochs is None:
            told.append("epochs=null")
        return [*told, "steps=null"] if self.epochs is not None and self.steps is None else told


def run_spec_from(run: Path | None, short: ShortForms, overrides: list[str]) -> RunSpec | None:
    """The run that the command line asks for; None if it asks for none.

    Raises:
        UsageError: A short form without a task or a run spec.
        RunSpecError: The run spec is not valid.
    """
    every = [*short.overrides(), *overrides]
    if run is not None and short.task is not None:
        raise UsageError(
            f"expected --run {run} or --task {short.task}, got both: the run spec says the task"
        )
    if run is not None:
        return load_run_spec(run, every)
    if short.task is None:
        if every:
            raise UsageError("expected --run RUN.yaml or --task beside the options of a run")
        return None
    document: dict[str, object] = {"name": _name_of(short.task)}
    if not any(each.startswith(("steps=", "epochs=")) for each in every):
        document["steps"] = DEFAULT_STEPS
    return parse_run_spec(document, every, origin="the command line")


def _name_of(task: str) -> str:
    """The task's, or of a task of one's own the class's, as far as it can name a directory."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", task.rpartition(":")[2])
    return name.strip("_.-")[:54] or "run"


def _yaml(value: str | int) -> str:
    """A value that YAML reads as it is, whatever characters a path may have."""
    return f"'{value.replace(chr(39), chr(39) * 2)}'" if isinstance(value, str) else str(value)
