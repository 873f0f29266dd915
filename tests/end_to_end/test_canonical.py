"""Real runs with canonical arithmetic: different devices, one digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.wgpu.device.adapters import adapters
from coordinator.audit.audit import AuditResult, audit
from coordinator.audit.recomputed import RecomputedStep, RecomputeRequest
from coordinator.storage.directory.run_directory import RunDirectory
from tests.bit_flip_worker import ELEMENT
from tests.cluster import RUNS, Cluster
from tests.commands import run_command
from tests.processes import start
from tests.small_decoder import write_decoder_run
from worker.recompute import StepRecomputer

pytest.importorskip("ziglang")

CANONICAL = (
    "--set", "arithmetic.mode=canonical", "--set", "arithmetic.multiply_add=separate",
    "--set", "exactness=require",
)  # fmt: skip
SHORT = ("--set", "steps=4", "--set", "evaluate_every=0", "--set", "checkpoint.keep_log=true")


def train(
    directory: Path, run: str | Path, backends: tuple[str, ...], *arguments: str
) -> dict[str, Any]:
    count = str(len(backends))
    run_options = ("--run", str(RUNS / run), *CANONICAL, *arguments)
    with Cluster(directory, "--expect-workers", count, *run_options) as cluster:
        for number, backend in enumerate(backends):
            cluster.start_worker(f"w{number}", "--backend", backend)
        result: dict[str, Any] = cluster.result()
        assert result["exact"]
        assert all(result["workers"].values())
        return result


def require_device() -> None:
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)


def audit_with_recomputation(directory: Path) -> AuditResult:
    """Audit a run of four steps, and recompute all of them on two threads."""
    run_directory = RunDirectory(directory)
    run, manifest = run_directory.read_run(), run_directory.read_manifest()
    assert run is not None
    assert manifest is not None
    recomputer = StepRecomputer(run.spec.model_copy(update={"threads": 2}), manifest.digest())
    try:
        return audit(
            directory,
            request=RecomputeRequest(4, lambda *step: RecomputedStep(*recomputer.step(*step))),
        )
    finally:
        recomputer.close()


def run_with_a_flip(directory: Path) -> Path:
    """Flip one bit in the third step, before hashing; return the directory of the run."""
    run_options = ("--run", str(RUNS / "regress.yaml"), *CANONICAL, *SHORT)
    with Cluster(directory, "--expect-workers", "1", *run_options) as cluster:
        cluster.workers["w0"] = start(
            "tests.bit_flip_worker", "2", "--coordinator", cluster.address["data"],
            "--name", "w0", "--backend", "cpu",
        )  # fmt: skip
        assert cluster.result()["exact"]
    return directory / "out"


def assert_flip_is_named(lines: list[str]) -> None:
    bad_lines = [line for line in lines if line.startswith("BAD")]
    assert len(bad_lines) == 3, bad_lines
    assert "step 2: the recomputed gradients have digest" in bad_lines[0]
    location = f"block 'linear', tensor 'weight', element {ELEMENT}"
    assert f"step 2: {location}: recomputed " in bad_lines[1]
    assert "4 of 4 steps recomputed" in bad_lines[2]


@pytest.mark.slow
def test_a_cpu_and_a_vulkan_device_are_exact_together(tmp_path):
    require_device()
    train(tmp_path, "regress.yaml", ("cpu", "vulkan"), *SHORT)
    report = audit_with_recomputation(tmp_path / "out")
    assert report.ok, report.lines()
    assert "4 of 4 steps recomputed" in "\n".join(report.lines())


def test_flipped_bit_is_found_only_by_recomputing(tmp_path):
    run = run_with_a_flip(tmp_path)
    assert audit(run).ok
    assert_flip_is_named(audit_with_recomputation(run).lines())


@pytest.mark.slow
def test_audit_command_recomputes_in_its_own_process(tmp_path):
    run = str(run_with_a_flip(tmp_path))
    assert run_command("coordinator", "audit", run).returncode == 0
    completed = run_command("coordinator", "audit", run, "--recompute", "4")
    assert completed.returncode == 1
    assert_flip_is_named(completed.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("run", ["regress.yaml", "digits.yaml"])
def test_threads_devices_and_mixtures_do_not_change_bits(tmp_path, run):
    require_device()
    short_settings = ("--set", "steps=2", "--set", "evaluate_every=0")
    single_worker = train(tmp_path / "one", run, ("cpu",), *short_settings)
    for directory_name, backends, threads in (
        ("threads", ("cpu",), 4), ("vulkan", ("vulkan",), 1), ("both", ("cpu", "vulkan"), 2),
    ):  # fmt: skip
        other = train(
            tmp_path / directory_name, run, backends, *short_settings, "--set", f"threads={threads}"
        )
        assert other["weights_digest"] == single_worker["weights_digest"]
        assert other["losses"] == single_worker["losses"]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("run", "small_settings"),
    [
        ("sms-spam.yaml", ("batch.samples=4", "data.holdout=0.002", "data.max_tokens=32")),
        ("small-llama.yaml", ("batch.samples=8", "data.holdout_samples=8")),
    ],
)
def test_a_language_model_on_a_device_has_the_digest_of_the_cpu(tmp_path, run, small_settings):
    require_device()
    short_settings = [
        argument
        for key in ("steps=2", "evaluate_every=0", *small_settings)
        for argument in ("--set", key)
    ]
    single_worker = train(tmp_path / "one", run, ("cpu",), *short_settings, "--set", "threads=2")
    other = train(tmp_path / "vulkan", run, ("vulkan",), *short_settings)
    assert other["weights_digest"] == single_worker["weights_digest"]
    assert other["losses"] == single_worker["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("task", [pytest.param("causal-lm", marks=pytest.mark.release), "classify"])
def test_killed_worker_and_late_worker_of_another_kind_keep_the_digest(tmp_path, task):
    """The run trains LoRA on an int8 base, with dropout and checkpointing."""
    require_device()
    run = write_decoder_run(task, tmp_path, steps=5)
    single_worker = train(tmp_path / "one", run, ("cpu",))
    arguments = ("--expect-workers", "2", "--run", str(run), *CANONICAL)
    with Cluster(tmp_path / "two", *arguments) as cluster:
        first = cluster.start_paused_worker("w0", 2, "--backend", "cpu")
        second = cluster.start_paused_worker("w1", 2, "--backend", "vulkan")
        first.wait_until_paused()
        second.wait_until_paused()
        cluster.workers["w1"].kill()
        cluster.wait_for("worker_lost", worker="w1")
        cluster.start_worker("late", "--backend", "vulkan")
        cluster.wait_for("worker_joined", worker="late")
        first.release()
        result = cluster.result()
    assert result["exact"]
    assert result["weights_digest"] == single_worker["weights_digest"]
    assert result["workers"]["late"] > 0
