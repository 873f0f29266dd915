"""Tests of `fit` and `samestep.hf.Trainer` on a machine with an accelerator.

test_standin.py runs them in a process whose torch has the stand-in device; benchmarks/cards.py runs
them on a real card, without the tests that need the stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import TensorDataset

import samestep
import samestep.hf
from backends.eager import torch_devices
from protocol.base.errors import DeviceError
from tests import standin
from tests.samestep.test_hf_trainer import SETTINGS, TEXTS, collate
from tests.tested_backend import BACKEND

X = torch.linspace(-1, 1, 48)[:, None]
DEVICE = torch_devices.torch_device(BACKEND, torch.accelerator.device_count() - 1)
CARD = f"{BACKEND}{DEVICE.index}"
IS_STANDIN = DEVICE.type == standin.NAME


@pytest.fixture(autouse=True)
def _isolated_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("SAMESTEP_BIND", "127.0.0.1:0")
    monkeypatch.chdir(tmp_path)
    yield
    if IS_STANDIN:
        standin.set_fault()
        standin.set_memory_limit(None)
        assert standin.take_reports() == []


class DropoutModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(1, 8), nn.Linear(8, 1)
        self.outer.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.inner(x), 0.1, self.training)
        scores: torch.Tensor = self.outer(hidden)
        return scores


def squared_error(module: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = (module(batch[0]) - batch[1]).square().sum()
    return loss


def build_task(**changes: Any) -> samestep.Task:
    arguments: dict[str, Any] = {
        "module": DropoutModel(), "train": TensorDataset(X, 2 * X), "loss": squared_error,
        "held_out": TensorDataset(X[:8], 2 * X[:8]),
    }  # fmt: skip
    return samestep.Task(**arguments | changes)


def fit_on(device: str, **changes: Any) -> samestep.Result:
    return samestep.fit(lambda: build_task(**changes), steps=4, batch=16, device=device)


def test_fit_returns_a_cpu_module_and_leaves_torch_unchanged():
    torch.accelerator.set_device_index(0)
    device_module = torch.get_device_module(DEVICE)
    rng_state = device_module.get_rng_state(DEVICE)
    result = fit_on(CARD)
    assert {parameter.device.type for parameter in result.module.parameters()} == {"cpu"}
    assert result.digest == fit_on(CARD).digest
    assert torch.accelerator.current_device_index() == 0
    assert torch.equal(device_module.get_rng_state(DEVICE), rng_state)


def test_loss_is_checked_on_the_training_device():
    devices = set()

    def loss(module: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        devices.add((str(batch[0].device), str(next(module.parameters()).device)))
        return squared_error(module, batch)

    fit_on(CARD, loss=loss)
    assert devices == {(str(DEVICE), str(DEVICE))}


def test_trial_names_index_out_of_range_and_leaves_the_card_usable():
    def loss(module: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor = module(batch[0]).sum()
        return total

    bad_indices = TensorDataset(torch.full((8, 2), 7))
    with pytest.raises(samestep.SamestepError, match=r"has 7.*in 7 rows"):
        fit_on(CARD, module=nn.Embedding(7, 3), train=bad_indices, loss=loss, held_out=None)
    fit_on(CARD)


def test_unsupported_operation_names_the_card():
    def loss(module: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor = module(batch[0]).cumsum(0).square().sum()
        return total

    with pytest.raises(DeviceError, match=rf"{BACKEND} {DEVICE.index}.*cumsum.*no fixed order"):
        fit_on(CARD, loss=loss)


@pytest.mark.skipif(not IS_STANDIN, reason="a real card's memory has no limit to set")
def test_error_for_a_trial_without_enough_memory_names_the_card():
    standin.set_memory_limit(1024)
    with pytest.raises(DeviceError, match=r"accelerator 1.*out of memory"):
        fit_on(CARD)


def make_trainer(directory: Path, **overrides: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {**SETTINGS, **overrides}
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir=str(directory), **settings)
    if not settings["use_cpu"]:
        arguments._n_gpu = 2
    return samestep.hf.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=[{"input_ids": text} for text in TEXTS],
        eval_dataset=[{"input_ids": text} for text in TEXTS[:4]],
        data_collator=collate,
        samestep={} if settings["use_cpu"] else {"device": CARD},
    )


def test_trainer_with_two_cards_equals_the_cpu(tmp_path, monkeypatch):
    """transformers' Trainer multiplies the loss by the number of cards; samestep's must not."""
    losses_by_device = {}
    for name in ("cpu", "card"):
        if name == "card" and IS_STANDIN:
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "standin:0")
        hf_trainer = make_trainer(tmp_path / name, use_cpu=name == "cpu")
        initial_loss = hf_trainer.evaluate()["eval_loss"]
        hf_trainer.train()
        losses = [row["loss"] for row in hf_trainer.state.log_history if "loss" in row]
        losses_by_device[name] = [initial_loss, *losses, hf_trainer.evaluate()["eval_loss"]]
        assert hf_trainer.model.device.type == {"cpu": "cpu", "card": DEVICE.type}[name]
    assert losses_by_device["card"] == pytest.approx(losses_by_device["cpu"], rel=1e-4)
