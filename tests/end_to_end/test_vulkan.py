"""Real runs whose workers compute on a Vulkan device: in CI, Mesa's software device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.wgpu.device.adapters import adapters
from protocol.spec.files.run_spec_file import load_run_spec
from tests.cluster import RUNS, Cluster
from tests.small_chat import write_packed_run
from tests.small_decoder import write_decoder_run
from worker.tasks.registry import build

SHORT = (
    "--set", "steps=2", "--set", "evaluate_every=0", "--set", "digits.hidden=[16]",
    "--set", "batch.samples=24",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _require_device():
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)


def train(
    directory: Path, run: str | Path, backends: tuple[str, ...], *arguments: str
) -> dict[str, Any]:
    count = str(len(backends))
    with Cluster(
        directory, "--expect-workers", count, "--run", str(RUNS / run), *arguments
    ) as cluster:
        for number, backend in enumerate(backends):
            cluster.start_worker(f"w{number}", "--backend", backend)
        result = cluster.result()
        for ready in cluster.events_named(
            "worker_ready"
        ):  # the journal has the results of the comparison
            assert ("gradients within" in ready["signature"]) == (ready["backend"] == "vulkan")
        return result


def test_one_and_two_workers_give_the_same_bits(tmp_path):
    reference = train(tmp_path / "one", "digits.yaml", ("vulkan",), *SHORT)
    result = train(tmp_path / "two", "digits.yaml", ("vulkan", "vulkan"), *SHORT)
    assert result["exact"]
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]
    assert result["eval"] == reference["eval"]


def test_run_of_different_workers_is_mixed_and_its_replicas_agree(tmp_path):
    """A different digest would halt the run."""
    mixed_result = train(tmp_path / "mixed", "digits.yaml", ("cpu", "vulkan"), *SHORT)
    assert mixed_result["outcome"] == "finished"
    assert not mixed_result["exact"]
    assert all(mixed_result["workers"].values())
    reference = train(tmp_path / "cpu", "digits.yaml", ("cpu",), *SHORT)
    assert mixed_result["losses"] == pytest.approx(reference["losses"], rel=1e-4)


def test_missing_adapter_gives_one_line_and_exit_code_69(tmp_path):
    run_options = ("--run", str(RUNS / "regress.yaml"), "--set", "steps=5")
    available = adapters()
    assert not isinstance(available, str)
    with Cluster(tmp_path, "--expect-workers", "1", *run_options) as cluster:
        count = len(available)
        expected = {
            str(count): f"there is no device {count}; this machine has {count}, ",
            "voodoo": "no device's name has 'voodoo' in it; this machine has "
            f"'{available[0].name}'",
        }
        for gpus in expected:
            cluster.start_worker(gpus, "--backend", "vulkan", "--gpus", gpus)
        for gpus, reason in expected.items():
            worker = cluster.workers[gpus]
            assert cluster.wait_for_exit(worker) == 69
            assert worker.stderr is not None
            (line,) = worker.stderr.read().splitlines()
            assert line.startswith(f"worker: backend 'vulkan' is not usable here: {reason}")


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("run", ["digits.yaml", "sms-spam.yaml", "small-llama.yaml"])
def test_sample_runs_agree_on_one_two_and_three_workers(tmp_path, run):
    short = ("--set", "steps=3", "--set", "evaluate_every=0")
    short_settings = {
        "sms-spam.yaml": ("--set", "data.holdout=0.02"),
        "small-llama.yaml": ("--set", "data.holdout_samples=8"),
    }.get(run, ())
    reference = train(tmp_path / "one", run, ("vulkan",), *short, *short_settings)
    for count in (2, 3):
        result = train(tmp_path / str(count), run, ("vulkan",) * count, *short, *short_settings)
        assert result["exact"]
        assert result["weights_digest"] == reference["weights_digest"]
        assert result["losses"] == reference["losses"]
        assert result["eval"] == reference["eval"]


def batch_lengths(run: Path) -> set[int]:
    """Return the lengths of all batches of one sample."""
    task = build(load_run_spec(run))
    count = task.manifest.train_samples
    return {task.batch([n]).arrays["input_ids"].shape[1] for n in range(count)}


@pytest.mark.slow
def test_packed_documents_agree_on_one_and_two_devices_and_a_cpu(tmp_path):
    """From scratch, several documents per sample: no attention across them, positions restart."""
    run = write_packed_run(tmp_path)
    reference = train(tmp_path / "one", run, ("vulkan",))
    result = train(tmp_path / "two", run, ("vulkan", "vulkan"))
    assert result["exact"]
    assert all(result["workers"].values())
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]
    assert result["eval"] == reference["eval"]
    cpu_result = train(tmp_path / "cpu", run, ("cpu",))
    assert reference["losses"] == pytest.approx(cpu_result["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["causal-lm", "classify", "regress"])
def test_other_runs_agree_on_one_and_two_workers(tmp_path, task):
    """LoRA of a decoder on an int8 base, with dropout, checkpointing, texts of several lengths
    (classify) and microbatches of two and of one."""
    short_settings: tuple[str, ...] = ()
    if task == "regress":
        run = RUNS / "regress.yaml"
        short_settings = (
            "--set",
            "regress.samples=60",
            "--set",
            "batch.samples=17",
            "--set",
            "steps=9",
        )
    else:
        run = write_decoder_run(task, tmp_path)
        assert len(batch_lengths(run)) == (3 if task == "classify" else 1)
    reference = train(tmp_path / "one", run, ("vulkan",), *short_settings)
    result = train(tmp_path / "two", run, ("vulkan", "vulkan"), *short_settings)
    assert result["exact"]
    assert all(result["workers"].values())
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]
    assert result["eval"] == reference["eval"]
