"""The loss of a Trainer over a large vocabulary is computed in parts, with equal values."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

import samestep.hf
from backends.losses import logits_in_parts, vocabulary_loss
from samestep.hf.losses import SAMPLES, SummedLoss
from tests.backends.losses.test_vocabulary_loss import (
    CHUNK_TOKENS,
    LARGE_VOCABULARY,
    assert_same_gradients,
)
from tests.small_heads import VOCABULARY, LargestTensor, bart, bert, gemma, llama, padded_texts, t5

MODELS: dict[str, Any] = {"llama": llama, "gemma": gemma, "bert": bert, "t5": t5, "bart": bart}


def items(vocabulary: int = VOCABULARY) -> list[dict[str, torch.Tensor]]:
    arrays = {name: torch.tensor(array) for name, array in padded_texts(vocabulary).arrays.items()}
    return [{name: array[row] for name, array in arrays.items()} for row in range(2)]


def make_trainer(trainer_class: Any, model: Any, directory: Any, *, smoothing: float = 0.0) -> Any:
    arguments = TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=2, max_steps=2, use_cpu=True,
        report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
        label_smoothing_factor=smoothing,
    )  # fmt: skip
    return trainer_class(model=model, args=arguments, train_dataset=items())


def batch(trainer: Any, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {**trainer.data_collator(rows), SAMPLES: torch.tensor(float(len(rows)))}


@pytest.mark.parametrize(
    ("name", "smoothing"), [*((name, 0.0) for name in MODELS), ("llama", 0.1), ("bert", 0.1)]
)
def test_loss_and_gradients_equal_those_of_transformers(name, smoothing, tmp_path, monkeypatch):
    """A smoothed loss needs all logits at once: transformers computes it from probabilities."""
    expected, model = MODELS[name](), MODELS[name]()
    stock = make_trainer(Trainer, expected, tmp_path, smoothing=smoothing)
    stock_batch = stock.data_collator(items())
    items_in_batch = stock._get_num_items_in_batch([stock_batch], torch.device("cpu"))
    stock_loss = stock.compute_loss(expected, {**stock_batch}, num_items_in_batch=items_in_batch)
    stock_loss.backward()
    monkeypatch.setattr(vocabulary_loss, "tokens_per_part", lambda _: CHUNK_TOKENS)
    trainer = make_trainer(samestep.hf.Trainer, model, tmp_path, smoothing=smoothing)
    losses = SummedLoss(trainer, [batch(trainer, items()[:1])])
    whole_batch = batch(trainer, items())
    with mock.patch.object(logits_in_parts, "checkpoint", side_effect=checkpoint) as computed:
        loss = losses.loss(model, whole_batch) / losses.weight(whole_batch)
    if not smoothing:
        assert computed.call_count >= 48 // CHUNK_TOKENS
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(stock_loss.detach()), rel=1e-6)
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "bart"])
def test_largest_tensor_is_the_logits_of_one_part(name, tmp_path, monkeypatch):
    model = MODELS[name](LARGE_VOCABULARY)
    trainer = make_trainer(samestep.hf.Trainer, model, tmp_path)
    losses = SummedLoss(trainer, [batch(trainer, items(LARGE_VOCABULARY)[:1])])
    largest_elements = []
    # All 48 tokens; then one more than the hidden size, so that the head's weight is smaller.
    for chunk_tokens in (1 << 20, 33):
        monkeypatch.setattr(vocabulary_loss, "tokens_per_part", lambda _, count=chunk_tokens: count)
        with LargestTensor() as in_training:
            losses.loss(model, batch(trainer, items(LARGE_VOCABULARY))).backward()
        with LargestTensor() as in_evaluation, torch.no_grad():
            losses.loss(model, batch(trainer, items(LARGE_VOCABULARY)))
        assert in_evaluation.elements == in_training.elements
        largest_elements.append(in_training.elements)
    assert largest_elements == [48 * LARGE_VOCABULARY, 33 * LARGE_VOCABULARY]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_losses_of_a_run_equal_those_with_all_logits_at_once(name, tmp_path, monkeypatch):
    runs = []
    for chunk_tokens in (1 << 20, CHUNK_TOKENS):
        monkeypatch.setattr(vocabulary_loss, "tokens_per_part", lambda _, count=chunk_tokens: count)
        trainer = make_trainer(samestep.hf.Trainer, MODELS[name](), tmp_path / str(chunk_tokens))
        with mock.patch.object(logits_in_parts, "checkpoint", side_effect=checkpoint) as computed:
            trainer.train()
        assert bool(computed.call_count) == (chunk_tokens == CHUNK_TOKENS)
        runs.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(runs[0]) == 2
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
