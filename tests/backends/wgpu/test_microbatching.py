"""Microbatches that are computed together have the bits of microbatches that are computed alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch, BlockGradient, Leaf, Loss, Trainable
from backends.wgpu.canonical.convention import Convention
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.lowering.estimate import FREE_SHARE, estimate
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.lowering.microbatching import add_slices, enlarge_for_microbatches
from backends.wgpu.lowering.plan import Plan
from backends.wgpu.program import CompiledProgram
from backends.wgpu.shaders.dispatch import Shader
from backends.wgpu.shaders.repeated import can_repeat, element_bytes, repeat_for_microbatches
from protocol.base.limits import INVOCATIONS_PER_DISPATCH
from tests.backends.wgpu import test_families as families
from tests.backends.wgpu.products import small_tiles
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


def compile_program(
    target, job, batch, microbatches: int, matmul=small_tiles, **options: Any
) -> CompiledProgram:
    """Compile a program that computes up to `microbatches` together.

    `options` are those of `KernelOptions`.
    """
    options = {"cooperative": True} | options
    kernel_options = KernelOptions(matmul=matmul, microbatches=microbatches, **options)
    program = CompiledProgram(target, job, kernel_options, adds_on_device=True)
    program.check(batch)
    return program


def subtree_items(program, leaves: list[Leaf]) -> list[Any]:
    """Return the items of a subtree, with values as bytes."""
    stream = program.gradients(leaves)
    assert len(leaves) == 1 or stream.sums is None, "the device adds the sums"
    return [
        (item.block, item.values.tobytes()) if isinstance(item, BlockGradient) else item
        for item in stream
    ]


def record_dispatch_counts(device, monkeypatch) -> list[int]:
    """Return a list that receives the number of dispatches of each later submission."""
    counts: list[int] = []
    run = device.run

    def counted_run(commands, copies=()):
        counts.append(len(commands.calls))
        return run(commands, copies)

    monkeypatch.setattr(device, "run", counted_run)
    return counts


def new_job(make_model, loss) -> Trainable:
    """Return a task with a new module."""
    return trainable(make_model(), loss)


def assert_same_bits(
    target, make_job, make_batch, matmul=small_tiles, microbatches: int = 4, **options: Any
) -> None:
    """Compute microbatches + 1 leaves one by one, and in a group that leaves one over."""
    leaves = [(make_batch(seed=leaf), 10 + leaf) for leaf in range(microbatches + 1)]
    results = []
    for count in (1, microbatches):
        program = compile_program(target, make_job(), leaves[0][0], count, matmul, **options)
        assert {placed.plan.microbatch_limit for placed in program._plans.values()} == {count}
        results.append(subtree_items(program, leaves))
        program.close()
    assert results[0] == results[1]


def test_grouped_microbatches_have_the_bits_of_single_ones(device, monkeypatch):
    torch.manual_seed(0)
    job = trainable(Mixer(), mixer_loss)
    leaves = [(mixer_batch(seed=leaf), 10 + leaf) for leaf in range(7)]
    leaves[5] = (mixer_batch(samples=0), 15)
    single, grouped = (compile_program(device, job, mixer_batch(), n) for n in (1, 4))
    (placed,) = grouped._plans.values()
    assert placed.plan.microbatch_limit == 4
    dispatch_counts = record_dispatch_counts(device, monkeypatch)
    for count in (1, 3, 7):
        assert subtree_items(grouped, leaves[:count]) == subtree_items(single, leaves[:count])
    dispatch_counts.clear()
    subtree_items(grouped, leaves[:4])
    assert sum(dispatch_counts) < 2 * len(placed.plan.dispatches), "dispatches of one group"
    with_nan = [(mixer_batch(seed=leaf), 10 + leaf) for leaf in range(4)]
    with_nan[2][0].arrays["y"][1, 2, 3] = np.nan
    *_, loss = grouped.gradients(with_nan)
    assert isinstance(loss, Loss)
    assert np.isnan(loss.loss_sum)
    for later_leaves in (leaves[:3], leaves):  # no NaN remains in the slices
        assert subtree_items(grouped, later_leaves) == subtree_items(single, later_leaves)
    for program in (single, grouped):
        program.close()


def test_microbatches_are_grouped_within_memory(device, monkeypatch):
    torch.manual_seed(0)
    job = trainable(Mixer(), mixer_loss)
    program = compile_program(device, job, mixer_batch(), 1)
    (plan,) = (placed.plan for placed in program._plans.values())
    single_estimate = program.estimates[-1]
    assert enlarge_for_microbatches(plan, 5, lambda _: True).microbatch_limit == 4, "a power of two"
    twice_the_memory = enlarge_for_microbatches(
        plan, 8, lambda candidate: sum(candidate.slots) <= 4 * sum(plan.slots)
    )
    assert twice_the_memory.microbatch_limit == 2
    assert enlarge_for_microbatches(plan, 8, lambda _: False) is plan
    grouped_estimate = estimate(add_slices(plan, 4), program._weights.nbytes())
    assert 4 * single_estimate.activations <= grouped_estimate.activations < grouped_estimate.total
    program.close()
    memory_bytes = int((single_estimate.total + 1000) / (1 - FREE_SHARE))
    monkeypatch.setattr(device, "adapter", replace(device.adapter, memory_bytes=memory_bytes))
    ungrouped = compile_program(device, job, mixer_batch(), 4)
    assert {placed.plan.microbatch_limit for placed in ungrouped._plans.values()} == {1}
    ungrouped.close()


def test_microbatches_with_large_or_unreadable_dispatches_are_not_grouped(device):
    """The median dispatch is too large, a grid is too deep, or a shader is not WGSL."""
    torch.manual_seed(0)
    program = compile_program(device, trainable(Mixer(), mixer_loss), mixer_batch(), 1)
    (plan,) = (placed.plan for placed in program._plans.values())
    program.close()
    first = plan.dispatches[0]
    many_invocations = replace(first, grid=(INVOCATIONS_PER_DISPATCH // 64, 1, 1))
    deep_grid = replace(first, grid=(1, 1, 40_000))  # twice the depth exceeds Vulkan's limit
    cpu_product = replace(first, shader=Shader("not WGSL, as a product of the CPU target", 3))
    assert microbatch_limit(replace(plan, dispatches=(first,))) == 8
    for dispatches in ((many_invocations,), (first, first, deep_grid), (cpu_product,)):
        assert microbatch_limit(replace(plan, dispatches=dispatches)) == 1


def microbatch_limit(plan: Plan) -> int:
    """Return how many of 8 microbatches a plan computes together, with unlimited memory."""
    return enlarge_for_microbatches(plan, 8, lambda _: True).microbatch_limit


KERNEL = """\
@group(0) @binding(0) var<storage, read> a: array<vec4<f16>>;
@group(0) @binding(1) var<storage, read> b0: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
fn a_four(i: u32) -> vec4f { return vec4f(a[b0[i / 4u]]); }
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
  out[id.x] = a_four(b0[id.x] + id.z)[b0[0]];
}
"""


def test_every_access_is_offset_to_the_slice_of_its_microbatch():
    shader = Shader(KERNEL, 3)
    assert can_repeat(KERNEL)
    assert not can_repeat(KERNEL.replace("b0[0]", "arrayLength(&b0)"))
    source = repeat_for_microbatches(shader, (512, 0, 256), 3).source
    assert "vec4f(a[microbatch * 64u + (b0[i / 4u])])" in source
    assert "out[microbatch * 64u + (id.x)] = a_four(b0[id.x] + id.z)[b0[0]];" in source
    assert "microbatch = microbatch_group.z / 3u;" in source
    assert "let id = vec3u(id_of_all.xy, id_of_all.z % 3u);" in source
    nested = repeat_for_microbatches(shader, (0, 256), 1).source
    assert "a[b0[microbatch * 64u + (i / 4u)]]" in nested


def test_element_sizes_of_wgsl_types():
    sizes = {"f32": 4, "u32": 4, "f16": 2, "vec4f": 16, "vec4<f16>": 8, "vec2h": 4, "u64": 8}
    assert {wgsl_type: element_bytes(wgsl_type) for wgsl_type in sizes} == sizes


def checkpointed_llama() -> nn.Module:
    module = llama(attention_dropout=0.1)
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return module.train()


MODELS: dict[str, Any] = {
    "llama": (llama, next_token_loss, token_batch),
    "llama with checkpointing": (checkpointed_llama, next_token_loss, token_batch),
    "bert with dropout": (lambda: bert(0.1), class_loss, labeled_batch),
    "lora": (qwen3_with_lora, next_token_loss, token_batch),
}


@pytest.mark.slow
@pytest.mark.parametrize("bindings", [8, 16])
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_same_bits(device, name, bindings):
    make_model, loss, make_batch = MODELS[name]
    assert_same_bits(device, partial(new_job, make_model, loss), make_batch, bindings=bindings)


@pytest.mark.slow
def test_kernels_of_software_devices_have_the_same_bits(device):
    """Some of these products read two float32 values as one 64-bit value."""
    make_job, matmul = partial(trainable, llama(), next_token_loss), MatmulTuner(device).shader
    assert_same_bits(device, make_job, token_batch, matmul, cooperative=False)


@pytest.mark.slow
def test_float16_has_the_same_bits(device):
    torch.manual_seed(0)
    make_job = partial(trainable, Mixer(), mixer_loss, precision="float16")
    assert_same_bits(device, make_job, mixer_batch, is_float16=True, microbatches=2)


@pytest.mark.slow
def test_canonical_kernels_have_the_same_bits(device):
    """Uses a device without the check for hidden names: functions of the canonical library may hide
    names of buffers."""
    from backends.wgpu.canonical.vulkan import CanonicalDevice
    from backends.wgpu.device.device import Device

    plain_device = Device(device.adapter)
    target = CanonicalDevice(plain_device, Convention(fused=False))
    for make_model, loss, make_batch in (MODELS["llama"], MODELS["bert with dropout"]):
        assert_same_bits(target, partial(new_job, make_model, loss), make_batch, canonical=True)
    plain_device.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", [*families.DECODERS, *families.ENCODERS])
def test_families_have_the_same_bits(device, family):
    is_decoder = family in families.DECODERS
    model_type, options = (families.DECODERS if is_decoder else families.ENCODERS)[family]
    module = families.build_model(model_type, options, "eager", is_decoder=is_decoder)
    loss = families.decoder_loss if is_decoder else class_loss

    def make_batch(seed: int) -> Batch:
        batch = families.padded_batch("left" if seed % 2 else "right", is_decoder=is_decoder)
        ids = np.roll(batch.arrays["input_ids"], seed, 0)
        return replace(batch, arrays={**batch.arrays, "input_ids": ids})

    assert_same_bits(
        device, partial(trainable, module, loss), make_batch, microbatches=2, bindings=16
    )
