"""One digest, whatever the number of workers and whatever happens to them."""

from __future__ import annotations

import asyncio
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests import processes
from tests.cluster import RUNS, Cluster
from tests.small_decoder import write_decoder_run

WORKERS = [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 8))]
STEPS = 24
DIGITS = (
    "--set", f"steps={STEPS}", "--set", "evaluate_every=0", "--set", "batch.samples=48",
)  # fmt: skip


def train(
    directory: Path, workers: int, run: str, *arguments: str, backend: str = "cpu"
) -> dict[str, Any]:
    with Cluster(
        directory, "--expect-workers", str(workers), "--run", str(RUNS / run), *arguments
    ) as cluster:
        for number in range(workers):
            cluster.start_worker(f"w{number}", "--backend", backend)
        return cluster.result()


@cache
def reference_result(directory: Path, run: str, *arguments: str) -> dict[str, Any]:
    return train(directory, 1, run, *arguments)


@pytest.fixture(scope="module")
def reference_directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("reference")


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("run", "arguments"),
    [pytest.param("regress.yaml", (), marks=pytest.mark.slow), ("digits.yaml", DIGITS)],
)
def test_any_number_of_workers_has_one_digest(
    tmp_path, reference_directory, run, arguments, workers
):
    reference = reference_result(reference_directory / run, run, *arguments)
    result = train(tmp_path, workers, run, *arguments)
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]
    assert result["eval"] == reference["eval"]
    assert sum(result["workers"].values()) == sum(reference["workers"].values())
    assert all(result["workers"].values())


SHORT = ("--set", "steps=3", "--set", "evaluate_every=0")
ONE_PACKAGE = Path(asyncio.__file__).parent  # tokenizing all of Python would take half a minute
SAMPLE_RUNS = {
    # With dropout, which is also the same on every worker.
    "sms-spam.yaml": (
        *SHORT, "--set", "lora.dropout=0.1", "--set", "data.holdout=0.01",
        "--set", "data.max_tokens=32", "--set", "batch.samples=12",
    ),
    "small-llama.yaml": (
        *SHORT, "--set", "model.config.attention_dropout=0.1", "--set", "data.holdout_samples=24",
        "--set", f"data.train={ONE_PACKAGE}", "--set", "data.pattern='*.py'",
    ),
}  # fmt: skip


@pytest.mark.slow  # smaller settings keep a run of two and one of three quick enough
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("run", SAMPLE_RUNS)
def test_sample_runs_have_one_digest(tmp_path, reference_directory, run, workers):
    """MiniLM with LoRA on real SMS, and a small Llama from scratch."""
    reference = reference_result(reference_directory / run, run, *SAMPLE_RUNS[run])
    result = train(tmp_path, workers, run, *SAMPLE_RUNS[run])
    assert result["exact"]
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]
    assert result["eval"] == reference["eval"]


def train_with_a_kill_and_a_late_worker(directory: Path, *run_options: str) -> dict[str, Any]:
    with Cluster(directory, "--expect-workers", "2", *run_options) as cluster:
        first, second = (
            cluster.start_paused_worker(f"w{n}", 1, "--backend", "cpu") for n in range(2)
        )
        first.wait_until_paused()
        second.wait_until_paused()
        cluster.workers["w1"].kill()
        cluster.wait_for("worker_lost", worker="w1")
        # The new worker needs seconds to import; without this wait the run would finish first.
        cluster.start_worker("w2", "--backend", "cpu")
        cluster.wait_for("worker_joined", worker="w2")
        first.release()
        result = cluster.result()
        assert cluster.has_reassigned_work(), cluster.event_names()
    assert result["exact"]
    return result


@pytest.mark.slow  # a smaller model keeps this quick enough
@pytest.mark.parametrize("run", SAMPLE_RUNS)
def test_sample_runs_with_a_killed_and_a_late_worker_have_one_digest(
    tmp_path, reference_directory, run
):
    """MiniLM with LoRA on real SMS, and a small Llama from scratch."""
    reference = reference_result(reference_directory / run, run, *SAMPLE_RUNS[run])
    result = train_with_a_kill_and_a_late_worker(
        tmp_path, "--run", str(RUNS / run), *SAMPLE_RUNS[run]
    )
    for key in ("weights_digest", "losses", "eval"):
        assert result[key] == reference[key]


def test_lora_on_a_quantized_base_with_a_killed_and_a_late_worker_has_one_digest(tmp_path):
    """The texts make batches of several lengths, the last batch is smaller, and dropout is on."""
    run_options = ("--run", str(write_decoder_run("classify", tmp_path)))
    with Cluster(tmp_path / "alone", "--expect-workers", "1", *run_options) as cluster:
        cluster.start_worker("w0", "--backend", "cpu")
        reference = cluster.result()
    result = train_with_a_kill_and_a_late_worker(tmp_path / "disturbed", *run_options)
    for key in ("weights_digest", "losses", "eval"):
        assert result[key] == reference[key]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["star", "sharded"])
def test_buffers_that_forward_changes_have_one_digest(tmp_path, topology):
    """One digest for one, two and four workers, one killed and one joining, and a sound audit."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "task: tests.buffers_task:BuffersTask\nsteps: 12\nevaluate_every: 4\n"
        "batch: {samples: 12, microbatch: 2, unit: microbatch}\n"
        f"exchange: {topology}\n"
    )
    run_options = ("--run", str(path))
    results = []
    for workers in (1, 2, 4):
        directory = tmp_path / str(workers)
        with Cluster(directory, "--expect-workers", str(workers), *run_options) as cluster:
            for number in range(workers):
                cluster.start_worker(f"w{number}", "--backend", "cpu")
            results.append(cluster.result())
    results.append(train_with_a_kill_and_a_late_worker(tmp_path / "disturbed", *run_options))
    for key in ("weights_digest", "losses", "eval"):
        assert [each[key] for each in results] == [results[0][key]] * len(results)
    weights = load_file(tmp_path / "2" / "out" / "model" / "model.safetensors")
    assert weights["norms.0.num_batches_tracked"] == 12
    assert (weights["norms.0.running_var"] != 1).all()
    audit = processes.run_to_end("coordinator", "audit", str(tmp_path / "disturbed" / "out"))
    assert audit.returncode == 0, audit.stdout
    assert audit.stdout.rstrip().endswith("sound")


@pytest.mark.slow
def test_regress_reaches_the_noise_free_solution(reference_directory):
    reference = reference_result(reference_directory / "regress.yaml", "regress.yaml")
    assert reference["eval"]["mse"] <= 1e-6


def test_worker_killed_in_the_middle_of_a_step_does_not_change_the_digest(
    tmp_path, reference_directory
):
    reference = reference_result(reference_directory / "digits.yaml", "digits.yaml", *DIGITS)
    with Cluster(
        tmp_path, "--expect-workers", "3", "--run", str(RUNS / "digits.yaml"), *DIGITS
    ) as cluster:
        holds = [
            cluster.start_paused_worker(f"w{number}", 11, "--backend", "cpu") for number in range(3)
        ]
        for hold in holds:
            hold.wait_until_paused()
        cluster.workers["w1"].kill()
        cluster.wait_for("worker_lost", worker="w1")
        for hold in holds:
            hold.release()
        result = cluster.result()
        assert cluster.has_reassigned_work(), cluster.event_names()
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]


def test_worker_that_joins_late_does_not_change_the_digest(tmp_path, reference_directory):
    reference = reference_result(reference_directory / "digits.yaml", "digits.yaml", *DIGITS)
    with Cluster(
        tmp_path, "--expect-workers", "1", "--run", str(RUNS / "digits.yaml"), *DIGITS
    ) as cluster:
        first = cluster.start_paused_worker("w0", 6, "--backend", "cpu")
        first.wait_until_paused()
        # The new worker needs seconds to import; without this wait the run would finish first.
        cluster.start_worker("w1", "--backend", "cpu")
        join_event = cluster.wait_for("worker_joined", worker="w1")
        first.release()
        result = cluster.result()
    assert join_event["step"] < STEPS
    assert result["workers"]["w1"] > 0
    assert result["weights_digest"] == reference["weights_digest"]


@pytest.mark.slow
def test_others_continue_without_a_stopped_worker_until_it_returns(tmp_path, reference_directory):
    longer_run = (*DIGITS, "--set", "steps=60")
    reference = reference_result(reference_directory / "longer", "digits.yaml", *longer_run)
    with Cluster(
        tmp_path, "--expect-workers", "2", "--run", str(RUNS / "digits.yaml"), *longer_run
    ) as cluster:
        # Each is stopped in an assigned step, before it computes any of it.
        first = cluster.start_paused_worker("w0", 30, "--backend", "cpu")
        second = cluster.start_paused_worker("w1", 11, "--backend", "cpu")
        stopped_step = second.wait_until_paused()
        cluster.workers["w1"].send_signal(signal.SIGSTOP)
        second.release()
        cluster.wait_for("straggler", worker="w1", from_step=stopped_step)
        step = first.wait_until_paused()
        cluster.workers["w0"].send_signal(signal.SIGSTOP)
        first.release()
        mark = cluster.event_count()
        cluster.workers["w1"].send_signal(signal.SIGCONT)
        # It applies the steps that it missed, and continues alone.
        join_event = cluster.wait_for("worker_joined", worker="w1", start=mark)
        cluster.wait_for("straggler", worker="w0", from_step=step)
        cluster.wait_for("committed", step=join_event["step"] + 5)
        cluster.workers["w0"].send_signal(signal.SIGCONT)
        result = cluster.result()
    assert result["weights_digest"] == reference["weights_digest"]
    assert result["losses"] == reference["losses"]


def test_unlike_instruction_sets_keep_equal_replicas(tmp_path):
    """Gradients may differ between the two; the state after every step may not."""
    with Cluster(
        tmp_path, "--expect-workers", "2", "--run", str(RUNS / "digits.yaml"), *DIGITS
    ) as cluster:
        cluster.start_worker(
            "w0", "--backend", "cpu", environment={"ATEN_CPU_CAPABILITY": "default"}
        )
        cluster.start_worker("w1", "--backend", "cpu", environment={"ATEN_CPU_CAPABILITY": "avx2"})
        result = cluster.result()
        assert not cluster.events_named("halted")
    # The commit barrier compared both with the coordinator's replica after each of these steps.
    assert result["steps"] == STEPS
    assert result["exact"] is False


def test_run_is_mixed_even_if_different_workers_joined_in_sequence(tmp_path):
    with Cluster(
        tmp_path, "--expect-workers", "1", "--run", str(RUNS / "digits.yaml"), *DIGITS
    ) as cluster:
        cluster.start_paused_worker(
            "w0", 6, "--backend", "cpu", environment={"ATEN_CPU_CAPABILITY": "avx2"}
        ).wait_until_paused()
        cluster.workers["w0"].kill()
        cluster.wait_for("worker_lost", worker="w0")
        cluster.start_worker(
            "w1", "--backend", "cpu", environment={"ATEN_CPU_CAPABILITY": "default"}
        )
        assert cluster.result()["exact"] is False


def test_required_exactness_refuses_a_different_worker(tmp_path):
    with Cluster(
        tmp_path, "--expect-workers", "1", "--run", str(RUNS / "regress.yaml"),
        "--set", "exactness=require", "--set", "steps=2000",
    ) as cluster:  # fmt: skip
        cluster.start_worker("w0", "--backend", "cpu", environment={"ATEN_CPU_CAPABILITY": "avx2"})
        cluster.wait_for("started")
        cluster.ask("POST", "/halt", {})
        different_worker = cluster.start_worker(
            "w1", "--backend", "cpu", environment={"ATEN_CPU_CAPABILITY": "default"}
        )
        assert cluster.wait_for_exit(different_worker) == 78
        assert different_worker.stderr is not None
        assert "numerics profile" in different_worker.stderr.read()
        cluster.ask("POST", "/continue", {})
        cluster.ask("POST", "/drain", {})
        assert cluster.result()["exact"] is True
