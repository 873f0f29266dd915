"""The runs in this coordinator's directory, for the page's list; a file is reread when it
changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from coordinator.storage.directory.run_directory import RunDirectory
from protocol.base.regular_file import read_json
from protocol.spec.run_spec import known_steps

_MOST_RUNS: Final = 200
_METRICS: Final = 3
"""How many metrics are listed."""
_Stamp = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run; `result` has the listed fields of `result.json`, each None without that file."""

    run_id: str
    directory: Path
    task: str
    steps: int | None
    result: dict[str, Any]

    def document(self, changed_s: float) -> dict[str, Any]:
        """Return the run as the page lists it.

        Args:
            changed_s: When the run's journal last grew, in seconds since 1970.
        """
        losses = self.result.get("losses") or [None]
        evaluation = (self.result.get("eval") or {}).items()
        metrics = {k: v for k, v in evaluation if v is not None and not k.startswith("confusion[")}
        return {
            "run_id": self.run_id,
            "task": self.task,
            "steps": self.steps,
            "changed": datetime.fromtimestamp(changed_s, UTC).isoformat(timespec="seconds"),
            "outcome": self.result.get("outcome") or "",
            "step": self.result.get("steps"),
            "loss": losses[-1],
            "eval": dict([*metrics.items()][:_METRICS]),
            "exact": self.result.get("exact"),
        }


class RunList:
    """The runs of one coordinator.

    Args:
        top: The directory of runs.
        once: Whether `top` is the directory of a single run.
    """

    def __init__(self, top: Path, *, once: bool) -> None:
        self._top = top
        self._once = once
        self._cache: dict[Path, tuple[_Stamp, ListedRun]] = {}

    def read(self) -> list[tuple[ListedRun, float]]:
        """Return the runs, newest first, each with the time at which its journal last grew.

        Blocks while it reads files. Runs that cannot be read are excluded: the audit names their
        faults.
        """
        paths = {self._top} if self._once else {p.parent for p in self._top.glob("*/run.json")}
        # Several threads may call this: each replaces the cache as a whole.
        readings = {path: read for path in paths if (read := self._read(path)) is not None}
        self._cache = {path: (stamp, run) for path, (stamp, run, _) in readings.items()}
        runs = [(run, changed_s) for _, run, changed_s in readings.values()]
        return sorted(runs, key=lambda entry: (entry[1], entry[0].run_id), reverse=True)[
            :_MOST_RUNS
        ]

    def _read(self, path: Path) -> tuple[_Stamp, ListedRun, float] | None:
        directory, cached = RunDirectory(path), self._cache.get(path)
        try:
            stamp = _change_time(directory.run_file), _change_time(directory.result_file)
            run = (
                cached[1]
                if cached is not None and cached[0] == stamp
                else _read_listed_run(directory)
            )
            return stamp, run, directory.journal.stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def _change_time(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _read_listed_run(directory: RunDirectory) -> ListedRun:
    """Read a run written by any release: only the listed fields are parsed."""
    run = read_json(directory.run_file)
    result_file = directory.result_file
    result = read_json(result_file) if result_file.exists() else {}
    summary = {name: result.get(name) for name in ("outcome", "steps", "eval", "exact")}
    summary["losses"] = (result.get("losses") or [])[-1:]
    spec = run["spec"]
    steps = known_steps(spec.get("steps"))
    return ListedRun(str(run["run_id"]), directory.path, str(spec["task"]), steps, summary)
