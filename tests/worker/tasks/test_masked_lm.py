"""Masked language modeling: the loss of transformers, and masks that a seed determines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.base.errors import DataError
from protocol.spec.run_spec import parse_run_spec
from tests.commands import run_command
from tests.small_sequences import save_encoder_decoders
from tests.worker.tasks.test_classify import export, perturbed_values
from worker.tasks.registry import build


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory) -> Path:
    """The small BERT with a head for masked tokens."""
    import transformers

    directory: Path = tmp_path_factory.mktemp("masked")
    config = transformers.AutoConfig.from_pretrained(tiny)
    transformers.BertForMaskedLM(config).save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(tiny).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("".join(f"line {n} of a text about {n * n} things\n" for n in range(800)))
    return path


def spec_of(model: object, text: Path, **overrides: Any) -> Any:
    return parse_run_spec({
        "task": "masked-lm", "seed": 7, "steps": 1, "model": {"source": str(model)},
        "data": {"train": str(text), "max_tokens": 32, **overrides.pop("data", {})},
        "batch": {"samples": 8, "microbatch": 4}, **overrides,
    })  # fmt: skip


@pytest.mark.parametrize("lora", [None, {"r": 2, "targets": "all-linear"}])
def test_loss_equals_transformers(model, text, tmp_path, lora):
    import peft
    import torch
    import transformers

    task: Any = build(spec_of(model, text, lora=lora))
    result_directory = export(task, perturbed_values(task), tmp_path)
    batch = task.drawn_batch(range(6), 1)
    parameters = dict(task.trainable.module.named_parameters())
    tensors = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    with torch.no_grad():
        for block, values in zip(task.manifest.blocks, perturbed_values(task), strict=True):
            for tensor, elements in block.slices():
                parameters[tensor.name].copy_(torch.tensor(values[elements].reshape(tensor.shape)))
        run_loss = float(task.trainable.loss(task.trainable.module.eval(), tensors)) / batch.weight
        if lora is None:
            repeat: Any = transformers.AutoModelForMaskedLM.from_pretrained(result_directory)
        else:
            base = transformers.AutoModelForMaskedLM.from_pretrained(model)
            repeat = peft.PeftModel.from_pretrained(base, result_directory)
        expected = float(repeat.eval()(**tensors).loss)
    assert run_loss == pytest.approx(expected, rel=1e-5)
    if lora is not None:
        merged = run_command(
            "worker", "merge", str(result_directory), "--out", str(tmp_path / "merged")
        )
        assert merged.returncode == 0, merged.stderr
    process = run_command("worker", "generate", str(result_directory), "hello")
    assert "fills in masked tokens" in process.stderr


def test_masks_follow_the_seed_and_replace_in_three_ways(model, text):
    import transformers

    task: Any = build(spec_of(model, text))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    first, repeat, other = (task.drawn_batch(range(100), seed) for seed in (1, 1, 2))
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, repeat.arrays[name])
    assert (first.arrays["labels"] != other.arrays["labels"]).any()
    read, labels = first.arrays["input_ids"], first.arrays["labels"]
    masked = labels >= 0
    assert first.weight == masked.sum()
    assert masked.any(axis=1).all()
    assert masked.mean() == pytest.approx(0.15, abs=0.02)
    mask_share = (read == tokenizer.mask_token_id)[masked].mean()
    assert mask_share == pytest.approx(0.8, abs=0.04)
    assert (read == labels)[masked].mean() == pytest.approx(0.1, abs=0.03)
    assert not np.isin(labels[masked], tokenizer.all_special_ids).any()
    np.testing.assert_array_equal(
        task.evaluation_batch(0).arrays["labels"], task.evaluation_batch(0).arrays["labels"]
    )


def test_a_model_without_masks_is_refused(text, tmp_path):
    bart = save_encoder_decoders(tmp_path)["bart"]
    with pytest.raises(DataError, match="a tokenizer with a mask token"):
        build(spec_of(bart, text))
