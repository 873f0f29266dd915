"""A coordinator that ends in some way and resumes: the same bits, and a sound audit."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.cluster import Cluster
from tests.free_ports import free_address

STEPS = 60
LOCAL = ("--local-workers", "1", "--backend", "scripted")
ANYWHERE = ("--bind", "127.0.0.1:0", "--control", "127.0.0.1:0")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[str, ...]:
    """The device does not matter here; test_same_bits tests workers that continue."""
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
def finished_out(job, tmp_path_factory) -> Path:
    """The directory of an undisturbed run."""
    directory = tmp_path_factory.mktemp("finished") / "out"
    completed = run(*ANYWHERE, *job, *LOCAL, "--out", str(directory))
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


def test_a_directory_with_a_run_is_not_overwritten(job, finished_out):
    repeat = run(*ANYWHERE, *job, *LOCAL, "--out", str(finished_out))
    assert repeat.returncode == 2
    assert "holds a run already" in one_line(repeat)
    assert "--resume" in one_line(repeat)


def test_finished_run_is_unchanged(finished_out):
    before = (finished_out / "result.json").read_bytes()
    repeat = run(*ANYWHERE, *LOCAL, "--out", str(finished_out), "--resume")
    assert repeat.returncode == 0, repeat.stderr
    assert "has finished" in repeat.stdout
    assert (finished_out / "result.json").read_bytes() == before


def test_other_run_spec_does_not_continue_a_run(job, finished_out):
    other = run(*ANYWHERE, *job, "--set", "seed=99", *LOCAL, "--out", str(finished_out), "--resume")
    assert other.returncode == 78
    assert "of another run spec" in one_line(other)


def test_nothing_to_resume_is_one_line(tmp_path):
    completed = run(*ANYWHERE, "--out", str(tmp_path / "nowhere"), "--resume")
    assert completed.returncode == 2
    assert "no such directory" in one_line(completed)
    completed = run("audit", str(tmp_path))
    assert completed.returncode == 2
    assert "expected a run" in one_line(completed)


def test_directory_has_at_most_one_coordinator(job, tmp_path):
    with Cluster(tmp_path, "--expect-workers", "1", *job) as cluster:
        out = str(tmp_path / "out")
        second = run(*ANYWHERE, *job, *LOCAL, "--out", out, "--resume")
        assert second.returncode == 2
        assert f"another coordinator (process {cluster.coordinator.pid})" in one_line(second)
        assert "is in progress" in one_line(run("audit", out))
        assert run("report", out).returncode == 0


def test_a_drained_run_continues(job, tmp_path, finished_out):
    address = free_address()
    arguments = ("--bind", address, "--control", "127.0.0.1:0", "--expect-workers", "1", *job)
    with Cluster(tmp_path, *arguments, "--resume") as cluster:
        worker = cluster.held_worker("w0", 16, "--backend", "scripted")
        worker.reached()
        cluster.coordinator.terminate()
        cluster.wait_for("draining")
        worker.release()  # the step in progress finishes first
        drained = cluster.result()
        assert drained["outcome"] == "drained"
        assert 15 < drained["steps"] < STEPS
    with Cluster(tmp_path, *arguments, "--resume") as cluster:
        cluster.worker("w1", "--backend", "scripted")
        result = cluster.result()
    assert result["outcome"] == "finished"
    assert result["weights_digest"] == result_of(finished_out)["weights_digest"]
    assert result["losses"] == result_of(finished_out)["losses"]
    assert run("audit", str(tmp_path / "out")).returncode == 0


def test_second_signal_ends_at_once_and_prints_how_to_continue(job, tmp_path, finished_out):
    with Cluster(tmp_path, "--expect-workers", "1", *job) as cluster:
        # The step in progress does not end.
        cluster.held_worker("w0", 16, "--backend", "scripted").reached()
        cluster.coordinator.send_signal(signal.SIGINT)
        cluster.wait_for("draining")
        cluster.coordinator.send_signal(signal.SIGINT)
        assert cluster.wait_for_exit(cluster.coordinator) == 1
        repeat = f"--resume --out {tmp_path / 'out'}"
        assert cluster.coordinator.stderr is not None
        assert repeat in cluster.coordinator.stderr.read().splitlines()[-1]
    completed = run(*ANYWHERE, *job, *LOCAL, *repeat.split())
    assert completed.returncode == 0, completed.stderr
    assert (
        result_of(tmp_path / "out")["weights_digest"] == result_of(finished_out)["weights_digest"]
    )


@pytest.mark.parametrize("mode", ["full", "checkpoint"])
def test_a_killed_coordinator_continues_with_the_same_worker(job, tmp_path, finished_out, mode):
    at = (
        "--bind", free_address(), "--control", "127.0.0.1:0", "--expect-workers", "1", *job,
        "--set", f"log={mode}", "--set", "checkpoint.keep_log=true", "--resume",
    )  # fmt: skip
    with Cluster(tmp_path, *at) as first:
        worker = first.held_worker("w0", 31, "--backend", "scripted")
        worker.reached()
        first.wait_for("checkpoint", step=24)
        first.coordinator.send_signal(signal.SIGKILL)
        first.wait_for_exit(first.coordinator)
        with Cluster(tmp_path, *at) as second:
            worker.release()
            resumed = second.wait_for("worker_joined", worker="w0")
            assert resumed["step"] >= (31 if mode == "full" else 24)
            result = second.result()
        first.wait_for_exit(first.workers["w0"])
    assert result["weights_digest"] == result_of(finished_out)["weights_digest"]
    assert result["losses"] == result_of(finished_out)["losses"]
    audit = run("audit", str(tmp_path / "out"))
    assert audit.returncode == 0, audit.stdout
    if mode == "full":
        assert f"{STEPS} of {STEPS} steps replayed" in audit.stdout
