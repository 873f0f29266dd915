"""Real runs with canonical arithmetic: unlike machines, one digest."""

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
from tests.commands import called
from tests.processes import start
from tests.small_decoder import decoder_run
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
    job = ("--run", str(RUNS / run), *CANONICAL, *arguments)
    with Cluster(directory, "--expect-workers", count, *job) as cluster:
        for number, backend in enumerate(backends):
            cluster.worker(f"w{number}", "--backend", backend)
        result: dict[str, Any] = cluster.result()
        assert result["exact"]
        assert all(result["workers"].values())
        return result


def a_device_is_there() -> None:
    if isinstance(why := adapters(), str):
        pytest.skip(why)


def computed_again(directory: Path) -> AuditResult:
    """The audit of a run of four steps, all of which are computed again, on two threads."""
    run_directory = RunDirectory(directory)
    run, manifest = run_directory.read_run(), run_directory.read_manifest()
    assert run is not None
    assert manifest is not None
    steps = StepRecomputer(run.spec.model_copy(update={"threads": 2}), manifest.digest())
    try:
        return audit(
            directory, request=RecomputeRequest(4, lambda *step: RecomputedStep(*steps.step(*step)))
        )
    finally:
        steps.close()


def flipped_run(directory: Path) -> Path:
    """A run in whose third step one bit was turned over before anything was hashed."""
    job = ("--run", str(RUNS / "regress.yaml"), *CANONICAL, *SHORT)
    with Cluster(directory, "--expect-workers", "1", *job) as cluster:
        cluster.workers["w0"] = start(
            "tests.bit_flip_worker", "2", "--coordinator", cluster.address["data"],
            "--name", "w0", "--backend", "cpu",
        )  # fmt: skip
        assert cluster.result()["exact"]
    return directory / "out"


def assert_the_flip_is_named(lines: list[str]) -> None:
    bad = [line for line in lines if line.startswith("BAD")]
    assert len(bad) == 3, bad
    assert "step 2: recomputed, its gradients have digest" in bad[0]
    place = f"block 'linear', tensor 'weight', element {ELEMENT} is"
    assert f"step 2: recomputed, {place}" in bad[1]
    assert "4 of 4 steps recomputed" in bad[2]


@pytest.mark.slow
def test_a_cpu_and_a_vulkan_device_are_exact_together(tmp_path):
    a_device_is_there()
    train(tmp_path, "regress.yaml", ("cpu", "vulkan"), *SHORT)
    report = computed_again(tmp_path / "out")
    assert report.ok, report.lines()
    assert "4 of 4 steps recomputed" in "\n".join(report.lines())


def test_a_flipped_bit_is_found_by_computing_again_alone(tmp_path):
    run = flipped_run(tmp_path)
    assert audit(run).ok
    assert_the_flip_is_named(computed_again(run).lines())


@pytest.mark.slow
def test_the_command_computes_again_in_its_own_process(tmp_path):
    run = str(flipped_run(tmp_path))
    assert called("coordinator", "audit", run).returncode == 0
    ended = called("coordinator", "audit", run, "--recompute", "4")
    assert ended.returncode == 1
    assert_the_flip_is_named(ended.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("run", ["regress.yaml", "digits.yaml"])
def test_threads_devices_and_mixtures_decide_no_bit(tmp_path, run):
    a_device_is_there()
    few = ("--set", "steps=2", "--set", "evaluate_every=0")
    alone = train(tmp_path / "one", run, ("cpu",), *few)
    for place, backends, threads in (
        ("threads", ("cpu",), 4), ("vulkan", ("vulkan",), 1), ("both", ("cpu", "vulkan"), 2),
    ):  # fmt: skip
        other = train(tmp_path / place, run, backends, *few, "--set", f"threads={threads}")
        assert other["weights_digest"] == alone["weights_digest"]
        assert other["losses"] == alone["losses"]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("run", "small"),
    [
        ("sms-spam.yaml", ("batch.samples=4", "data.holdout=0.002", "data.max_tokens=32")),
        ("small-llama.yaml", ("batch.samples=8", "data.holdout_samples=8")),
    ],
)
def test_a_language_model_on_a_device_has_the_digest_of_the_cpu(tmp_path, run, small):
    a_device_is_there()
    few = [word for key in ("steps=2", "evaluate_every=0", *small) for word in ("--set", key)]
    alone = train(tmp_path / "one", run, ("cpu",), *few, "--set", "threads=2")
    other = train(tmp_path / "vulkan", run, ("vulkan",), *few)
    assert other["weights_digest"] == alone["weights_digest"]
    assert other["losses"] == alone["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("job", [pytest.param("causal-lm", marks=pytest.mark.release), "classify"])
def test_one_is_killed_and_one_of_another_kind_comes_late(tmp_path, job):
    """LoRA on an int8 base, with dropout and checkpointing."""
    a_device_is_there()
    run = decoder_run(job, tmp_path, steps=5)
    alone = train(tmp_path / "one", run, ("cpu",))
    arguments = ("--expect-workers", "2", "--run", str(run), *CANONICAL)
    with Cluster(tmp_path / "two", *arguments) as cluster:
        first = cluster.held_worker("w0", 2, "--backend", "cpu")
        second = cluster.held_worker("w1", 2, "--backend", "vulkan")
        first.reached()
        second.reached()
        cluster.workers["w1"].kill()
        cluster.wait_for("worker_lost", worker="w1")
        cluster.worker("late", "--backend", "vulkan")
        cluster.wait_for("worker_joined", worker="late")
        first.release()
        result = cluster.result()
    assert result["exact"]
    assert result["weights_digest"] == alone["weights_digest"]
    assert result["workers"]["late"] > 0
