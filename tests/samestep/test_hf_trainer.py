"""`samestep.hf.Trainer` has the losses of transformers' Trainer, and ignores no argument that
matters."""

from __future__ import annotations

import dataclasses
import itertools
import re
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

import samestep.hf
from protocol.base.errors import SamestepError
from protocol.exact.samples import SampleOrder
from protocol.spec.sections.tasks import BatchSpec
from samestep.hf.arguments import HARMLESS, HONORED, REFUSED, check_arguments
from samestep.hf.callbacks import CallbackLoop
from samestep.hf.training import _make_task
from tests.cluster import Cluster

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip
TEXTS = [[1 + (3 * n + k * k) % 31 for k in range(4 + n % 5)] for n in range(16)]
ITEMS = [{"input_ids": text} for text in TEXTS]
SETTINGS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
    "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1,
    "max_grad_norm": 0.5, "logging_steps": 1, "seed": 5, "use_cpu": True, "report_to": "none",
    "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip


def collate(items):
    width = max(len(item["input_ids"]) for item in items)
    ids = torch.zeros((len(items), width), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row, item in enumerate(items):
        ids[row, : len(item["input_ids"])] = labels[row, : len(item["input_ids"])] = torch.tensor(
            item["input_ids"]
        )
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


class StockTrainer(transformers.Trainer):
    """The stock Trainer with samestep's order of samples."""

    def _get_train_sampler(self, *_):
        return EpochSampler(SampleOrder(5, len(TEXTS), batch_of(self.args)))


class EpochSampler(torch.utils.data.Sampler[int]):
    """The samples of an epoch in the order of a run."""

    def __init__(self, order):
        self._order, self._epoch = order, 0

    def set_epoch(self, epoch):
        self._epoch = epoch

    def __len__(self):
        return len(TEXTS)

    def __iter__(self):
        first = self._epoch * self._order.steps_per_epoch
        self._epoch += 1
        for step in range(first, first + self._order.steps_per_epoch):
            for samples in self._order.microbatches(step):
                yield from samples


def make_trainer(trainer_class, directory, data=ITEMS, **overrides):
    torch.manual_seed(0)
    return trainer_class(
        model=LlamaForCausalLM(CONFIG),
        args=TrainingArguments(output_dir=str(directory), **{**SETTINGS, **overrides}),
        train_dataset=data,
        data_collator=collate,
    )


def train(trainer_class, directory, **overrides):
    trainer = make_trainer(trainer_class, directory, **overrides)
    trainer.train()
    return trainer


def batch_of(arguments) -> BatchSpec:
    microbatch = arguments.per_device_train_batch_size
    return BatchSpec(
        samples=microbatch * arguments.gradient_accumulation_steps, microbatch=microbatch
    )


def losses(trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def log_of(trainer) -> list[dict[str, float]]:
    """Return the log without values that depend on clock and device."""
    return [
        {n: v for n, v in row.items() if not re.search("runtime|per_second|total_flos", n)}
        for row in trainer.state.log_history
    ]


@pytest.fixture(scope="module")
def samestep_trainer(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAMESTEP_BIND", "127.0.0.1:0")
        return train(samestep.hf.Trainer, tmp_path_factory.mktemp("ours"))


@pytest.fixture(autouse=True)
def _any_port(monkeypatch):
    monkeypatch.setenv("SAMESTEP_BIND", "127.0.0.1:0")


def test_losses_equal_the_stock_trainer_on_the_same_order(tmp_path, samestep_trainer):
    stock = train(StockTrainer, tmp_path)
    assert len(losses(samestep_trainer)) == 8
    assert losses(samestep_trainer) == pytest.approx(losses(stock), rel=1e-5)
    for name, tensor in stock.model.named_parameters():
        torch.testing.assert_close(
            dict(samestep_trainer.model.named_parameters())[name], tensor, rtol=1e-4, atol=1e-5
        )
    assert samestep_trainer.fitted.directory.parent == Path(samestep_trainer.args.output_dir)


@pytest.mark.parametrize(
    "schedule_options",
    [
        {},
        {"logging_steps": 3, "logging_first_step": True},
        {"logging_steps": 0.25},
        {
            "logging_strategy": "epoch",
            "per_device_train_batch_size": 3,
            "max_grad_norm": 0.0,
            "gradient_checkpointing": True,
        },
        {"logging_strategy": "no"},
    ],
)
def test_log_equals_the_stock_trainer(tmp_path, samestep_trainer, schedule_options):
    stock = train(StockTrainer, tmp_path / "stock", **schedule_options)
    if "per_device_train_batch_size" in schedule_options:
        samestep_trainer = train(samestep.hf.Trainer, tmp_path / "ours", **schedule_options)
    else:
        samestep_trainer = copy(samestep_trainer)
        samestep_trainer.args = TrainingArguments(
            output_dir=str(tmp_path), **{**SETTINGS, **schedule_options}
        )
        loop = CallbackLoop(samestep_trainer, len(TEXTS))
        with loop.observing():
            for row in samestep_trainer.fitted.history:
                loop.add_row(row)
            loop.end(samestep_trainer.fitted)
    stock_log, our_log = log_of(stock), log_of(samestep_trainer)
    assert [list(row) for row in our_log] == [list(row) for row in stock_log]
    for row, expected in zip(our_log, stock_log, strict=True):
        assert row == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("polynomial", {"power": 2.0}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("cosine_with_min_lr", {"min_lr": 1e-3}),
        ("inverse_sqrt", {"timescale": 3}),
        ("warmup_stable_decay", {"num_decay_steps": 2}),
    ],
)
def test_schedule_has_the_losses_and_rates_of_the_stock_trainer(tmp_path, schedule, options):
    schedule_options = {
        "lr_scheduler_type": schedule,
        "lr_scheduler_kwargs": options,
        "num_train_epochs": 1,
    }
    stock = train(StockTrainer, tmp_path / "stock", **schedule_options)
    our_trainer = train(samestep.hf.Trainer, tmp_path / "ours", **schedule_options)
    assert losses(our_trainer) == pytest.approx(losses(stock), rel=1e-5)
    rates = [[row["learning_rate"] for row in t.state.log_history if "loss" in row]
             for t in (stock, our_trainer)]  # fmt: skip
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)


def test_trainer_submits_its_run_to_a_serving_coordinator(tmp_path, monkeypatch):
    with Cluster(tmp_path / "served", "--expect-workers", "1") as cluster:
        monkeypatch.setenv("SAMESTEP_CONTROL", cluster.address["control"])
        submitted_result = train(samestep.hf.Trainer, tmp_path / "out", num_train_epochs=1)
    assert len(losses(submitted_result)) == 4
    assert not (tmp_path / "out" / "run-1").exists()


def test_every_argument_is_in_one_list():
    lists = (HONORED, HARMLESS, REFUSED)
    for field in dataclasses.fields(TrainingArguments):
        assert sum(field.name in names for names in lists) == 1, field.name


@pytest.mark.parametrize(
    "name",
    [field.name for field in dataclasses.fields(TrainingArguments) if field.name in REFUSED],
)
def test_refused_argument_is_named_with_its_value(tmp_path, name):
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    setattr(arguments, name, "set")
    with pytest.raises(SamestepError, match=rf"TrainingArguments\.{name}='set' cannot be hono"):
        check_arguments(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"torch_compile": True}, "torch_compile=True cannot be honored: leave it out"),
        ({"optim": "lomo"}, "optim='lomo'.* creating them raised"),
        ({"per_device_train_batch_size": 0}, "train_batch_size=0 cannot be honored: write 1"),
        ({"max_steps": -1, "num_train_epochs": 0}, "num_train_epochs=0 cannot be honored"),
    ],
)
def test_error_for_an_unsupported_argument_names_its_value(tmp_path, arguments, message):
    with pytest.raises(SamestepError, match=message):
        train(samestep.hf.Trainer, tmp_path, **arguments)


def test_unknown_argument_is_refused_unless_it_has_its_default(tmp_path):
    @dataclasses.dataclass
    class NewerArguments(TrainingArguments):
        gradient_noise: float = 0.0

    check_arguments(NewerArguments(output_dir=str(tmp_path)))
    with pytest.raises(SamestepError, match=r"gradient_noise=0\.5 .*does not know it"):
        check_arguments(NewerArguments(output_dir=str(tmp_path), gradient_noise=0.5))


class CustomStep(samestep.hf.Trainer):
    def training_step(self, *_):
        return None


class CustomInputs(transformers.Trainer):
    def _prepare_inputs(self, inputs):
        return inputs


class MixedTrainer(samestep.hf.SamestepMixin, CustomInputs):  # type: ignore[misc]  # it ships no types
    """A Trainer in which a class after the mixin overrides a method."""


class CustomEvaluation(samestep.hf.Trainer):
    def evaluate(self, *_, **__):
        return {}


def test_overridden_methods_of_the_loop_are_refused_by_name(tmp_path):
    for trainer_class, method_name in (
        (CustomStep, "CustomStep.training_step"),
        (MixedTrainer, "CustomInputs._prepare_inputs"),
    ):
        with pytest.raises(SamestepError, match=rf"{re.escape(method_name)} cannot be honored"):
            make_trainer(trainer_class, tmp_path).train()
    patched = make_trainer(samestep.hf.Trainer, tmp_path)
    patched.get_train_dataloader = list
    with pytest.raises(SamestepError, match=r"Trainer\.get_train_dataloader cannot be honored"):
        patched.train()
    trainer = make_trainer(CustomEvaluation, tmp_path)
    trainer.args.eval_strategy = "epoch"
    with pytest.raises(SamestepError, match=r"CustomEvaluation\.evaluate .* eval_strategy='no'"):
        trainer.train()


def test_mean_loss_is_multiplied_by_the_number_of_samples(tmp_path):
    class PatchTrainer(samestep.hf.Trainer):
        def compute_loss(self, model, inputs, *_, **__):
            return model(inputs["patches"]).mean() * inputs["labels"].mean()

    arguments: dict[str, Any] = {**SETTINGS, "remove_unused_columns": False}
    trainer = PatchTrainer(
        model=torch.nn.Linear(1, 1),
        args=TrainingArguments(output_dir=str(tmp_path), **arguments),
        train_dataset=[{"n": n + 1} for n in range(4)],
        data_collator=lambda items: {
            "patches": torch.ones(6, 1), "labels": torch.tensor([float(i["n"]) for i in items]),
        },
    )  # fmt: skip
    task: Any = _make_task(trainer)
    batch = task.collate([task.train[1], task.train[3]])
    assert task.weight(batch) == 2.0
    mean = trainer.compute_loss(trainer.model, batch)
    assert torch.equal(task.loss(trainer.model, batch), mean * 2)


@pytest.mark.parametrize(
    ("samestep_arguments", "message"),
    [
        ({"worker": 2}, "expected an argument of fit, got 'worker'; did you mean 'workers'?"),
        ({"lora": {}}, "expected an argument of fit, got 'lora'; expected one of batch, control"),
        ([2], "expected arguments of fit by name, got list: write samestep="),
    ],
)
def test_arguments_that_fit_does_not_have_are_refused_by_name(
    tmp_path, samestep_arguments, message
):
    with pytest.raises(SamestepError, match=f"samestep: {re.escape(message)}"):
        samestep.hf.Trainer(
            args=TrainingArguments(output_dir=str(tmp_path)), samestep=samestep_arguments
        )


class StreamedData(torch.utils.data.IterableDataset[dict[str, list[int]]]):
    def __iter__(self):
        return itertools.cycle(ITEMS)


@pytest.mark.parametrize("data", [None, StreamedData()])
def test_data_without_a_length_is_refused(tmp_path, data):
    trainer = make_trainer(samestep.hf.Trainer, tmp_path, data, max_steps=2)
    with pytest.raises(SamestepError, match="a length and items by number as train_dataset, got"):
        trainer.train()
