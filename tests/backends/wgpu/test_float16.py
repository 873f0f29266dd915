"""`model.precision: float16` on a device: equal to torch's products in two bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as product_of
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.capture.half_products import half_products
from backends.wgpu.device import arithmetic
from backends.wgpu.device.adapters import adapters
from backends.wgpu.lowering.elementwise import ELEMENTWISE
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import SamestepError
from tests.backends.wgpu.products import SMALL_TILES, TILES, product, small_tiles
from tests.backends.wgpu.small_models import (
    assert_like_the_cpu,
    bert,
    class_loss,
    gradients,
    labeled,
    llama,
    next_token_loss,
    qwen3_with_lora,
    text,
    trainable,
)

WITHIN = 3e-3
"""A sum rounded the other way is off by 5e-4, and so is everything computed from it."""
SCALE = 256.0
REST = [(True, True), (False, False), (False, True)]


@pytest.fixture(scope="module")
def backend():
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    vulkan = VulkanBackend()
    if vulkan.float16_refusal:
        pytest.skip(vulkan.float16_refusal)
    return vulkan


class Block(nn.Module):
    """Products, a bias, an activation and a residual behind a norm; optionally attention."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 48 if attends else 16)
        self.down = nn.Linear(16, 128, bias=False)

    def forward(self, x):
        y = self.up(self.norm(x))
        if self.attends:
            q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in y.chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.transpose(1, 2).flatten(2)
        return x + nn.functional.gelu(self.down(y))


def squares(module: nn.Module, arrays: Any) -> torch.Tensor:
    return (module(arrays["x"]) * arrays["y"]).sum()


def batch() -> Batch:
    draws = np.random.default_rng(0)
    arrays = {name: draws.normal(size=(2, 8, 128)).astype(np.float32) for name in "xy"}
    return Batch(arrays, 2.0)


def expected(module: nn.Module, loss: Any, sample_batch: Batch) -> dict[str, torch.Tensor]:
    """Compute in float16 with torch on this CPU."""
    arrays = {name: torch.from_numpy(array) for name, array in sample_batch.arrays.items()}
    module.zero_grad()
    with half_products(enabled=True):
        value = loss(module, arrays).float() * SCALE
    value.backward()
    return {n: p.grad / SCALE for n, p in module.named_parameters() if p.grad is not None}


def program_of(device, module, loss, *, precision="float16", cooperative=True):
    templates = Templates(cooperative, small_tiles, bindings=16, is_float16=precision == "float16")
    job = trainable(module, loss, precision=precision)
    program = CompiledProgram(device, job, templates, adds_on_device=True)
    program.loss_scale = SCALE if precision == "float16" else 1.0
    return job, program


@pytest.mark.parametrize(
    ("cooperative", "attends"),
    [(True, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in REST)],
)
def test_gradients_equal_torch_in_float16(device, backend, cooperative, attends):
    """As on a card, and as in software."""
    del backend
    torch.manual_seed(0)
    module = Block(attends=attends)
    job, program = program_of(device, module, squares, cooperative=cooperative)
    program.check(batch())
    actual, reference = gradients(program, batch()), expected(module, squares, batch())
    distances = []
    for number, block in enumerate(job.blocks):
        for tensor, elements in block.slices():
            value = reference[tensor.name].numpy().reshape(-1)
            distances.append(float(np.linalg.norm(actual[number][elements] - value)))
            assert distances[-1] <= WITHIN * np.linalg.norm(value), tensor.name
    with pytest.raises(AssertionError):  # not float32
        assert_like_the_cpu(module, job.blocks, squares, batch(), actual)
    (ready,) = program._plans.values()
    assert any("enable f16" in each.shader.module for each in ready.plan.dispatches)
    program.close()


def test_float16_values_take_two_bytes(device, backend):
    del backend
    bytes_by_precision = {}
    for precision in ("float32", "float16"):
        module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
        _, program = program_of(device, module, squares, precision=precision)
        program.check(batch())
        (ready,) = program._plans.values()
        weights = 128 * 128 * 4
        bytes_by_precision[precision] = sum(size for size in ready.plan.slots if size < weights)
        program.close()
    assert bytes_by_precision["float16"] < 0.7 * bytes_by_precision["float32"]


def test_overflow_is_not_finite_and_half_the_scale_suffices(device, backend):
    del backend
    torch.manual_seed(0)
    module = nn.Linear(128, 128)
    _, program = program_of(device, module, squares)
    program.check(batch())
    largest = float(np.abs(batch().arrays["y"]).max())
    results = []
    for scale in (2.0 ** np.ceil(np.log2(65_504 / largest)), 2.0**5, 1.0):
        program.loss_scale = scale
        results.append(np.concatenate([*gradients(program, batch()).values()]))
    overflowed, one, other = results
    assert not np.isfinite(overflowed).all()
    assert np.isfinite(one).all()
    assert np.linalg.norm(one - other) < WITHIN * np.linalg.norm(other)
    program.close()


ONCE_EACH = (("f16", False, SMALL_TILES), ("rounded", True, TILES[0]))
"""Each kind, layout and tile once."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ONCE_EACH else pytest.mark.slow)
        for kind in product_of(("f16", "rounded"), (False, True), (SMALL_TILES, TILES[0]))
    ],
)
def test_a_product_widens_or_rounds_its_operands(device, backend, kind):
    """Summed in float32: the bits equal those of the same numbers in float32."""
    del backend
    storage, is_transposed, tiles = kind
    for columns in (36, 35):  # in vectors of four and one by one
        float32_product = product(
            2, 20, 24, columns, a_turned=is_transposed, b_turned=not is_transposed
        )
        rounded = [x.astype(np.float16).astype(np.float32) for x in float32_product.bindings]
        operand_values = (
            [x.astype(np.float16) for x in float32_product.bindings]
            if storage == "f16"
            else float32_product.bindings
        )
        operands = {
            "a": replace(float32_product.problem.a, element_form=storage),
            "b": replace(float32_product.problem.b, element_form=storage),
        }
        widened = replace(
            float32_product,
            problem=replace(float32_product.problem, **operands),
            bindings=operand_values,
        )
        reference = replace(float32_product, bindings=rounded).on(device, tiles)
        assert np.array_equal(widened.on(device, tiles).view(np.uint32), reference.view(np.uint32))


def test_float16_round_trip_through_float32(device, backend, monkeypatch):
    del backend
    assert arithmetic.count_changed_float16(device) == 0
    clamped = arithmetic._NARROWING.source.replace(
        "f16(values[id.x])", "f16(clamp(values[id.x], -65504.0, 65504.0))"
    )
    monkeypatch.setattr(arithmetic, "_NARROWING", replace(arithmetic._NARROWING, source=clamped))
    assert arithmetic.count_changed_float16(device) >= 2, "infinities became numbers"


@pytest.mark.parametrize(("lacks", "reason"), [
    ("feature", "has no float16"), ("infinity", "does not preserve 2 of the 65,536 float16 values"),
])  # fmt: skip
def test_a_device_without_float16_refuses_in_one_line(lacks, reason, monkeypatch):
    if isinstance(cause := adapters(), str):
        pytest.skip(cause)
    backend = VulkanBackend()
    if lacks == "feature":
        monkeypatch.setattr(backend.device, "features", frozenset())
    else:
        monkeypatch.setattr("backends.wgpu.backend.count_changed_float16", lambda _: 2)
    job = trainable(nn.Linear(128, 128), squares, precision="float16")
    with pytest.raises(SamestepError, match=f"expected .*precision float32, got float16.*{reason}"):
        backend.compile(job, batch())
    backend.device.close()


def test_comparison_with_torch_uses_the_precision(backend, monkeypatch):
    """Correct float16 passes; wrong float16 does not."""
    module = nn.Sequential(nn.Linear(128, 20), nn.Tanh(), nn.Linear(20, 128))
    program = backend.compile(trainable(module, squares, precision="float16"), batch())
    assert float(program.parity.split()[2]) < WITHIN
    assert program.loss_scale == 1.0
    program.close()
    rule = ELEMENTWISE[torch.ops.aten.tanh.default]
    faulty_rules = {torch.ops.aten.tanh.default: lambda *names: f"({rule(*names)} * 1.05)"}
    monkeypatch.setattr("backends.wgpu.lowering.kernels._RULES", {**ELEMENTWISE, **faulty_rules})
    with pytest.raises(SamestepError, match=r"within 0\.01 of torch's, got a difference"):
        backend.compile(trainable(module, squares, precision="float16"), batch())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cooperative"),
    [
        ("a decoder", True),
        ("an encoder", False),
        ("LoRA on few bits", False),
        pytest.param("a decoder", False, marks=pytest.mark.release),
        pytest.param("an encoder", True, marks=pytest.mark.release),
        pytest.param("LoRA on few bits", True, marks=pytest.mark.release),
    ],
)
def test_models_of_transformers(device, backend, kind, cooperative):
    cases: dict[str, Any] = {
        "a decoder": (llama, next_token_loss, text, "float32"),
        "an encoder": (bert, class_loss, labeled, "float32"),
        "LoRA on few bits": (qwen3_with_lora, next_token_loss, text, "int8"),
    }
    make_model, loss, make_batch, base = cases[kind]
    job = trainable(
        make_model(attn_implementation="sdpa"), loss, precision="float16", base_dtype=base
    )
    if not cooperative:
        program = backend.compile(job, make_batch())
        assert float(program.parity.split()[2]) < WITHIN
        program.close()
        return
    _, program = program_of(device, make_model(attn_implementation="sdpa"), loss)
    program.check(make_batch())
    actual, reference = gradients(program, make_batch()), expected(make_model(), loss, make_batch())
    norm = max(float(x.norm()) for x in reference.values())
    for number, block in enumerate(job.blocks):
        for tensor, elements in block.slices():
            value = reference[tensor.name].numpy().reshape(-1)
            floor = max(float(np.linalg.norm(value)), 1e-2 * norm)
            assert np.linalg.norm(actual[number][elements] - value) <= 2 * WITHIN * floor, (
                tensor.name
            )
    program.close()
