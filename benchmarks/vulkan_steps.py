"""Microbatches on a Vulkan device and in torch, measured alternately for `benchmarks.vulkan`."""

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
from benchmarks.jobs import short_job
from benchmarks.torch_side import TorchSide
from benchmarks.turns import SideTimes, measure_alternately, ratios
from protocol.exact.samples import SampleOrder, microbatch_seed
from protocol.spec.run_spec import parse_run_spec

JOBS: Final = {"classify": "sms-spam", "causal-lm": "small-llama", "digits": "digits"}
SUBTREE_LEAVES: Final = 8
LAYERS: Final = 4
Adaptation = Literal["LoRA", "whole"]

_VOCABULARY: Final = 8192
"""Chosen so that logits of 8 x 512 tokens have 128 MiB, which every adapter can bind."""
_HEAD_SIZE: Final = 64


@dataclass(frozen=True, slots=True)
class Decoder:
    """A Llama-like decoder of `LAYERS` layers, and its microbatch.

    Attributes:
        hidden: Hidden size; feed-forward layers are 2.75 times as wide, heads have size 64.
        samples: Texts in a microbatch.
        tokens: Tokens of each text.
        adaptation: Whether to train low-rank matrices or the whole model.
    """

    hidden: int
    samples: int
    tokens: int
    adaptation: Adaptation

    def __str__(self) -> str:
        shape = f"{self.samples} x {self.tokens}"
        return f"decoder {self.hidden}, {LAYERS} layers, {self.adaptation}, {shape}"

    def batch(self) -> Batch:
        """Return random tokens."""
        rng = np.random.default_rng(0)
        ids = rng.integers(0, _VOCABULARY, (self.samples, self.tokens))
        return Batch({"input_ids": ids}, float(self.samples))

    def trainable(self, threads: int) -> Trainable:
        """Return the trainable, with torch's fastest attention."""
        from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 -- the import takes seconds

        from worker.models.blocks import cut_into_blocks  # noqa: PLC0415

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=_VOCABULARY, hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4, num_hidden_layers=LAYERS,
            num_attention_heads=self.hidden // _HEAD_SIZE,
            num_key_value_heads=max(1, self.hidden // _HEAD_SIZE // 4),
            max_position_embeddings=self.tokens, use_cache=False,
        )  # fmt: skip
        module: nn.Module = LlamaForCausalLM(config)
        if self.adaptation == "LoRA":
            import peft  # noqa: PLC0415

            names = ["q_proj", "v_proj"]
            lora = peft.LoraConfig(
                r=8, target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False
            )
            module = peft.get_peft_model(module, lora)
        return Trainable(cut_into_blocks(module), module, next_token_loss, threads=threads)


@dataclass(frozen=True, slots=True)
class Job:
    """One microbatch of a trainable."""

    name: str
    trainable: Trainable
    batch: Batch
    parameters: list[Array] | None = None
    seed: int = 0


def next_token_loss(module: nn.Module, arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the cross-entropy summed over tokens."""
    logits = module(input_ids=arrays["input_ids"]).logits
    ids = arrays["input_ids"].flatten()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids, reduction="sum")


def microbatch(program: Program, batch: Batch, seed: int) -> None:
    """Compute forward and backward and copy every gradient to the host."""
    for _ in program.gradients([(batch, seed)]):
        pass


def cpu_ratios(
    backend: VulkanBackend, side: TorchSide, device_times: SideTimes, torch_times: SideTimes
) -> str:
    """Return ratios of CPU time, if both sides compute on the CPU."""
    both_use_cpu = backend.adapter.software and side.shares_cpu
    return ratios(device_times.cpu_s, torch_times.cpu_s) if both_use_cpu else ""


def job_row(
    backend: VulkanBackend, side: TorchSide, task: str, rounds: int, threads: int
) -> list[str]:
    """Measure microbatches of one of the runs in deploy/runs."""
    return _row(backend, side, job_of(task, threads), rounds)


def decoder_row(
    backend: VulkanBackend, side: TorchSide, decoder: Decoder, rounds: int, threads: int
) -> list[str]:
    """Measure microbatches of a decoder of a commonly fine-tuned size."""
    job = Job(str(decoder), decoder.trainable(threads), decoder.batch())
    return _row(backend, side, job, rounds)


def sums_row(backend: VulkanBackend, task: str, rounds: int, threads: int) -> list[str]:
    """Measure subtrees of `SUBTREE_LEAVES` microbatches, with gradients added on the device and on
    the host.
    """
    job = job_of(task, threads)
    program = backend.compile(job.trainable, job.batch)
    leaves = [(job.batch, job.seed)] * SUBTREE_LEAVES
    assert job.parameters is not None
    program.load(job.parameters)

    def sum_on_device() -> None:
        _consume(program.gradients(leaves))

    def sum_on_host() -> None:
        _consume(program.sum_on_host(leaves))

    if not backend.has_exact_additions:
        program.close()
        return [job.name, "the device's additions are not exact", *[""] * 5]
    readbacks = []
    for subtree in (sum_on_device, sum_on_host):
        readbacks_before = backend.device.counts.readbacks
        subtree()
        readbacks.append(backend.device.counts.readbacks - readbacks_before)
    device_times, host_times = measure_alternately([sum_on_device, sum_on_host], rounds)
    program.close()
    return [
        job.name,
        *(f"{times.median_ms:.0f} ({times.spread_ms})" for times in (device_times, host_times)),
        ratios(device_times.wall_s, host_times.wall_s),
        ratios(device_times.cpu_s, host_times.cpu_s) if backend.adapter.software else "",
        *map(str, readbacks),
    ]


def _consume(stream: SubtreeGradients) -> None:
    for _ in stream:
        pass


def job_of(task: str, threads: int) -> Job:
    """Return the trainable of a run and its first microbatch."""
    from worker.tasks.registry import build  # noqa: PLC0415 -- importing transformers takes seconds

    spec = parse_run_spec({**short_job(JOBS[task], 1), "threads": threads})
    built_task = build(spec)
    order = SampleOrder(spec.seed, built_task.manifest.train_samples, spec.batch)
    batch = built_task.batch(order.microbatches(0)[0])
    shape = " x ".join(str(size) for size in next(iter(batch.arrays.values())).shape)
    seed = microbatch_seed(spec.seed, 0, 0)
    return Job(
        f"{task}, {shape}", built_task.trainable, batch, built_task.initial_parameters(), seed
    )


def _row(backend: VulkanBackend, side: TorchSide, job: Job, rounds: int) -> list[str]:
    torch_trainable = copy.deepcopy(job.trainable)
    start_s = time.perf_counter()
    device_program = backend.compile(job.trainable, job.batch)
    compiled_s = time.perf_counter() - start_s
    torch_program = side.backend.compile(torch_trainable, job.batch)
    programs = (device_program, torch_program)
    for program in programs:
        if job.parameters is not None:
            program.load(job.parameters)
    start_s = time.perf_counter()
    microbatch(device_program, job.batch, job.seed)
    first_s = time.perf_counter() - start_s
    difference = _difference(*(_gradients(program, job) for program in programs))
    assert torch_trainable.module is not None
    sides = [partial(microbatch, program, job.batch, job.seed) for program in programs]
    device_times, torch_times = measure_alternately(sides, rounds)
    for program in programs:
        program.close()
    return [
        job.name,
        f"{device_times.median_ms:.1f}",
        device_times.spread_ms,
        f"{torch_times.median_ms:.1f}",
        torch_times.spread_ms,
        ratios(device_times.wall_s, torch_times.wall_s),
        cpu_ratios(backend, side, device_times, torch_times),
        "dropout" if _has_dropout(torch_trainable.module) else f"{difference:.0e}",
        f"{compiled_s:.1f}",
        f"{first_s:.1f}",
    ]


def _gradients(program: Program, job: Job) -> list[Array]:
    items = program.gradients([(job.batch, job.seed)])
    return [item.values for item in items if isinstance(item, BlockGradient)]


def _difference(device_gradients: list[Array], torch_gradients: list[Array]) -> float:
    """Return the difference of all gradients, relative to their norm."""
    difference = sum(
        float(np.linalg.norm(device_values - torch_values)) ** 2
        for device_values, torch_values in zip(device_gradients, torch_gradients, strict=True)
    )
    return float(
        (
            difference
            / sum(float(np.linalg.norm(torch_values)) ** 2 for torch_values in torch_gradients)
        )
        ** 0.5
    )


def _has_dropout(module: nn.Module) -> bool:
    """Return whether the module has dropout, whose random numbers differ between backends."""
    return any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in module.modules())
