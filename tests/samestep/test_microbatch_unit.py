"""Losses over a whole microbatch, and buffers that forward changes, equal those of plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import samestep
from protocol.base.errors import DataError
from protocol.exact.samples import SampleOrder
from protocol.spec.sections.tasks import BatchSpec

STEPS = 7
SAMPLES = 50  # the last step of an epoch has fewer samples


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1).long())


class BatchNormNet(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8, momentum=momentum)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Teacher(nn.Module):
    """A model that distils from a moving average of its own weights, which forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for teacher, student in zip(
                self.teacher.parameters(), self.student.parameters(), strict=True
            ):
                teacher.lerp_(student, 0.1)
        return self.student(x) - 0.1 * self.teacher(x)


def cross_entropy_loss(module: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1])


def in_batch_loss(module: Any, batch: Any) -> torch.Tensor:
    rows = functional.normalize(module(batch[0]), dim=1)
    return functional.cross_entropy(rows @ rows.T / 0.2, torch.arange(len(rows)))


def cox_loss(module: Any, batch: Any) -> torch.Tensor:
    """Return Cox's negative partial likelihood, with risk sets within the microbatch."""
    risk = module(batch[0])[:, 0][batch[0][:, 1].argsort(descending=True)]
    return (risk.logcumsumexp(0) - risk).mean()


def ranking_loss(module: Any, batch: Any) -> torch.Tensor:
    score = module(batch[0])[:, 0]
    is_pair = batch[1][:, None] > batch[1][None, :]
    margin = functional.softplus(score[None, :] - score[:, None])
    return (margin * is_pair).sum() / is_pair.sum().clamp(min=1)


def train_in_torch(
    module: nn.Module, loss: Callable[[Any, Any], torch.Tensor], microbatch: int
) -> dict[str, torch.Tensor]:
    """Train in plain torch, with mean gradients of microbatches that each start from the step's
    buffers."""
    tensors = data().tensors
    order = SampleOrder(0, SAMPLES, BatchSpec(samples=16, microbatch=microbatch))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module.train()
    for step in range(STEPS):
        microbatches = order.microbatches(step)
        step_samples = sum(map(len, microbatches))
        trained = {name for name, p in module.named_parameters() if p.requires_grad}
        state = {n: v.clone() for n, v in module.state_dict().items() if n not in trained}
        buffer_means = {n: torch.zeros(v.shape, dtype=torch.float64) for n, v in state.items()}
        optimizer.zero_grad()
        for numbers in microbatches:
            module.load_state_dict(state, strict=False)
            mean = loss(module, [tensor[list(numbers)] for tensor in tensors])
            fraction = len(numbers) / step_samples
            (mean * fraction).backward()
            for name in buffer_means:
                buffer_means[name] += module.state_dict()[name].double() * fraction
        with torch.no_grad():
            for name, buffer_mean in buffer_means.items():
                target = module.state_dict()[name]
                target.copy_(buffer_mean if target.is_floating_point() else buffer_mean.round())
        optimizer.step()
    return module.state_dict()


def fit_task(
    build_module: Callable[[], nn.Module], loss: Any, microbatch: int, **overrides: Any
) -> Any:
    def build() -> samestep.Task:
        return samestep.Task(
            module=build_module(), train=data(), held_out=data(), loss=loss, unit="microbatch"
        )

    optimizer = {"name": "momentum", "lr": 0.1, "momentum": 0.9}
    return samestep.fit(
        build, steps=STEPS, batch=16, microbatch=microbatch, device="cpu", optimizer=optimizer,
        **overrides,
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "running statistics": (BatchNormNet, cross_entropy_loss),
    "cumulative statistics": (lambda: BatchNormNet(None), cross_entropy_loss),
    "a teacher": (Teacher, cross_entropy_loss),
    "in-batch negatives": (BatchNormNet, in_batch_loss),
    "cox": (lambda: nn.Linear(6, 3), cox_loss),
    "ranking": (lambda: nn.Linear(6, 3), ranking_loss),
}


CASES = [(name, microbatch) for name in MODELS for microbatch in (16, 4)]
QUICK = [("running statistics", 16), ("a teacher", 4), ("in-batch negatives", 4)]


@pytest.mark.parametrize(
    ("name", "microbatch"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_trained_tensors_and_evaluation_equal_those_of_torch(name, microbatch):
    build_module, loss = MODELS[name]
    result = fit_task(build_module, loss, microbatch)
    torch.manual_seed(0)
    expected = train_in_torch(build_module(), loss, microbatch)
    weights = result.module.state_dict()
    assert weights.keys() == expected.keys()
    tolerance = 1e-6 if loss is cross_entropy_loss else 1e-5
    for tensor, values in expected.items():
        np.testing.assert_allclose(
            weights[tensor], values, rtol=tolerance, atol=tolerance, err_msg=tensor
        )
    buffer_names = {
        "norm.running_mean",
        "norm.num_batches_tracked",
        "teacher.weight",
    } & weights.keys()
    torch.manual_seed(0)
    initial = build_module().state_dict()
    assert not any(torch.equal(weights[name], initial[name]) for name in buffer_names)
    evaluation_loss = evaluate_loss(result.module, loss, microbatch)
    assert result.metrics["loss"] == pytest.approx(evaluation_loss, rel=1e-5)


def evaluate_loss(module: nn.Module, loss: Any, microbatch: int) -> float:
    """Return the mean loss on all samples; each microbatch starts with the final buffers."""
    module.eval()
    total = 0.0
    with torch.no_grad():
        for lo in range(0, SAMPLES, microbatch):
            part = [tensor[lo : lo + microbatch] for tensor in data().tensors]
            total += float(loss(copy.deepcopy(module), part)) * len(part[0])
    return total / SAMPLES


def count_pairs(batch: Any) -> torch.Tensor:
    """Return the number of ordered pairs of a microbatch: 0 for a single sample."""
    return (batch[1][:, None] > batch[1][None]).sum()


def test_weight_may_count_pairs_of_a_microbatch():
    sample_counts = []

    def weight(batch: Any) -> torch.Tensor:
        sample_counts.append(len(batch[1]))
        return count_pairs(batch)

    result = samestep.fit(
        lambda: samestep.Task(
            module=nn.Linear(6, 3), train=data(), loss=ranking_loss, weight=weight,
            unit="microbatch",
        ),
        steps=2, batch=16, microbatch=4, device="cpu",
    )  # fmt: skip
    assert result.steps == 2
    assert min(sample_counts) > 1, "no trial with one sample, which has no pairs"
    with pytest.raises(DataError, match=r"got 0 for each of \d+ microbatches"):
        samestep.fit(
            lambda: samestep.Task(
                module=nn.Linear(6, 3), train=data(), loss=ranking_loss, weight=lambda _: 0,
                unit="microbatch",
            ),
            steps=2, batch=16, microbatch=4, device="cpu",
        )  # fmt: skip
