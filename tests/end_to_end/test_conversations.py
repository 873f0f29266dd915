"""LoRA on conversations with real processes: one model for any set of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.spec.model_card import read_card
from tests.cluster import Cluster
from tests.commands import run_command
from tests.small_chat import write_chat_run, write_dpo_run, write_packed_run
from tests.tool_chat import write_tool_run


def int4_run(directory: Path) -> Path:
    """Write a chat run whose base stays in 4 bits."""
    return write_chat_run(
        directory, model={"source": str(directory / "model"), "base_dtype": "int4"}
    )


def float16_run(directory: Path) -> Path:
    """Write a chat run whose loss scale overflows at first, and again after each step."""
    run = write_chat_run(directory)
    document = json.loads(run.read_text())
    document["model"] |= {"precision": "float16", "loss_scale": 2.0**24, "loss_scale_every": 1}
    document["log"], document["checkpoint"] = "full", {"keep_log": True, "every": 2}
    run.write_text(json.dumps(document))
    return run


RUNS = {
    "chat": write_chat_run, "dpo": write_dpo_run, "int4": int4_run, "float16": float16_run,
    "packed": write_packed_run, "tools": write_tool_run,
}  # fmt: skip
SLOW = {"float16", "int4", "packed", "tools"}
"""Kinds with slow tests only; quick tests of their parts: test_float16.py,
tests/worker/models/test_stored_dtypes.py, tests/worker/data/test_packing.py and
tests/worker/data/test_tools_and_masks.py."""
KINDS = [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in RUNS]


def train(run: Path, out: Path, workers: int) -> dict[str, Any]:
    with Cluster(out, "--expect-workers", str(workers), "--run", str(run)) as cluster:
        for number in range(workers):
            cluster.start_worker(f"w{number}", "--backend", "cpu")
        return cluster.result()


@pytest.fixture(scope="module", params=KINDS)
def single_worker_run(request, tmp_path_factory) -> tuple[Path, dict[str, Any], Path]:
    """Return a run spec, the result of one worker, and its directory."""
    directory = tmp_path_factory.mktemp(request.param)
    run = RUNS[request.param](directory)
    return run, train(run, directory / "alone", 1), directory / "alone" / "out"


def assert_same(result: dict[str, Any], reference: dict[str, Any]) -> None:
    for key in ("exact", "weights_digest", "losses", "eval"):
        assert result[key] == reference[key], key
    assert result["exact"]
    assert reference["losses"][-1] != reference["losses"][0]


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_workers_learn_the_same_as_one(single_worker_run, tmp_path, workers):
    run, reference, _ = single_worker_run
    result = train(run, tmp_path, workers)
    assert_same(result, reference)
    if "float16" not in run.parent.name:  # the first overflow stops the other workers
        assert sum(result["workers"].values()) == sum(reference["workers"].values())
    assert all(result["workers"].values())


@pytest.mark.slow  # test_same_bits.py kills workers and adds others
def test_killed_and_late_workers_do_not_change_the_result(single_worker_run, tmp_path):
    run, reference, _ = single_worker_run
    with Cluster(tmp_path, "--expect-workers", "3", "--run", str(run)) as cluster:
        holds = [cluster.start_paused_worker(f"w{n}", 1, "--backend", "cpu") for n in range(3)]
        for hold in holds:
            hold.wait_until_paused()
        cluster.workers["w1"].kill()
        cluster.wait_for("worker_lost", worker="w1")
        cluster.start_worker("late", "--backend", "cpu")
        cluster.wait_for("worker_joined", worker="late")
        for hold in holds:
            if hold is not holds[1]:
                hold.release()
        result = cluster.result()
        assert cluster.has_reassigned_work(), cluster.event_names()
    assert_same(result, reference)
    assert result["workers"]["late"] > 0


def test_result_has_metrics_and_a_card_and_generates_text(single_worker_run):
    """Check the task's metrics, the card beside the model or adapter, and a generated answer."""
    run, reference, out = single_worker_run
    preferences = {"loss_per_pair", "reward_accuracy", "reward_margin"}
    assert ({*reference["eval"]} == preferences) == ("dpo" in run.parent.name)
    card = read_card(out / ("model" if "packed" in run.parent.name else "adapter"))
    assert card is not None
    assert card.weights_digest == reference["weights_digest"]
    assert card.evaluations[-1].step == 4
    assert card.evaluations[-1].figures == reference["eval"]
    answer = run_command("worker", "generate", str(out), "What is 3?", "--max-tokens", "4")
    assert answer.returncode == 0, answer.stderr
