"""Runs in epochs, and a run that stops early: the same model for any number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import Cluster
from tests.commands import run_command

RUN = {
    "task": "regress", "seed": 5, "epochs": 2, "evaluate_every": 3,
    "regress": {"samples": 50, "features": 3},
    "batch": {"samples": 16, "microbatch": 3},
    "checkpoint": {"every": 3, "keep_log": True},
}  # fmt: skip
OPTIMIZERS = {
    "lion": {"name": "lion", "lr": 0.01, "schedule": "wsd", "decay_ratio": 0.5},
    "schedule-free": {"name": "schedule-free", "lr": 0.1, "warmup_steps": 3},
}


def train(directory: Path, workers: int, optimizer: dict[str, Any]) -> dict[str, Any]:
    directory.mkdir()
    run = directory / "run.yaml"
    run.write_text(yaml.safe_dump({**RUN, "optimizer": optimizer}))
    with Cluster(directory, "--expect-workers", str(workers), "--run", str(run)) as cluster:
        for number in range(workers):
            cluster.start_worker(f"w{number}", "--backend", "cpu")
        return cluster.result()


@pytest.mark.parametrize("name", [pytest.param("lion", marks=pytest.mark.slow), "schedule-free"])
def test_two_epochs_cover_every_sample_twice(tmp_path, name):
    single_worker = train(tmp_path / "alone", 1, OPTIMIZERS[name])
    two_workers = train(tmp_path / "together", 2, OPTIMIZERS[name])
    assert two_workers["weights_digest"] == single_worker["weights_digest"]
    assert (two_workers["losses"], two_workers["eval"]) == (
        single_worker["losses"],
        single_worker["eval"],
    )
    assert single_worker["steps"] == 2 * 4  # 16, 16, 16 and 2 of 50
    out = tmp_path / "together" / "out"
    audit = run_command("coordinator", "audit", str(out))
    assert audit.returncode == 0, audit.stdout
    for epoch in (0, 1):
        assert f"epoch {epoch}: 50 of 50 samples covered exactly once" in audit.stdout
    assert "8 of 8 steps replayed" in audit.stdout
    page = run_command("coordinator", "report", str(out))
    assert page.returncode == 0
    assert "2 of 2" in (out / "report.html").read_text()
    assert json.loads((out / "run.json").read_text())["spec"]["epochs"] == 2


def test_run_stops_by_its_metric_and_saves_the_best_model(tmp_path):
    """The rate is far too high, so the first evaluation stays the best."""
    document = {
        **{key: value for key, value in RUN.items() if key != "epochs"},
        "steps": 40, "evaluate_every": 2,
        "optimizer": {"name": "sgd", "lr": 1.4},
        "stop": {"figure": "mse", "patience": 2},
    }  # fmt: skip
    results = []
    for workers in (1, 2):
        directory = tmp_path / str(workers)
        directory.mkdir()
        run = directory / "run.yaml"
        run.write_text(yaml.safe_dump(document))
        with Cluster(directory, "--expect-workers", str(workers), "--run", str(run)) as cluster:
            for number in range(workers):
                cluster.start_worker(f"w{number}", "--backend", "cpu")
            results.append(cluster.result())
        audit = run_command("coordinator", "audit", str(directory / "out"))
        assert audit.returncode == 0, audit.stdout
    single_worker, two_workers = results
    assert single_worker["outcome"] == "finished"
    assert single_worker["steps"] < 40
    assert (two_workers["steps"], two_workers["weights_digest"]) == (
        single_worker["steps"], single_worker["weights_digest"],
    )  # fmt: skip
    best = [(tmp_path / n / "out" / "best" / "model.safetensors").read_bytes() for n in "12"]
    assert best[0] == best[1]
    assert best[0] != (tmp_path / "1" / "out" / "model" / "model.safetensors").read_bytes()
