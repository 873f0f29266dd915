"""A loss over all samples of a step with real processes: one model whatever happens to workers."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from backends.wgpu.device.adapters import adapters
from tests.cluster import RUNS, Cluster
from tests.free_ports import free_address
from tests.processes import run_to_end
from tests.small_chat import save_chat_model

pytestmark = pytest.mark.slow  # the simulation covers all of it
STEPS = 4
WORKER = ("--backend", "cpu")
COMPARED_KEYS = ("weights_digest", "losses", "eval")


def embed_run(directory: Path, **changes: Any) -> Path:
    """Write a run of a small BERT with dropout on the pairs of a sample run spec."""
    import torch
    import transformers

    model = directory / "model"
    save_chat_model(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    (model / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(model)
    path = directory / "run.yaml"
    path.write_text(json.dumps({
        "name": "pairs", "task": "embed", "seed": 7, "model": {"source": str(model)},
        "data": {"train": str(RUNS / "small-pairs.jsonl"), "max_tokens": 32},
        "batch": {"samples": 22, "microbatch": 4}, "steps": STEPS,
        "optimizer": {"name": "adamw", "lr": 5e-3},
        "embed": {"learn_temperature": True, "symmetric": True}, **changes,
    }))  # fmt: skip
    return path


@pytest.fixture(scope="module")
def run_spec(tmp_path_factory) -> Path:
    return embed_run(tmp_path_factory.mktemp("job"))


@cache
def reference_result(run_spec: Path) -> dict[str, Any]:
    with Cluster(
        run_spec.parent / "alone", "--expect-workers", "1", "--run", str(run_spec)
    ) as cluster:
        cluster.start_worker("w0", *WORKER)
        return cluster.result()


def assert_same(result: dict[str, Any], run_spec: Path) -> None:
    for key in COMPARED_KEYS:
        assert result[key] == reference_result(run_spec)[key], key
    assert result["exact"]


@pytest.mark.parametrize("workers", [2, 4])
def test_any_number_of_workers_gives_one_result(run_spec, tmp_path, workers):
    with Cluster(tmp_path, "--expect-workers", str(workers), "--run", str(run_spec)) as cluster:
        for number in range(workers):
            cluster.start_worker(f"w{number}", *WORKER)
        result = cluster.result()
    assert_same(result, run_spec)
    assert all(result["workers"].values())
    losses = result["losses"]
    assert losses[-1] < losses[0]
    audit = run_to_end("coordinator", "audit", str(tmp_path / "out"))
    assert audit.returncode == 0, audit.stdout


@pytest.mark.parametrize("hold_point", ["1", "1g"], ids=["embeddings", "gradients"])
def test_killed_and_late_workers_in_each_phase_do_not_change_the_result(
    run_spec, tmp_path, hold_point
):
    with Cluster(tmp_path, "--expect-workers", "3", "--run", str(run_spec)) as cluster:
        holds = [cluster.start_paused_worker(f"w{n}", hold_point, *WORKER) for n in range(3)]
        for hold in holds:
            hold.wait_until_paused()
        cluster.workers["w1"].kill()
        cluster.wait_for("worker_lost", worker="w1")
        cluster.start_worker("w3", *WORKER)
        cluster.wait_for("worker_joined", worker="w3")
        for hold in (holds[0], holds[2]):
            hold.release()
        result = cluster.result()
        assert cluster.has_reassigned_work(), cluster.event_names()
    assert_same(result, run_spec)
    assert result["workers"]["w3"] > 0


@pytest.mark.parametrize("hold_point", ["2", "2g"], ids=["embeddings", "gradients"])
def test_coordinator_killed_in_each_phase_resumes_with_the_same_result(
    run_spec, tmp_path, hold_point
):
    arguments = (
        "--bind", free_address(), "--control", "127.0.0.1:0", "--expect-workers", "1",
        "--run", str(run_spec), "--resume",
    )  # fmt: skip
    with Cluster(tmp_path, *arguments) as first:
        worker = first.start_paused_worker("w0", hold_point, *WORKER)
        worker.wait_until_paused()
        first.coordinator.send_signal(signal.SIGKILL)
        first.wait_for_exit(first.coordinator)
        with Cluster(tmp_path, *arguments) as second:
            worker.release()
            assert second.wait_for("worker_joined", worker="w0")["step"] >= 2
            result = second.result()
        first.wait_for_exit(first.workers["w0"])
    assert_same(result, run_spec)


def test_worker_with_two_processes_gives_the_same_result(run_spec, tmp_path):
    with Cluster(tmp_path, "--expect-workers", "2", "--run", str(run_spec)) as cluster:
        cluster.start_worker("w0", *WORKER, "--gpus", "0,1")
        result = cluster.result()
    assert_same(result, run_spec)


def test_sharded_topology_gives_the_same_result(run_spec, tmp_path):
    arguments = ("--run", str(run_spec), "--set", "exchange.topology=sharded")
    with Cluster(tmp_path, "--expect-workers", "3", *arguments) as cluster:
        for number in range(3):
            cluster.start_worker(f"w{number}", *WORKER)
        result = cluster.result()
    assert_same(result, run_spec)


@cache
def canonical_job(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return the run in canonical arithmetic, and its result on one CPU."""
    arithmetic = {"mode": "canonical", "multiply_add": "separate"}
    run = embed_run(directory, arithmetic=arithmetic, checkpoint={"keep_log": True})
    with Cluster(directory / "alone", "--expect-workers", "1", "--run", str(run)) as cluster:
        cluster.start_worker("w0", *WORKER)
        return run, cluster.result()


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("topology", ["star", "sharded"])
def test_a_cpu_and_a_vulkan_device_have_one_digest(tmp_path_factory, tmp_path, topology):
    """The run uses canonical arithmetic; another Vulkan device is killed between the two phases."""
    pytest.importorskip("ziglang")
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    run, expected = canonical_job(tmp_path_factory.getbasetemp() / "canonical")
    arguments = ("--run", str(run), "--set", f"exchange.topology={topology}")
    with Cluster(tmp_path, "--expect-workers", "3", *arguments) as cluster:
        cluster.start_worker("w0", *WORKER)
        cluster.start_worker("w1", "--backend", "vulkan")
        victim = cluster.start_paused_worker("w2", "1g", "--backend", "vulkan")
        victim.wait_until_paused()
        cluster.workers["w2"].kill()
        cluster.wait_for("worker_lost", worker="w2")
        result = cluster.result()
    for key in ("weights_digest", "losses"):
        assert result[key] == expected[key], key
    assert result["exact"]
    assert result["workers"]["w1"] > 0
    audit = run_to_end("coordinator", "audit", str(tmp_path / "out"), "--recompute", str(STEPS))
    assert audit.returncode == 0, audit.stdout
    assert f"{STEPS} of {STEPS} steps recomputed" in audit.stdout
