"""Each event that is worth a line has one, and no other: what the journal is made of."""

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
from tests.transcripts.transcript import Stage

TRAINS = (
    ("invite", "ann"), ("invite", "bob"), ("ready", "ann"), ("ready", "bob"), ("loaded",),
)  # fmt: skip


def run_and_records(*commands):
    """The run after these commands, and the records of all they led to."""
    stage = Stage(workers="2", steps="2", parts="2")
    records: list[Record] = []
    stage.hears = lambda actions: records.extend(records_of(actions, stage.run))
    for word, *plain in commands:
        options = dict(part.split("=") for part in plain if "=" in part)
        stage.command(word, [part for part in plain if "=" not in part], options)
    return stage.run, records


def kinds(records):
    return [type(record) for record in records]


def test_from_the_first_manifest_to_a_halt():
    run, records = run_and_records(*TRAINS, ("payload", "bob", "2-4", "value=nan"))
    assert kinds(records) == [ManifestSettled, ViewChanged, Planned, Halted]
    _, view, planned, halted = records
    assert (view.change, view.view, [member.name for member in view.members]) == (
        "started", 2, ["ann", "bob"],
    )  # fmt: skip
    assert planned.nodes == {"ann": ((0, 2),), "bob": ((2, 4),)}
    assert (planned.cause, planned.view, planned.microbatches) == ("step", 2, 4)
    assert (halted.worker, halted.block, halted.microbatches) == ("bob", "layer", (2, 4))
    assert halted.reason == run.reason


def test_what_a_lost_worker_leaves_is_planned_again_with_its_cause():
    _, records = run_and_records(*TRAINS, ("lost", "bob"))
    fault, view, planned = records[3:]
    assert (fault.what, fault.worker, fault.reason) == (
        "worker_lost", "bob", "the connection is over",
    )  # fmt: skip
    assert (view.change, view.worker, [member.name for member in view.members]) == (
        "lost", "bob", ["ann"],
    )  # fmt: skip
    assert (planned.cause, planned.nodes) == ("reassigned", {"ann": ((2, 4),)})


def test_a_worker_that_was_let_go_is_no_fault():
    _, records = run_and_records(
        *TRAINS, ("drains", "bob"), ("subtree", "bob", "2-4"), ("lost", "bob")
    )
    assert Fault not in kinds(records)
    view = records[-1]
    assert (view.change, view.worker, [member.name for member in view.members]) == (
        "drained", "bob", ["ann"],
    )  # fmt: skip
    _, records = run_and_records(*TRAINS, ("drains", "bob"), ("lost", "bob"))  # it had not finished
    assert records[3].what == "worker_lost"


def test_a_late_worker_is_noted_with_what_is_done_about_it():
    _, records = run_and_records(
        *TRAINS, ("tick", "100"), ("subtree", "bob", "2-4"), ("tick", "5100")
    )
    late, planned, speculated = records[3:]
    assert (late.what, late.worker, late.reason) == (
        "straggler", "ann", "step 0: gradients overdue",
    )  # fmt: skip
    assert (planned.cause, planned.nodes) == ("speculative", {"bob": ((0, 2),)})
    assert speculated.what == "speculated"


def test_a_worker_that_is_refused_is_a_fault():
    _, records = run_and_records(*TRAINS, ("invite", "cem"), ("ready", "cem", "data=other"))
    assert (records[-1].what, records[-1].worker) == ("refused", "cem")
    assert "same data" in records[-1].reason


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (Evaluated(term=1, step=2, metrics={"mean": 0.5}), Evaluated),
        (events.EvaluationMissed(2, "worker 'eva' left"), Fault),
        (events.StepRestarted(1, 0, 1), Fault),
        (events.RedoneOtherwise(1, "a", "b"), Fault),
        (events.WorkerPutAside("ann", 3, 19), Fault),
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
def test_what_else_is_noted_and_what_is_not(event, kind):
    run, _ = run_and_records()
    assert isinstance(record_of(event, run), kind)


def test_a_commit_says_whose_subtrees_make_it_up():
    _, records = run_and_records(*TRAINS, ("subtree", "ann", "0-2"), ("subtree", "bob", "2-4"))
    (commit,) = [record for record in records if isinstance(record, Committed)]
    assert commit.counted == ({"ann": ((0, 2),), "bob": ((2, 4),)},)
    assert (commit.step, commit.loss, commit.skipped) == (0, 0.5, False)


def test_no_two_events_are_told_by_one_name():
    by_event = {(event.name, event.__qualname__) for event in _all(Event) if event.name}
    assert len(by_event) == len({event for event, _ in by_event}) >= 20


def _all(kind):
    return [each for sub in kind.__subclasses__() for each in (sub, *_all(sub))]
