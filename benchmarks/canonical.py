"""Canonical arithmetic on this CPU against torch's eager mode, with the same number of threads.

    python -m benchmarks.canonical [--threads 2] [--rounds 10] [--only steps|error]

Steps are microbatches, forward and backward, of `sms-spam` (MiniLM with LoRA) and of a Llama of
hidden size 256 and 6 layers with 8 x 128 tokens. In addition to wall time it prints the ratio of
CPU time, which other processes affect less. Errors are of gradients against the same model in
float64, relative to their norm, compared with torch's errors in float32.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from backends.base.interface import Array, Batch, BlockGradient, Program, Trainable
from backends.cpu import CpuBackend
from benchmarks.machine import print_heading, print_table
from benchmarks.turns import measure_alternately, ratios
from benchmarks.vulkan_steps import job_of, microbatch, next_token_loss
from protocol.spec.sections.model import ArithmeticSpec

CANONICAL: Final = ArithmeticSpec(mode="canonical")
_VOCABULARY: Final = 4096
_FAMILIES: Final = (
    "Llama", "Qwen3", "StableLM", "OLMo 2", "Phi", "GPT-2", "GPT-NeoX", "BERT", "DistilBERT",
    "RoBERTa",
)  # fmt: skip


def llama(threads: int) -> tuple[str, Trainable, Batch, list[Array] | None, int]:
    """Return the job of a Llama, as `jobs` does."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 -- the import takes seconds

    from worker.models.blocks import cut_into_blocks  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    module: nn.Module = LlamaForCausalLM(config)
    ids = np.random.default_rng(0).integers(0, _VOCABULARY, (8, 128))
    task = Trainable(cut_into_blocks(module), module, next_token_loss, threads=threads)
    return "llama 256, 6 layers, 8 x 128", task, Batch({"input_ids": ids}, 8.0), None, 0


def jobs(threads: int) -> list[tuple[str, Trainable, Batch, list[Array] | None, int]]:
    """Return the jobs to measure: name, trainable, microbatch, parameters, seed."""
    job = job_of("classify", threads)
    return [
        (job.name, job.trainable, job.batch, job.parameters, job.seed),
        llama(threads),
    ]


def step_row(job: tuple[str, Trainable, Batch, list[Array] | None, int], rounds: int) -> list[str]:
    """Measure one microbatch in canonical arithmetic and in torch, alternately."""
    name, trainable, batch, parameters, seed = job
    backend = CpuBackend()
    torch_program = backend.compile(copy.deepcopy(trainable), batch)
    canonical_program = backend.compile(replace(trainable, arithmetic=CANONICAL), batch)
    for program in (canonical_program, torch_program):
        if parameters is not None:
            program.load(parameters)
    sides = [
        partial(microbatch, program, batch, seed) for program in (canonical_program, torch_program)
    ]
    canonical_times, torch_times = measure_alternately(sides, rounds)
    for program in (canonical_program, torch_program):
        program.close()
    return [
        name,
        f"{canonical_times.median_ms:.0f} ({canonical_times.spread_ms})",
        f"{torch_times.median_ms:.0f} ({torch_times.spread_ms})",
        ratios(canonical_times.wall_s, torch_times.wall_s),
        ratios(canonical_times.cpu_s, torch_times.cpu_s),
    ]


def _gradients(program: Program, batch: Batch) -> Array:
    items = program.gradients([(batch, 0)])
    values_by_block = {item.block: item.values for item in items if isinstance(item, BlockGradient)}
    return np.concatenate([values_by_block[block] for block in sorted(values_by_block)])


def error_row(name: str, module: nn.Module, loss: Any, batch: Batch) -> list[str]:
    """Return the errors of gradients against float64, relative to their norm."""
    from worker.models.blocks import cut_into_blocks  # noqa: PLC0415

    blocks = cut_into_blocks(module)
    reference = copy.deepcopy(module).double()
    reference.train()
    loss(reference, {key: torch.tensor(value) for key, value in batch.arrays.items()}).backward()
    parameters = dict(reference.named_parameters())
    tensors = [tensor for block in blocks for tensor in block.tensors]
    gradients_by_tensor = [parameters[tensor.name].grad for tensor in tensors]
    expected = np.concatenate([
        np.zeros(tensor.elements) if gradient is None else gradient.numpy().reshape(-1)
        for tensor, gradient in zip(tensors, gradients_by_tensor, strict=True)
    ])  # fmt: skip
    errors = []
    for arithmetic in (CANONICAL, ArithmeticSpec()):
        task = Trainable(blocks, copy.deepcopy(module), loss, arithmetic=arithmetic)
        program = CpuBackend().compile(task, batch)
        gradients = _gradients(program, batch)
        program.close()
        errors.append(float(np.linalg.norm(gradients - expected) / np.linalg.norm(expected)))
    canonical_error, torch_error = errors
    return [
        name,
        f"{canonical_error:.1e}",
        f"{torch_error:.1e}",
        f"{canonical_error / torch_error:.2f}",
    ]


def error_rows() -> list[list[str]]:
    """Return the errors for small models of ten families."""
    from tests.backends.wgpu import test_families as families  # noqa: PLC0415  (seconds)

    rows = []
    for name in _FAMILIES:
        is_decoder = name in families.DECODERS
        model_class, sizes = (families.DECODERS if is_decoder else families.ENCODERS)[name]
        module = families.build_model(model_class, sizes, "eager", is_decoder=is_decoder)
        loss = families.decoder_loss if is_decoder else families.class_loss
        rows.append(
            error_row(name, module, loss, families.padded_batch("right", is_decoder=is_decoder))
        )
    return rows


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=("steps", "error"))
    options = parser.parse_args()
    if options.only != "error":
        print_heading("Canonical arithmetic on this CPU, and torch's, per microbatch")
        header = ["step", "canonical ms", "torch ms", "ratio", "CPU time"]
        rows = [step_row(job, options.rounds) for job in jobs(options.threads)]
        print_table(header, rows)
    if options.only != "steps":
        print_heading("Error of gradients against float64, relative to their norm")
        print_table(["model", "canonical", "torch", "ratio"], error_rows())


if __name__ == "__main__":
    main()
