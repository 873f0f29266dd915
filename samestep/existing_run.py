"""The run in a directory that `fit` is asked to resume."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from blake3 import blake3

from protocol.base.errors import DataError, MessageError, Mismatch
from protocol.base.regular_file import read_json
from protocol.exact.schedule import learning_rate
from protocol.spec.cross_check import CrossCheck
from protocol.spec.manifest import SCRIPT_DIRECTORY, Manifest
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes
from protocol.spec.spec_changes import changes_between, may_change, refused_change
from samestep.arguments import EDITED
from samestep.code_difference import first_difference
from samestep.script import MODULES, Script

_UNKNOWN: Final = "its content differs"


@dataclass(frozen=True, slots=True)
class ExistingRun:
    """A run whose directory exists already.

    Attributes:
        directory: The run's directory.
        spec: The run spec.
        is_finished: Whether the run has finished.
    """

    directory: Path
    spec: RunSpec
    is_finished: bool

    @classmethod
    def find(cls, directory: Path) -> Self | None:
        """Read the run in a directory; None if it is unreadable: the coordinator reports why."""
        try:
            document = read_json(directory / "run.json")
            spec = parse_run_spec_bytes(json.dumps(document["spec"]).encode())
        except (OSError, ValueError, KeyError, TypeError, MessageError):
            return None
        return cls(directory, spec, _read_outcome(directory) == "finished")

    @property
    def call(self) -> int | None:
        """The number of the run's `fit` within the script, counted from 1."""
        number = self._identity.get("call")
        return number if isinstance(number, int) else None

    @property
    def _identity(self) -> Mapping[str, Any]:
        """Name, digest and call of the script that began the run."""
        return self.spec.options.get("script") or {}

    @property
    def script_file(self) -> str:
        """The run's copy of its script; empty without one.

        A run's directory may have been moved since the run began: a copy in it with the script's
        digest is the run's script too.
        """
        if self.spec.data is None:
            return ""
        path = Path(self.spec.data.train)
        moved = self.directory.resolve() / SCRIPT_DIRECTORY / path.name
        if not path.is_file() and _digest_of(moved) == self._identity.get("digest"):
            return str(moved)
        return str(path)

    def script_for(self, script: Script, *, may_be_edited: bool) -> Script | None:
        """Return the identity of the run's script, if this script is an edited version of it.

        Args:
            script: The script that resumes the run.
            may_be_edited: Whether `resume="edited"` accepts any edit.

        Returns:
            This script with the digest of the run's script; None if this is another script, or is
            unchanged and `may_be_edited` is false.

        Raises:
            Mismatch: The edit changes code; shows the first difference.
        """
        first = str(self._identity.get("digest") or "")
        if not first or script.path is None or self._identity.get("name") != script.name:
            return None
        if may_be_edited:
            modules, cross_check = self._digests.get(MODULES, ""), self._cross_check
            return replace(
                script, digest=first, first_modules=modules, first_cross_check=cross_check
            )
        if script.digest == first:
            return None
        self._require_script_file()
        difference = self._edit_of(script)
        if difference == "":
            return replace(script, digest=first)
        restored = ""
        if difference is not None:
            restored = f"restore it with cp {self.script_file} {script.path}, "
        raise Mismatch(
            f"resume: expected the script of the run in {str(self.directory)!r}, got one that was "
            f'edited: {difference or _UNKNOWN}; {restored}write resume="{EDITED}" if nothing that '
            "is trained changes, or use another directory"
        )

    def accepted_edit(self, script: Script, cross_check: CrossCheck) -> str:
        """Describe the edit that `resume="edited"` accepts unchecked; empty if there is none.

        Args:
            script: The script that resumes the run. It has imported its modules.
            cross_check: What its task reads and computes now.
        """
        differences = []
        if script.digest != self._identity.get("digest"):
            difference = self._edit_of(script)
            differences += [] if difference == "" else [f"its script: {difference or _UNKNOWN}"]
        if script.modules_digest() != self._digests.get(MODULES, ""):
            differences.append("the modules beside its script")
        first_check = self._cross_check
        if first_check is not None and (changed := first_check.find_difference(cross_check)):
            name, expected, value = changed
            differences.append(f"{name} ({expected}, now {value})")
        if not differences:
            return ""
        return (
            f"the run in {str(self.directory)!r} continues with an edit of "
            f"{', and of '.join(differences)}; that it changes nothing that is trained is your "
            "word, samestep compares only the gradients at the initial weights"
        )

    def _edit_of(self, script: Script) -> str | None:
        """Describe how a script's code differs from the run's; None if that is unknown."""
        before = _read_text(Path(self.script_file))
        if script.path is None or blake3(before.encode()).hexdigest() != self._identity["digest"]:
            return None
        return first_difference(before, _read_text(script.path))

    def _require_script_file(self) -> None:
        if self.script_file and not Path(self.script_file).is_file():
            raise Mismatch(
                f"resume: expected the run's script at {self.script_file} or in "
                f"{str(self.directory / SCRIPT_DIRECTORY)!r}, got no such file: put the script "
                "back, or use another directory"
            )

    def check_inputs(self, manifest: Manifest) -> None:
        """Check that model and data are those that the run began with.

        Raises:
            Mismatch: They differ; the message names the inputs.
        """
        stored = _manifest_in(self.directory)
        if stored is None:
            return
        names = stored.differences(manifest)
        if not names:
            self._check_cross_check(manifest)
            return
        remedy = "restore what was changed"
        if names == [MODULES]:
            remedy = f'restore them, write resume="{EDITED}" if nothing that is trained changes'
        raise Mismatch(
            f"resume: expected the {' and '.join(names)} that the run in {str(self.directory)!r} "
            f"began with, got others: {remedy}, or use another directory"
        )

    def _check_cross_check(self, manifest: Manifest) -> None:
        if self._cross_check is None:
            return
        origin = f"when the run in {str(self.directory)!r} started"
        if difference := self._cross_check.describe_difference(manifest.cross_check, origin):
            raise Mismatch(
                f'resume: {difference}; write resume="{EDITED}" if you mean to change it'
            )

    def numerics_profiles(self) -> frozenset[str]:
        """Return the numerics profiles of all workers that have computed a step of this run."""
        try:
            return frozenset(map(str, read_json(self.directory / "terms.json")["signatures"]))
        except (OSError, ValueError, KeyError, TypeError):
            return frozenset()

    @property
    def _cross_check(self) -> CrossCheck | None:
        stored = _manifest_in(self.directory)
        return None if stored is None else stored.cross_check

    @property
    def _digests(self) -> Mapping[str, str]:
        stored = _manifest_in(self.directory)
        return {} if stored is None else stored.digests

    def check(self, spec: RunSpec) -> tuple[str, ...]:
        """Check that this run may be resumed with a run spec.

        Returns:
            Each change, as `steps: 10 -> 20`.

        Raises:
            Mismatch: The run may not be resumed; the message names the differences.
        """
        if spec == self.spec:
            return ()
        if not refused_change(self.spec, spec):
            return tuple(changes_between(self.spec, spec))
        old_settings, new_settings = _flatten_settings(self.spec), _flatten_settings(spec)
        changed_keys = [
            key
            for key in {**old_settings, **new_settings}
            if old_settings.get(key) != new_settings.get(key)
        ]
        refused_keys = [key for key in changed_keys if not may_change(key)]
        if not refused_keys:
            self._require_script_file()
        shown_keys = (refused_keys or changed_keys)[:3]
        changes = ", ".join(
            _describe_change(key, old_settings.get(key), new_settings.get(key))
            for key in shown_keys
        )
        remedy = "use the same arguments"
        if "script" in changed_keys:
            remedy = "use the same script (it can read what changes, such as steps, from sys.argv)"
        raise Mismatch(
            f"resume: expected the arguments of the run in {str(self.directory)!r}, got another "
            f"{changes}; {remedy}, or another directory"
        )

    def first_changed_rate(self, spec: RunSpec, epoch_samples: int) -> int:
        """Return the first step of this run whose learning rate another run spec changes.

        Steps count from 1; 0 if there is no such step.

        Args:
            spec: The other run spec.
            epoch_samples: Number of samples in an epoch.
        """
        old_steps, new_steps = (
            run_spec.steps_with(epoch_samples) for run_spec in (self.spec, spec)
        )
        old_optimizer, new_optimizer = self.spec.optimizer, spec.optimizer
        for step in range(min(old_steps, new_steps)):
            if learning_rate(old_optimizer, step, old_steps) != learning_rate(
                new_optimizer, step, new_steps
            ):
                return step + 1
        return 0


def _manifest_in(directory: Path) -> Manifest | None:
    """Read a run's manifest; None if it is unreadable: the coordinator reports why."""
    try:
        return Manifest.from_bytes((directory / "manifest.json").read_bytes())
    except (OSError, MessageError):
        return None


def _digest_of(path: Path) -> str:
    try:
        return Script.at(path).digest
    except DataError:
        return ""


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError):
        return ""


def _read_outcome(directory: Path) -> object:
    try:
        return read_json(directory / "result.json")["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _flatten_settings(spec: RunSpec) -> dict[str, Any]:
    """Return all settings by their names in `fit`, with a section's keys as `section.key`."""
    document = spec.model_dump(mode="json")
    options = document.pop("options", {})
    document |= {"script": options.get("script"), "options": options.get("options")}
    document["precision"] = options.get("precision")
    document.pop("data", None)  # the script's path: its content is compared by digest
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, dict) and key not in {"script", "options"}:
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    return flat


def _describe_change(key: str, old_value: object, new_value: object) -> str:
    if key in {"script", "options"}:
        return key
    return f"{key} ({old_value!r}, now {new_value!r})"
