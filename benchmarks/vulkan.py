"""A Vulkan device against torch on the same machine: matrix products and whole training steps.

    python -m benchmarks.vulkan [--device llvmpipe] [--against cpu|cuda] [--rounds 10]
        [--only matmul|attention|steps|decoder|sums] [--peak-tflops 30]

torch computes the same in float32, alternately with the device: on CUDA (without TF32) if it is
available, else on all threads of the machine, as a software adapter does. If both sides compute on
the CPU, the ratio of CPU time is shown too, because other processes affect it less.

Products are those of a decoder of hidden size 1024 and 2048 with 8 x 512 tokens on a card, or
smaller ones on a software adapter, with the share of the card's float32 peak if it is known.
Attention is measured fused and unfused on the device, in microbatches of one text for a decoder of
two layers. Steps are microbatches of the runs `sms-spam` (classify: MiniLM with LoRA) and
`small-llama` (causal-lm from scratch), forward and backward with all gradients copied to the host;
then, on a card or with `--only decoder`, those of Llama-like decoders of hidden size 1024 and 2048,
with LoRA and in full, 8 x 512 tokens (1 x 64 on a software adapter). Sums are subtrees of eight
such microbatches whose gradients are added on the device or on the host.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, get_args

import numpy as np
import torch
from torch import nn

from backends.base.interface import Batch, Trainable
from backends.registry import choose
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from backends.wgpu.shaders.attention.problem import AttentionSizes
from backends.wgpu.shaders.dispatch import Dispatch
from backends.wgpu.shaders.matmul.shader import MatmulProblem, Operand, matmul_shader
from benchmarks.machine import print_heading, print_table
from benchmarks.torch_side import Reference, TorchSide, torch_side
from benchmarks.turns import measure_alternately, ratios
from benchmarks.vulkan_steps import (
    JOBS,
    Adaptation,
    Decoder,
    cpu_ratios,
    decoder_row,
    job_row,
    microbatch,
    sums_row,
)

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


def matmul_row(
    backend: VulkanBackend,
    side: TorchSide,
    shape: tuple[int, int, int],
    rounds: int,
    peak: float | None = None,
) -> list[str]:
    """Measure inputs times transposed weights of one shape; the device's peak is in TFLOP/s."""
    m, k, n = shape
    device = backend.device
    problem = MatmulProblem(1, m, k, n, Operand((0, k, 1)), Operand((0, 1, k)))
    choice = backend.tuner.choose_kernel(problem)
    shader, grid = matmul_shader(problem, choice)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k)).astype(np.float32)
    w = rng.standard_normal((n, k)).astype(np.float32)
    buffers = [device.buffer(x.nbytes), device.buffer(w.nbytes), device.buffer(4 * m * n)]
    device.upload(buffers[0], x)
    device.upload(buffers[1], w)
    commands = device.prepare([Dispatch(shader, (0, 1, 2), grid, "x @ W^T")] * _DISPATCHES, buffers)
    torch_x, torch_w = (torch.from_numpy(array).to(side.device) for array in (x, w))

    def run_torch() -> None:
        for _ in range(_DISPATCHES):
            torch.mm(torch_x, torch_w.T)
        side.synchronize()

    def run_device() -> None:
        device.run(commands).result()

    device_times, torch_times = measure_alternately([run_device, run_torch], rounds)
    operations = 2 * m * k * n * _DISPATCHES
    product = device.read(buffers[2], 4 * m * n).reshape(m, n)
    exact = x.astype(np.float64) @ w.T
    error = float(np.abs(product - exact).max() / np.abs(exact).max())
    rates = [
        operations / statistics.median(side.wall_s) / 1e12 for side in (device_times, torch_times)
    ]
    return [
        f"{m} x {k} by {k} x {n}",
        f"{rates[0]:.3f}",
        "" if peak is None else f"{rates[0] / peak:.1%}",
        f"{rates[1]:.3f}",
        ratios(device_times.wall_s, torch_times.wall_s),
        cpu_ratios(backend, side, device_times, torch_times),
        f"{error:.0e}",
        f"{choice}",
    ]


@dataclass(frozen=True, slots=True)
class _ForcedFusion(KernelOptions):
    """Kernel options that fuse attention if `fused` is true, whether or not this is faster."""

    fused: bool = False

    def fuses(self, sizes: AttentionSizes) -> bool:
        del sizes
        return self.fused


def attention_row(backend: VulkanBackend, length: int, rounds: int) -> list[str]:
    """Measure a microbatch of one text, with fused and unfused attention."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 -- the import takes seconds

    from worker.models.blocks import cut_into_blocks  # noqa: PLC0415

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
        template = _ForcedFusion(not backend.adapter.software, backend.tuner.shader, fused)
        job = Trainable(cut_into_blocks(module), module, loss)
        programs.append(CompiledProgram(backend.device, job, template, adds_on_device=True))
        programs[-1].check(batch)
    separate_times, fused_times = measure_alternately(
        [partial(microbatch, attention_program, batch, 0) for attention_program in programs], rounds
    )
    memory = [program.estimates[0].activations / 2**20 for program in programs]
    for program in programs:
        program.close()
    return [
        f"{length}",
        *(f"{side.median_ms:.0f} ({side.spread_ms})" for side in (separate_times, fused_times)),
        ratios(fused_times.wall_s, separate_times.wall_s),
        *(f"{mib:.1f}" for mib in memory),
    ]


_PRODUCT_HEADER: Final = (
    "product", "TFLOP/s", "of peak", "torch", "ratio of time", "of CPU time", "error", "kernel",
)  # fmt: skip
_ATTENTION_HEADER: Final = (
    "tokens", "unfused ms", "fused ms", "ratio", "unfused MiB", "fused MiB",
)  # fmt: skip
_STEP_HEADER: Final = (
    "microbatch", "ms", "min-max", "torch ms", "min-max", "ratio", "of CPU time", "difference",
    "compile s", "first s",
)  # fmt: skip
_SUM_HEADER: Final = (
    "subtree of 8", "device adds, ms", "host adds, ms", "ratio", "of CPU time", "readbacks", "host",
)  # fmt: skip


def main() -> None:
    """Print the tables."""
    options = _options()
    device_choice = int(options.device) if options.device.isdecimal() else options.device
    backend = choose("vulkan", device_choice).backend
    assert isinstance(backend, VulkanBackend)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    side, software, rounds = torch_side(options.against), backend.adapter.software, options.rounds
    device_name = f"{backend.adapter.name} ({backend.adapter.driver})"
    print_heading(f"Vulkan on {device_name} against torch on {side.name}")

    def should_show(table: str) -> bool:
        return options.only == table or (
            options.only is None and (table != "decoder" or not software)
        )

    if should_show("matmul"):
        peak = options.peak_tflops or side.peak_tflops_of(backend.adapter.name)
        shapes = SOFTWARE_SHAPES if software else CARD_SHAPES
        print_table(
            _PRODUCT_HEADER, [matmul_row(backend, side, shape, rounds, peak) for shape in shapes]
        )
    if should_show("attention"):
        lengths = SOFTWARE_LENGTHS if software else CARD_LENGTHS
        print_table(
            _ATTENTION_HEADER, [attention_row(backend, length, rounds) for length in lengths]
        )
    steps = []
    if should_show("steps"):
        steps += [job_row(backend, side, task, rounds, threads) for task in options.tasks]
    if should_show("decoder"):
        samples, tokens = options.batch or ((1, 64) if software else (8, 512))
        for hidden in options.hidden:
            for adaptation in get_args(Adaptation):
                decoder = Decoder(hidden, samples, tokens, adaptation)
                steps.append(decoder_row(backend, side, decoder, rounds, threads))
    if steps:
        print_table(_STEP_HEADER, steps)
    if should_show("sums"):
        print_table(
            _SUM_HEADER, [sums_row(backend, task, rounds, threads) for task in options.tasks]
        )
    backend.device.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="0", help="number or part of the name")
    parser.add_argument("--against", default="auto", choices=get_args(Reference))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=("matmul", "attention", "steps", "decoder", "sums"))
    parser.add_argument("--tasks", nargs="+", choices=tuple(JOBS), default=list(JOBS))
    parser.add_argument("--hidden", nargs="+", type=int, default=[1024, 2048], help="of decoders")
    parser.add_argument(
        "--batch", nargs=2, type=int, metavar=("TEXTS", "TOKENS"), help="of decoders"
    )
    parser.add_argument("--peak-tflops", type=float, help="the card's float32 peak")
    return parser.parse_args()


if __name__ == "__main__":
    main()
