"""Plans: layers share shaders, and no buffer is overwritten while its value is still needed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from backends.wgpu.capture.attention import never_fuses
from backends.wgpu.capture.capture import capture_step
from backends.wgpu.lowering.layer_kernels import LayerKernels, lower_layer
from backends.wgpu.lowering.lowering import Templates, lower
from backends.wgpu.lowering.plan import Plan, make_plan
from backends.wgpu.shaders.matmul.shader import matmul_shader
from tests.backends.wgpu.small_models import (
    bert,
    class_loss,
    labeled,
    llama,
    next_token_loss,
    text,
)
from worker.models.blocks import cut_into_blocks

DISPATCHES_PER_LAYER = 25
"""Sizes of a decoder that is trained forward and backward in full."""


def planned(module, loss, batch, *, fused: bool = False) -> Plan:
    """Plan as a program does, without a device."""
    names = [tensor.name for block in cut_into_blocks(module) for tensor in block.tensors]
    arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    bindings = 16 if fused else 8  # as on cards
    template = Templates(cooperative=True, matmul=matmul_shader, bindings=bindings)
    capture = capture_step(module, loss, names, arrays, template.fuses if fused else never_fuses)
    kinds: dict[int, LayerKernels] = {}
    for kind in capture.kinds:
        if id(kind) not in kinds:
            kinds[id(kind)] = lower_layer(kind, (), template)
    values = [None] * (len(capture.tensors) + len(capture.arrays) + 1)
    outer = lower(capture.graph, values, (), template)
    groups = [[1 + number] for number in reversed(range(len(names)))]
    groups[-1].append(0)
    layers = [kinds[id(kind)] for kind in capture.kinds]
    return make_plan(capture, outer, layers, groups, template.merge)


def shaders(plan: Plan) -> set[str]:
    return {dispatch.shader.source for dispatch in plan.dispatches}


@cache
def of_a_llama(layers: int) -> Plan:
    """Shared by tests that do not change it, because a capture is slow."""
    return planned(llama(layers=layers), next_token_loss, text())


def test_depth_adds_no_shaders():
    shallow, deep = of_a_llama(2), of_a_llama(6)
    assert shaders(deep) == shaders(shallow)
    per_layer = (len(deep.dispatches) - len(shallow.dispatches)) / 4
    assert per_layer < 45  # unfused attention, rows too short to share a workgroup


def test_a_decoder_layer_takes_few_dispatches():
    wide_sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    shallow, deep = (
        planned(llama(layers=n, **wide_sizes), next_token_loss, text(), fused=True) for n in (2, 3)
    )
    assert len(deep.dispatches) - len(shallow.dispatches) <= DISPATCHES_PER_LAYER


@pytest.mark.slow
def test_different_layers_are_distinguished():
    """GPT-2 can scale a layer's attention by its index."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 32,
    }
    shader_sets = []
    for scaled in (False, True):
        config = transformers.GPT2Config(
            **sizes, scale_attn_by_inverse_layer_idx=scaled, bos_token_id=0, eos_token_id=0
        )
        torch.manual_seed(0)
        module = transformers.GPT2LMHeadModel(config)
        shader_sets.append(shaders(planned(module, next_token_loss, text())))
    plain, scaled_ones = shader_sets
    assert len(scaled_ones) > len(plain)


def test_memory_is_shared_only_between_disjoint_lifetimes():
    """Replay the plan: every read must find the value that was written for it."""
    plan = planned(bert(dropout=0.1), class_loss, labeled())
    slots = [location.slot for location in plan.locations]
    last_read: dict[int, int] = {}
    for offset, dispatch in enumerate(plan.dispatches):
        for number in dispatch.buffers:
            last_read[number] = offset
    for segment in plan.segments:
        output_slots = [plan.outputs[output] for output in segment.outputs]
        for number in (number for number in output_slots if number is not None):
            last_read[number] = max(last_read[number], segment.end - 1)
    value_by_slot: dict[int, int] = {}
    written_slots: set[int] = set()
    for offset, dispatch in enumerate(plan.dispatches):
        inputs = dispatch.buffers[: -len(dispatch.written)]
        for number in inputs:
            if slots[number] >= 0:
                assert value_by_slot[slots[number]] == number
        assert len({slots[output] for output in dispatch.written}) == len(dispatch.written)
        for output in dispatch.written:
            assert slots[output] >= 0, "an input was written"
            assert slots[output] not in {slots[number] for number in inputs}
            before = value_by_slot.get(slots[output])
            if before is not None and before != output:
                assert last_read[before] < offset
            value_by_slot[slots[output]] = output
            written_slots.add(output)
    assert len({slots[number] for number in written_slots}) < len(written_slots) / 2


def test_first_gradients_are_complete_long_before_the_last():
    plan = of_a_llama(6)
    segment_ends = [segment.end for segment in plan.segments]
    assert segment_ends == sorted(segment_ends)
    assert segment_ends[0] < 0.5 * len(plan.dispatches)
    assert segment_ends[-1] == len(plan.dispatches)
