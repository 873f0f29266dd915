"""`samestep.fit` of one machine against the loop that one would write: seconds per step.

The same model, batches and microbatches, one thread. What a run's start and end take is left out:
two lengths are measured, and their difference divided by the steps between.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from benchmarks.machine import print_heading, print_table

WIDTH, DEPTH, SAMPLES = 1024, 4, 4096
BATCH, MICROBATCH = 256, 32
RATE = 1e-3


def data() -> TensorDataset:
    """Made up."""
    x = torch.linspace(-1, 1, SAMPLES * 64).reshape(SAMPLES, 64)
    return TensorDataset(x, (x.sum(1) > 0).long())


def model() -> nn.Module:
    """A multi-layer perceptron of some four million parameters."""
    widths = [64, *[WIDTH] * DEPTH]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:])]  # noqa: B905, RUF007
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2))


def loss(module: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy, summed."""
    return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="sum")


def fitted(steps: int) -> None:
    """A run of `fit`."""

    def build() -> samestep.Task:
        return samestep.Task(module=model(), train=data(), loss=loss)

    with contextlib.redirect_stdout(io.StringIO()):
        samestep.fit(
            build, steps=steps, batch=BATCH, microbatch=MICROBATCH, device="cpu",
            optimizer={"name": "adamw", "lr": RATE}, settings={"checkpoint": {"every": 0}},
        )  # fmt: skip


def bare(steps: int) -> None:
    """The loop in plain PyTorch."""
    module, samples = model(), data()
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % SAMPLES
        for lo in range(0, BATCH, MICROBATCH):
            batch = [tensor[rows[lo : lo + MICROBATCH]] for tensor in samples.tensors]
            (loss(module, batch) / BATCH).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def step_s(train: Callable[[int], None], short: int, long: int) -> float:
    """Seconds of one step, start and end left out."""
    times = []
    for steps in (short, long):
        begun = time.perf_counter()
        train(steps)
        times.append(time.perf_counter() - begun)
    return (times[1] - times[0]) / (long - short)


def main() -> None:
    """Measure by turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("SAMESTEP_BIND", "127.0.0.1:0")
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        pairs = [
            (step_s(fitted, 5, 5 + given.steps), step_s(bare, 5, 5 + given.steps))
            for _ in range(given.turns)
        ]
    print_heading("samestep.fit against the bare loop")
    ours, plain = (median(column) for column in zip(*pairs, strict=True))
    ratio = median(a / b for a, b in pairs)
    print_table(
        ("fit, ms a step", "bare loop, ms a step", "ratio"),
        [(f"{1e3 * ours:.1f}", f"{1e3 * plain:.1f}", f"{ratio:.3f}")],
    )


if __name__ == "__main__":
    main()
