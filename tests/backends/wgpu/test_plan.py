"""Plans: layers share their shaders, and no buffer is written while its value is still wanted."""

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
"""Of a decoder, forward and backward, all of it trained."""


def planned(module, loss, batch, *, fused: bool = False) -> Plan:
    """As a program does it, without a device."""
    names = [tensor.name for block in cut_into_blocks(module) for tensor in block.tensors]
    arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    bindings = 16 if fused else 8  # cards have them
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
    return make_plan(capture, outer, layers, groups, template.merged)


def shaders(plan: Plan) -> set[str]:
    return {dispatch.shader.source for dispatch in plan.dispatches}


@cache
def of_a_llama(layers: int) -> Plan:
    """For tests that leave it as it is: a capture takes long."""
    return planned(llama(layers=layers), next_token_loss, text())


def test_depth_adds_no_shader():
    shallow, deep = of_a_llama(2), of_a_llama(6)
    assert shaders(deep) == shaders(shallow)
    per_layer = (len(deep.dispatches) - len(shallow.dispatches)) / 4
    assert per_layer < 45  # attention written out, rows too short to be shared


def test_a_decoder_layer_takes_few_dispatches():
    wide = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    few, more = (
        planned(llama(layers=n, **wide), next_token_loss, text(), fused=True) for n in (2, 3)
    )
    assert len(more.dispatches) - len(few.dispatches) <= DISPATCHES_PER_LAYER


@pytest.mark.slow
def test_layers_that_compute_otherwise_are_distinguished():
    """GPT-2 can scale a layer's attention by its number."""
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


def test_memory_is_shared_only_between_values_of_different_times():
    """Replays the plan: every read finds the value that was written for it."""
    plan = planned(bert(dropout=0.1), class_loss, labeled())
    slots = [place.slot for place in plan.locations]
    last_read: dict[int, int] = {}
    for at, dispatch in enumerate(plan.dispatches):
        for number in dispatch.buffers:
            last_read[number] = at
    for segment in plan.segments:
        output_slots = [plan.outputs[output] for output in segment.outputs]
        for number in (number for number in output_slots if number is not None):
            last_read[number] = max(last_read[number], segment.end - 1)
    holds: dict[int, int] = {}
    written: set[int] = set()
    for at, dispatch in enumerate(plan.dispatches):
        reads = dispatch.buffers[: -len(dispatch.written)]
        for number in reads:
            if slots[number] >= 0:
                assert holds[slots[number]] == number
        assert len({slots[output] for output in dispatch.written}) == len(dispatch.written)
        for output in dispatch.written:
            assert slots[output] >= 0, "an input was written"
            assert slots[output] not in {slots[number] for number in reads}
            before = holds.get(slots[output])
            if before is not None and before != output:
                assert last_read[before] < at
            holds[slots[output]] = output
            written.add(output)
    assert len({slots[number] for number in written}) < len(written) / 2


def test_the_first_blocks_gradients_are_complete_long_before_the_last():
    plan = of_a_llama(6)
    ends = [segment.end for segment in plan.segments]
    assert ends == sorted(ends)
    assert ends[0] < 0.5 * len(plan.dispatches)
    assert ends[-1] == len(plan.dispatches)
