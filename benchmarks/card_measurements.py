"""The measurements of `benchmarks.cards`: `python -m benchmarks.card_measurements PART`.

PART is a key of `PARTS`. The last line that a part prints is its result.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import transformers

from backends.base.interface import Batch, Program, Trainable
from backends.eager.eager import EagerBackend
from backends.eager.torch_devices import torch_device
from backends.wgpu.backend import VulkanBackend
from benchmarks.vulkan_steps import Decoder, microbatch
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.run_spec import ModelRun
from tests import standin
from tests.cluster import RUNS, Cluster
from tests.small_decoder import write_decoder_run
from worker.cli import main as worker
from worker.models.device_memory import estimate
from worker.tasks.base.task import Task
from worker.tasks.registry import build

ROOT: Final = Path(__file__).parents[1]
_DIGITS_RUN: Final = (
    "--run", str(RUNS / "digits.yaml"), "--set", "steps=16", "--set", "batch.samples=48",
)  # fmt: skip
_FROZEN_BASE_RUN: Final = """
task: "tests.frozen_base_task:FrozenBase"
steps: 4
batch: {samples: 14, microbatch: 2}
checkpoint: {every: 0}
"""
_MIB: Final = 2.0**20
_ROUNDS: Final = 7
_MICROBATCHES: Final = 4
"""Microbatches of a timed subtree."""
_THERMOMETERS: Final = (
    ("nvidia-smi", "--format=csv,noheader",
     "--query-gpu=index,temperature.gpu,clocks.sm,power.draw,clocks_event_reasons.active"),
    ("rocm-smi", "--showtemp", "--showpower", "--showclocks", "--csv"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a measured decoder, and of a square matrix product."""

    tokens: int = 512
    hidden: int = 512
    layers: int = 16
    product: int = 4096


QUICK_SIZES: Final = Sizes(tokens=64, hidden=128, layers=2, product=256)


def is_standin(backend: str) -> bool:
    """Return whether torch's cards are the stand-in device of tests/standin."""
    return torch_device(backend).type == standin.NAME


def compare_digests(backend: str, sizes: Sizes) -> None:
    """Compare a run's digest on the CPU, on one card twice, and on two cards of one worker."""
    steps = ("--set", "steps=4") if sizes == QUICK_SIZES else ()
    arguments: dict[str, tuple[str, ...]] = {
        "cpu": ("--backend", "cpu"),
        "one card": ("--backend", f"{backend}0"),
        "one card again": ("--backend", f"{backend}0"),
    }
    if torch.accelerator.device_count() > 1:
        arguments["two cards"] = ("--backend", backend, "--gpus", "0,1")
    digest_by_name = {}
    for name, options in arguments.items():
        expect_workers = str(2 if name == "two cards" else 1)
        digest_by_name[name] = _digest(
            (*_DIGITS_RUN, *steps, "--expect-workers", expect_workers), options
        )
        print(f"{name}: {digest_by_name[name][:16]}", flush=True)
    has_one_digest = len({digest for name, digest in digest_by_name.items() if name != "cpu"}) == 1
    is_cpu_equal = digest_by_name["cpu"] == digest_by_name["one card"]
    print(f"the cards' digests are {'one' if has_one_digest else 'NOT one'}; the CPU's is "
          f"{'the same' if is_cpu_equal else 'another'}")  # fmt: skip
    if not has_one_digest:
        sys.exit(1)


def _digest(run: tuple[str, ...], options: tuple[str, ...]) -> str:
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory), *run) as cluster:
        # A new process: a forked process cannot use a card.
        cluster.start_worker("w", *options, environment=dict(os.environ))
        return str(cluster.result()["weights_digest"])


def run_sharded(backend: str, sizes: Sizes) -> None:
    """Run one worker whose frozen base is sharded over two ranks with a card each."""
    del sizes
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "run.yaml"
        path.write_text(_FROZEN_BASE_RUN)
        run = ("--expect-workers", "1", "--run", str(path))
        single_digest = _digest(run, ("--backend", f"{backend}0"))
        with Cluster(Path(name) / "ranks", *run) as cluster:
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                "2", "-m", "benchmarks.card_measurements", "rank", "--", "--coordinator",
                cluster.address["data"], "--backend", backend, "--shard",
            ]  # fmt: skip
            ranks = subprocess.run(  # noqa: S603 -- our own command
                command, cwd=ROOT, capture_output=True, text=True, check=False
            )
            print(ranks.stdout, ranks.stderr[-2000:])
            ranks.check_returncode()
            sharded_digest = cluster.result()["weights_digest"]
    # A rank may allocate memory on its own card only.
    cards_by_rank = {
        int(rank): [
            int(card) for card, sizes in re.findall(r"(\d+) (\d+) bytes", text) if int(sizes)
        ]
        for rank, text in sorted(re.findall(r"rank (\d+) allocated (.*)", ranks.stdout))
    }
    uses_own_cards = cards_by_rank == {0: [0], 1: [1]}
    comparison = "that of one card" if sharded_digest == single_digest else "not that of one card"
    print(f"ranks used the cards {cards_by_rank}, "
          f"{'each its own' if uses_own_cards else 'NOT each its own'}; "
          f"the digest is {comparison}")  # fmt: skip
    if not uses_own_cards:
        sys.exit(1)


def run_rank(arguments: list[str]) -> None:
    """Run one rank of `run_sharded`, then print how much memory it allocated on each card."""
    sys.argv = ["worker", *arguments]
    try:
        worker()
    finally:
        cards = [
            f"{index} {torch.accelerator.max_memory_allocated(index)} bytes"
            for index in range(torch.accelerator.device_count())
        ]
        print(f"rank {os.environ['RANK']} allocated {', '.join(cards)}", flush=True)


def compare_memory(backend: str, sizes: Sizes) -> None:
    """Compare the memory estimate for LoRA training of a decoder with torch's counters."""
    device = torch_device(backend)
    ratios = []
    for changes in ({}, {"base_dtype": "int4"}, {"gradient_checkpointing": True}):
        with tempfile.TemporaryDirectory() as directory:
            spec, task, batch = large_decoder(Path(directory), changes, sizes)
            expected = estimate(spec)
            assert expected is not None
            program = EagerBackend(backend).compile(task.trainable, batch)
            torch.accelerator.reset_peak_memory_stats(device)
            for _ in program.gradients([(batch, 0)]):
                pass
            peak_bytes = torch.accelerator.max_memory_allocated(device)
            program.close()
        ratios.append(peak_bytes / expected.total)
        print(f"{changes or 'float32'}: estimated {expected.total / _MIB:.0f} MiB ({expected}), "
              f"allocated {peak_bytes / _MIB:.0f} MiB, ratio {ratios[-1]:.2f}")  # fmt: skip
    print(f"allocated memory to estimated: {min(ratios):.2f} to {max(ratios):.2f}")


def large_decoder(
    directory: Path, model: Mapping[str, object], sizes: Sizes
) -> tuple[ModelRun, Task, Batch]:
    """Return a run with LoRA on a Llama, its task, and a microbatch of the longest samples."""
    path = write_decoder_run(
        "causal-lm", directory, lora={"r": 8}, batch={"samples": 2, "microbatch": 2},
        model={"source": str(directory / "model"), **model},
    )  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=16 * sizes.hidden, hidden_size=sizes.hidden,
        intermediate_size=11 * sizes.hidden // 4, num_hidden_layers=sizes.layers,
        num_attention_heads=8, max_position_embeddings=1024,
    )  # fmt: skip
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.LlamaForCausalLM(config).save_pretrained(directory / "model")
    spec = load_run_spec(path, [f"data.max_tokens={sizes.tokens}"])
    assert isinstance(spec, ModelRun)
    task = build(spec)
    shape = (2, sizes.tokens)
    arrays = {name: np.resize(a, shape) for name, a in task.batch([0]).arrays.items()}
    return spec, task, Batch(arrays, 2.0 * sizes.tokens)


def compare_speed(backend: str, sizes: Sizes) -> None:
    """Compare LoRA training with a plain loop, and with the card's rate of matrix products."""
    ratios = []
    print(_temperature("before"))
    for precision in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as directory:
            model = {"precision": precision, "base_dtype": "float32"}
            _, task, batch = large_decoder(Path(directory), model, sizes)
            _, plain_task, _ = large_decoder(Path(directory) / "plain", model, sizes)
        plain_loop = _PlainLoop(plain_task.trainable, torch_device(backend), precision)
        program = EagerBackend(backend).compile(task.trainable, batch)
        samestep_s, plain_s = _microbatch_times(program, plain_loop, batch)
        program.close()
        rate = (
            4 * plain_loop.matrix_elements * 2 * sizes.tokens / samestep_s
        )  # two per weight and token in forward, two in backward
        product_rate = _product_rate(torch_device(backend), precision, sizes.product)
        ratios.append(samestep_s / plain_s)
        product_share = (
            f"{rate / product_rate:.0%} of a product of {sizes.product} ({product_rate / 1e12:.3f})"
        )
        print(f"{precision}: {1e3 * samestep_s:.2f} ms a microbatch of {2 * sizes.tokens} tokens, "
              f"plain loop {1e3 * plain_s:.2f} ms, ratio {ratios[-1]:.3f}; {rate / 1e12:.3f} "
              "TFLOPS, "
              f"{product_share}")  # fmt: skip
    print(_temperature("after"))
    note = (
        "; the stand-in's kernels run on the CPU, so this says nothing about a card"
        if is_standin(backend)
        else ""
    )
    print(f"time to that of a plain loop: {min(ratios):.2f} to {max(ratios):.2f}{note}")


class _PlainLoop:
    """A plain loop of forward and backward; gradients stay on the card."""

    def __init__(self, job: Trainable, device: torch.device, precision: str) -> None:
        assert job.module is not None
        assert job.loss is not None
        self._module, self._loss, self._device = job.module.to(device).train(), job.loss, device
        self._autocast: Callable[[], AbstractContextManager[Any]] = lambda: torch.autocast(
            device.type, torch.bfloat16, enabled=precision == "bfloat16"
        )
        self.matrix_elements = sum(
            parameter.numel()
            for name, parameter in self._module.named_parameters()
            if parameter.dim() == 2 and "embed" not in name
        )

    def run(self, batch: Batch) -> None:
        for _ in range(_MICROBATCHES):
            arrays = {name: torch.tensor(a).to(self._device) for name, a in batch.arrays.items()}
            with self._autocast():
                loss = self._loss(self._module, arrays)
            loss.float().backward()
        for parameter in self._module.parameters():
            parameter.grad = None
        torch.accelerator.synchronize(self._device)


def _microbatch_times(
    program: Program, plain_loop: _PlainLoop, batch: Batch
) -> tuple[float, float]:
    """Return seconds per microbatch of samestep and of the plain loop, alternating, after a
    warm-up."""

    def run_samestep() -> None:
        for _ in program.gradients([(batch, seed) for seed in range(_MICROBATCHES)]):
            pass

    def run_plain() -> None:
        plain_loop.run(batch)

    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for run, times in zip((run_samestep, run_plain), seconds, strict=True):
            start_s = time.monotonic()
            run()
            times.append((time.monotonic() - start_s) / _MICROBATCHES)
    return median(seconds[0][1:]), median(seconds[1][1:])


def _product_rate(device: torch.device, precision: str, size: int) -> float:
    """Return the operations per second of the fastest square matrix product."""
    matrix = torch.ones(size, size, device=device, dtype=getattr(torch, precision))
    seconds = []
    for _ in range(_ROUNDS):
        start_s = time.monotonic()
        matrix @ matrix
        torch.accelerator.synchronize(device)
        seconds.append(time.monotonic() - start_s)
    return 2.0 * size**3 / min(seconds)


def _temperature(moment: str) -> str:
    for command in _THERMOMETERS:
        if shutil.which(command[0]):
            process = subprocess.run(  # noqa: S603 -- our own command
                command, capture_output=True, text=True, timeout=20, check=False
            )
            return f"{moment}, by {command[0]}: {process.stdout.strip() or process.stderr.strip()}"
    return f"temperature and clock {moment}: unknown, nvidia-smi and rocm-smi are missing"


def compare_vulkan_memory(backend: str, sizes: Sizes) -> None:
    """Compare the memory estimate for a decoder's step on Vulkan with the memory that CUDA reports
    as used."""
    del backend, sizes
    vulkan = VulkanBackend()
    decoder = Decoder(1024, 8, 512, "whole")
    torch.cuda.mem_get_info(0)  # creates CUDA's own context, which is not counted
    free_before = int(torch.cuda.mem_get_info(0)[0])
    program = vulkan.compile(decoder.trainable(threads=1), decoder.batch())
    microbatch(program, decoder.batch(), 0)
    used_bytes = free_before - int(torch.cuda.mem_get_info(0)[0])
    estimated = max(memory_estimate.total for memory_estimate in program.estimates)
    print(f"{decoder}: estimated {estimated / _MIB:.0f} MiB, used {used_bytes / _MIB:.0f} MiB, "
          f"ratio {used_bytes / estimated:.2f}; {program.parity}")  # fmt: skip


PARTS: Final[Mapping[str, Callable[[str, Sizes], None]]] = {
    "digests": compare_digests, "shard": run_sharded, "memory": compare_memory,
    "speed": compare_speed, "vulkan-memory": compare_vulkan_memory,
}  # fmt: skip


def main() -> None:
    """Measure one part."""
    if sys.argv[1:3] == ["rank", "--"]:
        run_rank(sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--kind", dest="backend", default="cuda", help="backend of torch's cards")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    is_small = options.quick or is_standin(options.backend)  # the stand-in's kernels run on one CPU
    PARTS[options.part](options.backend, QUICK_SIZES if is_small else Sizes())


if __name__ == "__main__":
    main()
