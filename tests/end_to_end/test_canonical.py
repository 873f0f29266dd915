"""Real runs with canonical arithmetic: unlike machines, one digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.wgpu.device.adapters import adapters
from tests.cluster import RUNS, Cluster
from tests.small_decoder import decoder_run

pytest.importorskip("ziglang")

CANONICAL = (
    "--set", "arithmetic.mode=canonical", "--set", "arithmetic.multiply_add=separate",
    "--set", "exactness=require",
)  # fmt: skip
SHORT = ("--set", "steps=4", "--set", "evaluate_every=0")


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


def test_a_cpu_and_a_vulkan_device_are_exact_together(tmp_path):
    a_device_is_there()
    together = train(tmp_path / "both", "regress.yaml", ("cpu", "vulkan"), *SHORT)
    alone = train(tmp_path / "one", "regress.yaml", ("cpu",), *SHORT, "--set", "threads=2")
    assert together["weights_digest"] == alone["weights_digest"]
    assert together["losses"] == alone["losses"]


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    "run", ["regress.yaml", "digits.yaml", "sms-spam.yaml", "small-llama.yaml"]
)
def test_the_main_jobs(tmp_path, run):
    a_device_is_there()
    few: tuple[str, ...] = ("--set", "steps=2", "--set", "evaluate_every=0")
    few += {
        "sms-spam.yaml": ("--set", "batch.samples=8", "--set", "data.holdout=0.02"),
        "small-llama.yaml": ("--set", "batch.samples=8", "--set", "data.holdout_samples=8"),
    }.get(run, ())
    alone = train(tmp_path / "one", run, ("cpu",), *few)
    for place, backends, threads in (
        ("threads", ("cpu",), 4), ("vulkan", ("vulkan",), 1), ("both", ("cpu", "vulkan"), 2),
    ):  # fmt: skip
        other = train(tmp_path / place, run, backends, *few, "--set", f"threads={threads}")
        assert other["weights_digest"] == alone["weights_digest"]
        assert other["losses"] == alone["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["causal-lm", "classify"])
def test_one_is_killed_and_one_of_another_kind_comes_late(tmp_path, job):
    """LoRA on an int8 base, with dropout and checkpointing."""
    a_device_is_there()
    run = decoder_run(job, tmp_path)
    alone = train(tmp_path / "one", run, ("cpu",))
    arguments = ("--expect-workers", "2", "--run", str(run), *CANONICAL)
    with Cluster(tmp_path / "two", *arguments) as cluster:
        first = cluster.held_worker("w0", 6, "--backend", "cpu")
        second = cluster.held_worker("w1", 6, "--backend", "vulkan")
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
