"""Events that are journaled have a line each; others have none."""

import pytest

from coordinator.run.outputs import events
from coordinator.run.outputs.events import (
    Committed,
    Evaluated,
    Event,
    Halted,
    ManifestSettled,
    Planned,
    Record,
    ViewChanged,
)
from coordinator.service import events as service_events
from coordinator.service.journal_lines import record_of, records_of
from coordinator.storage.directory.journal_records import Fault
from protocol.exact.reduction.tree import Subtree
from tests.transcripts.transcript import ScriptedCoordinator

START_TRAINING = (
    ("invite", "ann"), ("invite", "bob"), ("ready", "ann"), ("ready", "bob"), ("loaded",),
)  # fmt: skip


def run_and_records(*commands):
    """Return the run after these commands, and the records of all resulting events."""
    stage = ScriptedCoordinator(workers="2", steps="2", parts="2")
    records: list[Record] = []
    stage.on_actions = lambda actions: records.extend(records_of(actions, stage.run))
    for command, *arguments in commands:
        options = dict(part.split("=") for part in arguments if "=" in part)
        stage.command(command, [part for part in arguments if "=" not in part], options)
    return stage.run, records


def kinds(records):
    return [type(record) for record in records]


def test_manifest_view_plan_and_halt_are_recorded():
    run, records = run_and_records(*START_TRAINING, ("payload", "bob", "2-4", "value=nan"))
    assert kinds(records) == [ManifestSettled, ViewChanged, Planned, Halted]
    _, view, planned, halt = records
    assert (view.change, view.view, [member.name for member in view.members]) == (
        "started", 2, ["ann", "bob"],
    )  # fmt: skip
    assert planned.nodes == {"ann": ((0, 2),), "bob": ((2, 4),)}
    assert (planned.cause, planned.view, planned.microbatches) == ("step", 2, 4)
    assert (halt.worker, halt.block, halt.microbatches) == ("bob", "layer", (2, 4))
    assert halt.reason == run.reason


def test_subtrees_of_a_lost_worker_are_replanned_with_the_cause():
    _, records = run_and_records(*START_TRAINING, ("lost", "bob"))
    fault, view, planned = records[3:]
    assert (fault.what, fault.worker, fault.reason) == (
        "worker_lost", "bob", "the connection is over",
    )  # fmt: skip
    assert (view.change, view.worker, [member.name for member in view.members]) == (
        "lost", "bob", ["ann"],
    )  # fmt: skip
    assert (planned.cause, planned.nodes) == ("reassigned", {"ann": ((2, 4),)})


def test_dismissed_worker_is_no_fault():
    _, records = run_and_records(
        *START_TRAINING, ("drains", "bob"), ("subtree", "bob", "2-4"), ("lost", "bob")
    )
    assert Fault not in kinds(records)
    view = records[-1]
    assert (view.change, view.worker, [member.name for member in view.members]) == (
        "drained", "bob", ["ann"],
    )  # fmt: skip
    _, records = run_and_records(
        *START_TRAINING, ("drains", "bob"), ("lost", "bob")
    )  # lost before it had finished
    assert records[3].what == "worker_lost"


def test_late_worker_is_recorded_with_the_reaction():
    _, records = run_and_records(
        *START_TRAINING, ("tick", "100"), ("subtree", "bob", "2-4"), ("tick", "5100")
    )
    straggler_fault, planned, speculated = records[3:]
    assert (straggler_fault.what, straggler_fault.worker, straggler_fault.reason) == (
        "straggler", "ann", "step 0: gradients overdue",
    )  # fmt: skip
    assert (planned.cause, planned.nodes) == ("speculative", {"bob": ((0, 2),)})
    assert speculated.what == "speculated"


def test_refused_worker_is_a_fault():
    _, records = run_and_records(*START_TRAINING, ("invite", "cem"), ("ready", "cem", "data=other"))
    assert (records[-1].what, records[-1].worker) == ("refused", "cem")
    assert "same data" in records[-1].reason


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (Evaluated(term=1, step=2, metrics={"mean": 0.5}), Evaluated),
        (events.EvaluationMissed(2, "worker 'eva' left"), Fault),
        (events.StepRestarted(1, 0, 1), Fault),
        (events.StepRedoneDifferently(1, "a", "b"), Fault),
        (events.WorkerSetAside("ann", 3, 19), Fault),
        (events.DeviceFault("ann", "gpu1", "gone"), Fault),
        (events.WorkerUnready("ann", "no data"), Fault),
        (service_events.LogUnreadable("torn"), Fault),
        (service_events.InternalError("a bug"), Fault),
        (service_events.RunFailing("nobody is left"), Fault),
        (events.WorkerReady("ann", "a device", "cpu", "0" * 64), type(None)),
        (events.SubtreesReassigned(0, [str(Subtree(0, 2))]), type(None)),
        (service_events.Draining(), type(None)),
    ],
)
def test_event_becomes_its_record_or_none(event, kind):
    run, _ = run_and_records()
    assert isinstance(record_of(event, run), kind)


def test_commit_names_the_workers_of_its_subtrees():
    _, records = run_and_records(
        *START_TRAINING, ("subtree", "ann", "0-2"), ("subtree", "bob", "2-4")
    )
    (commit,) = [record for record in records if isinstance(record, Committed)]
    assert commit.counted == ({"ann": ((0, 2),), "bob": ((2, 4),)},)
    assert (commit.step, commit.loss, commit.skipped) == (0, 0.5, False)


def test_event_names_are_unique():
    by_event = {(event.name, event.__qualname__) for event in _all(Event) if event.name}
    assert len(by_event) == len({event for event, _ in by_event}) >= 20


def _all(kind):
    return [subclass for sub in kind.__subclasses__() for subclass in (sub, *_all(sub))]
