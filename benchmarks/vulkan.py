"""A Vulkan device against torch on the same machine: matrix products, and whole training steps.

    python -m benchmarks.vulkan [--device llvmpipe] [--rounds 10] [--only matmul|attention|steps]

Products are those of a decoder of hidden size 1024 and 2048 at 8 x 512 tokens on a card, smaller
ones on a software adapter. Attention is fused beside written out, both on the device, in
microbatches of one text for a decoder of two layers. Steps are microbatches of the runs `sms-spam`
(classify: MiniLM with LoRA) and `small-llama` (causal-lm from scratch), forward and backward with
all gradients brought to the host; torch's eager mode computes the same beside it, in turn, on as
many threads as a software adapter takes: all of the machine's. Of a software adapter the ratio of
CPU time is shown too: other processes disturb it less.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import nn

from backends.eager import EagerBackend
from backends.interface import Batch, Program, Trainable
from backends.registry import choose
from backends.wgpu.attention_problem import AttentionSizes
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.dispatch import Dispatch
from backends.wgpu.lowering import Templates
from backends.wgpu.matmul import MatmulProblem, Operand, matmul_shader
from backends.wgpu.program import VulkanProgram
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
CARD_LENGTHS: Final = (128, 512, 2048, 8192)
SOFTWARE_LENGTHS: Final = (64, 512, 1024)
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


@dataclass(frozen=True, slots=True)
class _Forced(Templates):
    """Fuses attention whether it pays or not."""

    fused: bool = False

    def fuses(self, sizes: AttentionSizes) -> bool:
        del sizes
        return self.fused


def attention_row(backend: VulkanBackend, length: int, rounds: int) -> list[str]:
    """A microbatch of one text of so many tokens, both ways."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (seconds)

    from worker.blocks import cut_into_blocks  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=length,
        use_cache=False,
    )  # fmt: skip

    def loss(module: nn.Module, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = module(input_ids=arrays["input_ids"]).logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), arrays["input_ids"].flatten(), reduction="sum"
        )

    ids = np.random.default_rng(0).integers(0, 256, (1, length))
    batch = Batch({"input_ids": ids}, 1.0)
    programs = []
    for fused in (False, True):
        module: nn.Module = LlamaForCausalLM(config)
        template = _Forced(not backend.adapter.software, backend.tuner.shader, fused)
        job = Trainable(cut_into_blocks(module), module, loss)
        programs.append(VulkanProgram(backend.device, job, template, adds=True))
        programs[-1].check(batch)
    apart, joined = by_turns([partial(_microbatch, p, batch, 0) for p in programs], rounds)
    memory = [program.estimates[0].activations / 2**20 for program in programs]
    for program in programs:
        program.close()
    return [
        f"{length}",
        *(f"{side.median_ms:.0f} ({side.spread_ms})" for side in (apart, joined)),
        ratios(joined.wall_s, apart.wall_s),
        *(f"{mib:.1f}" for mib in memory),
    ]


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
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="0", help="number or part of the name")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=("matmul", "attention", "steps"))
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
    if options.only in {None, "matmul"}:
        shapes = SOFTWARE_SHAPES if backend.adapter.software else CARD_SHAPES
        head = ["product", "TFLOP/s", "torch", "ratio of time", "of CPU time", "error", "kernel"]
        print_table(head, [matmul_row(backend, shape, options.rounds) for shape in shapes])
    if options.only in {None, "attention"}:
        lengths = SOFTWARE_LENGTHS if backend.adapter.software else CARD_LENGTHS
        head = ["tokens", "written out ms", "fused ms", "ratio", "written out MiB", "fused MiB"]
        print_table(head, [attention_row(backend, each, options.rounds) for each in lengths])
    if options.only in {None, "steps"}:
        head = [
            "microbatch", "ms", "from-to", "torch ms", "from-to", "ratio", "of CPU time",
            "compile s", "first s",
        ]  # fmt: skip
        rows = [step_row(backend, task, options.rounds, threads) for task in options.tasks]
        print_table(head, rows)
    backend.device.close()


if __name__ == "__main__":
    main()
