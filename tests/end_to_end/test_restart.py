"""Coordinators that are drained, stopped or killed resume with the same bits and a sound audit."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from protocol.base.errors import ExitCode
from tests import processes
from tests.cluster import Cluster
from tests.free_ports import free_address

STEPS = 60
PAUSE_STEP = 16
LOCAL = ("--local-workers", "1", "--backend", "scripted")
ANY_PORT = ("--bind", "127.0.0.1:0", "--control", "127.0.0.1:0")


@pytest.fixture(scope="module")
def run_options(tmp_path_factory) -> tuple[str, ...]:
    """Return the options of a scripted run; test_same_bits.py trains real models."""
    spec = tmp_path_factory.mktemp("job") / "run.yaml"
    spec.write_text(
        f"task: scripted\nsteps: {STEPS}\nbatch: {{samples: 8, microbatch: 1}}\n"
        "checkpoint: {every: 12}\n"
    )
    return "--run", str(spec)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the coordinator command to its end."""
    return processes.run_to_end("coordinator", *arguments)


def one_line(completed: subprocess.CompletedProcess[str]) -> str:
    (line,) = completed.stderr.strip().splitlines()
    return line


def result_of(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return document


@pytest.fixture(scope="module")
def finished_out(run_options, tmp_path_factory) -> Path:
    """Return the directory of an undisturbed run."""
    directory = tmp_path_factory.mktemp("finished") / "out"
    completed = run(*ANY_PORT, *run_options, *LOCAL, "--out", str(directory))
    assert completed.returncode == 0, completed.stderr
    return directory


def test_an_undisturbed_run_is_sound_and_reported(finished_out):
    audit = run("audit", str(finished_out))
    assert audit.returncode == 0, audit.stdout
    assert audit.stdout.rstrip().endswith("sound")
    assert "samples covered exactly once" in audit.stdout
    report = run("report", str(finished_out))
    page = Path(report.stdout.strip())
    assert page == finished_out / "report.html"
    html = page.read_text()
    for expected in ("AI Act", "<svg", result_of(finished_out)["weights_digest"]):
        assert expected in html
    page.unlink()


def test_a_flipped_byte_is_found_and_its_line_named(finished_out):
    journal = finished_out / "journal.jsonl"
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    offset = sum(map(len, lines[:40])) + len(lines[40]) // 2
    try:
        journal.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        audit = run("audit", str(finished_out))
        assert audit.returncode == 1
        assert "line 41 is bad" in audit.stdout
    finally:
        journal.write_bytes(content)


def test_a_directory_with_a_run_is_not_overwritten(run_options, finished_out):
    completed = run(*ANY_PORT, *run_options, *LOCAL, "--out", str(finished_out))
    assert completed.returncode == 2
    assert "holds a run already" in one_line(completed)
    assert "--resume" in one_line(completed)


def test_resuming_a_finished_run_changes_nothing(finished_out):
    before = (finished_out / "result.json").read_bytes()
    completed = run(*ANY_PORT, *LOCAL, "--out", str(finished_out), "--resume")
    assert completed.returncode == 0, completed.stderr
    assert "has finished" in completed.stdout
    assert (finished_out / "result.json").read_bytes() == before


def test_other_run_spec_does_not_continue_a_run(run_options, finished_out):
    completed = run(
        *ANY_PORT, *run_options, "--set", "seed=99", *LOCAL, "--out", str(finished_out), "--resume"
    )
    assert completed.returncode == ExitCode.MISMATCH
    assert "of another run spec" in one_line(completed)


def test_missing_run_gives_a_one_line_error(tmp_path):
    completed = run(*ANY_PORT, "--out", str(tmp_path / "nowhere"), "--resume")
    assert completed.returncode == 2
    assert "no such directory" in one_line(completed)
    completed = run("audit", str(tmp_path))
    assert completed.returncode == 2
    assert "expected a run" in one_line(completed)


def test_directory_has_at_most_one_coordinator(run_options, tmp_path):
    with Cluster(tmp_path, "--expect-workers", "1", *run_options) as cluster:
        out = str(tmp_path / "out")
        second = run(*ANY_PORT, *run_options, *LOCAL, "--out", out, "--resume")
        assert second.returncode == 2
        assert f"another coordinator (process {cluster.coordinator.pid})" in one_line(second)
        assert "is in progress" in one_line(run("audit", out))
        assert run("report", out).returncode == 0


def test_a_drained_run_continues(run_options, tmp_path, finished_out):
    address = free_address()
    arguments = (
        "--bind",
        address,
        "--control",
        "127.0.0.1:0",
        "--expect-workers",
        "1",
        *run_options,
    )
    # --resume starts the run if there is none.
    with Cluster(tmp_path, *arguments, "--resume") as cluster:
        worker = cluster.start_paused_worker("w0", PAUSE_STEP, "--backend", "scripted")
        worker.wait_until_paused()
        cluster.coordinator.terminate()
        cluster.wait_for("draining")
        worker.release()  # the step in progress finishes first
        drained_result = cluster.result()
        assert drained_result["outcome"] == "drained"
        assert PAUSE_STEP <= drained_result["steps"] < STEPS
    with Cluster(tmp_path, *arguments, "--resume") as cluster:
        cluster.start_worker("w1", "--backend", "scripted")
        result = cluster.result()
    assert result["outcome"] == "finished"
    assert result["weights_digest"] == result_of(finished_out)["weights_digest"]
    assert result["losses"] == result_of(finished_out)["losses"]
    assert run("audit", str(tmp_path / "out")).returncode == 0


def test_second_signal_ends_at_once_and_prints_how_to_continue(run_options, tmp_path, finished_out):
    with Cluster(tmp_path, "--expect-workers", "1", *run_options) as cluster:
        # The step in progress does not end.
        cluster.start_paused_worker("w0", PAUSE_STEP, "--backend", "scripted").wait_until_paused()
        cluster.coordinator.send_signal(signal.SIGINT)
        cluster.wait_for("draining")
        cluster.coordinator.send_signal(signal.SIGINT)
        assert cluster.wait_for_exit(cluster.coordinator) == 1
        resume_options = f"--resume --out {tmp_path / 'out'}"
        assert cluster.coordinator.stderr is not None
        assert resume_options in cluster.coordinator.stderr.read().splitlines()[-1]
    completed = run(*ANY_PORT, *run_options, *LOCAL, *resume_options.split())
    assert completed.returncode == 0, completed.stderr
    assert (
        result_of(tmp_path / "out")["weights_digest"] == result_of(finished_out)["weights_digest"]
    )


@pytest.mark.parametrize("mode", ["full", "checkpoint"])
def test_a_killed_coordinator_continues_with_the_same_worker(
    run_options, tmp_path, finished_out, mode
):
    arguments = (
        "--bind", free_address(), "--control", "127.0.0.1:0", "--expect-workers", "1", *run_options,
        "--set", f"log={mode}", "--set", "checkpoint.keep_log=true", "--resume",
    )  # fmt: skip
    with Cluster(tmp_path, *arguments) as first:
        worker = first.start_paused_worker("w0", 31, "--backend", "scripted")
        worker.wait_until_paused()
        first.wait_for("checkpoint", step=24)
        first.coordinator.send_signal(signal.SIGKILL)
        first.wait_for_exit(first.coordinator)
        with Cluster(tmp_path, *arguments) as second:
            worker.release()
            join_event = second.wait_for("worker_joined", worker="w0")
            assert join_event["step"] >= (31 if mode == "full" else 24)
            result = second.result()
        first.wait_for_exit(first.workers["w0"])
    assert result["weights_digest"] == result_of(finished_out)["weights_digest"]
    assert result["losses"] == result_of(finished_out)["losses"]
    audit = run("audit", str(tmp_path / "out"))
    assert audit.returncode == 0, audit.stdout
    if mode == "full":
        assert f"{STEPS} of {STEPS} steps replayed" in audit.stdout
