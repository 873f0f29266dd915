"""Before a run, a device that differs from torch is refused, and the operator named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch, Trainable
from backends.wgpu import parity
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.device.adapters import adapters
from backends.wgpu.lowering.elementwise import ELEMENTWISE
from protocol.base.errors import SamestepError
from tests.backends.wgpu.small_models import (
    Mixer,
    bert,
    class_loss,
    labeled,
    llama,
    mixed,
    mixer_loss,
    next_token_loss,
    qwen3_with_lora,
    text,
    trainable,
)
from worker.models.blocks import cut_into_blocks

_aten = torch.ops.aten


@pytest.fixture(scope="module")
def backend():
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    return VulkanBackend()


def compared(backend: VulkanBackend, job: Trainable, *batches: Batch) -> str:
    example, *others = batches
    program = backend.compile(job, example, others)
    program.close()
    return program.parity


@pytest.mark.parametrize(
    ("make_model", "loss", "batch"),
    [
        (Mixer, mixer_loss, mixed),
        pytest.param(partial(bert, dropout=0.2), class_loss, labeled, marks=pytest.mark.slow),
    ],
)
def test_a_whole_model_with_dropout_is_compared_in_two_shapes(backend, make_model, loss, batch):
    report = compared(backend, trainable(make_model(), loss), batch(), batch(2))
    assert report.startswith("gradients within ")
    assert float(report.split()[2]) < 1e-5
    assert "(all; " in report


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float32", "int4"])
def test_large_model_is_compared_in_part(backend, base, monkeypatch):
    """With frozen weights as the device stores them; all layers are restored afterwards."""
    monkeypatch.setattr(parity, "_BUDGET_S", 0.0)
    model = qwen3_with_lora(num_hidden_layers=4)
    job = trainable(model, next_token_loss, base_dtype=base)
    report = compared(backend, job, text())
    assert "(3 layers, 1 samples; " in report
    assert float(report.split()[2]) < 1e-5
    assert job.module is not None
    assert {n for n, _ in job.module.named_parameters()} == {n for n, _ in model.named_parameters()}


class Layer(nn.Module):
    """Computes with a number that no input holds."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = lambda: factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.factor()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(0.5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def squares(module: nn.Module, arrays: Any) -> torch.Tensor:
    result: torch.Tensor = module(arrays["x"])
    return (result**2).sum()


def vectors(samples: int = 5) -> Batch:
    x = np.random.default_rng(0).normal(0, 1, (samples, 4)).astype(np.float32)
    return Batch({"x": x}, float(samples))


def job_of(module: nn.Module, loss: Callable[..., torch.Tensor] = squares) -> Trainable:
    return Trainable(cut_into_blocks(module), module, loss)


def test_a_wrong_operator_is_named_with_its_module(backend, monkeypatch):
    rule = ELEMENTWISE[_aten.tanh.default]
    monkeypatch.setitem(
        ELEMENTWISE, _aten.tanh.default, lambda *operand_names: f"({rule(*operand_names)} * 1.001)"
    )
    monkeypatch.setattr("backends.wgpu.lowering.kernels._RULES", ELEMENTWISE)
    with pytest.raises(SamestepError) as error:
        compared(backend, job_of(Layers()), vectors())
    assert "of torch's, got a difference of " in str(error.value)
    assert "the operator is 'tanh.default', which gives shape [5, 4] in layers.0;" in str(
        error.value
    )
    assert "\n" not in str(error.value)


class Counting(Layers):
    """Its forward depends on its call count."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * float(self.calls)


def test_frozen_trace_is_detected(backend):
    with pytest.raises(SamestepError, match="torch's results differ from run to run"):
        compared(backend, job_of(Counting()), vectors())


def test_non_finite_values_must_agree():
    one = {"": np.array([1.0]), "w": np.array([np.nan, 1.0, np.inf])}
    assert parity.difference(one, one) == ("", 0.0)
    other = {**one, "w": np.array([np.nan, 1.0, 3.0])}
    assert parity.difference(one, other) == ("w", np.inf)
    assert parity.difference(other, one) == ("w", np.inf)


def test_rounding_of_an_exact_zero_is_allowed():
    one = {"": np.array([1.0]), "w": np.array([1.0, 1.0]), "b": np.array([1e-8])}
    _, distance = parity.difference(one, {**one, "b": np.array([-1e-8])})
    assert distance < parity.TOLERANCE
    name, distance = parity.difference(one, {**one, "b": np.array([1e-3])})
    assert name == "b"
    assert distance > parity.TOLERANCE


class Saturated(nn.Module):
    """A norm over two numbers gives 1 and -1 for any input: its gradient is pure rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm((x + self.shift).unflatten(-1, (2, 2)), (2,)) ** -2


def test_torch_rounding_is_not_a_device_fault(backend):
    assert compared(backend, job_of(Saturated()), vectors())


@pytest.mark.parametrize(
    ("make_model", "loss", "batch"),
    [
        (Mixer, mixer_loss, mixed),
        pytest.param(llama, next_token_loss, text, marks=pytest.mark.slow),
    ],
)
def test_microbatches_are_also_compared_in_reverse(backend, make_model, loss, batch):
    assert compared(backend, trainable(make_model(), loss), batch(samples=2))


def test_lowering_error_is_one_line(backend, monkeypatch):
    def rule(*_: object) -> str:
        raise ZeroDivisionError("no\nsuch thing")

    monkeypatch.setattr(
        "backends.wgpu.lowering.kernels._RULES", {**ELEMENTWISE, _aten.tanh.default: rule}
    )
    with pytest.raises(
        SamestepError, match=r"cannot generate kernels .*: ZeroDivisionError: no such"
    ):
        compared(backend, job_of(Layers()), vectors())
