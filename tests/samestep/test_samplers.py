"""torch's samplers in a task: the samples of an epoch, their audit, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import samestep
from coordinator.audit.audit import audit
from protocol.base.errors import SamestepError
from protocol.exact.samples import draw
from protocol.spec.sampling import Sampling
from worker.scripts.samplers import sampling_of

X = torch.linspace(-1, 1, 20)[:, None]
WEIGHTS = [0.0] * 4 + [1.0] * 8 + [3.5] * 8
FIT_OPTIONS: dict[str, Any] = {
    "epochs": 2, "batch": 6, "microbatch": 3, "device": "cpu", "seed": 3,
    "optimizer": {"name": "sgd", "lr": 0.1},
}  # fmt: skip


def squares(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()


def make_task(sampler):
    return samestep.Task(
        module=nn.Linear(1, 1), train=TensorDataset(X, 2 * X), loss=squares, sampler=sampler
    )


def train_with_torch(orders):
    """Train with torch on these samples of each epoch, in batches of 6; return the module."""
    torch.manual_seed(3)
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for order in orders:
        for rows in torch.as_tensor(order).split(6):
            optimizer.zero_grad()
            (squares(module, (X[rows], 2 * X[rows])) / len(rows)).backward()
            optimizer.step()
    return module


@pytest.mark.parametrize(
    ("sampler", "sampling", "count_text"),
    [
        (
            WeightedRandomSampler(WEIGHTS, 14),
            Sampling.by_weight(WEIGHTS, 14),
            "14 of 14 draws by weight, with replacement,",
        ),
        (
            WeightedRandomSampler(WEIGHTS, 14, replacement=False),
            Sampling.by_weight(WEIGHTS, 14, replacement=False),
            "14 of 14 draws by weight, without replacement,",
        ),
        (
            RandomSampler(X, num_samples=18),
            Sampling(draws=18, replacement=False),
            "18 of 18 draws with equal chances, without replacement,",
        ),
    ],
)
def test_epoch_has_the_samples_that_the_sampler_draws(tmp_path, sampler, sampling, count_text):
    result = samestep.fit(lambda: make_task(sampler), directory=tmp_path / "run", **FIT_OPTIONS)
    assert result.steps == 6
    expected_module = train_with_torch([draw(3, epoch, 20, sampling) for epoch in range(2)])
    torch.testing.assert_close(result.module.weight, expected_module.weight, rtol=1e-5, atol=1e-6)
    report = audit(tmp_path / "run")
    assert report.ok, report.lines()
    coverage_texts = [finding.text for finding in report.findings if finding.check == "coverage"]
    assert [text.partition(": ")[2] for text in coverage_texts] == [
        f"{count_text} used exactly once, as redrawn from the seed"
    ] * 2


def test_sampler_over_all_samples_equals_none():
    assert sampling_of(RandomSampler(X), 20) is None
    assert sampling_of(None, 20) is None


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (SequentialSampler(X), "got SequentialSampler: leave it out, as the order of samples"),
        (SubsetRandomSampler([1, 2]), r"pass torch\.utils\.data\.Subset\(data, indices\) as train"),
        (WeightedRandomSampler([1.0, 2.0], 3), "a weight for each of 20 training samples, got 2"),
        (RandomSampler(X, num_samples=30), "at most 20 draws without replacement, got 30"),
        (RandomSampler(range(10)), "a RandomSampler over the 20 training samples, got one over 10"),
        ([3, 1, 2], "got list: pass a WeightedRandomSampler or a RandomSampler"),
    ],
)
def test_sampler_without_an_equivalent_is_refused(sampler, message):
    with pytest.raises(SamestepError, match=message):
        sampling_of(sampler, 20)


def test_balanced_classes_have_equal_weights():
    labels = np.array([0] * 90 + [1] * 10)
    counts = np.bincount(labels)
    sampling = Sampling.by_weight(1.0 / counts[labels])
    draw_counts = np.bincount(labels[draw(1, 0, 100, sampling)], minlength=2)
    assert abs(int(draw_counts[0]) - 50) < 20
    assert sampling.weights is not None
    assert sampling.weights[labels == 0].sum(dtype=np.int64) == pytest.approx(
        sampling.weights[labels == 1].sum(dtype=np.int64), rel=1e-8
    )
