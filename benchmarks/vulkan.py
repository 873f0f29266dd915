"""A Vulkan device against torch on the same machine: matrix products, and whole training steps.

    python -m benchmarks.vulkan [--device llvmpipe] [--rounds 10] [--only matmul|steps]

Products are those of a decoder of hidden size 1024 and 2048 at 8 x 512 tokens on a card, smaller
ones on a software adapter. Steps are microbatches of the runs `sms-spam` (classify: MiniLM with
LoRA) and `small-llama` (causal-lm from scratch), forward and backward with all gradients brought to
the host; torch's eager mode computes the same beside it, in turn, on as many threads as a software
adapter takes: all of the machine's. Of a software adapter the ratio of CPU time is shown too: other
processes disturb it less.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch

from backends.eager import EagerBackend
from backends.interface import Batch, Program
from backends.registry import choose
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.dispatch import Dispatch
from backends.wgpu.matmul import MatmulProblem, Operand, matmul_shader
from benchmarks.jobs import short
from benchmarks.machine import print_heading, print_table
from protocol.run_spec import parse_run_spec
from protocol.samples import SampleOrder, microbatch_seed

JOBS: Final = {"classify": "sms-spam", "causal-lm": "small-llama"}
CARD_SHAPES: Final = (
    (4096, 1024, 1024),
    (4096, 1024, 3072),
    (4096, 2048, 2048),
    (4096, 2048, 6144),
)
SOFTWARE_SHAPES: Final = ((64, 128, 32), (128, 384, 384), (128, 384, 1536), (512, 512, 512))
_DISPATCHES: Final = 8


@dataclass(frozen=True, slots=True)
class Timed:
    """Rounds of one side: seconds on the clock and of the process's CPU."""

    wall_s: list[float]
    cpu_s: list[float]

    @property
    def median_ms(self) -> float:
        """On the clock."""
        return statistics.median(self.wall_s) * 1e3

    @property
    def spread_ms(self) -> str:
        """From the quickest to the slowest."""
        return f"{min(self.wall_s) * 1e3:.1f}-{max(self.wall_s) * 1e3:.1f}"


def by_turns(sides: Sequence[Callable[[], None]], rounds: int) -> list[Timed]:
    """Run the sides one after the other, so many times; the first round is left out."""
    timed = [Timed([], []) for _ in sides]
    for number in range(rounds + 1):
        for side, into in zip(sides, timed, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            side()
            if number:
                into.wall_s.append(time.perf_counter() - wall)
                into.cpu_s.append(time.process_time() - cpu)
    return timed


def ratios(ours: list[float], theirs: list[float]) -> str:
    """The median of the rounds' ratios, and its spread."""
    each = sorted(one / other for one, other in zip(ours, theirs, strict=True))
    return f"{statistics.median(each):.2f} ({each[0]:.2f}-{each[-1]:.2f})"


def matmul_row(backend: VulkanBackend, shape: tuple[int, int, int], rounds: int) -> list[str]:
    """Inputs times transposed weights, of one shape."""
    m, k, n = shape
    device = backend.device
    problem = MatmulProblem(1, m, k, n, Operand((0, k, 1)), Operand((0, 1, k)))
    choice = backend.tuner.choice(problem)
    shader, grid = matmul_shader(problem, choice)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((m, k)).astype(np.float32)
    w = draw.standard_normal((n, k)).astype(np.float32)
    buffers = [device.buffer(x.nbytes), device.buffer(w.nbytes), device.buffer(4 * m * n)]
    device.upload(buffers[0], x)
    device.upload(buffers[1], w)
    prepared = device.prepare([Dispatch(shader, (0, 1, 2), grid, "x @ W^T")] * _DISPATCHES, buffers)
    on_host = torch.from_numpy(x), torch.from_numpy(w).T

    def on_cpu() -> None:
        for _ in range(_DISPATCHES):
            torch.mm(*on_host)

    def on_device() -> None:
        device.run(prepared).result()

    ours, theirs = by_turns([on_device, on_cpu], rounds)
    operations = 2 * m * k * n * _DISPATCHES
    found = device.read(buffers[2], 4 * m * n).reshape(m, n)
    exact = x.astype(np.float64) @ w.T
    error = float(np.abs(found - exact).max() / np.abs(exact).max())
    rates = [operations / statistics.median(side.wall_s) / 1e12 for side in (ours, theirs)]
    return [
        f"{m} x {k} by {k} x {n}",
        *(f"{rate:.3f}" for rate in rates),
        ratios(ours.wall_s, theirs.wall_s),
        ratios(ours.cpu_s, theirs.cpu_s) if backend.adapter.software else "",
        f"{error:.0e}",
        f"{choice}",
    ]


def _microbatch(program: Program, batch: Batch, seed: int) -> None:
    for _ in program.gradients(batch, seed):
        pass


def step_row(backend: VulkanBackend, task: str, rounds: int, threads: int) -> list[str]:
    """Microbatches of one job, here and in torch's eager mode on the CPU."""
    from worker.tasks.registry import build  # noqa: PLC0415  (transformers: seconds)

    spec = parse_run_spec({**short(JOBS[task], 1), "threads": threads})
    built = build(spec)
    order = SampleOrder(spec.seed, built.manifest.train_samples, spec.batch)
    batch = built.batch(order.microbatches(0)[0])
    other = copy.deepcopy(built.trainable)
    start = time.perf_counter()
    ours: Program = backend.compile(built.trainable, batch)
    compiled_s = time.perf_counter() - start
    theirs: Program = EagerBackend("cpu").compile(other, batch)
    for program in (ours, theirs):
        program.load(built.initial_parameters())
    seed = microbatch_seed(spec.seed, 0, 0)
    start = time.perf_counter()
    _microbatch(ours, batch, seed)
    first_s = time.perf_counter() - start
    sides = [partial(_microbatch, program, batch, seed) for program in (ours, theirs)]
    mine, torchs = by_turns(sides, rounds)
    for program in (ours, theirs):
        program.close()
    shape = " x ".join(str(size) for size in next(iter(batch.arrays.values())).shape)
    return [
        f"{task}, {shape}",
        f"{mine.median_ms:.1f}",
        mine.spread_ms,
        f"{torchs.median_ms:.1f}",
        torchs.spread_ms,
        ratios(mine.wall_s, torchs.wall_s),
        ratios(mine.cpu_s, torchs.cpu_s) if backend.adapter.software else "",
        f"{compiled_s:.1f}",
        f"{first_s:.1f}",
    ]


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="0", help="number or part of the name")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=("matmul", "steps"))
    parser.add_argument("--tasks", nargs="+", choices=tuple(JOBS), default=list(JOBS))
    options = parser.parse_args()
    wanted = int(options.device) if options.device.isdecimal() else options.device
    backend = choose("vulkan", wanted).backend
    assert isinstance(backend, VulkanBackend)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    print_heading(
        f"Vulkan on {backend.adapter.name} ({backend.adapter.driver}) against torch's CPU"
    )
    if options.only != "steps":
        shapes = SOFTWARE_SHAPES if backend.adapter.software else CARD_SHAPES
        head = ["product", "TFLOP/s", "torch", "ratio of time", "of CPU time", "error", "kernel"]
        print_table(head, [matmul_row(backend, shape, options.rounds) for shape in shapes])
    if options.only != "matmul":
        head = [
            "microbatch", "ms", "from-to", "torch ms", "from-to", "ratio", "of CPU time",
            "compile s", "first s",
        ]  # fmt: skip
        rows = [step_row(backend, task, options.rounds, threads) for task in options.tasks]
        print_table(head, rows)
    backend.device.close()


if __name__ == "__main__":
    main()
