"""Later runs continue earlier runs and use their results, with commands only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import RUNS, Cluster
from tests.commands import run_command
from tests.small_chat import write_chat_run


def train(run: Path, out: Path, *options: str) -> dict[str, Any]:
    with Cluster(out, "--expect-workers", "1", "--run", str(run), *options) as cluster:
        cluster.start_worker("w0", "--backend", "cpu")
        return cluster.result()


@pytest.mark.slow  # in one process: tests/coordinator/service/test_spec_change.py
def test_a_finished_run_continues_with_more_steps_by_the_command(tmp_path):
    run = RUNS / "regress.yaml"
    settings = ("--set", "optimizer={name: adamw, amsgrad: true, swa: {}}", "--set", "steps=20")
    uninterrupted_result = train(run, tmp_path / "whole", *settings)
    partial_result = train(run, tmp_path / "part", *settings, "--set", "steps=10")
    with Cluster(
        tmp_path / "part", "--expect-workers", "2", "--resume", "--set", "steps=20"
    ) as cluster:
        cluster.start_worker("w0", "--backend", "cpu")
        cluster.start_worker("w1", "--backend", "cpu")
        extended_result = cluster.result()
    assert (
        extended_result["weights_digest"]
        == uninterrupted_result["weights_digest"]
        != partial_result["weights_digest"]
    )
    assert run_command("coordinator", "audit", str(tmp_path / "part" / "out")).returncode == 0


@pytest.mark.slow  # in parts: tests/worker/models/test_adapter.py, test_epochs.py
@pytest.mark.parametrize("key", ["init_from", "adapter"])
def test_run_continues_from_another_result_and_stops_by_its_metric(tmp_path, key):
    run = write_chat_run(tmp_path, evaluate_every=2)
    first = train(run, tmp_path / "first")
    document = json.loads(run.read_text())
    first_out = tmp_path / "first" / "out"
    if key == "adapter":
        document["model"]["adapter"] = str(first_out / "adapter")
    else:
        del document["model"], document["lora"]
        document["init_from"] = str(first_out)
    # No metric improves by that much.
    document |= {
        "steps": 40, "seed": 8, "checkpoint": {"every": 2, "keep_last": 3},
        "stop": {"figure": "loss_per_token", "patience": 2, "min_delta": 100.0},
    }  # fmt: skip
    run.write_text(json.dumps(document))
    second = train(run, tmp_path / "second")
    assert second["losses"][0] < first["losses"][0]
    assert second["steps"] == 6
    out = tmp_path / "second" / "out"
    adapters = [(out / name / "adapter_model.safetensors") for name in ("best", "adapter")]
    assert all(path.is_file() for path in adapters), [*out.iterdir()]
    with Cluster(tmp_path / "second", "--expect-workers", "1", "--resume", "--from-step", "2") as c:
        c.start_worker("w0", "--backend", "cpu")
        repeated_result = c.result()
    assert repeated_result["weights_digest"] == second["weights_digest"]
    for arguments in (
        ("generate", str(out), "What is 3?", "--max-tokens", "4"),
        ("merge", str(out), "--out", str(tmp_path / "merged")),
    ):
        completed = run_command("worker", *arguments)
        assert completed.returncode == 0, completed.stderr
