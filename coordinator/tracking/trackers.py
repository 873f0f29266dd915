"""The trackers: each returns the last step that it has of a run, and stores later rows.

The trackers' libraries are extras, imported on demand. Their files are below `trackers/` in the
run's directory, unless a library's environment variables name a server. Each library reads its keys
from the environment only.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from coordinator.disk.durable_file import replace_file
from coordinator.tracking.rows import Row
from protocol.base.errors import UsageError
from protocol.base.regular_file import read_json

TRACKERS: Final[Mapping[str, str]] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
}
"""The module of each tracker; an extra with the tracker's name installs it."""
DIRECTORY: Final = "trackers"
_PROJECT: Final = "samestep"


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run to track.

    Attributes:
        directory: The directory of the tracker's files.
        run_id: The run's ID.
        spec: The run spec, as a document.
    """

    directory: Path
    run_id: str
    spec: dict[str, Any]


class Tracker(Protocol):
    """Stores values by step."""

    def last(self) -> int:
        """Return the highest step that the tracker has; -1 without steps."""

    def take(self, row: Row) -> None:
        """Store one row."""

    def flush(self) -> None:
        """Make stored rows visible."""

    def close(self, outcome: str) -> None:
        """Close the tracker: the run is over (finished, drained, failed), or will continue later
        (empty)."""


def check_trackers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of available trackers, without duplicates.

    Raises:
        UsageError: There is no such tracker, or its library is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--track: expected one of {', '.join(TRACKERS)}, got {name!r}")
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise UsageError(
                f"--track {name}: its library is not installed here; pip install 'samestep[{name}]'"
            )
    return tuple(dict.fromkeys(names))


def open_tracker(name: str, tracked: TrackedRun) -> Tracker:
    """Begin a run in a tracker, or continue it."""
    tracked.directory.mkdir(parents=True, exist_ok=True)
    tracker_types: dict[str, type[_TensorBoard | _Wandb | _MLflow]] = {
        "tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow,
    }  # fmt: skip
    return tracker_types[name](tracked)


def _library(name: str) -> Any:
    return importlib.import_module(name)


class _TensorBoard:
    """Event files in the format of TensorBoard's own writer; each row is one event."""

    def __init__(self, tracked: TrackedRun) -> None:
        self._directory = tracked.directory
        self._last = max(self._steps(), default=-1)
        files = _library("tensorboard.summary.writer.event_file_writer")
        self._events = _library("tensorboard.compat.proto.event_pb2")
        self._summaries = _library("tensorboard.compat.proto.summary_pb2")
        self._writer = files.EventFileWriter(str(tracked.directory))

    def _steps(self) -> list[int]:
        loading = _library("tensorboard.backend.event_processing.event_file_loader")
        files = sorted(self._directory.glob("events.out.tfevents.*"))
        events = (
            logged_event
            for file in files
            for logged_event in loading.EventFileLoader(str(file)).Load()
        )
        return [int(event.step) for event in events if event.summary.value]

    def last(self) -> int:
        return self._last

    def take(self, row: Row) -> None:
        values = [
            self._summaries.Summary.Value(tag=name, simple_value=value)
            for name, value in row.values.items()
        ]
        summary = self._summaries.Summary(value=values)
        event = self._events.Event(wall_time=row.at_s, step=row.step, summary=summary)
        self._writer.add_event(event)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, outcome: str) -> None:
        del outcome
        self._writer.close()


class _MLflow:
    """A run of MLflow; a tag with samestep's run ID identifies it when the run continues."""

    def __init__(self, tracked: TrackedRun) -> None:
        # A directory of files is enough for one run; newer releases require this variable.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = _library("mlflow")
        self._entities = _library("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or tracked.directory.absolute().as_uri()
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        runs = self._client.search_runs(
            [number], f"tags.`{_PROJECT}.run_id` = '{tracked.run_id}'", max_results=1
        )
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        tags = {f"{_PROJECT}.run_id": tracked.run_id, "mlflow.runName": tracked.run_id}
        self._run = self._client.create_run(number, tags=tags).info.run_id
        self._client.log_dict(self._run, tracked.spec, "run_spec.json")

    def last(self) -> int:
        names = self._client.get_run(self._run).data.metrics
        steps = (
            metric.step
            for name in names
            for metric in self._client.get_metric_history(self._run, name)
        )
        return max(steps, default=-1)

    def take(self, row: Row) -> None:
        at_ms = int(row.at_s * 1000)
        metrics = [
            self._entities.Metric(name, value, at_ms, row.step)
            for name, value in row.values.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def flush(self) -> None:
        pass

    def close(self, outcome: str) -> None:
        status = {"finished": "FINISHED", "failed": "FAILED"}.get(outcome, "KILLED")
        self._client.set_terminated(self._run, status)


class _Wandb:
    """A run of Weights & Biases, online or (WANDB_MODE=offline) in files for `wandb sync`.

    Offline the library cannot tell which steps it has, so the last step is stored in a file.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        wandb = _library("wandb")
        self._last_step_file = tracked.directory / "last_step.json"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            id=tracked.run_id,
            name=tracked.run_id,
            resume="allow",
            dir=str(tracked.directory),
            config=tracked.spec,
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
        try:
            last_step = int(read_json(self._last_step_file)["step"])
        except (OSError, ValueError, KeyError, TypeError):
            last_step = -1
        self._last = max(last_step, int(self._run.step) - 1)

    def last(self) -> int:
        return self._last

    def take(self, row: Row) -> None:
        self._run.log(row.values, step=row.step, commit=True)
        self._last = row.step

    def flush(self) -> None:
        replace_file(self._last_step_file, json.dumps({"step": self._last}).encode())

    def close(self, outcome: str) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))
