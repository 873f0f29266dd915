"""Real runs whose workers compute on a Vulkan device: on CI, Mesa's software one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.wgpu.device.adapters import adapters
from protocol.spec.files.run_spec_file import load_run_spec
from tests.cluster import RUNS, Cluster
from tests.small_chat import packed_run
from tests.small_decoder import decoder_run
from worker.tasks.registry import build

SHORT = (
    "--set", "steps=2", "--set", "evaluate_every=0", "--set", "digits.hidden=[16]",
    "--set", "batch.samples=24",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _a_device_is_there():
    if isinstance(why := adapters(), str):
        pytest.skip(why)


def train(
    directory: Path, run: str | Path, backends: tuple[str, ...], *arguments: str
) -> dict[str, Any]:
    count = str(len(backends))
    with Cluster(
        directory, "--expect-workers", count, "--run", str(RUNS / run), *arguments
    ) as cluster:
        for number, backend in enumerate(backends):
            cluster.worker(f"w{number}", "--backend", backend)
        result = cluster.result()
        for ready in cluster.every("worker_ready"):  # what was compared stands in the journal
            assert ("gradients within" in ready["signature"]) == (ready["backend"] == "vulkan")
        return result


def test_one_worker_and_two_give_the_same_bits(tmp_path):
    alone = train(tmp_path / "one", "digits.yaml", ("vulkan",), *SHORT)
    together = train(tmp_path / "two", "digits.yaml", ("vulkan", "vulkan"), *SHORT)
    assert together["exact"]
    assert together["weights_digest"] == alone["weights_digest"]
    assert together["losses"] == alone["losses"]
    assert together["eval"] == alone["eval"]


def test_a_run_of_unlike_workers_is_mixed_and_its_replicas_agree(tmp_path):
    """A digest that differed would halt the run."""
    mixed = train(tmp_path / "mixed", "digits.yaml", ("cpu", "vulkan"), *SHORT)
    assert mixed["outcome"] == "finished"
    assert not mixed["exact"]
    assert all(mixed["workers"].values())
    alone = train(tmp_path / "cpu", "digits.yaml", ("cpu",), *SHORT)
    assert mixed["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def test_an_adapter_that_is_missing_is_one_line_and_69(tmp_path):
    job = ("--run", str(RUNS / "regress.yaml"), "--set", "steps=5")
    present = adapters()
    assert not isinstance(present, str)
    with Cluster(tmp_path, "--expect-workers", "1", *job) as cluster:
        wanted = {
            str(
                len(present)
            ): f"there is no device {len(present)}; this machine has {len(present)}, ",
            "voodoo": f"no device's name has 'voodoo' in it; this machine has '{present[0].name}'",
        }
        for gpus in wanted:
            cluster.worker(gpus, "--backend", "vulkan", "--gpus", gpus)
        for gpus, reason in wanted.items():
            worker = cluster.workers[gpus]
            assert cluster.wait_for_exit(worker) == 69
            assert worker.stderr is not None
            (line,) = worker.stderr.read().splitlines()
            assert line.startswith(f"worker: backend 'vulkan' is not usable here: {reason}")


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("run", ["digits.yaml", "sms-spam.yaml", "small-llama.yaml"])
def test_the_main_jobs_on_one_two_and_three(tmp_path, run):
    short = ("--set", "steps=3", "--set", "evaluate_every=0")
    few = {
        "sms-spam.yaml": ("--set", "data.holdout=0.02"),
        "small-llama.yaml": ("--set", "data.holdout_samples=8"),
    }.get(run, ())
    alone = train(tmp_path / "one", run, ("vulkan",), *short, *few)
    for count in (2, 3):
        together = train(tmp_path / str(count), run, ("vulkan",) * count, *short, *few)
        assert together["exact"]
        assert together["weights_digest"] == alone["weights_digest"]
        assert together["losses"] == alone["losses"]
        assert together["eval"] == alone["eval"]


def lengths(run: Path) -> set[int]:
    """That batches of one sample have."""
    task = build(load_run_spec(run))
    count = task.manifest.train_samples
    return {task.batch([n]).arrays["input_ids"].shape[1] for n in range(count)}


@pytest.mark.slow
def test_packed_documents_on_one_two_and_a_cpu(tmp_path):
    """From scratch, several in a sample: no attention across, positions begin anew."""
    run = packed_run(tmp_path)
    alone = train(tmp_path / "one", run, ("vulkan",))
    together = train(tmp_path / "two", run, ("vulkan", "vulkan"))
    assert together["exact"]
    assert all(together["workers"].values())
    assert together["weights_digest"] == alone["weights_digest"]
    assert together["losses"] == alone["losses"]
    assert together["eval"] == alone["eval"]
    on_cpu = train(tmp_path / "cpu", run, ("cpu",))
    assert alone["losses"] == pytest.approx(on_cpu["losses"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["causal-lm", "classify", "regress"])
def test_jobs_that_the_plain_run_leaves_out(tmp_path, job):
    """LoRA of a decoder on an int8 base, with dropout, checkpointing, texts of several lengths
    (classify) and microbatches of two and of one."""
    few: tuple[str, ...] = ()
    if job == "regress":
        run = RUNS / "regress.yaml"
        few = ("--set", "regress.samples=60", "--set", "batch.samples=17", "--set", "steps=9")
    else:
        run = decoder_run(job, tmp_path)
        assert len(lengths(run)) == (3 if job == "classify" else 1)
    alone = train(tmp_path / "one", run, ("vulkan",), *few)
    together = train(tmp_path / "two", run, ("vulkan", "vulkan"), *few)
    assert together["exact"]
    assert all(together["workers"].values())
    assert together["weights_digest"] == alone["weights_digest"]
    assert together["losses"] == alone["losses"]
    assert together["eval"] == alone["eval"]
