"""LoRA on conversations by real processes: one model whoever was there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from protocol.spec.model_card import read_card
from tests.cluster import Cluster
from tests.commands import called
from tests.small_chat import chat_run, dpo_run


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
    card = read_card(tmp_path / "1" / "out" / "adapter")
    assert card is not None
    assert card.weights_digest == alone["weights_digest"]
    assert card.evaluations[-1].step == 4
    assert card.evaluations[-1].figures == alone["eval"]
    said = called(
        "worker", "generate", str(tmp_path / "1" / "out"), "What is 3?", "--max-tokens", "4"
    )
    assert said.returncode == 0, said.stderr


def test_one_worker_and_two_learn_the_same_preferences(tmp_path):
    run = dpo_run(tmp_path, steps=3)
    alone, together = (train(run, tmp_path / str(count), count) for count in (1, 2))
    assert together["weights_digest"] == alone["weights_digest"]
    assert together["losses"] == alone["losses"]
    assert together["eval"] == alone["eval"]
    assert {*alone["eval"]} == {"loss_per_pair", "reward_accuracy", "reward_margin"}
