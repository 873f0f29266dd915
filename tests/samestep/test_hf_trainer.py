"""A script for transformers' Trainer with the class swapped: the same losses, nothing ignored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import samestep.hf
from protocol.base.errors import SamestepError
from protocol.exact.samples import SampleOrder
from protocol.spec.run_spec import BatchSpec
from samestep.hf.arguments import HARMLESS, HONOURED, REFUSED, refuse_what_is_not_had

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
)  # fmt: skip
TEXTS = [[1 + (3 * n + k * k) % 31 for k in range(4 + n % 5)] for n in range(16)]
SET = {
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


class InOurOrder(transformers.Trainer):
    """The stock Trainer, on the order of samples that samestep has."""

    def _get_train_sampler(self, *_):
        batch = BatchSpec(samples=4, microbatch=2)
        return _Epochs(SampleOrder(5, len(TEXTS), batch))


class _Epochs(torch.utils.data.Sampler[int]):
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


def trained(kind, directory, **more):
    torch.manual_seed(0)
    trainer = kind(
        model=LlamaForCausalLM(CONFIG),
        args=TrainingArguments(output_dir=str(directory), **{**SET, **more}),
        train_dataset=[{"input_ids": text} for text in TEXTS],
        data_collator=collate,
    )
    trainer.train()
    return trainer


def losses(trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch):
    monkeypatch.setenv("SAMESTEP_BIND", "127.0.0.1:0")


def test_losses_are_those_of_the_stock_trainer_on_the_same_order(tmp_path):
    stock = trained(InOurOrder, tmp_path / "stock")
    ours = trained(samestep.hf.Trainer, tmp_path / "ours")
    assert len(losses(ours)) == 8
    assert losses(ours) == pytest.approx(losses(stock), rel=1e-5)
    for name, tensor in stock.model.named_parameters():
        torch.testing.assert_close(
            dict(ours.model.named_parameters())[name], tensor, rtol=1e-4, atol=1e-5
        )
    assert ours.fitted.directory.is_relative_to(tmp_path / "ours")


def test_every_argument_is_in_one_list():
    lists = (HONOURED, HARMLESS, frozenset(REFUSED))
    for field in dataclasses.fields(TrainingArguments):
        assert sum(field.name in each for each in lists) == 1, field.name


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"torch_compile": True}, "torch_compile=True cannot be honoured: leave it out"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True cannot be honoured"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha=5 cannot be honoured"),
        ({"load_best_model_at_end": True, "save_strategy": "no"}, "load_best_model_at_end=True"),
        ({"lr_scheduler_type": "polynomial"}, "write one of linear, cosine"),
        ({"optim": "adafactor"}, "write one of adamw_torch"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path, arguments, named):
    with pytest.raises(SamestepError, match=named):
        trained(samestep.hf.Trainer, tmp_path, **arguments)


def test_an_argument_that_a_newer_release_has_is_refused_where_it_is_set(tmp_path):
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        gradient_noise: float = 0.0

    refuse_what_is_not_had(Newer(output_dir=str(tmp_path)))
    with pytest.raises(SamestepError, match=r"gradient_noise=0\.5 .*does not know it"):
        refuse_what_is_not_had(Newer(output_dir=str(tmp_path), gradient_noise=0.5))


def test_a_loop_of_ones_own_is_named(tmp_path):
    class Mine(samestep.hf.Trainer):
        def training_step(self, *_):
            return None

    with pytest.raises(SamestepError, match=r"Mine\.training_step cannot be honoured"):
        trained(Mine, tmp_path)
