"""Tests of a Trainer's custom optimizers, NEFTune and data_seed against the stock Trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, TrainingArguments

import samestep.hf
from protocol.exact.samples import SampleOrder, microbatch_seed
from tests.samestep.test_hf_trainer import (
    CONFIG,
    ITEMS,
    SETTINGS,
    TEXTS,
    EpochSampler,
    StockTrainer,
    batch_of,
    collate,
    losses,
    make_trainer,
    train,
)


@pytest.fixture(autouse=True)
def _any_port(monkeypatch):
    monkeypatch.setenv("SAMESTEP_BIND", "127.0.0.1:0")


def assert_same(trainer, stock) -> None:
    """Assert that two Trainers have equal losses and weights, up to rounding."""
    assert losses(trainer) == pytest.approx(losses(stock), rel=1e-5)
    parameters = dict(trainer.model.named_parameters())
    for name, tensor in stock.model.named_parameters():
        torch.testing.assert_close(parameters[name], tensor, rtol=1e-4, atol=1e-5)


def layer_wise_adamw(trainer):
    """Return AdamW with a learning rate for each layer, and without decay on norms."""
    groups = []
    for name, p in trainer.model.named_parameters():
        depth = next((n for n in range(2) if f"layers.{n}." in name), 0)
        decay = 0.0 if "norm" in name else 0.1
        groups.append({"params": [p], "lr": 1e-2 * 0.5 ** (1 - depth), "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


class LayerWiseMixin:
    def create_optimizer(self, *_):
        self.optimizer = layer_wise_adamw(self)
        return self.optimizer


class LayerWiseTrainer(LayerWiseMixin, samestep.hf.Trainer):  # type: ignore[misc]  # untyped
    pass


class LayerWiseStockTrainer(LayerWiseMixin, StockTrainer):
    pass


def train_with_optimizer_objects(trainer_class, directory):
    trainer = make_trainer(trainer_class, directory, num_train_epochs=1)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)
    trainer.optimizer, trainer.lr_scheduler = optimizer, scheduler
    trainer.train()
    return trainer


def test_custom_optimizers_equal_the_stock_trainer(tmp_path):
    assert_same(
        train_with_optimizer_objects(samestep.hf.Trainer, tmp_path / "ours"),
        train_with_optimizer_objects(StockTrainer, tmp_path / "stock"),
    )
    training_options = {"num_train_epochs": 1}
    trainer = train(LayerWiseTrainer, tmp_path / "ours", **training_options)
    assert_same(trainer, train(LayerWiseStockTrainer, tmp_path / "stock", **training_options))
    assert trainer.optimizer is None  # a second train() creates its own


def test_named_optimizers_are_created_and_translated(tmp_path):
    for training_options in (
        {"optim": "sgd", "optim_args": "momentum=0.9,nesterov=True"},
        {"optim": "rmsprop", "weight_decay": 0.1},
    ):
        arguments = {"num_train_epochs": 1, **training_options}
        trainer = train(samestep.hf.Trainer, tmp_path / "ours", **arguments)
        assert_same(trainer, train(StockTrainer, tmp_path / "stock", **arguments))


class SeededStockTrainer(StockTrainer):
    """The stock Trainer, whose generator is seeded before each microbatch as samestep seeds it."""

    microbatches = 0

    def training_step(self, *args, **options):
        torch.manual_seed(microbatch_seed(5, *divmod(self.microbatches, 2)))
        self.microbatches += 1
        return super().training_step(*args, **options)


def test_neftune_noise_equals_that_of_the_stock_trainer(tmp_path):
    training_options = {"neftune_noise_alpha": 5.0, "num_train_epochs": 1}
    trainer = train(samestep.hf.Trainer, tmp_path / "ours", **training_options)
    stock = make_trainer(SeededStockTrainer, tmp_path / "stock", **training_options)
    stock.train()
    assert_same(trainer, stock)
    embeddings = trainer.model.get_input_embeddings()
    assert not embeddings._forward_hooks
    assert not hasattr(embeddings, "neftune_noise_alpha")


def test_data_seed_changes_only_the_order_of_samples(tmp_path):
    class StockTrainerWithDataSeed(StockTrainer):
        def _get_train_sampler(self, *_):
            return EpochSampler(SampleOrder(9, len(TEXTS), batch_of(self.args)))

    training_options = {"data_seed": 9, "num_train_epochs": 1}
    trainer = train(samestep.hf.Trainer, tmp_path / "ours", **training_options)
    assert_same(trainer, train(StockTrainerWithDataSeed, tmp_path / "stock", **training_options))


def test_several_evaluation_sets_have_the_log_of_the_stock_trainer(tmp_path):
    logs = []
    for trainer_class in (samestep.hf.Trainer, StockTrainer):
        torch.manual_seed(0)
        arguments: dict[str, Any] = {
            **SETTINGS,
            "num_train_epochs": 1,
            "eval_strategy": "epoch",
            "logging_steps": 2,
        }
        trainer = trainer_class(
            model=LlamaForCausalLM(CONFIG),
            args=TrainingArguments(output_dir=str(tmp_path / trainer_class.__name__), **arguments),
            train_dataset=ITEMS,
            eval_dataset={"web": ITEMS[:5], "books": ITEMS[8:10]},
            data_collator=collate,
        )
        trainer.train()
        rows = trainer.state.log_history
        logs.append([(r["step"], n, v) for r in rows for n, v in r.items() if n.endswith("_loss")])
    names = [name for _, name, _ in logs[0]]
    assert (
        names
        == [name for _, name, _ in logs[1]]
        == ["eval_web_loss", "eval_books_loss", "train_loss"]
    )
    # transformers averages the means of batches; here each evaluation set is one batch.
    assert [v for *_, v in logs[0]] == pytest.approx([v for *_, v in logs[1]], rel=1e-5)


def test_batch_norm_trains_with_the_microbatch_as_the_unit(tmp_path):
    class BatchNormModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
            self.outer = torch.nn.Linear(4, 2)

        def forward(self, x, labels=None):
            logits = self.outer(self.norm(self.inner(x)))
            return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

    x = torch.linspace(-1, 1, 48).reshape(16, 3).sin()
    data = [{"x": row, "labels": int(row.sum() > 0)} for row in x]
    training_options: dict[str, Any] = {
        **SETTINGS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1,
        "max_steps": 4,
    }  # fmt: skip
    outcomes = []
    unit = {"unit": "microbatch"}
    variants: list[tuple[Any, dict[str, Any]]] = [
        (samestep.hf.Trainer, {"samestep": unit}), (StockTrainer, {}),
    ]  # fmt: skip
    for trainer_class, extra_arguments in variants:
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path / trainer_class.__name__), **training_options
        )
        trainer = trainer_class(
            model=BatchNormModel(), args=arguments, train_dataset=data, **extra_arguments
        )
        trainer.train()
        outcomes.append((losses(trainer), trainer.model.norm.running_var.clone()))
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-5)
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1], rtol=1e-5, atol=1e-6)
