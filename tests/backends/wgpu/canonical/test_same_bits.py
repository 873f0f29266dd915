"""Canonical arithmetic has the same bits for any number of threads, any instruction set, and on a
Vulkan device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from torch import nn
from torch.nn import functional

from backends.base.interface import Batch, BlockGradient, Loss, Program
from backends.cpu import CpuBackend
from backends.wgpu.canonical import compiler
from backends.wgpu.device.adapters import adapters
from protocol.base.errors import SamestepError
from protocol.spec.sections.model import ArithmeticSpec
from tests.backends.wgpu.small_models import (
    Mixer,
    bert,
    class_loss,
    labeled_batch,
    llama,
    mixer_batch,
    mixer_loss,
    next_token_loss,
    qwen3_with_lora,
    token_batch,
    trainable,
)

pytest.importorskip("ziglang")


def perceptron() -> nn.Module:
    """Build a network whose inactive units have zero gradients, which are sums of -0."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    )


def perceptron_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    """Add expressions that drivers may simplify or compute differently."""
    x = module(arrays["x"])
    simplifiable = 0.0 * (x - 1.0) + (1 - (1 - x)) + (x + (0.3 - x)) + 10.0 ** (0.3 * x)
    return functional.cross_entropy(x, arrays["y"], reduction="sum") + simplifiable.sum()


def few_samples() -> Batch:
    rng = np.random.default_rng(0)
    return Batch({"x": rng.normal(size=(4, 6)).astype(np.float32), "y": np.arange(4) % 3}, 4.0)


MakeModel = Callable[[], nn.Module]
MODELS: dict[str, tuple[MakeModel, Any, Batch, dict[str, Any]]] = {
    "perceptron": (perceptron, perceptron_loss, few_samples(), {}),
    "llama": (llama, next_token_loss, token_batch(), {}),
    "mixer": (Mixer, mixer_loss, mixer_batch(), {}),
    "bert with dropout": (lambda: bert(0.1), class_loss, labeled_batch(), {}),
    "lora on int8": (qwen3_with_lora, next_token_loss, token_batch(), {"base_dtype": "int8"}),
}


@contextmanager
def only_instructions(name: str) -> Iterator[None]:
    """Compile kernels for this instruction set only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAMESTEP_CPU_INSTRUCTIONS", name)
        compiler.best_instructions.cache_clear()
        yield
    compiler.best_instructions.cache_clear()


def subtree_digest(program: Program, batch: Batch) -> str:
    """Return the digest of gradients and loss of a subtree of three microbatches."""
    hasher = blake3()
    for item in program.gradients([(batch, 1), (batch, 2), (batch, 3)]):
        if isinstance(item, BlockGradient):
            hasher.update(item.values.tobytes())
        elif isinstance(item, Loss):
            hasher.update(np.float64(item.loss_sum).tobytes())
    return hasher.hexdigest()


def digest_on(backend: Any, name: str, convention: str, threads: int = 1) -> str:
    """Return the digest of a model on a backend; `convention` is one of `_CONVENTIONS`."""
    make_model, loss, batch, options = MODELS[name]
    keys = {"subnormals": "flushed"} if convention == "flushed" else {"multiply_add": convention}
    arithmetic = ArithmeticSpec.model_validate({"mode": "canonical", **keys})
    task = trainable(make_model(), loss, threads=threads, arithmetic=arithmetic, **options)
    program = backend.compile(task, batch)
    try:
        return subtree_digest(program, batch)
    finally:
        program.close()


@cache
def reference_digest(name: str, convention: str) -> str:
    """Return the digest on one CPU thread, which all other digests must equal."""
    return digest_on(CpuBackend(), name, convention)


QUICK = {"mixer", "perceptron"}
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
_CONVENTIONS = ("fused", "separate", "flushed")


@pytest.mark.parametrize("name", NAMES)
def test_a_vulkan_device_gives_the_bits_of_the_cpu(name: str) -> None:
    if isinstance(available := adapters(), str):
        pytest.skip(available)
    from backends.wgpu.backend import VulkanBackend

    # Mesa's software device rounds the product of a multiply-add.
    digest = digest_on(VulkanBackend(), name, "separate")
    assert digest == reference_digest(name, "separate")


@pytest.mark.parametrize("threads", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_bits(name: str, threads: int) -> None:
    digest = digest_on(CpuBackend(), name, "separate", threads)
    assert digest == reference_digest(name, "separate")


@pytest.mark.slow
@pytest.mark.parametrize("convention", _CONVENTIONS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("instruction_set", ["scalar", "avx2", "avx512"])
def test_instruction_sets_do_not_change_bits(
    name: str, convention: str, instruction_set: str
) -> None:
    try:
        with only_instructions(instruction_set):
            digest = digest_on(CpuBackend(), name, convention)
    except SamestepError as error:
        pytest.skip(str(error))
    assert digest == reference_digest(name, convention)


@pytest.mark.slow
def test_fused_and_separate_multiply_add_differ() -> None:
    assert reference_digest("llama", "fused") != reference_digest("llama", "separate")
