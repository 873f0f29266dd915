"""One digest for any number of threads, any instruction set, and a Vulkan device."""

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
    labeled,
    llama,
    mixed,
    mixer_loss,
    next_token_loss,
    qwen3_with_lora,
    text,
    trainable,
)

pytest.importorskip("ziglang")


def perceptron() -> nn.Module:
    """Where a unit is inactive, its gradients are zeros: sums of terms that are -0."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    )


def perceptron_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    """Also contains expressions that drivers simplify or compute in their own way."""
    x = module(arrays["x"])
    simplifiable = 0.0 * (x - 1.0) + (1 - (1 - x)) + (x + (0.3 - x)) + 10.0 ** (0.3 * x)
    return functional.cross_entropy(x, arrays["y"], reduction="sum") + simplifiable.sum()


def few_samples() -> Batch:
    draw = np.random.default_rng(0)
    return Batch({"x": draw.normal(size=(4, 6)).astype(np.float32), "y": np.arange(4) % 3}, 4.0)


Model = Callable[[], nn.Module]
MODELS: dict[str, tuple[Model, Any, Batch, dict[str, Any]]] = {
    "perceptron": (perceptron, perceptron_loss, few_samples(), {}),
    "llama": (llama, next_token_loss, text(), {}),
    "mixer": (Mixer, mixer_loss, mixed(), {}),
    "bert with dropout": (lambda: bert(0.1), class_loss, labeled(), {}),
    "lora on int8": (qwen3_with_lora, next_token_loss, text(), {"base_dtype": "int8"}),
}


@contextmanager
def instructions(name: str) -> Iterator[None]:
    """Pretend that the processor has only these instructions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAMESTEP_CPU_INSTRUCTIONS", name)
        compiler.best_instructions.cache_clear()
        yield
    compiler.best_instructions.cache_clear()


def digest(program: Program, batch: Batch) -> str:
    """Digest gradients and loss of a subtree of three microbatches."""
    hasher = blake3()
    for item in program.gradients([(batch, 1), (batch, 2), (batch, 3)]):
        if isinstance(item, BlockGradient):
            hasher.update(item.values.tobytes())
        elif isinstance(item, Loss):
            hasher.update(np.float64(item.loss_sum).tobytes())
    return hasher.hexdigest()


def on_backend(backend: Any, name: str, rounding: str, threads: int = 1) -> str:
    """Return the digest of a model on this backend."""
    model, loss, batch, changes = MODELS[name]
    keys = {"subnormals": "flushed"} if rounding == "flushed" else {"multiply_add": rounding}
    arithmetic = ArithmeticSpec.model_validate({"mode": "canonical", **keys})
    task = trainable(model(), loss, threads=threads, arithmetic=arithmetic, **changes)
    program = backend.compile(task, batch)
    try:
        return digest(program, batch)
    finally:
        program.close()


@cache
def on_one_thread(name: str, rounding: str) -> str:
    """Return the digest that all others must equal."""
    return on_backend(CpuBackend(), name, rounding)


QUICK = {"mixer", "perceptron"}
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
_WAYS = ("fused", "separate", "flushed")


@pytest.mark.parametrize("name", NAMES)
def test_a_vulkan_device_gives_the_bits_of_the_cpu(name: str) -> None:
    if isinstance(available := adapters(), str):
        pytest.skip(available)
    from backends.wgpu.backend import VulkanBackend

    # Mesa's software device rounds the product of a multiply-add.
    assert on_backend(VulkanBackend(), name, "separate") == on_one_thread(name, "separate")


@pytest.mark.parametrize("threads", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_change_bits(name: str, threads: int) -> None:
    on_threads = on_backend(CpuBackend(), name, "separate", threads)
    assert on_threads == on_one_thread(name, "separate")


@pytest.mark.slow
@pytest.mark.parametrize("rounding", _WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("instruction_set", ["scalar", "avx2", "avx512"])
def test_instruction_sets_do_not_change_bits(
    name: str, rounding: str, instruction_set: str
) -> None:
    expected = on_one_thread(name, rounding)
    try:
        with instructions(instruction_set):
            actual = on_backend(CpuBackend(), name, rounding)
    except SamestepError as error:
        pytest.skip(str(error))
    assert actual == expected


@pytest.mark.slow
def test_fused_and_separate_multiply_add_differ() -> None:
    assert on_one_thread("llama", "fused") != on_one_thread("llama", "separate")
