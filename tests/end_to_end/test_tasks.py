"""Tasks with labels, and options of LoRA, with real processes: one model for one worker or two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.small_chat import save_chat_model, write_chat_run
from tests.small_sequences import PAIRS, TAGGED_ROWS, save_encoder_decoders

ROWS: list[dict[str, Any]] = [
    {"text": f"{a} and {b}", "more": f"{n} of {b}", "labels": [a, b], "value": n / 4}
    for n, (a, b) in enumerate((a, b) for a in ("cat", "dog", "cow") for b in ("fish", "bird"))
] * 2
for number, row in enumerate(ROWS):
    row["text"] += f" {number}"
LABELS: dict[str, dict[str, Any]] = {
    "multi-label": {"problem": "multi-label", "label": "labels"},
    "regression of pairs": {"problem": "regression", "label": "value", "text_pair": "more"},
}
LORA: dict[str, dict[str, Any]] = {
    "dora": {"dora": True},
    "all-linear": {"targets": "all-linear", "rslora": True},
}


def write_run(kind: str, directory: Path) -> Path:
    if kind in LORA:
        return write_chat_run(directory, lora={"r": 4, **LORA[kind]})
    rows, task = ROWS, "classify"
    data: dict[str, Any] = LABELS.get(kind, {})
    if kind == "seq2seq":
        rows, task, model = PAIRS, kind, save_encoder_decoders(directory)["t5"]
    elif kind == "masked-lm":
        rows, task, model = (
            [{"text": f"{n} and {n * n} are numbers"} for n in range(60)],
            kind,
            _bert(directory),
        )
    else:
        model = directory / "model"
        save_chat_model(model)
        if kind == "tag":
            rows, task = TAGGED_ROWS, kind
    path = directory / "rows.json"
    path.write_text(json.dumps(rows))
    run = directory / "run.yaml"
    run.write_text(json.dumps({
        "name": "rows", "task": task, "seed": 7, "model": {"source": str(model)}, "steps": 3,
        "lora": {"r": 4}, "data": {"train": str(path), "max_tokens": 64, **data},
        "batch": {"samples": 6, "microbatch": 2}, "optimizer": {"name": "adamw", "lr": 5e-3},
    }))  # fmt: skip
    return run


def _bert(directory: Path) -> Path:
    """Save a small BERT with a head for masked tokens; return its directory."""
    import transformers

    model = directory / "bert"
    save_chat_model(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"mask_token": "<pad>"})
    tokenizer.save_pretrained(model)
    (model / "model.safetensors").unlink()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(model)
    return model


def train(run: Path, out: Path, workers: int) -> dict[str, Any]:
    with Cluster(out, "--expect-workers", str(workers), "--run", str(run)) as cluster:
        for number in range(workers):
            cluster.start_worker(f"w{number}", "--backend", "cpu")
        return cluster.result()


@pytest.mark.slow  # tests/worker/tasks checks one worker's metrics
@pytest.mark.parametrize("kind", ["tag", "seq2seq", "masked-lm", *LABELS, *LORA])
def test_two_workers_learn_the_same_as_one(tmp_path, kind):
    (tmp_path / "data").mkdir()
    run = write_run(kind, tmp_path / "data")
    one_worker, two_workers = (train(run, tmp_path / str(n), n) for n in (1, 2))
    for key in ("exact", "weights_digest", "losses", "eval"):
        assert two_workers[key] == one_worker[key], key
    assert one_worker["exact"]
    assert one_worker["losses"][-1] != one_worker["losses"][0]
