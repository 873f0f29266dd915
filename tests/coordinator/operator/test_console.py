"""Output of the coordinator: on a terminal, or with its fields in systemd's journal."""

import io
import math
import re
import time
from types import SimpleNamespace

import pytest
import structlog
from rich.console import Console

from coordinator.operator.console import ProgressConsole
from coordinator.operator.structured_log import set_up_logging
from coordinator.run.outputs.events import Committed, Halted, TrainingStarted, WorkerRefused
from coordinator.run.outputs.restart import CommitRecord
from coordinator.run.run import RunPhase
from coordinator.service.events import (
    Draining,
    RunAccepted,
    RunEnded,
    RunResumed,
    WorkerConnected,
)
from protocol.cli.systemd import Priority, SystemJournal
from protocol.spec.run_spec import parse_run_spec_text
from protocol.wire.messages import Commit
from tests.coordinator.operator.test_status import run_after


class RecordingJournal(SystemJournal):
    """A journal that records its journal."""

    def __init__(self):
        self.entries = []

    def write(self, message, fields=None, priority=Priority.INFO):
        self.entries.append((message, dict(fields or {}), priority))


def service(*, once=False):
    return SimpleNamespace(
        settings=SimpleNamespace(once=once),
        current=SimpleNamespace(run=SimpleNamespace(run_id="r-1", manifest=None)),
        finished=SimpleNamespace(
            directory="runs/r-1",
            outcome=None,
            run=SimpleNamespace(checkpoints=SimpleNamespace(saved_step=2)),
        ),
        sessions={},
        trainers=[],
        known_workers=set(),
    )


def progress(journal=None, *, once=False):
    screen = io.StringIO()
    return ProgressConsole(service(once=once), Console(file=screen), journal), screen


HALTED = Halted(term=1, step=3, attempt=0, reason="a NaN", worker="ann", block="layer")


def committed(step):
    commit = Commit(term=1, step=step, attempt=0, scalars=None, loss=1.0, averages_digest="0" * 64)
    return Committed.of(CommitRecord(commit=commit, optimizer_step=step))


def test_entry_has_the_fields_and_priority_of_its_event():
    journal = RecordingJournal()
    console, screen = progress(journal)
    console.emit(HALTED)
    console.emit(WorkerConnected("bob", "cpu", "a key", 1))
    halted_entry, connected_entry = journal.entries
    assert halted_entry == (
        "HALTED at step 3: a NaN",
        {"event": "halted", "run_id": "r-1", **HALTED.fields()},
        Priority.ERROR,
    )
    assert connected_entry[0] == "worker bob connected, backend cpu; 1 connected"
    assert connected_entry[2] is Priority.INFO
    assert screen.getvalue() == ""


@pytest.mark.parametrize("reason", ["a NaN", "step 3: a NaN"])
def test_without_a_journal_the_same_lines_are_printed(reason):
    console, screen = progress()
    console.emit(HALTED.model_copy(update={"reason": reason}))
    assert screen.getvalue() == "HALTED at step 3: a NaN\n"


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        (RunPhase.TRAINING, "draining: finishing the step in progress"),
        (RunPhase.WAITING, "draining: no step is in progress"),
    ],
)
def test_draining_mentions_a_step_only_if_one_is_in_progress(phase, line):
    journal = RecordingJournal()
    console, _ = progress(journal)
    console._service.current.run.phase = phase
    console.emit(Draining())
    assert journal.entries[-1][0] == line


def test_draining_an_idle_service_mentions_no_step():
    journal = RecordingJournal()
    console, _ = progress(journal)
    console._service.current = None
    console.emit(Draining())
    assert journal.entries[-1][0] == "draining: no step is in progress"


def test_refused_worker_is_reported():
    console, screen = progress()
    console.emit(WorkerRefused("bob", "the run requires exactness"))
    assert screen.getvalue() == "worker bob is dismissed: the run requires exactness\n"


@pytest.mark.parametrize("once", [True, False])
def test_service_reports_the_start_and_end_of_each_run(once):
    console, screen = progress(once=once)
    console.emit(RunAccepted("digits", 5), "r-1")
    console.emit(RunEnded("failed", "no data"), "r-1")
    console.emit(RunAccepted("teacher-logits", None), "r-2")
    resume_command = "coordinator --resume --out runs/r-1"
    lines = [
        "run r-1 accepted: digits, 5 steps",
        "run r-1 failed: no data",
        f"  to resume: coordinator resume r-1, or {resume_command}",
        "run r-2 accepted: teacher-logits, all steps",
    ]
    assert screen.getvalue().splitlines() == ([] if once else lines)


def test_first_step_of_every_run_is_reported_at_once():
    console, screen = progress()
    console._service.current.started_s = None
    console._service.current.run.phase = RunPhase.TRAINING
    for step in (0, 1):
        console.emit(committed(step), "r-1")
    console.emit(TrainingStarted(["ann"]), "r-1")
    for step in (0, 1):
        console.emit(committed(step), "r-1")
    line = "r-1: training"
    assert screen.getvalue().splitlines() == [line, "training starts", line]


CLASSIFY = "{task: classify, model: {source: m}, data: {train: a.csv, holdout: 0}, "
DIGITS = "{task: digits, digits: {holdout: 0}, "
NOTICE = "  evaluate_every 5 has no effect: no samples are held out for evaluation; "


@pytest.mark.parametrize("event", [TrainingStarted(["ann"]), RunResumed("digits", 8, 3, notes=[])])
@pytest.mark.parametrize(
    ("spec", "evaluate_every", "parts", "notices"),
    [
        (CLASSIFY, 5, 0, [NOTICE + "raise data.holdout, or set data.validation"]),
        (DIGITS, 5, 0, [NOTICE + "raise digits.holdout"]),
        (CLASSIFY, 5, 1, []),
        (CLASSIFY, 0, 0, []),
    ],
)
def test_start_warns_that_nothing_will_be_evaluated(event, spec, evaluate_every, parts, notices):
    run = run_after("invite ann", "ready ann", workers="1", parts=str(parts))
    run.spec = parse_run_spec_text(f"{spec} steps: 8, evaluate_every: {evaluate_every}}}")
    console, screen = progress()
    console._service.current = SimpleNamespace(run=run)
    console.emit(event, "r-1")
    assert screen.getvalue().splitlines()[1:] == notices


def test_skipped_step_has_no_loss():
    console, screen = progress()
    run = run_after("invite ann", "ready ann", "loaded", workers="1")
    console._service.current = SimpleNamespace(run=run, started_s=0.0, started_step=0, outcome=None)
    run.losses.append(math.nan)
    console.emit(committed(0), "r-1")
    assert "  skipped  " in screen.getvalue()
    assert "nan" not in screen.getvalue()


def test_names_are_not_interpreted_as_markup(monkeypatch):
    worker = {"name": "[/x]", "device": "[red]a card", "state": "active"}
    document = {"workers": [worker], "waiting_for": "[/y]"}
    monkeypatch.setattr("coordinator.operator.console.status_document", lambda *_: document)
    console, screen = progress()
    console._service.current.started_s = None
    console._service.current.run.phase = RunPhase.TRAINING
    Console(file=screen, width=100).print(console._screen())
    assert all(text in screen.getvalue() for text in ("[/x]", "[red]a card", "waiting for [/y]"))


def test_progress_is_one_line_at_any_width(monkeypatch):
    document = {"workers": [{"name": "a", "device": "d", "state": "active"}]}
    monkeypatch.setattr("coordinator.operator.console.status_document", lambda *_: document)
    run = run_after("invite ann", "ready ann", "loaded", workers="1")
    console, screen = progress()
    console._service.current = SimpleNamespace(
        run=run, started_s=time.monotonic() - 7200, started_step=-1, outcome=None
    )
    Console(file=screen, width=80).print(console._screen())
    line = screen.getvalue().splitlines()[0]
    assert re.fullmatch(
        r"step 0/\d+  loss -  0\.0 samples/s, 2:00:00 elapsed, about \d+:00:00 left", line.strip()
    )


def test_refused_worker_is_named_once_while_the_run_waits():
    console, screen = progress()
    run = run_after("invite ann", "invite bob", "fails ann", workers="3")
    console._service.current.run = run
    console._service.sessions["bob"] = None
    console._service.trainers.append("bob")
    console._service.known_workers.update(("ann", "bob", "cem"))
    console.tick()
    console._wait_before_line_s = 0.0
    console.tick()
    assert screen.getvalue() == (
        "waiting 0 s for 2 more workers: 1 of 3 are connected; "
        "ann cannot take part: the device failed: out of memory; connected before: cem\n"
    )


def test_waiting_is_reported_at_growing_intervals_up_to_a_minute(monkeypatch):
    reporter, screen = progress()
    reporter._service.current.run = run_after("invite ann", workers="2")
    now_s = reporter._waiting_since_s
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for _ in range(300):
        now_s += 1
        reporter.tick()
    seconds = re.findall(r"waiting (\d+) s for", screen.getvalue())
    assert [int(second) + 1 for second in seconds] == [6, 11, 21, 41, 81, 141, 201, 261]


def test_waiting_time_of_another_phase_does_not_count():
    console, screen = progress()
    run = run_after("invite ann", workers="1")
    console._service.current.run = run
    console.tick()
    run._finish("finished", "all steps are committed", 0)
    console._wait_before_line_s = 0.0
    console.tick()
    assert screen.getvalue() == ""
    console._wait_before_line_s = 0.0
    console.tick()
    assert screen.getvalue() == "waiting 0 s for the disk to take the result\n"


@pytest.fixture
def logger():
    yield structlog.get_logger("coordinator")
    structlog.reset_defaults()


def test_journal_has_warnings_without_duplicates(logger, capsys):
    journal = RecordingJournal()
    set_up_logging(journal, as_json=False)
    logger.info("worker_connected", worker="ann")
    logger.warning("blob_changed", path="data.csv", digest="d")
    ((message, fields, priority),) = journal.entries
    assert message == "blob_changed: path data.csv, digest d"
    assert (fields["event"], fields["path"], priority) == (
        "blob_changed",
        "data.csv",
        Priority.WARNING,
    )
    assert capsys.readouterr().err == ""


def test_json_lines_are_optional(logger, capsys):
    set_up_logging(None, as_json=True)
    logger.info("worker_connected", worker="ann")
    assert re.match(r'{"worker": "ann", "event": "worker_connected"', capsys.readouterr().err)
