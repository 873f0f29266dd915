"""A coordinator that ends, one way or another, and goes on: the same bits, and a sound audit."""

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
    """What the device computes is of no matter here: workers that go on are in test_same_bits."""
    spec = tmp_path_factory.mktemp("job") / "run.yaml"
    spec.write_text(
        f"task: scripted\nsteps: {STEPS}\nbatch: {{samples: 8, microbatch: 1}}\n"
        "checkpoint: {every: 12}\n"
    )
    return "--run", str(spec)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The coordinator command, to its end."""
    return processes.ended("coordinator", *arguments)


def one_line(ended: subprocess.CompletedProcess[str]) -> str:
    (line,) = ended.stderr.strip().splitlines()
    return line


def result_of(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return document


@pytest.fixture(scope="module")
def finished(job, tmp_path_factory) -> Path:
    """The directory of a run that nothing has disturbed."""
    directory = tmp_path_factory.mktemp("finished") / "out"
    ended = run(*ANYWHERE, *job, *LOCAL, "--out", str(directory))
    assert ended.returncode == 0, ended.stderr
    return directory


def test_an_undisturbed_run_is_sound_and_reported(finished):
    audited = run("audit", str(finished))
    assert audited.returncode == 0, audited.stdout
    assert audited.stdout.rstrip().endswith("sound")
    assert "samples covered exactly once" in audited.stdout
    reported = run("report", str(finished))
    page = Path(reported.stdout.strip())
    assert page == finished / "report.html"
    html = page.read_text()
    for expected in ("AI Act", "<svg", result_of(finished)["weights_digest"]):
        assert expected in html
    page.unlink()


def test_a_flipped_byte_is_found_and_its_line_named(finished):
    journal = finished / "journal.jsonl"
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    at = sum(map(len, lines[:40])) + len(lines[40]) // 2
    try:
        journal.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        audited = run("audit", str(finished))
        assert audited.returncode == 1
        assert "line 41 is bad" in audited.stdout
    finally:
        journal.write_bytes(content)


def test_a_directory_with_a_run_is_not_overwritten(job, finished):
    again = run(*ANYWHERE, *job, *LOCAL, "--out", str(finished))
    assert again.returncode == 2
    assert "holds a run already" in one_line(again)
    assert "--resume" in one_line(again)


def test_a_finished_run_stays_as_it_is(finished):
    before = (finished / "result.json").read_bytes()
    again = run(*ANYWHERE, *LOCAL, "--out", str(finished), "--resume")
    assert again.returncode == 0, again.stderr
    assert "has finished" in again.stdout
    assert (finished / "result.json").read_bytes() == before


def test_another_run_spec_does_not_continue_with_it(job, finished):
    other = run(*ANYWHERE, *job, "--set", "seed=99", *LOCAL, "--out", str(finished), "--resume")
    assert other.returncode == 78
    assert "of another run spec" in one_line(other)


def test_nothing_to_resume_is_one_line(tmp_path):
    ended = run(*ANYWHERE, "--out", str(tmp_path / "nowhere"), "--resume")
    assert ended.returncode == 2
    assert "no such directory" in one_line(ended)
    ended = run("audit", str(tmp_path))
    assert ended.returncode == 2
    assert "expected a run" in one_line(ended)


def test_one_directory_has_one_coordinator(job, tmp_path):
    with Cluster(tmp_path, "--expect-workers", "1", *job) as cluster:
        out = str(tmp_path / "out")
        second = run(*ANYWHERE, *job, *LOCAL, "--out", out, "--resume")
        assert second.returncode == 2
        assert f"another coordinator (process {cluster.coordinator.pid})" in one_line(second)
        assert "is in progress" in one_line(run("audit", out))
        assert run("report", out).returncode == 0


def test_a_drained_run_continues(job, tmp_path, finished):
    address = free_address()
    at = ("--bind", address, "--control", "127.0.0.1:0", "--expect-workers", "1", *job)
    with Cluster(tmp_path, *at, "--resume") as cluster:
        worker = cluster.held_worker("w0", 16, "--backend", "scripted")
        worker.reached()
        cluster.coordinator.terminate()
        cluster.wait_for("draining")
        worker.release()  # the step in progress is finished first
        drained = cluster.result()
        assert drained["outcome"] == "drained"
        assert 15 < drained["steps"] < STEPS
    with Cluster(tmp_path, *at, "--resume") as cluster:
        cluster.worker("w1", "--backend", "scripted")
        result = cluster.result()
    assert result["outcome"] == "finished"
    assert result["weights_digest"] == result_of(finished)["weights_digest"]
    assert result["losses"] == result_of(finished)["losses"]
    assert run("audit", str(tmp_path / "out")).returncode == 0


def test_a_second_signal_ends_at_once_and_says_how_to_continue(job, tmp_path, finished):
    with Cluster(tmp_path, "--expect-workers", "1", *job) as cluster:
        # The step in progress does not end.
        cluster.held_worker("w0", 16, "--backend", "scripted").reached()
        cluster.coordinator.send_signal(signal.SIGINT)
        cluster.wait_for("draining")
        cluster.coordinator.send_signal(signal.SIGINT)
        assert cluster.wait_for_exit(cluster.coordinator) == 1
        again = f"--resume --out {tmp_path / 'out'}"
        assert cluster.coordinator.stderr is not None
        assert again in cluster.coordinator.stderr.read().splitlines()[-1]
    ended = run(*ANYWHERE, *job, *LOCAL, *again.split())
    assert ended.returncode == 0, ended.stderr
    assert result_of(tmp_path / "out")["weights_digest"] == result_of(finished)["weights_digest"]


@pytest.mark.parametrize("mode", ["full", "checkpoint"])
def test_a_killed_coordinator_continues_with_the_same_worker(job, tmp_path, finished, mode):
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
    assert result["weights_digest"] == result_of(finished)["weights_digest"]
    assert result["losses"] == result_of(finished)["losses"]
    audited = run("audit", str(tmp_path / "out"))
    assert audited.returncode == 0, audited.stdout
    if mode == "full":
        assert f"{STEPS} of {STEPS} steps replayed" in audited.stdout
