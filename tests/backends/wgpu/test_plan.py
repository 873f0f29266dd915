"""Plans: equal layers share shaders, and no value is overwritten before its last read."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from backends.wgpu.capture.attention import never_fuses
from backends.wgpu.capture.capture import capture_step
from backends.wgpu.lowering.layer_kernels import LayerKernels, lower_layer
from backends.wgpu.lowering.lowering import KernelOptions, lower
from backends.wgpu.lowering.plan import Plan, make_plan
from backends.wgpu.shaders.matmul.shader import matmul_shader
from tests.backends.wgpu.small_models import (
    bert,
    class_loss,
    labeled_batch,
    llama,
    next_token_loss,
    token_batch,
)
from worker.models.blocks import cut_into_blocks

DISPATCHES_PER_LAYER = 25
"""Limit for a decoder layer with fused attention, in forward and backward."""


def plan_for_gpu(module, loss, batch, *, is_fused: bool = False) -> Plan:
    """Plan a step with the kernels of a GPU, without a device; `is_fused` fuses attention."""
    names = [tensor.name for block in cut_into_blocks(module) for tensor in block.tensors]
    arrays = {name: torch.tensor(array) for name, array in batch.arrays.items()}
    bindings = 16 if is_fused else 8
    kernel_options = KernelOptions(cooperative=True, matmul=matmul_shader, bindings=bindings)
    capture = capture_step(
        module, loss, names, arrays, kernel_options.fuses if is_fused else never_fuses
    )
    kinds: dict[int, LayerKernels] = {}
    for kind in capture.kinds:
        if id(kind) not in kinds:
            kinds[id(kind)] = lower_layer(kind, (), kernel_options)
    values = [None] * (len(capture.tensors) + len(capture.arrays) + 1)
    outer = lower(capture.graph, values, (), kernel_options)
    groups = [[1 + number] for number in reversed(range(len(names)))]
    groups[-1].append(0)
    layers = [kinds[id(kind)] for kind in capture.kinds]
    return make_plan(capture, outer, layers, groups, kernel_options.merge)


def shader_sources(plan: Plan) -> set[str]:
    return {dispatch.shader.source for dispatch in plan.dispatches}


@cache
def llama_plan(layers: int) -> Plan:
    """Return a plan that tests share and must not change, because a capture is slow."""
    return plan_for_gpu(llama(layers=layers), next_token_loss, token_batch())


def test_a_deeper_model_needs_no_more_shaders():
    shallow, deep = llama_plan(2), llama_plan(6)
    assert shader_sources(deep) == shader_sources(shallow)
    per_layer = (len(deep.dispatches) - len(shallow.dispatches)) / 4
    assert per_layer < 45  # attention is not fused, and rows are too short for workgroup sums


def test_dispatches_of_a_decoder_layer_are_limited():
    wide_sizes = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}
    shallow, deep = (
        plan_for_gpu(llama(layers=n, **wide_sizes), next_token_loss, token_batch(), is_fused=True)
        for n in (2, 3)
    )
    assert len(deep.dispatches) - len(shallow.dispatches) <= DISPATCHES_PER_LAYER


@pytest.mark.slow
def test_layers_that_use_their_index_have_separate_shaders():
    """GPT-2 can divide a layer's attention scores by its index."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 32,
    }
    shader_sets = []
    for is_scaled in (False, True):
        config = transformers.GPT2Config(
            **sizes, scale_attn_by_inverse_layer_idx=is_scaled, bos_token_id=0, eos_token_id=0
        )
        torch.manual_seed(0)
        module = transformers.GPT2LMHeadModel(config)
        shader_sets.append(shader_sources(plan_for_gpu(module, next_token_loss, token_batch())))
    unscaled, scaled = shader_sets
    assert len(scaled) > len(unscaled)


def test_buffers_share_a_slot_only_if_their_lifetimes_are_disjoint():
    """Replays the plan: every read must find its buffer in the slot."""
    plan = plan_for_gpu(bert(dropout=0.1), class_loss, labeled_batch())
    slots = [location.slot for location in plan.locations]  # negative for inputs
    last_read: dict[int, int] = {}
    for index, dispatch in enumerate(plan.dispatches):
        for buffer in dispatch.buffers:
            last_read[buffer] = index
    for segment in plan.segments:
        for output in segment.outputs:
            output_buffer = plan.outputs[output]
            if output_buffer is not None:
                last_read[output_buffer] = max(last_read[output_buffer], segment.end - 1)
    buffer_by_slot: dict[int, int] = {}
    written_buffers: set[int] = set()
    for index, dispatch in enumerate(plan.dispatches):
        inputs = dispatch.buffers[: -len(dispatch.written)]
        for buffer in inputs:
            if slots[buffer] >= 0:
                assert buffer_by_slot[slots[buffer]] == buffer
        assert len({slots[buffer] for buffer in dispatch.written}) == len(dispatch.written)
        for buffer in dispatch.written:
            assert slots[buffer] >= 0, "a kernel writes an input"
            assert slots[buffer] not in {slots[read_buffer] for read_buffer in inputs}
            old_buffer = buffer_by_slot.get(slots[buffer])
            if old_buffer is not None and old_buffer != buffer:
                assert last_read[old_buffer] < index
            buffer_by_slot[slots[buffer]] = buffer
            written_buffers.add(buffer)
    assert len({slots[buffer] for buffer in written_buffers}) < len(written_buffers) / 2


def test_first_gradients_are_complete_in_the_first_half_of_the_plan():
    plan = llama_plan(6)
    segment_ends = [segment.end for segment in plan.segments]
    assert segment_ends == sorted(segment_ends)
    assert segment_ends[0] < 0.5 * len(plan.dispatches)
    assert segment_ends[-1] == len(plan.dispatches)
