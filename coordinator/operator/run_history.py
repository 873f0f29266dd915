"""The history of a run for the page: curves, workers and events, only from the run's journal.

Each `read` reads only the new lines of the journal. The memory is bounded for runs of any length: a
curve that reaches its bound is halved by merging neighboring points.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from coordinator.storage.directory.journal import JournalTail
from protocol.spec.run_spec import known_steps

_POINTS: Final = 2_000
"""The most points of a curve; an even number, since pairs of points are merged."""
_EVENTS: Final = 300
_EVALUATIONS: Final = 500
_WORKERS: Final = 200


@dataclass(slots=True)
class Curve:
    """A value by step: points (last step, mean, lowest, highest), each of `stride` steps."""

    points: list[tuple[int, float, float, float]] = field(default_factory=list)
    stride: int = 1
    _waiting: list[tuple[int, float]] = field(default_factory=list)

    def add(self, step: int, value: float | None) -> None:
        """Add the value of a step; a missing or non-finite value leaves no point."""
        if value is None or not math.isfinite(value):
            return
        self._waiting.append((step, value))
        if len(self._waiting) == self.stride:
            self.points.append(self._merge_waiting())
            self._waiting.clear()
        if len(self.points) == _POINTS:
            self._halve()

    def cut(self, step: int) -> None:
        """Remove the points after `step`: these steps are redone."""
        self.points = [point for point in self.points if point[0] <= step]
        self._waiting = [point for point in self._waiting if point[0] <= step]

    def document(self, after: int) -> dict[str, Any]:
        """Return columns of the points after a step, rounded for display.

        The last point may cover fewer steps than the others and still change: all points up to step
        `full` are final, as long as `stride` is the same.
        """
        points = [*self.points, self._merge_waiting()] if self._waiting else self.points
        new_points = [point for point in points if point[0] > after]
        return {
            "stride": self.stride,
            "full": self.points[-1][0] if self.points else 0,
            "step": [point[0] for point in new_points],
            **{
                name: [float(f"{point[column]:.6g}") for point in new_points]
                for column, name in enumerate(("mean", "low", "high"), 1)
            },
        }

    def _merge_waiting(self) -> tuple[int, float, float, float]:
        values = [value for _, value in self._waiting]
        return self._waiting[-1][0], math.fsum(values) / len(values), min(values), max(values)

    def _halve(self) -> None:
        pairs = zip(self.points[::2], self.points[1::2], strict=True)
        self.points = [
            (right[0], (left[1] + right[1]) / 2, min(left[2], right[2]), max(left[3], right[3]))
            for left, right in pairs
        ]
        self.stride *= 2


@dataclass(slots=True)
class _Worker:
    name: str
    device: str
    backend: str
    signature: str
    here: bool
    since: str
    why: str = ""


class RunHistory:
    """Follows one journal.

    Args:
        journal: The file; it may not exist yet.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = JournalTail(journal)
        self._reset()

    def _reset(self) -> None:
        self._losses, self._norms, self._rates, self._times = (Curve() for _ in range(4))
        self._workers_at: list[tuple[int, int]] = []
        self._evaluations: deque[tuple[int, dict[str, float | None]]] = deque(maxlen=_EVALUATIONS)
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._workers: dict[str, _Worker] = {}
        self._errors: dict[str, dict[str, Any]] = {}
        self._began = self._run_id = ""
        self._steps: int | None = None
        self._epochs: int | None = None
        self._samples: int | None = None
        self._last = ""
        self._last_commit: datetime | None = None
        self._outcome = ""

    def read(self) -> None:
        """Read the journal's new lines; blocks while it reads."""
        if self._journal.restart_if_cut():
            self._reset()
        for time, record in self._journal.read_new_records():
            with suppress(ValueError, KeyError, TypeError):  # the audit reports it
                self._take(time, record)

    def document(self, after: int = 0) -> dict[str, Any]:
        """Return all data that the page draws; of curves, only the points after a step."""
        return {
            "run_id": self._run_id,
            "steps": self._steps,
            "epochs": self._epochs,
            "samples": self._samples,
            "last": self._last,
            "began": self._began,
            "outcome": self._outcome,
            "loss": self._losses.document(after),
            "norm": self._norms.document(after),
            "rate": self._rates.document(after),
            "step_s": self._times.document(after),
            "workers_at": self._workers_at,
            "evaluations": [
                {"step": step, "metrics": metrics} for step, metrics in self._evaluations
            ],
            "events": [*self._events],
            "errors": self._errors,
            "workers": [
                {
                    "name": worker.name, "device": worker.device, "backend": worker.backend,
                    "signature": worker.signature[:12], "here": worker.here, "since": worker.since,
                    "why": worker.why,
                }
                for worker in self._workers.values()
            ],
        }  # fmt: skip

    def _take(self, time: str, record: dict[str, Any]) -> None:
        self._last = time
        match record["kind"]:
            case "commit":
                self._commit(time, record)
            case "evaluation":
                self._evaluations.append((record["step"], record["metrics"]))
            case "view":
                self._view(time, record)
            case "run":
                self._began, self._run_id = time, record["run_id"]
                self._steps = known_steps(record["spec"].get("steps"))
                self._samples = record["spec"].get("batch", {}).get("samples")
                self._epochs = record["spec"].get("epochs")
            case "manifest" if self._epochs and self._samples:
                self._steps = self._epochs * -(-record["train_samples"] // self._samples)
            case "resumed":
                self._add_resumption(time, record)
            case "end":
                self._outcome = record["outcome"]
                self._add_event(time, record, record["outcome"], record["reason"])
            case "halt":
                self._add_error(time, record, "halted", record["reason"])
            case "fault":
                text = "; ".join(filter(None, (record["reason"], record["response"])))
                self._add_error(time, record, record["what"], text)
            case "command":
                self._outcome = ""
                self._add_event(time, record, record["command"], record.get("source", ""))
            case "checkpoint":
                self._add_event(time, record, "checkpoint", record["directory"])

    def _commit(self, time: str, record: dict[str, Any]) -> None:
        committed_at, step = datetime.fromisoformat(time), record["step"] + 1
        self._losses.add(step, record["loss"])
        self._norms.add(step, record.get("norm"))
        self._rates.add(step, record.get("rate"))
        if self._last_commit is not None:
            self._times.add(step, (committed_at - self._last_commit).total_seconds())
        self._last_commit, self._outcome = committed_at, ""
        if record["skipped"]:
            self._add_event(time, record, "skipped", "nothing was applied")

    def _view(self, time: str, record: dict[str, Any]) -> None:
        members, name = record["members"], record.get("worker")
        self._workers_at.append((record["step"], len(members)))
        if len(self._workers_at) > _POINTS:
            del self._workers_at[1::2]
        present_names = {member["name"] for member in members}
        for member in members:
            earlier = self._workers.get(member["name"])
            since = earlier.since if earlier is not None and earlier.here else time
            self._workers[member["name"]] = _Worker(
                name=member["name"], device=member["device"], backend=member["backend"],
                signature=member["signature"], here=True, since=since,
            )  # fmt: skip
        for worker in self._workers.values():
            if worker.here and worker.name not in present_names:
                worker.here, worker.since = False, time
                worker.why = record["reason"] if worker.name == name else record["change"]
        absent_names = [worker.name for worker in self._workers.values() if not worker.here]
        for name_to_drop in absent_names[: max(0, len(self._workers) - _WORKERS)]:
            del self._workers[name_to_drop]
        reason, computing = record["reason"], f"workers from now on: {len(members)}"
        text = f"{reason}; {computing}" if reason else computing
        self._add_event(time, record, record["change"], text, name)

    def _add_resumption(self, time: str, record: dict[str, Any]) -> None:
        for curve in (self._losses, self._norms, self._rates, self._times):
            curve.cut(record["step"])
        evaluations = [entry for entry in self._evaluations if entry[0] <= record["step"]]
        self._evaluations = deque(evaluations, maxlen=_EVALUATIONS)
        self._workers_at = [entry for entry in self._workers_at if entry[0] <= record["step"]]
        self._last_commit, self._outcome = None, ""
        for worker in self._workers.values():
            worker.here, worker.since, worker.why = False, time, "the coordinator was restarted"
        self._add_event(time, record, "resumed", "; ".join(record["notes"]))

    def _add_error(self, time: str, record: dict[str, Any], kind: str, text: str) -> None:
        worker = record.get("worker")
        self._add_event(time, record, kind, text, worker)
        if worker is not None:
            self._errors.pop(worker, None)
            self._errors[worker] = {
                "time": time,
                "step": record["step"],
                "what": kind,
                "text": text,
            }
            if len(self._errors) > _WORKERS:
                del self._errors[next(iter(self._errors))]

    def _add_event(
        self, time: str, record: dict[str, Any], kind: str, text: str, worker: str | None = None
    ) -> None:
        step = record.get("step")
        self._events.append(
            {"time": time, "step": step, "what": kind, "worker": worker, "text": text}
        )
