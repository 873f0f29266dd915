"""What a person sees at the console: progress while a run goes on, and what came of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coordinator.members.doorway import CONTROL_PORT
from coordinator.operator.pace import pace_of
from coordinator.operator.status import status_document, waiting_for
from coordinator.run.outputs.facts import (
    CapturePlanned,
    DeviceFault,
    EvaluationMissed,
    Fact,
    HeldOutMeasured,
    LossScaleHalved,
    NodesReassigned,
    NodesSpeculated,
    RedoneOtherwise,
    RunContinued,
    RunHalted,
    StepCommitted,
    StepRestarted,
    TrainingStarted,
    WorkerJoined,
    WorkerLate,
    WorkerPutAside,
    WorkerReady,
    WorkerRefused,
    WorkerUnready,
)
from coordinator.run.run import Run
from coordinator.service.execution import Execution
from coordinator.service.listener import (
    CopiedAgain,
    CopyFailed,
    Draining,
    InternalError,
    LogUnreadable,
    LoopHeld,
    RunAccepted,
    RunEnded,
    RunResumed,
    RunWaitsForDisk,
    SecretsSound,
    SecretsTrouble,
    WorkerConnected,
    WorkerDisconnected,
    document,
)
from coordinator.service.repeated_ends import NotAWorker, WorkerComesAndGoes
from coordinator.service.service import Service
from protocol.command.system_journal import Priority, SystemJournal
from protocol.data.capture_index import INDEX

_LINE_INTERVAL_S: Final = 2.0
"""Between two progress lines where the output is no terminal."""
_FIRST_WAITING_S: Final = 5.0
"""Until the first line that says what is waited for; each next one comes after twice as long."""

_TOLD: Final[dict[type[Fact], str]] = {
    WorkerConnected: "worker {worker} connected, backend {backend}; {workers} connected",
    WorkerReady: "worker {worker} ready on {device}, backend {backend}",
    WorkerDisconnected: "worker {worker} left: {reason}; {workers} connected",
    WorkerUnready: "worker {worker} cannot take part: {reason}",
    WorkerRefused: "worker {worker} is sent away: {reason}",
    WorkerJoined: "worker {worker} joined after step {step}",
    CapturePlanned: "capturing {samples} samples in {steps} steps: at most {size}, {token_bytes} "
    "bytes for a token",
    TrainingStarted: "training starts",
    RunResumed: "run {run_id} goes on after step {step} of {steps}",
    NodesReassigned: "step {step}: a lost worker's microbatches {nodes} go to others",
    WorkerLate: "step {step}: {owing} of {worker} overdue; others go on without",
    DeviceFault: "worker {worker}: {reason}",
    WorkerPutAside: "step {step}: {worker} answers too late too often; aside until step {until}",
    EvaluationMissed: "step {step}: not evaluated: {reason}",
    NodesSpeculated: "step {step}: idle workers take microbatches {nodes} as well",
    RedoneOtherwise: "step {step} was done again with other bits than before the restart",
    LogUnreadable: "the log cannot be read: {error}",
    LossScaleHalved: "step {step}: overflow in float16; again with scale {loss_scale:g}",
    StepRestarted: "step {step} is started anew: a worker left before its state was compared",
    RunHalted: "HALTED at step {step}: {reason}",
    RunContinued: "continued at step {step}",
    CopiedAgain: "the checkpoint after step {step} is copied to {to}: it takes copies again",
    CopyFailed: "the checkpoint after step {step} is not copied to {to}: {error}",
    WorkerComesAndGoes: "worker {worker} comes and goes: lost {count} times in a row while "
    "{phase}: {reason}; {cause}",
    NotAWorker: "something at {address} that is not a worker connects to the workers' port "
    f"({{count}} so far): {{reason}}; {CONTROL_PORT}",
    RunWaitsForDisk: "run {run_id} waits: {reason}; it begins once the directory can be used",
    SecretsTrouble: "{reason}",
    SecretsSound: "the files of keys and join token are there and can be used",
    Draining: "draining: the step in progress is finished first",
    LoopHeld: "the coordinator heard nobody for {held_ms} ms: its event loop was held",
    InternalError: "internal error: {error}",
}
_TOLD_WHILE_SERVING: Final[dict[type[Fact], str]] = {
    RunAccepted: "run {run_id} accepted: {task}, {steps} steps",
    RunEnded: "run {run_id} {outcome}: {reason}",
}
"""One run that is done at a terminal has its own first and last lines."""
_PRIORITIES: Final[dict[type, Priority]] = {
    WorkerDisconnected: Priority.NOTICE,
    WorkerUnready: Priority.WARNING,
    WorkerRefused: Priority.WARNING,
    NodesReassigned: Priority.NOTICE,
    WorkerLate: Priority.NOTICE,
    DeviceFault: Priority.WARNING,
    WorkerPutAside: Priority.WARNING,
    EvaluationMissed: Priority.WARNING,
    RedoneOtherwise: Priority.WARNING,
    WorkerComesAndGoes: Priority.WARNING,
    RunWaitsForDisk: Priority.ERROR,
    SecretsTrouble: Priority.ERROR,
    CopyFailed: Priority.ERROR,
    LogUnreadable: Priority.ERROR,
    RunHalted: Priority.ERROR,
    LoopHeld: Priority.WARNING,
    InternalError: Priority.CRITICAL,
}


class ProgressConsole:
    """Tells a service's reports: a live table on a terminal, else a line now and then.

    Args:
        service: Whose.
        console: Where lines go, unless there is a journal.
        journal: Gets each line with its event's fields.
    """

    def __init__(
        self, service: Service, console: Console, journal: SystemJournal | None = None
    ) -> None:
        self._service = service
        self._console = console
        self._journal = journal
        serving = {} if service.settings.once else _TOLD_WHILE_SERVING
        self._sentences = {**_TOLD, **serving}
        self._last_line_s = 0.0
        self._waiting_since_s = time.monotonic()
        self._tell_after_s = _FIRST_WAITING_S
        self._waiting_at: tuple[int, object] = (-1, None)
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

    def reported(self, fact: Fact, run_id: str = "") -> None:
        """Tell one fact; see `listener.Listener`."""
        fields = document(fact, run_id)
        if isinstance(fact, TrainingStarted | RunResumed):
            self._last_line_s = 0.0  # a run's first step is told at once
        execution = self._service.current
        # Who leaves once all is done is missed by nobody: what is told next is how the run ended.
        unmissed = isinstance(fact, WorkerDisconnected) and self._is_done
        if not unmissed and (sentence := self._sentences.get(type(fact))) is not None:
            self._tell(sentence.format(**_in_sentences(fields)), fact, fields)
        match fact:
            case TrainingStarted() if execution is not None:
                if notes := _notes(execution.run):
                    told = ", ".join(f"{k.replace('_', ' ')} {n}" for k, n in notes.items())
                    self._tell(f"  data: {told}", fact)
            case RunResumed():
                for note in fact.notes:
                    self._tell(f"  {note}", fact)
            case HeldOutMeasured() if execution is not None:
                figures = _headline(execution.run, fact.metrics)
                text = ", ".join(f"{name} {_figure(value)}" for name, value in figures.items())
                self._tell(f"step {fact.step}: held-out {text}", fact, fields)
            case RunEnded(outcome="failed"):
                self._tell_way_on(run_id)
            case StepCommitted() if execution is not None and self._live is None:
                self._progress_line(execution, fact, fields)

    @property
    def _is_done(self) -> bool:
        """Whether the one run is over but for its files."""
        execution = self._service.current
        over = execution is not None and execution.outcome is not None
        return over and self._service.settings.once

    def _tell_way_on(self, run_id: str) -> None:
        """One run that is done at a terminal has it in its last line."""
        finished = self._service.finished
        if self._service.settings.once or finished is None or finished.run.saves.saved is None:
            return
        if finished.outcome is not None and not finished.outcome.is_resumable:
            return
        elsewhere = f"coordinator --resume --out {finished.directory}"
        self._tell(f"  go on with it: coordinator resume {run_id}, or {elsewhere}")

    def tick(self) -> None:
        """Called about once a second: say what has been waited for all this time."""
        execution, now_s = self._service.current, time.monotonic()
        waiting = ""
        if execution is not None and self._live is None:
            waiting = waiting_for(execution.run, self._service.trainers).words
            at = (execution.run.step, execution.run.phase)
            if at != self._waiting_at:
                self._waiting_at, waiting = at, ""
        if not waiting:
            self._waiting_since_s, self._tell_after_s = now_s, _FIRST_WAITING_S
        elif now_s - self._waiting_since_s >= self._tell_after_s:
            self._tell_after_s *= 2
            told = {*self._service.sessions, *(execution.run.unfit if execution else ())}
            away = ", ".join(sorted(self._service.known - told))
            before = f"; was here before: {away}" if away else ""
            seconds = now_s - self._waiting_since_s
            self._tell(f"waiting {seconds:.0f} s for {waiting}{before}")

    def _tell(
        self, text: str, fact: Fact | None = None, fields: Mapping[str, object] | None = None
    ) -> None:
        if self._journal is None:
            self._console.print(Text(text), soft_wrap=True)
            return
        current = self._service.current
        run = {"run_id": current.run.run_id} if current is not None else {}
        told = {"event": fact.event if fact is not None else "waiting", **run, **(fields or {})}
        self._journal.write(text, told, _PRIORITIES.get(type(fact), Priority.INFO))

    def _progress_line(
        self, execution: Execution, fact: Fact, fields: Mapping[str, object]
    ) -> None:
        now_s = time.monotonic()
        if now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            self._tell(_progress(execution, now_s), fact, fields)

    def _screen(self) -> Group:
        execution = self._service.current
        if execution is None:
            return Group()
        document = status_document(self._service, time.monotonic())
        table = Table(box=None)
        line = _progress(execution, time.monotonic(), shares=False)
        waiting = document.get("waiting_for") or ""
        leaf = "replica" if document.get("replicas") else "microbatch"
        for column in ("worker", "device", "state", "share", f"ms/{leaf}"):
            table.add_column(column)
        for worker in document["workers"]:
            speed = worker.get("ms_per_microbatch")
            # As they are: a string would be read as markup.
            table.add_row(
                Text(worker["name"]),
                Text(worker["device"]),
                worker["state"],
                _share(worker),
                "" if speed is None else f"{speed:.0f}",
            )
        told = f"waiting for {waiting}" if waiting else ""
        return Group(
            *(Text(each, no_wrap=True, overflow="ellipsis") for each in (line, told)), table
        )


def _in_sentences(fields: Mapping[str, object]) -> dict[str, object]:
    """Lists as people write them, a number of steps that nobody knows yet, and a step told once."""
    told = {"steps": "all"} | {
        name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in fields.items()
    }
    if "reason" in told:
        told["reason"] = str(told["reason"]).removeprefix(f"step {told.get('step')}: ")
    return told


def _progress(execution: Execution, now_s: float, *, shares: bool = True) -> str:
    run = execution.run
    if execution.started_s is None:
        return f"{run.run_id}: {run.phase.value}"
    pace = pace_of(execution, now_s)
    loss = run.losses[-1] if run.losses else None
    told = "loss -" if loss is None else f"loss {loss:.6g}" if math.isfinite(loss) else "skipped"
    epochs = f" ({run.epochs})" if run.epochs else ""
    line = f"step {run.step}/{run.steps}{epochs}  {told}  {pace or ''}".rstrip()
    division = run.progress.division if run.progress is not None else None
    if not shares or not division:
        return line
    parts = ", ".join(f"{name} {count}" for name, count in sorted(division.items()))
    return f"{line}  {'microbatches' if run.spec.replicas is None else 'replicas'}: {parts}"


def _share(worker: Mapping[str, Any]) -> str:
    """What it computes of the step: how far it is with a replica, or how many microbatches."""
    at = worker.get("stretch")
    if at is not None:
        return f"replica {at['replica']}: step {at['inner_step']} of {at['inner_steps']}"
    return str(worker.get("microbatches_of_step", ""))


def print_outcome(execution: Execution, console: Console, again: str) -> None:
    """The last lines: metric, digest, where the trained tensors lie, and how to go on."""
    outcome = execution.outcome
    assert outcome is not None
    if outcome.outcome == "failed":
        return
    run = execution.run
    exact = "exact: every worker has the same numeric signature"
    mixed = "mixed: workers of unlike signatures; replicas are equal, other runs may differ"
    epochs = f" ({run.epochs})" if run.epochs else ""
    pace = f"{run.step} of {run.steps} steps{epochs} in {execution.result.get('wall_s', 0)} s"
    if run.step == 0:
        console.print(Text(f"{outcome.outcome}: {outcome.reason}"))
        return
    lines = [
        f"{outcome.outcome}: {pace} ({exact if execution.result.get('exact') else mixed})",
        *(
            f"held-out {name}: {_figure(value)}"
            for name, value in _headline(run, run.metrics).items()
        ),
        *(f"{name.replace('_', ' ')}: {count}" for name, count in _notes(run).items()),
        _digest_line(execution),
    ]
    if outcome.outcome == "drained":
        lines.append(f"{outcome.reason}; go on with it: {again}")
    if execution.model_directory is not None:
        lines.append(f"{execution.model_directory.name}: {execution.model_directory}")
        if run.spec.task == "classify":
            lines.append(f'try it: worker classify {execution.model_directory} "some text"')
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _digest_line(execution: Execution) -> str:
    """Of what was trained, or of the list of what was captured."""
    manifest, exported = execution.run.manifest, execution.result.get("exported")
    if manifest is None or manifest.capture is None:
        return f"weights digest: {execution.result.get('weights_digest', '-')}"
    files = exported if isinstance(exported, dict) else {}
    return f"capture digest: {files.get(f'{manifest.export.directory}/{INDEX}', '-')}"


def _headline(run: Run, figures: Mapping[str, float]) -> dict[str, float]:
    """The figures of an evaluation that belong on a screen; the rest is in the files."""
    metrics = run.manifest.metrics if run.manifest is not None else ()
    return {m.name: figures[m.name] for m in metrics if m.name in figures and not m.detail}


def _notes(run: Run) -> dict[str, int]:
    """What the task counted while reading its data, as far as there is any of it."""
    notes = run.manifest.notes if run.manifest is not None else {}
    return {name: count for name, count in notes.items() if count}


def _figure(value: object) -> str:
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.3e}"
