"""The run in a directory that `fit` is asked to resume."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from protocol.base.errors import MessageError, Mismatch
from protocol.base.regular_file import read_json
from protocol.exact.schedule import learning_rate
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes
from protocol.spec.spec_changes import changes_between, refused_change


@dataclass(frozen=True, slots=True)
class ExistingRun:
    """A run that was started before.

    Attributes:
        directory: Its directory.
        spec: Its run spec.
        finished: Whether it has finished.
    """

    directory: Path
    spec: RunSpec
    finished: bool

    @classmethod
    def find(cls, directory: Path) -> Self | None:
        """Read the run in a directory; None if it is unreadable: the coordinator reports why."""
        try:
            document = read_json(directory / "run.json")
            spec = parse_run_spec_bytes(json.dumps(document["spec"]).encode())
        except (OSError, ValueError, KeyError, TypeError, MessageError):
            return None
        return cls(directory, spec, _outcome(directory) == "finished")

    @property
    def call(self) -> int | None:
        """The number of its `fit` within the script, counted from 1."""
        number = (self.spec.options.get("script") or {}).get("call")
        return number if isinstance(number, int) else None

    def check(self, spec: RunSpec) -> tuple[str, ...]:
        """Check that a run spec is this run's, or one that a resumed run may change to.

        Returns:
            Each change, as `steps: 10 -> 20`.

        Raises:
            Mismatch: It is not; names what differs.
        """
        if spec == self.spec:
            return ()
        if not refused_change(self.spec, spec):
            return tuple(changes_between(self.spec, spec))
        before, now = _flat(self.spec), _flat(spec)
        differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        changes = ", ".join(_change(key, before.get(key), now.get(key)) for key in differing[:3])
        remedy = "use the same arguments"
        if "script" in differing:
            remedy = "use the same script (it can read what changes, such as steps, from sys.argv)"
        raise Mismatch(
            f"resume: expected the arguments of the run in {str(self.directory)!r}, got another "
            f"{changes}; {remedy}, or another directory"
        )

    def other_rates(self, spec: RunSpec, epoch_samples: int) -> int:
        """The first step of this run whose learning rate another run spec changes; 0 if none.

        Args:
            spec: The other run spec.
            epoch_samples: How many samples an epoch has.
        """
        steps, now = (each.steps_with(epoch_samples) for each in (self.spec, spec))
        before, after = self.spec.optimizer, spec.optimizer
        for step in range(min(steps, now)):
            if learning_rate(before, step, steps) != learning_rate(after, step, now):
                return step + 1
        return 0


def _outcome(directory: Path) -> object:
    try:
        return read_json(directory / "result.json")["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _flat(spec: RunSpec) -> dict[str, Any]:
    """All settings by the name they have in `fit`, with a section's keys as `section.key`."""
    document = spec.model_dump(mode="json")
    options = document.pop("options", {})
    document |= {"script": options.get("script"), "options": options.get("options")}
    document["precision"] = options.get("precision")
    document.pop("data", None)  # the script's path: its content is compared by digest
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and key not in {"script", "options"}:
            flat |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat


def _change(key: str, before: object, now: object) -> str:
    if key in {"script", "options"}:
        return key
    return f"{key} ({before!r}, now {now!r})"
