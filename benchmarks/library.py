"""`samestep.fit` on one machine against a hand-written loop: seconds per step.

Both sides use the same model, batches and microbatches, and one thread. Start and end of a run are
excluded: runs of two lengths are measured, and the difference is divided by the difference in
steps. Each side first runs once unmeasured, because the first run has page faults for memory that
both sides use, which take a tenth of a step of convolutions. `fit` keeps freed memory in its
process, so the bare loop does too. `fit` adds the exchange of gradients and the commit, whose cost
depends on bytes, not on computation; one job has few bytes for its computation, one has many.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from benchmarks.machine import print_heading, print_table

LEARNING_RATE = 1e-3
MICROBATCHES = 8


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output; `x` is (samples, channels, height, width)."""
        return nn.functional.relu(x + self.inner(x))


def convolutions() -> nn.Module:
    """Return a model of about 300,000 parameters, each used at every position of an image."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), *(Residual(64) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2),
    )  # fmt: skip


def perceptron() -> nn.Module:
    """Return a model of about 3 million parameters, each used once per sample."""
    widths = [64, 1024, 1024, 1024, 1024]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers, nn.Linear(1024, 2))


@dataclass(frozen=True, slots=True)
class Job:
    """The job to train.

    Attributes:
        shape: Shape of a sample; values are random.
        steps: Steps of the longer of two runs.
    """

    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int
    batch: int
    steps: int

    def data(self) -> TensorDataset:
        """Return all samples, with random classes that cannot be learned in a few steps. A model
        that has learned its task has subnormal gradients, which make a processor ten times slower.
        """
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((self.samples, *self.shape), generator=generator)
        return TensorDataset(x, torch.randint(2, (self.samples,), generator=generator))


JOBS = (
    Job("convolutions, 128 pictures of 24 x 24", convolutions, (3, 24, 24), 512, 128, 12),
    Job("perceptron, 256 rows of 64", perceptron, (64,), 4096, 256, 60),
)


def loss(module: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the summed cross-entropy."""
    return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def train_with_fit(job: Job, steps: int) -> None:
    """Train with `fit`."""

    def build() -> samestep.Task:
        return samestep.Task(module=job.model(), train=job.data(), loss=loss)

    with contextlib.redirect_stdout(io.StringIO()):
        samestep.fit(
            build, steps=steps, batch=job.batch, microbatch=job.batch // MICROBATCHES,
            device="cpu", optimizer={"name": "adamw", "lr": LEARNING_RATE},
            settings={"checkpoint": {"every": 0}},
        )  # fmt: skip


def train_bare(job: Job, steps: int) -> None:
    """Train with a loop in plain PyTorch."""
    module, samples = job.model(), job.data()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    microbatch = job.batch // MICROBATCHES
    for step in range(steps):
        rows = torch.arange(step * job.batch, (step + 1) * job.batch) % job.samples
        for lo in range(0, job.batch, microbatch):
            batch = [tensor[rows[lo : lo + microbatch]] for tensor in samples.tensors]
            (loss(module, batch) / job.batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def measure_step_s(train: Callable[[Job, int], None], job: Job) -> float:
    """Measure the seconds of one step, without start and end of the run."""
    times = []
    for steps in (3, 3 + job.steps):
        start_s = time.perf_counter()
        train(job, steps)
        times.append(time.perf_counter() - start_s)
    return (times[1] - times[0]) / job.steps


def measure_row(job: Job, turns: int) -> tuple[str, ...]:
    """Measure both sides alternately; return a row of the table."""
    for train in (train_bare, train_with_fit):
        train(job, job.steps)
    pairs = [
        (measure_step_s(train_with_fit, job), measure_step_s(train_bare, job)) for _ in range(turns)
    ]
    fit_s, bare_s = (median(column) for column in zip(*pairs, strict=True))
    ratio = median(a / b for a, b in pairs)
    megabytes = sum(parameter.numel() for parameter in job.model().parameters()) * 4 / 1e6
    return (
        job.name, f"{megabytes:.1f}", f"{1e3 * fit_s:.1f}", f"{1e3 * bare_s:.1f}", f"{ratio:.3f}"
    )  # fmt: skip


def main() -> None:
    """Measure all jobs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("SAMESTEP_BIND", "127.0.0.1:0")
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        rows = [measure_row(job, options.turns) for job in JOBS]
    print_heading("samestep.fit against the bare loop")
    header = ("job", "gradients, MB", "fit, ms a step", "bare loop, ms a step", "ratio")
    print_table(header, rows)


if __name__ == "__main__":
    main()
