"""The run that is in a directory already, when `fit` is to go on with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from protocol.base.errors import MessageError, Mismatch
from protocol.base.regular_file import read_json
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes


@dataclass(frozen=True, slots=True)
class KeptRun:
    """One that was begun.

    Attributes:
        finished: Whether nothing is left to be done.
    """

    directory: Path
    spec: RunSpec
    finished: bool

    @classmethod
    def find(cls, directory: Path) -> Self | None:
        """None where there is none that can be read: whoever reads it for the run will say why."""
        try:
            document = read_json(directory / "run.json")
            spec = parse_run_spec_bytes(json.dumps(document["spec"]).encode())
        except (OSError, ValueError, KeyError, TypeError, MessageError):
            return None
        return cls(directory, spec, _outcome(directory) == "finished")

    @property
    def call(self) -> int | None:
        """The how manieth fit of its script it is of."""
        number = (self.spec.options.get("script") or {}).get("call")
        return number if isinstance(number, int) else None

    def check(self, spec: RunSpec) -> None:
        """See that this is the run that is asked for.

        Raises:
            Mismatch: It is another one; what differs.
        """
        if spec == self.spec:
            return
        ours, theirs = _flat(self.spec), _flat(spec)
        differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        told = ", ".join(_told(key, ours.get(key), theirs.get(key)) for key in differing[:3])
        raise Mismatch(
            f"resume: expected the run in {str(self.directory)!r} as it was begun, got another "
            f"{told}; give what it was begun with, or another directory"
        )


def _outcome(directory: Path) -> object:
    try:
        return read_json(directory / "result.json")["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _flat(spec: RunSpec) -> dict[str, Any]:
    """By name as `fit` has it: a section's keys each by itself."""
    document = spec.model_dump(mode="json")
    options = document.pop("options", {})
    document |= {"script": options.get("script"), "options": options.get("options")}
    document["precision"] = options.get("precision")
    document.pop("data", None)  # where the script lies; what it holds is told by its digest
    found: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and key not in {"script", "options"}:
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found[key] = value
    return found


def _told(key: str, before: object, now: object) -> str:
    if key in {"script", "options"}:
        return key
    return f"{key} ({before!r}, now {now!r})"
