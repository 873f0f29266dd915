"""The run in a directory that `fit` is asked to resume."""

from __future__ import annotations

import ast
import itertools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from blake3 import blake3

from protocol.base.errors import MessageError, Mismatch
from protocol.base.regular_file import read_json
from protocol.exact.schedule import learning_rate
from protocol.spec.run_spec import RunSpec, parse_run_spec_bytes
from protocol.spec.spec_changes import changes_between, may_change, refused_change
from samestep.arguments import EDITED
from samestep.script import MODULES, Script


@dataclass(frozen=True, slots=True)
class ExistingRun:
    """A run that was started before.

    Attributes:
        directory: Its directory.
        spec: Its run spec.
        is_finished: Whether it has finished.
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
        return cls(directory, spec, _outcome(directory) == "finished")

    @property
    def call(self) -> int | None:
        """The number of its `fit` within the script, counted from 1."""
        number = (self.spec.options.get("script") or {}).get("call")
        return number if isinstance(number, int) else None

    @property
    def script_file(self) -> str:
        """The script of its `fit`, which is in its directory; empty without one."""
        return "" if self.spec.data is None else self.spec.data.train

    def script_for(self, script: Script, *, may_be_edited: bool) -> Script | None:
        """Return the script of the run, which an edited one stands for; None if it was not edited.

        Args:
            script: The script that resumes the run.
            may_be_edited: Whether the user says that the edit changes nothing that is trained.

        Raises:
            Mismatch: It does something else; shows the first line that differs.
        """
        identity = self.spec.options.get("script") or {}
        first = str(identity.get("digest") or "")
        if not first or script.path is None or identity.get("name") != script.name:
            return None
        if may_be_edited:
            modules = _manifest_digests(self.directory).get(MODULES, "")
            return replace(script, digest=first, first_modules=modules)
        if script.digest == first:
            return None
        self._require_script_file()
        before, now = _text_of(Path(self.script_file)), _text_of(script.path)
        is_known = blake3(before.encode()).hexdigest() == first
        if is_known and _is_same_code(before, now):
            return replace(script, digest=first)
        what = _first_difference(before, now) if is_known else "its content differs"
        restored = f"restore it with cp {self.script_file} {script.path}, " if is_known else ""
        raise Mismatch(
            f"resume: expected the script of the run in {str(self.directory)!r}, got one that was "
            f'edited: {what}; {restored}write resume="{EDITED}" if nothing that is trained '
            "changes, or use another directory"
        )

    def _require_script_file(self) -> None:
        if self.script_file and not Path(self.script_file).is_file():
            raise Mismatch(
                f"resume: expected the run's script at {self.script_file}, got no such file: move "
                "the run's directory back, put the script back, or use another directory"
            )

    def check(self, spec: RunSpec) -> tuple[str, ...]:
        """Check that this run may be resumed with a run spec.

        Returns:
            Each change, as `steps: 10 -> 20`.

        Raises:
            Mismatch: It may not; the message names the differences.
        """
        if spec == self.spec:
            return ()
        if not refused_change(self.spec, spec):
            return tuple(changes_between(self.spec, spec))
        old_settings, new_settings = _flat(self.spec), _flat(spec)
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
            _change(key, old_settings.get(key), new_settings.get(key)) for key in shown_keys
        )
        remedy = "use the same arguments"
        if "script" in changed_keys:
            remedy = "use the same script (it can read what changes, such as steps, from sys.argv)"
        raise Mismatch(
            f"resume: expected the arguments of the run in {str(self.directory)!r}, got another "
            f"{changes}; {remedy}, or another directory"
        )

    def other_rates(self, spec: RunSpec, epoch_samples: int) -> int:
        """Return the first step of this run whose learning rate another run spec changes; 0 if
        none.

        Args:
            spec: The other run spec.
            epoch_samples: How many samples an epoch has.
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


def _manifest_digests(directory: Path) -> dict[str, str]:
    try:
        return dict(read_json(directory / "manifest.json")["digests"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, ValueError):
        return ""


def _is_same_code(one: str, other: str) -> bool:
    """Whether two scripts differ in comments and layout alone."""
    try:
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    except SyntaxError:
        return False


def _first_difference(before: str, now: str) -> str:
    """The first line that differs, such as `line 3 was 'lr = 1', is 'lr = 2'`."""
    lines = itertools.zip_longest(before.splitlines(), now.splitlines(), fillvalue="")
    number, (old, new) = next((n, each) for n, each in enumerate(lines, 1) if each[0] != each[1])
    return f"line {number} was {old.strip()[:80]!r}, is {new.strip()[:80]!r}"


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
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    return flat


def _change(key: str, old_value: object, new_value: object) -> str:
    if key in {"script", "options"}:
        return key
    return f"{key} ({old_value!r}, now {new_value!r})"
