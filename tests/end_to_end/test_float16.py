"""float16 with forced overflows: one model whoever was there, and no batch lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster import Cluster
from tests.commands import called
from tests.small_chat import chat_run


def float16_run(directory: Path) -> Path:
    """A scale that overflows at first, and again after each step."""
    run = chat_run(directory)
    document = json.loads(run.read_text())
    document["model"] |= {"precision": "float16", "loss_scale": 2.0**24, "loss_scale_every": 1}
    document["log"], document["checkpoint"] = "full", {"keep_log": True, "every": 2}
    run.write_text(json.dumps(document))
    return run


def train(run: Path, out: Path, workers: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with Cluster(out, "--expect-workers", str(workers), "--run", str(run)) as cluster:
        for number in range(workers):
            cluster.worker(f"w{number}", "--backend", "cpu")
        result = cluster.result()
        return result, cluster.every("loss_scale_halved")


def test_one_worker_and_two_halve_the_scale_alike_and_lose_no_batch(tmp_path):
    run = float16_run(tmp_path)
    alone, halved = train(run, tmp_path / "1", 1)
    together, halved_again = train(run, tmp_path / "2", 2)
    assert alone["outcome"] == "finished"
    assert together["weights_digest"] == alone["weights_digest"]
    assert together["losses"] == alone["losses"]
    scales = [(each["step"], each["loss_scale"]) for each in halved]
    assert scales == [(each["step"], each["loss_scale"]) for each in halved_again]
    assert len([step for step, _ in scales if step == 0]) > 1
    assert {step for step, _ in scales} == {0, 1, 2, 3}  # it grows after each
    audit = called("coordinator", "audit", str(tmp_path / "2" / "out"))
    assert audit.returncode == 0, audit.stdout
    assert "4 of 4 steps taken again" in audit.stdout
