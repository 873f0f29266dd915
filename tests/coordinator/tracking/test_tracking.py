"""Trackers in separate processes: installed trackers, and broken ones that do not block the run."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.run.outputs.events import Committed, TrainingStarted
from coordinator.service.events import RunAccepted, RunEnded
from coordinator.storage.directory.journal import Journal
from coordinator.storage.directory.journal_records import Ended
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.tracking.trackers import TRACKERS
from coordinator.tracking.tracking import Tracking
from protocol.cli.command_line import child_environment, command_of
from protocol.spec.run_spec import parse_run_spec
from tests.cluster import Cluster
from tests.commands import run_command

RUN = """
task: scripted
steps: 40
batch: {samples: 8, microbatch: 1}
scripted: {blocks: 2, block_bytes: 64, samples: 64}
"""
STEPS = [*range(1, 41)]


def write_run(directory: Path, steps: int, *, is_ended: bool = False) -> Path:
    """Write a run's directory with `steps` steps in its journal."""
    run_directory = RunDirectory(directory)
    if not directory.exists():
        run_directory.begin("scripted-1", parse_run_spec({"task": "scripted", "steps": steps}))
    journal = Journal(run_directory.journal)
    for step in range(journal.line_count, steps):
        journal.append(
            Committed(
                term=1,
                step=step,
                attempt=0,
                optimizer_step=step,
                loss=1.0 / (step + 1),
                skipped=False,
                averages_digest="0" * 64,
            )
        )
    if is_ended:
        journal.append(Ended(term=1, step=steps, outcome="finished", reason=""))
    journal.sync()
    journal.close()
    return directory


def feed_tracker(name: str, run: Path) -> str:
    """Run the tracker in its own process, because these libraries leave threads and files open."""
    arguments = [*command_of("coordinator"), "track", str(run), "--to", name]
    completed = subprocess.run(
        arguments, env=child_environment(), capture_output=True, text=True, check=True
    )
    return completed.stdout


def logged_by_tensorboard(directory: Path) -> list[tuple[int, float]]:
    loader = importlib.import_module(
        "tensorboard.backend.event_processing.event_file_loader"
    ).EventFileLoader
    files = sorted((directory / "trackers" / "tensorboard").glob("events.*"))
    return [
        (event.step, value.tensor.float_val[0])
        for file in files
        for event in loader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "loss"
    ]


def logged_by_mlflow(directory: Path) -> list[tuple[int, float]]:
    tracking_uri = (directory / "trackers" / "mlflow").as_uri()
    client = importlib.import_module("mlflow").MlflowClient(tracking_uri=tracking_uri)
    [run] = client.search_runs([client.get_experiment_by_name("samestep").experiment_id])
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]


def logged_by_wandb(directory: Path) -> list[tuple[int, float]]:
    """Read the files for `wandb sync`: a log in LevelDB's format after a header of 7 bytes."""
    pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
    files = (directory / "trackers" / "wandb").glob("wandb/offline-run-*/*.wandb")
    losses = []
    for file in files:
        for content in leveldb_records(file.read_bytes(), 7):
            history = pb2.Record.FromString(content).history
            items = {"".join([i.key, *i.nested_key]): i.value_json for i in history.item}
            if "loss" in items:
                losses.append((int(items["_step"]), float(items["loss"])))
    return sorted(losses)


def leveldb_records(content: bytes, position: int) -> Iterator[bytes]:
    """Yield records; kind 1 is a complete record, 2, 3 and 4 its first, middle and last part."""
    parts = b""
    while len(content) - position > 7:
        if 32_768 - position % 32_768 < 7:
            position += (
                32_768 - position % 32_768
            )  # the rest of the block is too short for a header
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in {1, 4}:
            yield parts
            parts = b""


LOG_READERS = {
    "tensorboard": logged_by_tensorboard, "wandb": logged_by_wandb, "mlflow": logged_by_mlflow,
}  # fmt: skip
INSTALLED = [name for name in TRACKERS if importlib.util.find_spec(TRACKERS[name]) is not None]


@pytest.fixture
def no_server(monkeypatch):
    """Let trackers write to the run's directory instead of a server."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.usefixtures("no_server")
@pytest.mark.parametrize("name", TRACKERS)
def test_every_step_is_reported_once_across_two_processes(tmp_path, name):
    if name not in INSTALLED:
        pytest.skip(f"needs the extra {name}")
    run = write_run(tmp_path / "run", 3)
    assert "sent 2 steps; it has the run up to step 2" in feed_tracker(name, run)
    write_run(run, 6, is_ended=True)
    assert "sent 4 steps; it has the run up to step 6" in feed_tracker(name, run)
    assert "sent 0 steps; it has the run up to step 6" in feed_tracker(name, run)
    assert LOG_READERS[name](run) == [(n, pytest.approx(1 / n)) for n in range(1, 7)]


@pytest.mark.usefixtures("no_server")
@pytest.mark.skipif(not INSTALLED, reason="needs the extra tensorboard, wandb or mlflow")
def test_restarted_coordinator_continues_all_trackers(tmp_path):
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    options = ["--expect-workers", "1", *(f"--track={name}" for name in INSTALLED)]
    with Cluster(tmp_path, *options, "--run", str(run)) as cluster:
        cluster.start_worker("w0", "--backend", "scripted:5")
        cluster.wait_for("committed", step=9)
        cluster.coordinator.kill()
        cluster.coordinator.wait()
    with Cluster(tmp_path, *options, "--resume") as cluster:
        cluster.start_worker("w0", "--backend", "scripted:1")
        result = cluster.result()
        assert cluster.wait_for_exit(cluster.coordinator) == 0
    for name in INSTALLED:
        losses = LOG_READERS[name](tmp_path / "out")
        assert [step for step, _ in losses] == STEPS, name
        assert [value for _, value in losses] == pytest.approx(result["losses"]), name


BROKEN = {
    "fails": "def init(**kw): raise RuntimeError('no such server\\nat all')",
    "hangs": "import time\ndef Settings(**kw): pass\ndef init(**kw): time.sleep(600)",
    "dies": "import os\ndef Settings(**kw): pass\ndef init(**kw): os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize(
    ("fault", "expected_text"),
    [("fails", "AttributeError"), ("hangs", "in time"), ("dies", "it was ended")],
)
def test_broken_tracker_is_reported_in_one_line(tmp_path, monkeypatch, fault, expected_text):
    (tmp_path / "wandb.py").write_text(BROKEN[fault])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run = write_run(tmp_path / "run", 3, is_ended=True)
    lines: list[str] = []
    tracking = Tracking(("wandb",), lambda: run, lines.append, grace_s=5)
    before = time.monotonic()
    tracking.emit(RunAccepted("scripted", 3), "scripted-1")
    for _ in range(100_000):  # more than a pipe buffers
        tracking.emit(TrainingStarted([]))
    tracking.emit(RunEnded("finished", ""), "scripted-1")
    assert time.monotonic() - before < 5
    tracking.stop()
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert expected_text in lines[0]
    assert f"coordinator track {run} --to wandb" in lines[0]


def test_unknown_tracker_is_refused_at_once(tmp_path):
    for arguments, expected_text in (
        (("--track", "tensorbord"), "expected one of tensorboard"),
        (("track", str(tmp_path), "--to", "trackio"), "expected one of tensorboard"),
    ):
        completed = run_command(
            "coordinator", *arguments, *(["--expect-workers", "1"] if "-" in arguments[0] else [])
        )
        assert (completed.returncode, completed.stderr.count("\n")) == (2, 1)
        assert expected_text in completed.stderr


def test_missing_library_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name)
    )
    completed = run_command("coordinator", "--expect-workers", "1", "--track", "wandb")
    assert "pip install 'samestep[wandb]'" in completed.stderr


def test_directory_without_a_run_is_refused(tmp_path):
    pytest.importorskip("tensorboard")
    completed = run_command("coordinator", "track", str(tmp_path), "--to", "tensorboard")
    assert completed.returncode == 2
    assert "run.json" in completed.stderr
