"""`model.precision: float16` on a device: gradients equal torch's with float16 products."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch
from backends.quantization.frozen_base import round_frozen_base
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.capture.half_products import half_products
from backends.wgpu.device import arithmetic
from backends.wgpu.device.adapters import adapters
from backends.wgpu.lowering.elementwise import ELEMENTWISE
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import SamestepError
from tests.backends.wgpu.products import SMALL_TILES, TILES, random_product, small_tiles
from tests.backends.wgpu.small_models import (
    assert_equals_cpu,
    bert,
    class_loss,
    gradients,
    labeled_batch,
    llama,
    next_token_loss,
    qwen3_with_lora,
    token_batch,
    trainable,
)

RELATIVE_TOLERANCE = 3e-3
"""One different rounding to float16 changes a value by 5e-4, and all values computed from it."""
LOSS_SCALE = 256.0


@pytest.fixture(scope="module")
def backend():
    """Provide a backend with float16, or skip the test."""
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    vulkan = VulkanBackend()
    if vulkan.float16_refusal:
        pytest.skip(vulkan.float16_refusal)
    return vulkan


class Block(nn.Module):
    """A norm, products, a bias, an activation and a residual; optionally attention."""

    def __init__(self, *, has_attention: bool) -> None:
        super().__init__()
        self.has_attention = has_attention
        self.norm = nn.LayerNorm(128)
        self.up = nn.Linear(128, 48 if has_attention else 16)
        self.down = nn.Linear(16, 128, bias=False)

    def forward(self, x):
        y = self.up(self.norm(x))
        if self.has_attention:
            q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in y.chunk(3, -1))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.transpose(1, 2).flatten(2)
        return x + nn.functional.gelu(self.down(y))


def weighted_sum(module: nn.Module, arrays: Any) -> torch.Tensor:
    return (module(arrays["x"]) * arrays["y"]).sum()


def random_batch() -> Batch:
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(2, 8, 128)).astype(np.float32) for name in "xy"}
    return Batch(arrays, 2.0)


def float16_gradients(module: nn.Module, loss: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the gradients with float16 products, computed by torch on the CPU."""
    arrays = {name: torch.from_numpy(array) for name, array in batch.arrays.items()}
    module.zero_grad()
    with half_products(enabled=True):
        value = loss(module, arrays).float() * LOSS_SCALE
    value.backward()
    return {n: p.grad / LOSS_SCALE for n, p in module.named_parameters() if p.grad is not None}


def new_program(
    device, module, loss, *, precision="float16", cooperative=True, base_dtype="float32"
):
    """Return a task and its program; `cooperative` uses the kernels of a GPU."""
    kernel_options = KernelOptions(
        cooperative, small_tiles, bindings=16, is_float16=precision == "float16"
    )
    job = trainable(module, loss, precision=precision, base_dtype=base_dtype)
    program = CompiledProgram(device, job, kernel_options, adds_on_device=True)
    program.loss_scale = LOSS_SCALE if precision == "float16" else 1.0
    return job, program


@pytest.mark.parametrize(
    ("cooperative", "has_attention"),
    [
        (True, False),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_torch_in_float16(device, backend, cooperative, has_attention):
    del backend
    torch.manual_seed(0)
    module = Block(has_attention=has_attention)
    job, program = new_program(device, module, weighted_sum, cooperative=cooperative)
    program.check(random_batch())
    actual = gradients(program, random_batch())
    reference = float16_gradients(module, weighted_sum, random_batch())
    for number, block in enumerate(job.blocks):
        for tensor, elements in block.slices():
            expected = reference[tensor.name].numpy().reshape(-1)
            difference = np.linalg.norm(actual[number][elements] - expected)
            assert difference <= RELATIVE_TOLERANCE * np.linalg.norm(expected), tensor.name
    with pytest.raises(AssertionError):  # they are not the gradients of float32 products
        assert_equals_cpu(module, job.blocks, weighted_sum, random_batch(), actual)
    (placed,) = program._plans.values()
    assert any("enable f16" in dispatch.shader.module for dispatch in placed.plan.dispatches)
    program.close()


def test_float16_activations_take_less_memory(device, backend):
    del backend
    activation_bytes = {}
    for precision in ("float32", "float16"):
        module = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
        _, program = new_program(device, module, weighted_sum, precision=precision)
        program.check(random_batch())
        (placed,) = program._plans.values()
        weight_bytes = 128 * 128 * 4  # slots of this size hold gradients, which are float32
        activation_bytes[precision] = sum(n for n in placed.plan.slots if n < weight_bytes)
        program.close()
    assert activation_bytes["float16"] < 0.7 * activation_bytes["float32"]


def test_a_too_large_loss_scale_gives_non_finite_gradients(device, backend):
    del backend
    torch.manual_seed(0)
    module = nn.Linear(128, 128)
    _, program = new_program(device, module, weighted_sum)
    program.check(random_batch())
    largest = float(np.abs(random_batch().arrays["y"]).max())
    results = []
    overflowing_scale = 2.0 ** np.ceil(np.log2(65_504 / largest))  # float16 ends at 65,504
    for scale in (overflowing_scale, 32.0, 1.0):
        program.loss_scale = scale
        results.append(np.concatenate([*gradients(program, random_batch()).values()]))
    overflowed, scaled, unscaled = results
    assert not np.isfinite(overflowed).all()
    assert np.isfinite(scaled).all()
    difference = np.linalg.norm(scaled - unscaled)
    assert difference < RELATIVE_TOLERANCE * np.linalg.norm(unscaled)
    program.close()


QUICK_CASES = (("f16", False, SMALL_TILES), ("rounded", True, TILES[0]))
"""Cases with each element form, layout and tile size once."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in QUICK_CASES else pytest.mark.slow)
        for case in itertools.product(("f16", "rounded"), (False, True), (SMALL_TILES, TILES[0]))
    ],
)
def test_products_of_float16_values_have_the_bits_of_float32(device, backend, case):
    """A product reads float16 operands, or rounds float32 operands, and sums in float32."""
    del backend
    element_form, is_transposed, tiles = case
    for columns in (36, 35):  # read in vectors of four, and one by one
        float32_product = random_product(
            2, 20, 24, columns, a_is_transposed=is_transposed, b_is_transposed=not is_transposed
        )
        rounded = [x.astype(np.float16).astype(np.float32) for x in float32_product.bindings]
        bindings = float32_product.bindings
        if element_form == "f16":
            bindings = [x.astype(np.float16) for x in bindings]
        operands = {
            "a": replace(float32_product.problem.a, element_form=element_form),
            "b": replace(float32_product.problem.b, element_form=element_form),
        }
        float16_product = replace(
            float32_product,
            problem=replace(float32_product.problem, **operands),
            bindings=bindings,
        )
        reference = replace(float32_product, bindings=rounded).run_on(device, tiles)
        assert np.array_equal(
            float16_product.run_on(device, tiles).view(np.uint32), reference.view(np.uint32)
        )


def test_float16_probe_detects_lost_infinities(device, backend, monkeypatch):
    del backend
    assert arithmetic.count_changed_float16(device) == 0
    clamped = arithmetic._NARROWING.source.replace(
        "f16(values[id.x])", "f16(clamp(values[id.x], -65504.0, 65504.0))"
    )
    monkeypatch.setattr(arithmetic, "_NARROWING", replace(arithmetic._NARROWING, source=clamped))
    assert arithmetic.count_changed_float16(device) >= 2, "both infinities became finite"


@pytest.mark.parametrize(("missing", "reason"), [
    ("feature", "has no float16"), ("infinity", "does not preserve 2 of the 65,536 float16 values"),
])  # fmt: skip
def test_a_device_without_float16_is_refused(missing, reason, monkeypatch):
    if isinstance(cause := adapters(), str):
        pytest.skip(cause)
    backend = VulkanBackend()
    if missing == "feature":
        monkeypatch.setattr(backend.device, "features", frozenset())
    else:
        monkeypatch.setattr("backends.wgpu.backend.count_changed_float16", lambda _: 2)
    job = trainable(nn.Linear(128, 128), weighted_sum, precision="float16")
    with pytest.raises(SamestepError, match=f"expected .*precision float32, got float16.*{reason}"):
        backend.compile(job, random_batch())
    backend.device.close()


def test_parity_check_detects_a_wrong_operator_in_float16(backend, monkeypatch):
    module = nn.Sequential(nn.Linear(128, 20), nn.Tanh(), nn.Linear(20, 128))
    program = backend.compile(trainable(module, weighted_sum, precision="float16"), random_batch())
    assert parity_difference(program) < RELATIVE_TOLERANCE
    assert program.loss_scale == 1.0
    program.close()
    tanh_rule = ELEMENTWISE[torch.ops.aten.tanh.default]
    faulty_rules = {torch.ops.aten.tanh.default: lambda *names: f"({tanh_rule(*names)} * 1.05)"}
    monkeypatch.setattr("backends.wgpu.lowering.kernels._RULES", {**ELEMENTWISE, **faulty_rules})
    with pytest.raises(SamestepError, match=r"within 0\.01 of torch's, got a difference"):
        backend.compile(trainable(module, weighted_sum, precision="float16"), random_batch())


def parity_difference(program: Any) -> float:
    """Return the difference in "gradients within ... of torch's"."""
    return float(program.parity.split()[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cooperative"),
    [
        ("a decoder", True),
        ("an encoder", False),
        ("LoRA on an int8 base", False),
        pytest.param("a decoder", False, marks=pytest.mark.release),
        pytest.param("an encoder", True, marks=pytest.mark.release),
        pytest.param("LoRA on an int8 base", True, marks=pytest.mark.release),
    ],
)
def test_gradients_of_models_of_transformers_equal_torch_in_float16(
    device, backend, name, cooperative
):
    """Without `cooperative`, the backend compiles and its parity check compares."""
    cases: dict[str, Any] = {
        "a decoder": (llama, next_token_loss, token_batch, "float32"),
        "an encoder": (bert, class_loss, labeled_batch, "float32"),
        "LoRA on an int8 base": (qwen3_with_lora, next_token_loss, token_batch, "int8"),
    }
    make_model, loss, make_batch, base_dtype = cases[name]
    module = make_model(attn_implementation="sdpa")
    if not cooperative:
        job = trainable(module, loss, precision="float16", base_dtype=base_dtype)
        program = backend.compile(job, make_batch())
        assert parity_difference(program) < RELATIVE_TOLERANCE
        program.close()
        return
    job, program = new_program(device, module, loss, base_dtype=base_dtype)
    program.check(make_batch())
    actual = gradients(program, make_batch())
    reference_module = make_model()
    round_frozen_base(reference_module, base_dtype)
    reference = float16_gradients(reference_module, loss, make_batch())
    largest_norm = max(float(gradient.norm()) for gradient in reference.values())
    for number, block in enumerate(job.blocks):
        for tensor, elements in block.slices():
            expected = reference[tensor.name].numpy().reshape(-1)
            # Smaller gradients are mostly rounding errors.
            norm = max(float(np.linalg.norm(expected)), 1e-2 * largest_norm)
            difference = np.linalg.norm(actual[number][elements] - expected)
            assert difference <= 2 * RELATIVE_TOLERANCE * norm, tensor.name
    program.close()
