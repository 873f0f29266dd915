"""Merged kernels give the bits of separate kernels, in fewer dispatches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from tests.backends.wgpu.products import small_tiles
from tests.backends.wgpu.small_models import (
    assert_equals_cpu,
    bert,
    class_loss,
    gradients,
    labeled_batch,
    llama,
    next_token_loss,
    token_batch,
    trainable,
)

WIDE = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 2}
"""Sizes with rows so long that a workgroup shares each."""
NOT_MERGED, MIN_BINDINGS, GPU_BINDINGS = 0, 8, 16
"""Bindings per shader: too few for merged kernels, those of every adapter, and those of GPUs."""


class Block(nn.Module):
    """A norm, products with biases, an activation, a residual and a softmax; two products share an
    input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.up, self.gate = nn.Linear(128, 20), nn.Linear(128, 20)
        self.down = nn.Linear(20, 128, bias=False)

    def forward(self, x):
        y = self.norm(x)
        y = nn.functional.gelu(self.up(y)) * self.gate(y)
        return torch.softmax(self.down(y) + x, -1)


def block_loss(module, arrays):
    return (module(arrays["x"]) * arrays["y"]).sum()


def gradients_and_dispatches(device, job, batch, bindings):
    """Return the gradients, and the number of dispatches of a step."""
    program = CompiledProgram(
        device, job, KernelOptions(True, small_tiles, bindings=bindings), adds_on_device=True
    )
    program.check(batch)
    values = gradients(program, batch)
    dispatches = sum(len(placed.plan.dispatches) for placed in program._plans.values())
    program.close()
    return values, dispatches


def test_merged_block_has_the_same_bits(device):
    torch.manual_seed(0)
    module = Block()
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(2, 5, 128)).astype(np.float32) for name in "xy"}
    batch = Batch(arrays, 2.0)
    (separate, separate_count), (merged, merged_count) = (
        gradients_and_dispatches(device, trainable(module, block_loss), batch, bindings)
        for bindings in (NOT_MERGED, MIN_BINDINGS)
    )
    assert all(np.array_equal(merged[number], values) for number, values in separate.items())
    assert merged_count < 0.7 * separate_count
    assert_equals_cpu(module, trainable(module, block_loss).blocks, block_loss, batch, merged)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["decoder", "encoder"])
def test_merged_models_have_the_same_bits(device, architecture):
    if architecture == "decoder":
        module, loss, batch = llama(**WIDE, num_key_value_heads=1), next_token_loss, token_batch()
    else:
        module, loss, batch = bert(dropout=0.1, **WIDE), class_loss, labeled_batch()
    results, counts = {}, {}
    for bindings in (NOT_MERGED, MIN_BINDINGS, GPU_BINDINGS):
        job = trainable(module, loss)
        results[bindings], counts[bindings] = gradients_and_dispatches(device, job, batch, bindings)
    for bindings in (MIN_BINDINGS, GPU_BINDINGS):
        for number, values in results[NOT_MERGED].items():
            assert np.array_equal(results[bindings][number], values)
    assert counts[GPU_BINDINGS] <= counts[MIN_BINDINGS] < 0.7 * counts[NOT_MERGED]
    if architecture == "decoder":  # the encoder has dropout, whose masks are not torch's
        assert_equals_cpu(module, job.blocks, loss, batch, results[GPU_BINDINGS])
