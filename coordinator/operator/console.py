"""The console: progress of a run, and its outcome."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.members.acceptor import CONTROL_PORT
from coordinator.operator.event_pipe import EventPipe
from coordinator.operator.status import pace_of, status_document, waited_for_now
from coordinator.run.outputs.events import (
    CapturePlanned,
    Committed,
    DeviceFault,
    Evaluated,
    EvaluationMissed,
    Event,
    Halted,
    LossScaleHalved,
    RateLowered,
    RunContinued,
    StepRedoneDifferently,
    StepRestarted,
    SubtreesReassigned,
    SubtreesSpeculated,
    TrainingStarted,
    WorkerJoined,
    WorkerLate,
    WorkerReady,
    WorkerRefused,
    WorkerSetAside,
    WorkerUnready,
)
from coordinator.run.run import Run, RunPhase
from coordinator.service.events import (
    CopyFailed,
    CopyRecovered,
    Draining,
    EventLoopBlocked,
    InternalError,
    LogUnreadable,
    RunAccepted,
    RunEnded,
    RunResumed,
    RunWaitsForDisk,
    SecretsDamaged,
    SecretsRestored,
    WorkerConnected,
    WorkerDisconnected,
    WorkerOutpaced,
    event_fields,
)
from coordinator.service.execution import Execution
from coordinator.service.flapping import StrayConnection, WorkerFlapping
from coordinator.service.service import Service
from protocol.cli.systemd import Priority, SystemJournal
from protocol.spec.files.run_files import CAPTURE_INDEX

_LINE_INTERVAL_S: Final = 2.0
"""Seconds between two progress lines, if the output is not a terminal."""
_FIRST_WAITING_S: Final = 5.0
"""Seconds until the first line about waiting; the interval then doubles up to
`_WAITING_EVERY_S`."""
_WAITING_EVERY_S: Final = 60.0

_SENTENCES: Final[dict[type[Event], str]] = {
    WorkerConnected: "worker {worker} connected, backend {backend}; {workers} connected",
    WorkerReady: "worker {worker} ready on {device}, backend {backend}",
    WorkerDisconnected: "worker {worker} left: {reason}; {workers} connected",
    WorkerUnready: "worker {worker} cannot take part: {reason}",
    WorkerRefused: "worker {worker} is dismissed: {reason}",
    WorkerJoined: "worker {worker} joined after step {step}",
    CapturePlanned: "capturing {samples} samples in {steps} steps: at most {size}, {token_bytes} "
    "bytes per token",
    TrainingStarted: "training starts",
    RunResumed: "run {run_id} continues after step {step} of {steps}",
    SubtreesReassigned: "step {step}: a lost worker's microbatches {nodes} go to others",
    WorkerLate: "step {step}: {owing} of {worker} overdue; the others continue without",
    DeviceFault: "worker {worker}: {reason}",
    WorkerSetAside: "step {step}: {worker} was late too often; set aside until step {until}",
    RateLowered: "step {step}: {metric} no longer improves: learning rate {rate:g}",
    EvaluationMissed: "step {step}: not evaluated: {reason}",
    SubtreesSpeculated: "step {step}: idle workers take microbatches {nodes} as well",
    StepRedoneDifferently: "step {step} was repeated with different bits than before the restart",
    LogUnreadable: "the log cannot be read: {error}",
    WorkerOutpaced: "worker {worker} receives steps more slowly than the run takes them: it had "
    "reached step {reached} of {step}, and starts again from a newer checkpoint; it needs a faster "
    "link or machine",
    LossScaleHalved: "step {step}: overflow in float16; repeated with loss scale {loss_scale:g}",
    StepRestarted: "step {step} starts over: a worker left before its state was verified",
    Halted: "HALTED at step {step}: {reason}",
    RunContinued: "continued at step {step}",
    CopyRecovered: "the checkpoint after step {step} is copied to {to}: copies work again",
    CopyFailed: "the checkpoint after step {step} is not copied to {to}: {error}",
    WorkerFlapping: "worker {worker} keeps disconnecting: lost {count} times in a row while "
    "{phase}: {reason}; {cause}",
    StrayConnection: "something at {address} that is not a worker connects to the workers' port "
    f"({{count}} so far): {{reason}}; {CONTROL_PORT}",
    RunWaitsForDisk: "run {run_id} waits: {reason}; it begins once its directory is usable",
    SecretsDamaged: "{reason}",
    SecretsRestored: "the files of keys and join token are usable again",
    Draining: "draining: finishing the step in progress",
    EventLoopBlocked: "the coordinator's event loop was blocked for {held_ms} ms",
    InternalError: "internal error: {error}",
}
_DRAINING_WITHOUT_STEP: Final = "draining: no step is in progress"
_SENTENCES_WHILE_SERVING: Final[dict[type[Event], str]] = {
    RunAccepted: "run {run_id} accepted: {task}, {steps} steps",
    RunEnded: "run {run_id} {outcome}: {reason}",
}
"""Only for a serving coordinator: with a single run, the command itself and the last lines say
this."""
_PRIORITIES: Final[dict[type, Priority]] = {
    WorkerDisconnected: Priority.NOTICE,
    WorkerUnready: Priority.WARNING,
    WorkerRefused: Priority.WARNING,
    SubtreesReassigned: Priority.NOTICE,
    WorkerLate: Priority.NOTICE,
    DeviceFault: Priority.WARNING,
    WorkerSetAside: Priority.WARNING,
    EvaluationMissed: Priority.WARNING,
    StepRedoneDifferently: Priority.WARNING,
    WorkerFlapping: Priority.WARNING,
    RunWaitsForDisk: Priority.ERROR,
    SecretsDamaged: Priority.ERROR,
    CopyFailed: Priority.ERROR,
    LogUnreadable: Priority.ERROR,
    WorkerOutpaced: Priority.WARNING,
    Halted: Priority.ERROR,
    EventLoopBlocked: Priority.WARNING,
    InternalError: Priority.CRITICAL,
}


class ProgressConsole:
    """Renders a service's events: a live table on a terminal, otherwise lines at intervals.

    Args:
        service: The service.
        console: Prints the lines, unless there is a `journal`.
        journal: Receives each line with its event's fields.
    """

    def __init__(
        self,
        service: Service,
        console: Console,
        journal: SystemJournal | EventPipe | None = None,
    ) -> None:
        self._service = service
        self._console = console
        self._journal = journal
        serving = {} if service.settings.once else _SENTENCES_WHILE_SERVING
        self._sentences = {**_SENTENCES, **serving}
        self._last_line_s = 0.0
        self._waiting_since_s = time.monotonic()
        self._wait_before_line_s = _FIRST_WAITING_S
        self._waiting_position: tuple[int, object] = (-1, None)
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(
                console=console, get_renderable=self._screen, refresh_per_second=4, transient=True
            )

    def start(self) -> None:
        if self._live is not None:
            self._live.start()

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def emit(self, event: Event, run_id: str = "") -> None:
        """Render an event; see `EventSink`."""
        fields = event_fields(event, run_id)
        if isinstance(self._journal, EventPipe):
            self._journal.emit(event)
        if isinstance(event, TrainingStarted | RunResumed):
            self._last_line_s = 0.0  # a run's first step is shown at once
        execution = self._service.current
        # Workers that leave after the last step are not reported: the run's end is.
        is_after_end = isinstance(event, WorkerDisconnected) and self._is_done
        sentence = self._sentences.get(type(event))
        if isinstance(event, Draining) and not _has_step(execution):
            sentence = _DRAINING_WITHOUT_STEP
        if not is_after_end and sentence is not None:
            self._print(sentence.format(**_in_sentences(fields)), event, fields)
        match event:
            case TrainingStarted() if execution is not None:
                if notes := _notes(execution.run):
                    counts = ", ".join(f"{k.replace('_', ' ')} {n}" for k, n in notes.items())
                    self._print(f"  data: {counts}", event)
                self._print_evaluation_notice(execution.run, event)
            case RunResumed():
                for note in event.notes:
                    self._print(f"  {note}", event)
                if execution is not None:
                    self._print_evaluation_notice(execution.run, event)
            case Evaluated() if execution is not None:
                metrics = _headline(execution.run, event.metric_values)
                text = ", ".join(f"{name} {_metric(value)}" for name, value in metrics.items())
                self._print(f"step {event.step}: held-out {text}", event, fields)
            case RunEnded(outcome="failed"):
                self._print_resume_command(run_id)
            case Committed() if execution is not None and self._live is None:
                self._progress_line(execution, event, fields)

    def _print_evaluation_notice(self, run: Run, event: Event) -> None:
        """Print a notice if `evaluate_every` has no effect, because no samples are held out."""
        if run.manifest is None or run.manifest.evaluation_parts or not run.spec.evaluate_every:
            return
        sections = ("data", run.spec.task)
        held_out = [
            section for section in sections if hasattr(getattr(run.spec, section, 0), "holdout")
        ]
        remedy = f"raise {held_out[0]}.holdout" if held_out else "give the task held-out data"
        remedy += ", or set data.validation" if held_out[:1] == ["data"] else ""
        self._print(
            f"  evaluate_every {run.spec.evaluate_every} has no effect: no samples are held out "
            f"for evaluation; {remedy}",
            event,
        )

    @property
    def _is_done(self) -> bool:
        """Whether the only run is over except for its files."""
        execution = self._service.current
        is_over = execution is not None and execution.outcome is not None
        return is_over and self._service.settings.once

    def _print_resume_command(self, run_id: str) -> None:
        """Print the command that resumes a failed run; with a single run, the last line has it."""
        finished = self._service.finished
        if (
            self._service.settings.once
            or finished is None
            or finished.run.checkpoints.saved_step is None
        ):
            return
        if finished.outcome is not None and not finished.outcome.is_resumable:
            return
        command = f"coordinator --resume --out {shlex.quote(str(finished.directory))}"
        self._print(f"  to resume: coordinator resume {run_id}, or {command}")

    def tick(self) -> None:
        """Report a long wait of the run, and its cause; called about once a second."""
        execution, now_s = self._service.current, time.monotonic()
        waiting_text = ""
        if execution is not None and self._live is None:
            waiting_text = waited_for_now(self._service).words
            position = (execution.run.steps_committed, execution.run.phase)
            if position != self._waiting_position:
                self._waiting_position, waiting_text = position, ""
        if not waiting_text:
            self._waiting_since_s, self._wait_before_line_s = now_s, _FIRST_WAITING_S
        elif now_s - self._waiting_since_s >= self._wait_before_line_s:
            self._wait_before_line_s += min(self._wait_before_line_s, _WAITING_EVERY_S)
            present = {*self._service.sessions, *(execution.run.unfit if execution else ())}
            absent_names = ", ".join(sorted(self._service.known_workers - present))
            absent_text = f"; connected before: {absent_names}" if absent_names else ""
            seconds = now_s - self._waiting_since_s
            self._print(f"waiting {seconds:.0f} s for {waiting_text}{absent_text}")

    def _print(
        self, text: str, event: Event | None = None, fields: Mapping[str, object] | None = None
    ) -> None:
        if self._journal is None:
            self._console.print(Text(text), soft_wrap=True)
            return
        current = self._service.current
        run = {"run_id": current.run.run_id} if current is not None else {}
        journal_fields = {
            "event": event.name if event is not None else "waiting",
            **run,
            **(fields or {}),
        }
        self._journal.write(text, journal_fields, _PRIORITIES.get(type(event), Priority.INFO))

    def _progress_line(
        self, execution: Execution, event: Event, fields: Mapping[str, object]
    ) -> None:
        now_s = time.monotonic()
        if now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            self._print(_progress(execution, now_s), event, fields)

    def _screen(self) -> Group:
        execution = self._service.current
        if execution is None:
            return Group()
        document = status_document(self._service, time.monotonic())
        table = Table(box=None)
        line = _progress(execution, time.monotonic(), shares=False)
        waiting_text = document.get("waiting_for") or ""
        leaf = "replica" if document.get("replicas") else "microbatch"
        for column in ("worker", "device", "state", "share", f"ms/{leaf}"):
            table.add_column(column)
        for worker in document["workers"]:
            speed = worker.get("ms_per_microbatch")
            # Text, because a string would be parsed as markup.
            table.add_row(
                Text(worker["name"]),
                Text(worker["device"]),
                worker["state"],
                _share(worker),
                "" if speed is None else f"{speed:.0f}",
            )
        waiting_line = f"waiting for {waiting_text}" if waiting_text else ""
        return Group(
            *(Text(text, no_wrap=True, overflow="ellipsis") for text in (line, waiting_line)), table
        )


def _has_step(execution: Execution | None) -> bool:
    """Return whether a step, or an evaluation between steps, is in progress."""
    phases = (RunPhase.TRAINING, RunPhase.EVALUATING)
    return execution is not None and execution.run.phase in phases


def _in_sentences(fields: Mapping[str, object]) -> dict[str, object]:
    """Format the fields for sentences: join lists with commas, name an unknown number of steps
    `all`, and do not repeat the step in the reason."""
    formatted = {"steps": "all"} | {
        name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in fields.items()
    }
    if "reason" in formatted:
        formatted["reason"] = str(formatted["reason"]).removeprefix(
            f"step {formatted.get('step')}: "
        )
    return formatted


def _progress(execution: Execution, now_s: float, *, shares: bool = True) -> str:
    run = execution.run
    if execution.started_s is None:
        return f"{run.run_id}: {run.phase.value}"
    pace = pace_of(execution, now_s)
    loss = run.losses[-1] if run.losses else None
    loss_text = (
        "loss -" if loss is None else f"loss {loss:.6g}" if math.isfinite(loss) else "skipped"
    )
    epochs = f" ({run.epochs})" if run.epochs else ""
    line = f"step {run.steps_committed}/{run.steps}{epochs}  {loss_text}  {pace or ''}".rstrip()
    division = run.progress.division if run.progress is not None else None
    if not shares or not division:
        return line
    parts = ", ".join(f"{name} {count}" for name, count in sorted(division.items()))
    return f"{line}  {'microbatches' if run.spec.replicas is None else 'replicas'}: {parts}"


def _share(worker: Mapping[str, Any]) -> str:
    """Format a worker's share of the step: its inner step, or its microbatches."""
    phase = worker.get("inner_phase")
    if phase is not None:
        return f"replica {phase['replica']}: step {phase['inner_step']} of {phase['inner_steps']}"
    return str(worker.get("microbatches_of_step", ""))


def print_outcome(execution: Execution, console: Console, resume_command: str) -> None:
    """Print the last lines: outcome, metrics, digest, path of the trained tensors, and the command
    to resume a drained run."""
    outcome = execution.outcome
    assert outcome is not None
    if outcome.outcome == "failed":
        return
    run = execution.run
    exact = "exact: every worker has the same numerics profile"
    mixed = "mixed: numerics profiles differ; replicas are equal, other runs may differ"
    epochs = f" ({run.epochs})" if run.epochs else ""
    steps, wall_s = f"{run.steps_committed} of {run.steps} steps", execution.result.get("wall_s", 0)
    pace = f"{steps}{epochs} in {wall_s} s"
    if run.steps_committed == 0:
        console.print(Text(f"{outcome.outcome}: {outcome.reason}"))
        return
    lines = [
        f"{outcome.outcome}: {pace} ({exact if execution.result.get('exact') else mixed})",
        *(
            f"held-out {name}: {_metric(value)}"
            for name, value in _headline(run, run.metrics).items()
        ),
        *(f"{name.replace('_', ' ')}: {count}" for name, count in _notes(run).items()),
        _digest_line(execution),
    ]
    if outcome.outcome == "drained":
        lines.append(
            f"{outcome.reason}; to resume: {resume_command}" if resume_command else outcome.reason
        )
    if execution.model_directory is not None:
        lines.append(f"{execution.model_directory.name}: {execution.model_directory}")
        if run.spec.task in {"classify", "tag"}:
            directory = shlex.quote(str(execution.model_directory))
            lines.append(f'try it: worker classify {directory} "some text"')
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _digest_line(execution: Execution) -> str:
    """Format the digest of the trained weights, or of the list of captured files."""
    manifest, exported = execution.run.manifest, execution.result.get("exported")
    if manifest is None or manifest.capture is None:
        return f"weights digest: {execution.result.get('weights_digest', '-')}"
    files = exported if isinstance(exported, dict) else {}
    return f"capture digest: {files.get(f'{manifest.export.directory}/{CAPTURE_INDEX}', '-')}"


def _headline(run: Run, values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that the console shows; detailed metrics are only in the files."""
    metrics = run.manifest.metrics if run.manifest is not None else ()
    return {m.name: values[m.name] for m in metrics if m.name in values and not m.detail}


def _notes(run: Run) -> dict[str, int]:
    """Return the counts that the task made while reading its data, without zeros."""
    notes = run.manifest.notes if run.manifest is not None else {}
    return {name: count for name, count in notes.items() if count}


def _metric(value: object) -> str:
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.3e}"
