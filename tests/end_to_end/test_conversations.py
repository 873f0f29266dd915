"""LoRA on conversations by real processes: one model whoever was there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster import Cluster
from tests.small_chat import chat_run


def train(run: Path, out: Path, workers: int) -> dict[str, Any]:
    with Cluster(out, "--expect-workers", str(workers), "--run", str(run)) as cluster:
        for number in range(workers):
            cluster.worker(f"w{number}", "--backend", "cpu")
        return cluster.result()


def test_one_worker_and_two_learn_the_same_from_conversations(tmp_path):
    run = chat_run(tmp_path)
    alone, together = (train(run, tmp_path / str(count), count) for count in (1, 2))
    assert together["weights_digest"] == alone["weights_digest"]
    assert together["losses"] == alone["losses"]
    assert together["eval"] == alone["eval"]
    assert sum(together["workers"].values()) == sum(alone["workers"].values())
    assert all(together["workers"].values())
    assert alone["losses"][-1] != alone["losses"][0]
