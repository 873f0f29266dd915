"""The status document in each phase of a run: what the run waits for, and why."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.files.blob_server import BlobServer
from coordinator.operator.status import status_document, waiting_for
from coordinator.operator.status_text import status_lines, summary
from coordinator.run.outputs.actions import Finish
from coordinator.service.coordinator_replica import ReplicaState
from coordinator.service.execution import Execution
from coordinator.service.service import Service, Settings
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.run_storage import RunStorage
from protocol.spec.run_spec import parse_run_spec
from protocol.wire.messages import Hello
from tests.live_service import live_service
from tests.transcripts.transcript import ScriptedCoordinator

NOW_S = 100.0


class ExecutionSink:
    def emit(self, event, run_id=""):
        del event, run_id

    def end_run(self, execution, outcome):
        del execution, outcome


def run_after(*commands, **options):
    """Return a run after these commands, each `command argument ... key=value`."""
    stage = ScriptedCoordinator(**options)
    for line in commands:
        command, *rest = line.split()
        arguments = [part for part in rest if "=" not in part]
        stage.command(command, arguments, dict(part.split("=") for part in rest if "=" in part))
    return stage.run


TWO_TRAIN = ("invite ann", "invite bob", "ready ann", "ready bob", "loaded")
COMMITTED = (*TWO_TRAIN, "subtree ann 0-2", "subtree bob 2-4")


@pytest.mark.parametrize(
    ("commands", "options", "worker_names", "expected"),
    [
        ((), {"workers": "3"}, ["ann"], "2 more workers: 1 of 3 are connected"),
        (
            ("invite ann", "invite bob", "unready ann own=yes"), {"workers": "2"}, ["ann", "bob"],
            "1 more worker: 1 of 2 are connected; ann cannot take part: too large for its device",
        ),
        (
            ("invite ann", "invite bob", "fails ann"), {"workers": "2"}, ["bob"],
            ("1 more worker: 1 of 2 are connected; "
                "ann cannot take part: the device failed: out of memory"),
        ),
        (("invite ann", "invite bob", "ready ann"), {}, ["ann", "bob"], "bob to build the task"),
        (("invite ann", "ready ann left_out=other-bits"), {"workers": "2"}, ["ann", "ann"],
            "1 more worker: 1 of 2 are connected; ann: other-bits"),
        (TWO_TRAIN[:-1], {}, ["ann", "bob"], "ann to send the initial state"),
        ((*TWO_TRAIN, "subtree bob 2-4", "payload ann 0-2", "loss ann 0-2"), {}, ["ann", "bob"],
            "gradients of ann"),
        ((*COMMITTED,), {"disk": "slow"}, ["ann", "bob"],
            "the disk to take the checkpoint of step 0"),
        ((*TWO_TRAIN, "saved 0", "subtree ann 0-2", "subtree bob 2-4"), {"disk": "slow"},
            ["ann", "bob"], "the disk to take the commit of step 0"),
        ((*TWO_TRAIN, "saved 0", "subtree ann 0-2", "subtree bob 2-4", "durable 0", "applied ann 1",
            "applied bob 1", "replica 1"), {"disk": "slow", "steps": "1"},
            ["ann", "bob"], "the disk to take the checkpoint of step 1"),
        ((*TWO_TRAIN, "invite cem", "ready cem initial=other", "lost ann", "lost bob"), {},
            ["cem"], "cem to load the state"),
        (TWO_TRAIN, {}, ["ann", "bob"], "gradients of ann, bob"),
        ((*TWO_TRAIN, "subtree ann 0-2"), {}, ["ann", "bob"], "gradients of bob"),
        ((*TWO_TRAIN, "halt"), {}, ["ann"],
            "an operator (continue, continue --skip-step, or give-up): halted by the operator"),
        ((*TWO_TRAIN, "lost ann", "lost bob"), {}, [], "a worker: all have left"),
        ((*TWO_TRAIN, "invite cem", "fails cem", "lost ann", "lost bob"), {}, [],
            "a worker that can take part; cem cannot take part: the device failed: out of memory"),
        (COMMITTED, {"steps": "1"}, ["ann"], "ann, bob to apply the step"),
        ((*COMMITTED, "applied ann 1", "applied bob 1"), {"steps": "1"}, ["ann"],
            "ann, bob to apply the step"),
        ((*COMMITTED, "lost ann", "lost bob"), {"steps": "1"}, [], "a worker: all have left"),
        (COMMITTED, {"steps": "1", "parts": "4"}, ["ann"], "ann, bob to evaluate"),
        ((*COMMITTED, "result ann 0", "result ann 1"), {"steps": "1", "parts": "4"}, ["ann"],
            "bob to evaluate"),
        ((*COMMITTED, "lost ann", "lost bob"), {"steps": "1", "parts": "4"}, [],
            "a worker: all have left"),
        ((*COMMITTED, "result ann 0", "result bob 1"), {"steps": "1", "parts": "2"}, ["ann"],
            "ann, bob to apply the step"),
    ],
)  # fmt: skip
def test_status_names_what_the_run_waits_for(commands, options, worker_names, expected):
    run = run_after(*commands, **{"workers": "2", **options})
    wait_text = waiting_for(run, worker_names)
    assert wait_text.words == expected
    assert [name for name in worker_names if name in wait_text.workers] == [
        name for name in worker_names if name in expected.partition("; ")[0]
    ]


def test_failed_run_does_not_wait_for_the_disk():
    run = run_after("invite ann", "fails ann", workers="1")
    run._finish("failed", "no such file", 2)
    assert waiting_for(run, []).words == ""


def test_late_coordinator_replica_is_named():
    run = run_after(*COMMITTED, workers="2", steps="1")
    assert run.progress is not None
    run.progress.agreement._awaited.clear()
    assert waiting_for(run, ["ann"]).words == "the coordinator's replica to apply the step"


def storage(run):
    """Return a storage that the test never uses."""
    return RunStorage(
        RunDirectory(Path()), run.run_id, run.spec, term=1, guard=lambda: None, failed=print
    )


async def service_with(run, *names):
    service = Service(Settings(("127.0.0.1", 9000), run.expect_workers if run else 1, Path(), True))
    if run is not None:
        service.current = Execution(
            run, service.sessions, storage(run), BlobServer(run.run_id, None), ExecutionSink()
        )
    for name in names:
        hello = Hello(
            release="0",
            name=name,
            instance="0" * 32,
            backend="cpu",
            duty="train",
            nonce=bytes(32),
            enrolled=False,
        )
        channel = SimpleNamespace(
            peer="host:1", bytes_received=5, bytes_sent=7, last_received_s=NOW_S - 2
        )
        service.sessions[name] = SimpleNamespace(  # type: ignore[assignment]
            hello=hello, channel=channel, preparing=""
        )
    return service


async def test_task_preparation_progress_is_shown_with_the_workers():
    run = run_after("invite ann", "invite bob", "ready ann", workers="2")
    service = await service_with(run, "ann", "bob")
    service.sessions["ann"].preparing = "compiling"  # reported before it was ready
    assert status_document(service, NOW_S)["waiting_for"] == "bob to build the task"
    service.sessions["bob"].preparing = "read 1.00 GiB of 8.00 GiB, 9 s left"
    assert status_document(service, NOW_S)["waiting_for"] == (
        "bob to build the task (bob: read 1.00 GiB of 8.00 GiB, 9 s left)"
    )


async def test_idle_service_is_reported():
    document = status_document(await service_with(None), NOW_S)
    assert (document["phase"], document["reason"]) == ("idle", "no run was submitted")
    assert "phase    idle (no run was submitted)" in list(status_lines(document))
    assert summary(document) == "idle, 0 of 1 workers"
    unencrypted = document | {"encryption": "none (--plaintext)"}
    assert summary(unencrypted) == "idle, 0 of 1 workers; NOT ENCRYPTED"
    json.dumps(document, allow_nan=False)


async def test_status_of_a_training_run_fits_on_one_screen():
    run = run_after(*COMMITTED, "applied ann 1", "applied bob 1", "replica 1", workers="2")
    service = await service_with(run, "ann", "bob", "idle")
    assert service.current is not None
    service.current.replica_state = ReplicaState(1, "s" * 64)
    service.current.weights_digest = "w" * 64
    document = json.loads(json.dumps(status_document(service, NOW_S), allow_nan=False))
    expected = {
        "phase": "training", "step": 1, "steps": 2, "loss": 0.5, "weights_digest": "w" * 64,
        "exact": True, "view": 2, "waiting_for": "gradients of ann, bob", "balance": 1.0,
    }  # fmt: skip
    assert {key: document[key] for key in expected} == expected
    ann, bob, idle_worker = document["workers"]
    assert (ann["state"], ann["microbatches_of_step"], ann["microbatches"]) == ("active", 2, 2)
    assert (bob["device"], bob["ms_per_microbatch"], bob["last_seen_s"]) == ("a device", 10.0, 2.0)
    assert (idle_worker["state"], idle_worker["device"]) == ("idle", "")
    assert not any("SILENT" in line for line in status_lines(document))
    idle_worker["last_seen_s"] = 8.5
    assert "  idle: idle, SILENT, seen 8.5 s ago" in list(status_lines(document))
    lines = list(status_lines(document))
    assert len(lines) <= 24
    assert "waiting  for gradients of ann, bob (compute)" in lines
    assert document["stage"] == "compute"
    assert document["exchange"]["way"] == "star"
    assert "exchange a star: the run spec says so" in lines
    expected_line = f"training, run {document['run_id']} step 1 of 2, 3 of 2 workers; "
    assert summary(document) == (expected_line + "waiting for gradients of ann, bob")
    assert (
        "  bob: active on a device, 2 microbatches of this step, 10 ms/microbatch, seen 2 s ago"
        in lines
    )


async def test_halt_is_reported_with_its_reason():
    run = run_after(*TWO_TRAIN, "payload bob 2-4 value=nan", workers="2")
    document = status_document(await service_with(run, "ann", "bob"), NOW_S)
    assert document["phase"] == "halted"
    assert "from worker 'bob'" in document["reason"]
    assert document["waiting_for"].startswith("an operator")


async def test_skipped_step_has_no_loss_in_json():
    run = run_after(*TWO_TRAIN, "halt", "continue skip=yes", workers="2")
    assert math.isnan(run.losses[-1])
    document = status_document(await service_with(run), NOW_S)
    assert document["loss"] is None
    json.dumps(document, allow_nan=False)


async def test_finished_run_shows_its_outcome():
    run = run_after(*TWO_TRAIN, "give-up", workers="2")
    service = await service_with(run)
    service.finished, service.current = service.current, None
    assert service.finished is not None
    service.finished.outcome = Finish("failed", "nobody is left", 1)
    document = status_document(service, NOW_S)
    assert (document["phase"], document["reason"]) == ("failed", "nobody is left")
    assert "waiting_for" not in document
    assert next(iter(status_lines(document))) == "phase    failed (nobody is left)"


async def test_unlike_workers_show_as_mixed():
    run = run_after(
        "invite ann", "invite bob", "ready ann", "ready bob signature=gpu", "loaded", workers="2"
    )
    document = status_document(await service_with(run, "ann", "bob"), NOW_S)
    assert document["exact"] is False
    lines = list(status_lines(document))
    assert "numbers  mixed (exactness: prefer)" in lines
    assert any(line.startswith("unit     sample, computed") for line in lines)
    signatures = {worker["signature"] for worker in document["workers"]}
    assert len(signatures) == 2


@pytest.mark.parametrize(
    ("commands", "options", "reason"),
    [
        (("invite ann", "invite bob", "ready ann", "ready bob signature=gpu"),
            {"exactness": "require"},
            "exactness: require expects the run's numerics profile"),
        (("invite ann", "invite bob", "ready ann", "unready bob own=yes"), {},
            "too large for its device"),
    ],
    ids=["other bits", "too small"],
)  # fmt: skip
async def test_refused_worker_is_named_and_not_counted(commands, options, reason):
    run = run_after(*commands, workers="2", **options)
    service = await service_with(run, "ann", "bob")
    document = json.loads(json.dumps(status_document(service, NOW_S), allow_nan=False))
    wait_text = document["waiting_for"]
    assert wait_text.startswith(
        f"1 more worker: 1 of 2 are connected; bob cannot take part: {reason}"
    )
    _, bob = document["workers"]
    assert (bob["state"], bob["cannot"].startswith(reason)) == ("cannot take part", True)
    lines = list(status_lines(document))
    assert f"waiting  for {wait_text}" in lines
    assert "workers  1 of 2 expected, view 0" in lines
    assert "  bob: cannot take part, seen 2 s ago" in lines
    assert ", 1 of 2 workers; waiting for 1 more worker: 1 of 2 are connected" in summary(document)


async def test_waiting_run_and_missing_loss_are_described():
    run = run_after(*COMMITTED, "applied ann 1", "applied bob 1", "replica 1", workers="2")
    document = status_document(await service_with(run, "ann", "bob"), NOW_S)
    lines = list(status_lines(document | {"loss": None, "queued_runs": ["a-1", "b-2"]}))
    assert "step     1 of 2, no loss" in lines
    assert "queued   a-1, b-2" in lines


async def test_unknown_step_counts_are_not_reported(tmp_path):
    spec = parse_run_spec(
        {"task": "teacher-logits", "model": {"source": "teacher"}, "data": {"train": "text"}}
    )
    async with live_service(tmp_path, 1) as live:
        live.service.submit(spec)
        document = status_document(live.service, time.monotonic())
        assert document["steps"] is None
        assert "step     0, no loss" in list(status_lines(document))
        assert summary(document).startswith(f"waiting, run {document['run_id']} step 0, 0 of 1")
