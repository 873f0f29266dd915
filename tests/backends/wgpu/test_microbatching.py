"""Several microbatches in one submission: each has the bits that it has alone."""

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
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.lowering.microbatching import add_slices, enlarge_for_microbatches
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
    labeled,
    llama,
    mixed,
    mixer_loss,
    next_token_loss,
    qwen3_with_lora,
    text,
    trainable,
)


def compiled(  # noqa: PLR0917
    target, job, batch, at_once: int, matmul=small_tiles, largest_bytes=None, **changes: Any
) -> CompiledProgram:
    changes = {"cooperative": True} | changes
    template = Templates(matmul=matmul, microbatches=at_once, **changes)
    program = CompiledProgram(
        target, job, template, adds_on_device=True, largest_bytes=largest_bytes
    )
    program.check(batch)
    return program


def subtree(program, leaves: list[Leaf]) -> list[Any]:
    """Return its items, with the bits of their values."""
    stream = program.gradients(leaves)
    assert len(leaves) == 1 or stream.sums is None, "added on the device"
    return [
        (item.block, item.values.tobytes()) if isinstance(item, BlockGradient) else item
        for item in stream
    ]


def split_into_dispatches(device, monkeypatch) -> list[int]:
    """Record how many dispatches each submission has, from now on."""
    counts: list[int] = []
    run = device.run

    def counted(commands, copies=()):
        counts.append(len(commands.calls))
        return run(commands, copies)

    monkeypatch.setattr(device, "run", counted)
    return counts


def fresh_job(model, loss) -> Trainable:
    """Build a new module each time, because a device takes over its frozen weights."""
    return trainable(model(), loss)


def same_bits(
    target, make_job, make_batch, matmul=small_tiles, room: int = 4, **changes: Any
) -> None:
    """Compute subtrees one microbatch at a time, and `room` at once; one remains."""
    leaves = [(make_batch(seed=leaf), 10 + leaf) for leaf in range(room + 1)]
    results = []
    for at_once in (1, room):
        program = compiled(target, make_job(), leaves[0][0], at_once, matmul, **changes)
        assert {ready.plan.microbatch_limit for ready in program._plans.values()} == {at_once}
        results.append(subtree(program, leaves))
        program.close()
    assert results[0] == results[1]


def test_microbatches_have_the_bits_that_each_has_alone(device, monkeypatch):
    torch.manual_seed(0)
    job = trainable(Mixer(), mixer_loss)
    leaves = [(mixed(seed=leaf), 10 + leaf) for leaf in range(7)]
    leaves[5] = (mixed(samples=0), 15)
    alone, four = (compiled(device, job, mixed(), n) for n in (1, 4))
    (ready,) = four._plans.values()
    assert ready.plan.microbatch_limit == 4
    counts = split_into_dispatches(device, monkeypatch)
    for count in (1, 3, 7):
        assert subtree(four, leaves[:count]) == subtree(alone, leaves[:count]), count
    counts.clear()
    subtree(four, leaves[:4])
    assert sum(counts) < 2 * len(ready.plan.dispatches)
    with_nan = [(mixed(seed=leaf), 10 + leaf) for leaf in range(4)]
    with_nan[2][0].arrays["y"][1, 2, 3] = np.nan
    *_, last = four.gradients(with_nan)
    assert isinstance(last, Loss)
    assert np.isnan(last.loss_sum)
    for subtrees in (leaves[:3], leaves):  # a NaN of one microbatch must not reach another's slice
        assert subtree(four, subtrees) == subtree(alone, subtrees)
    for program in (alone, four):
        program.close()


def test_large_microbatches_are_computed_one_by_one(device, monkeypatch):
    torch.manual_seed(0)
    job = trainable(Mixer(), mixer_loss)
    program = compiled(device, job, mixed(), 1)
    (plan,) = (ready.plan for ready in program._plans.values())
    memory_bytes = program.estimates[-1].total
    assert enlarge_for_microbatches(plan, 5, lambda _: True).microbatch_limit == 4
    assert (
        enlarge_for_microbatches(
            plan, 8, lambda candidate: sum(candidate.slots) <= 4 * sum(plan.slots)
        ).microbatch_limit
        == 2
    )
    assert enlarge_for_microbatches(plan, 8, lambda _: False) is plan
    (repeat,) = (estimate(add_slices(plan, 4), program._weights.nbytes()),)
    assert 4 * program.estimates[-1].activations <= repeat.activations < repeat.total
    program.close()
    room = int((memory_bytes + 1000) / (1 - FREE_SHARE))
    monkeypatch.setattr(device, "adapter", replace(device.adapter, memory_bytes=room))
    without_batching = compiled(device, job, mixed(), 4)
    assert {ready.plan.microbatch_limit for ready in without_batching._plans.values()} == {1}
    without_batching.close()
    large_dispatch = replace(plan.dispatches[0], grid=(INVOCATIONS_PER_DISPATCH // 64, 1, 1))
    assert (
        enlarge_for_microbatches(
            replace(plan, dispatches=(large_dispatch,)), 8, lambda _: True
        ).microbatch_limit
        == 1
    )
    deep_dispatch = replace(plan.dispatches[0], grid=(1, 1, 20_000))
    assert (
        enlarge_for_microbatches(
            replace(plan, dispatches=(deep_dispatch,) * 2), 8, lambda _: True
        ).microbatch_limit
        == 1
    )
    unread = replace(plan.dispatches[0], shader=Shader("a product of the processor's", 3))
    assert (
        enlarge_for_microbatches(
            replace(plan, dispatches=(unread,)), 8, lambda _: True
        ).microbatch_limit
        == 1
    )


SOURCE = """\
@group(0) @binding(0) var<storage, read> a: array<vec4<f16>>;
@group(0) @binding(1) var<storage, read> b0: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
fn a_four(i: u32) -> vec4f { return vec4f(a[b0[i / 4u]]); }
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
  out[id.x] = a_four(b0[id.x] + id.z)[b0[0]];
}
"""


def test_index_is_offset_by_its_slice():
    shader = Shader(SOURCE, 3)
    assert can_repeat(SOURCE)
    assert not can_repeat(SOURCE.replace("b0[0]", "arrayLength(&b0)"))
    text = repeat_for_microbatches(shader, (512, 0, 256), 3).source
    assert "vec4f(a[microbatch * 64u + (b0[i / 4u])])" in text
    assert "out[microbatch * 64u + (id.x)] = a_four(b0[id.x] + id.z)[b0[0]];" in text
    assert "microbatch = microbatch_group.z / 3u;" in text
    assert "let id = vec3u(id_of_all.xy, id_of_all.z % 3u);" in text
    nested = repeat_for_microbatches(shader, (0, 256), 1).source
    assert "a[b0[microbatch * 64u + (i / 4u)]]" in nested
    kinds = {"f32": 4, "u32": 4, "f16": 2, "vec4f": 16, "vec4<f16>": 8, "vec2h": 4, "u64": 8}
    assert {kind: element_bytes(kind) for kind in kinds} == kinds


def checkpointed() -> nn.Module:
    module = llama(attention_dropout=0.1)
    module.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return module.train()


MODELS: dict[str, Any] = {
    "llama": (llama, next_token_loss, text),
    "its layers computed twice": (checkpointed, next_token_loss, text),
    "bert with dropout": (lambda: bert(0.1), class_loss, labeled),
    "lora": (qwen3_with_lora, next_token_loss, text),
}


@pytest.mark.slow
@pytest.mark.parametrize("bindings", [8, 16])
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_same_bits(device, name, bindings):
    module, loss, batch = MODELS[name]
    same_bits(device, partial(fresh_job, module, loss), batch, bindings=bindings)


@pytest.mark.slow
def test_kernels_of_software_devices_have_the_same_bits(device):
    """Some products read two numbers as one of 64 bits."""
    make_job, matmul = partial(trainable, llama(), next_token_loss), MatmulTuner(device).shader
    same_bits(device, make_job, text, matmul, cooperative=False)


@pytest.mark.slow
def test_float16_has_the_same_bits(device):
    torch.manual_seed(0)
    make_job = partial(trainable, Mixer(), mixer_loss, precision="float16")
    same_bits(device, make_job, mixed, is_float16=True, room=2)


@pytest.mark.slow
def test_canonical_kernels_have_the_same_bits(device):
    """On a device that lets functions of the canonical library hide names of buffers."""
    from backends.wgpu.canonical.vulkan import CanonicalDevice
    from backends.wgpu.device.device import Device

    plain_device = Device(device.adapter)
    target = CanonicalDevice(plain_device, Convention(fused=False))
    for module, loss, batch in (MODELS["llama"], MODELS["bert with dropout"]):
        same_bits(target, partial(fresh_job, module, loss), batch, canonical=True)
    plain_device.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", [*families.DECODERS, *families.ENCODERS])
def test_families_have_the_same_bits(device, family):
    decoder = family in families.DECODERS
    kind, sizes = (families.DECODERS if decoder else families.ENCODERS)[family]
    module = families.model(kind, sizes, "eager", decoder=decoder)
    loss = families.decoder_loss if decoder else class_loss

    def batch(seed: int) -> Batch:
        padded = families.padded("left" if seed % 2 else "right", decoder=decoder)
        ids = padded.arrays["input_ids"]
        return replace(padded, arrays={**padded.arrays, "input_ids": np.roll(ids, seed, 0)})

    same_bits(device, partial(trainable, module, loss), batch, room=2, bindings=16)
