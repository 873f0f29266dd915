"""Whole steps on a Vulkan device and in torch, alternating: rows of `benchmarks.vulkan`."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import numpy as np
import torch
from torch import nn

from backends.base.interface import Array, Batch, BlockGradient, Program, Trainable
from backends.base.subtree_gradients import SubtreeGradients
from backends.wgpu.backend import VulkanBackend
from benchmarks.jobs import short
from benchmarks.torch_side import TorchSide
from benchmarks.turns import Timed, by_turns, ratios
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.spec.run_spec import parse_run_spec

JOBS: Final = {"classify": "sms-spam", "causal-lm": "small-llama", "digits": "digits"}
SUBTREE_LEAVES: Final = 8
LAYERS: Final = 4
Trained = Literal["LoRA", "whole"]

_VOCABULARY: Final = 8192
"""Logits of 8 x 512 tokens then have 128 MiB, which every adapter binds."""
_HEAD: Final = 64


@dataclass(frozen=True, slots=True)
class Decoder:
    """A Llama-like decoder of `LAYERS` layers, and its microbatch.

    Attributes:
        hidden: Its width; feed-forward layers have 2.75 times as much, heads 64.
        samples: Texts in a microbatch.
        tokens: Of each text.
        trained: Low-rank matrices beside a frozen base, or everything.
    """

    hidden: int
    samples: int
    tokens: int
    trained: Trained

    def __str__(self) -> str:
        shape = f"{self.samples} x {self.tokens}"
        return f"decoder {self.hidden}, {LAYERS} layers, {self.trained}, {shape}"

    def batch(self) -> Batch:
        """Random tokens."""
        draw = np.random.default_rng(0)
        ids = draw.integers(0, _VOCABULARY, (self.samples, self.tokens))
        return Batch({"input_ids": ids}, float(self.samples))

    def trainable(self, threads: int) -> Trainable:
        """With torch's own attention, the quickest it has."""
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (seconds)

        from worker.models.blocks import cut_into_blocks  # noqa: PLC0415

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4, num_hidden_layers=LAYERS,
            num_attention_heads=self.hidden // _HEAD,
            num_key_value_heads=max(1, self.hidden // _HEAD // 4),
            max_position_embeddings=self.tokens, use_cache=False,
        )  # fmt: skip
        module: nn.Module = LlamaForCausalLM(config)
        if self.trained == "LoRA":
            import peft  # noqa: PLC0415

            names = ["q_proj", "v_proj"]
            lora = peft.LoraConfig(
                r=8, target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False
            )
            module = peft.get_peft_model(module, lora)
        return Trainable(cut_into_blocks(module), module, next_token_loss, threads=threads)


@dataclass(frozen=True, slots=True)
class Job:
    """One microbatch of something trained."""

    name: str
    trainable: Trainable
    batch: Batch
    parameters: list[Array] | None = None
    seed: int = 0


def next_token_loss(module: nn.Module, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy, summed over tokens."""
    logits = module(input_ids=arrays["input_ids"]).logits
    ids = arrays["input_ids"].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids, reduction="sum")


def microbatch(program: Program, batch: Batch, seed: int) -> None:
    """Forward and backward; every gradient comes to the host, so both sides are done."""
    for _ in program.gradients([(batch, seed)]):
        pass


def cpu_ratios(backend: VulkanBackend, side: TorchSide, ours: Timed, theirs: Timed) -> str:
    """Where both sides compute on the CPU."""
    both = backend.adapter.software and side.shares_cpu
    return ratios(ours.cpu_s, theirs.cpu_s) if both else ""


def job_row(
    backend: VulkanBackend, side: TorchSide, task: str, rounds: int, threads: int
) -> list[str]:
    """Microbatches of one of the runs in deploy/runs."""
    return _row(backend, side, job_of(task, threads), rounds)


def decoder_row(
    backend: VulkanBackend, side: TorchSide, decoder: Decoder, rounds: int, threads: int
) -> list[str]:
    """Microbatches of a decoder of a size that people fine-tune."""
    job = Job(str(decoder), decoder.trainable(threads), decoder.batch())
    return _row(backend, side, job, rounds)


def sums_row(backend: VulkanBackend, task: str, rounds: int, threads: int) -> list[str]:
    """Subtrees of `SUBTREE_LEAVES` microbatches, their gradients added on the device and on the
    host."""
    job = job_of(task, threads)
    program = backend.compile(job.trainable, job.batch)
    leaves = [(job.batch, job.seed)] * SUBTREE_LEAVES
    assert job.parameters is not None
    program.load(job.parameters)

    def on_device() -> None:
        _all(program.gradients(leaves))

    def on_host() -> None:
        _all(program.sum_on_host(leaves))

    if not backend.exact_additions:
        program.close()
        return [job.name, "its additions are not exact", *[""] * 5]
    readbacks = []
    for subtree in (on_device, on_host):
        before = backend.device.counts.readbacks
        subtree()
        readbacks.append(backend.device.counts.readbacks - before)
    ours, theirs = by_turns([on_device, on_host], rounds)
    program.close()
    return [
        job.name,
        *(f"{timed.median_ms:.0f} ({timed.spread_ms})" for timed in (ours, theirs)),
        ratios(ours.wall_s, theirs.wall_s),
        ratios(ours.cpu_s, theirs.cpu_s) if backend.adapter.software else "",
        *map(str, readbacks),
    ]


def _all(stream: SubtreeGradients) -> None:
    for _ in stream:
        pass


def job_of(task: str, threads: int) -> Job:
    """What a run trains, and its first microbatch."""
    from worker.tasks.registry import build  # noqa: PLC0415  (transformers: seconds)

    spec = parse_run_spec({**short(JOBS[task], 1), "threads": threads})
    built = build(spec)
    order = SampleOrder(spec.seed, built.manifest.train_samples, spec.batch)
    batch = built.batch(order.microbatches(0)[0])
    shape = " x ".join(str(size) for size in next(iter(batch.arrays.values())).shape)
    seed = microbatch_seed(spec.seed, 0, 0)
    return Job(f"{task}, {shape}", built.trainable, batch, built.initial_parameters(), seed)


def _row(backend: VulkanBackend, side: TorchSide, job: Job, rounds: int) -> list[str]:
    other = copy.deepcopy(job.trainable)
    start = time.perf_counter()
    ours = backend.compile(job.trainable, job.batch)
    compiled_s = time.perf_counter() - start
    theirs = side.backend.compile(other, job.batch)
    programs = (ours, theirs)
    for program in programs:
        if job.parameters is not None:
            program.load(job.parameters)
    start = time.perf_counter()
    microbatch(ours, job.batch, job.seed)
    first_s = time.perf_counter() - start
    apart = _difference(*(_gradients(program, job) for program in programs))
    assert other.module is not None
    sides = [partial(microbatch, program, job.batch, job.seed) for program in programs]
    mine, torchs = by_turns(sides, rounds)
    for program in programs:
        program.close()
    return [
        job.name,
        f"{mine.median_ms:.1f}",
        mine.spread_ms,
        f"{torchs.median_ms:.1f}",
        torchs.spread_ms,
        ratios(mine.wall_s, torchs.wall_s),
        cpu_ratios(backend, side, mine, torchs),
        "dropout" if _drops(other.module) else f"{apart:.0e}",
        f"{compiled_s:.1f}",
        f"{first_s:.1f}",
    ]


def _gradients(program: Program, job: Job) -> list[Array]:
    items = program.gradients([(job.batch, job.seed)])
    return [item.values for item in items if isinstance(item, BlockGradient)]


def _difference(ours: list[Array], theirs: list[Array]) -> float:
    """Of all gradients, relative to their norm."""
    apart = sum(float(np.linalg.norm(a - b)) ** 2 for a, b in zip(ours, theirs, strict=True))
    return float((apart / sum(float(np.linalg.norm(b)) ** 2 for b in theirs)) ** 0.5)


def _drops(module: nn.Module) -> bool:
    """Whether it has dropout, whose draws are each backend's own."""
    return any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in module.modules())
