"""The parity check refuses a device whose results differ from torch's, and names the operator."""

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
    labeled_batch,
    llama,
    mixer_batch,
    mixer_loss,
    next_token_loss,
    qwen3_with_lora,
    token_batch,
    trainable,
)
from worker.models.blocks import cut_into_blocks

_aten = torch.ops.aten


@pytest.fixture(scope="module")
def backend():
    """Provide a backend, or skip the test."""
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    return VulkanBackend()


def parity_report(backend: VulkanBackend, job: Trainable, *batches: Batch) -> str:
    """Compile a task for these batches and return the report of the comparison with torch."""
    example, *others = batches
    program = backend.compile(job, example, others)
    program.close()
    return program.parity


@pytest.mark.parametrize(
    ("make_model", "loss", "batch"),
    [
        (Mixer, mixer_loss, mixer_batch),
        pytest.param(partial(bert, dropout=0.2), class_loss, labeled_batch, marks=pytest.mark.slow),
    ],
)
def test_a_whole_model_with_dropout_is_compared_in_two_shapes(backend, make_model, loss, batch):
    report = parity_report(backend, trainable(make_model(), loss), batch(), batch(2))
    assert report.startswith("gradients within ")
    assert float(report.split()[2]) < 1e-5
    assert "(all; " in report


@pytest.mark.slow
@pytest.mark.parametrize("base", ["float32", "int4"])
def test_large_model_is_compared_in_part(backend, base, monkeypatch):
    """The comparison uses the frozen weights as the device stores them, and removes layers only
    temporarily."""
    monkeypatch.setattr(parity, "_BUDGET_S", 0.0)
    model = qwen3_with_lora(num_hidden_layers=4)
    job = trainable(model, next_token_loss, base_dtype=base)
    report = parity_report(backend, job, token_batch())
    assert "(3 layers, 1 samples; " in report
    assert float(report.split()[2]) < 1e-5
    assert job.module is not None
    assert {n for n, _ in job.module.named_parameters()} == {n for n, _ in model.named_parameters()}


class Layer(nn.Module):
    """A layer with a Python number from a closure, which no tensor holds."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = lambda: factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * self.factor()


class Layers(nn.Module):
    """Three equal layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(0.5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sum_of_squares(module: nn.Module, arrays: Any) -> torch.Tensor:
    result: torch.Tensor = module(arrays["x"])
    return (result**2).sum()


def random_batch(samples: int = 5) -> Batch:
    x = np.random.default_rng(0).normal(0, 1, (samples, 4)).astype(np.float32)
    return Batch({"x": x}, float(samples))


def new_job(module: nn.Module, loss: Callable[..., torch.Tensor] = sum_of_squares) -> Trainable:
    return Trainable(cut_into_blocks(module), module, loss)


def test_a_wrong_operator_is_named_with_its_module(backend, monkeypatch):
    tanh_rule = ELEMENTWISE[_aten.tanh.default]
    monkeypatch.setitem(
        ELEMENTWISE, _aten.tanh.default, lambda *names: f"({tanh_rule(*names)} * 1.001)"
    )
    monkeypatch.setattr("backends.wgpu.lowering.kernels._RULES", ELEMENTWISE)
    with pytest.raises(SamestepError) as error:
        parity_report(backend, new_job(Layers()), random_batch())
    assert "of torch's, got a difference of " in str(error.value)
    assert "the operator is 'tanh.default', which gives shape [5, 4] in layers.0;" in str(
        error.value
    )
    assert "\n" not in str(error.value)


class Counting(Layers):
    """Layers whose result depends on the number of calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * float(self.calls)


def test_a_forward_that_depends_on_the_number_of_calls_is_refused(backend):
    with pytest.raises(SamestepError, match="torch's results differ from run to run"):
        parity_report(backend, new_job(Counting()), random_batch())


def test_non_finite_values_must_agree():
    infinite = {"": np.array([1.0]), "w": np.array([np.nan, 1.0, np.inf])}
    assert parity.difference(infinite, infinite) == ("", 0.0)
    finite = {**infinite, "w": np.array([np.nan, 1.0, 3.0])}
    assert parity.difference(infinite, finite) == ("w", np.inf)
    assert parity.difference(finite, infinite) == ("w", np.inf)


def test_rounding_errors_of_an_exact_zero_are_allowed():
    expected = {"": np.array([1.0]), "w": np.array([1.0, 1.0]), "b": np.array([1e-8])}
    _, distance = parity.difference(expected, {**expected, "b": np.array([-1e-8])})
    assert distance < parity.TOLERANCE
    name, distance = parity.difference(expected, {**expected, "b": np.array([1e-3])})
    assert name == "b"
    assert distance > parity.TOLERANCE


class Saturated(nn.Module):
    """A norm over two numbers gives 1 and -1 for any input, so its gradient is pure rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm((x + self.shift).unflatten(-1, (2, 2)), (2,)) ** -2


def test_rounding_errors_of_torch_are_allowed(backend):
    assert parity_report(backend, new_job(Saturated()), random_batch())


@pytest.mark.parametrize(
    ("make_model", "loss", "batch"),
    [
        (Mixer, mixer_loss, mixer_batch),
        pytest.param(llama, next_token_loss, token_batch, marks=pytest.mark.slow),
    ],
)
def test_a_single_batch_is_compared_in_both_orders(backend, make_model, loss, batch):
    assert parity_report(backend, trainable(make_model(), loss), batch(samples=2))


def test_an_error_while_kernels_are_generated_is_one_line(backend, monkeypatch):
    def failing_rule(*_: object) -> str:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr(
        "backends.wgpu.lowering.kernels._RULES", {**ELEMENTWISE, _aten.tanh.default: failing_rule}
    )
    with pytest.raises(
        SamestepError, match=r"cannot generate kernels .*: ZeroDivisionError: two lines"
    ):
        parity_report(backend, new_job(Layers()), random_batch())
