"""Fewer dispatches with the same bits: merged kernels equal separate ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.program import CompiledProgram
from tests.backends.wgpu.products import small_tiles
from tests.backends.wgpu.small_models import (
    assert_like_the_cpu,
    bert,
    class_loss,
    gradients,
    labeled,
    llama,
    next_token_loss,
    text,
    trainable,
)

WIDE = {"hidden_size": 128, "intermediate_size": 160, "num_attention_heads": 2}
"""Rows that share a workgroup."""
ALONE, FEW, MANY = 0, 8, 16


class Block(nn.Module):
    """Products with biases, an activation and a residual, between norms; two products share an
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


def results(device, job, batch, bindings):
    """Return the gradients, and the number of dispatches."""
    program = CompiledProgram(
        device, job, Templates(True, small_tiles, bindings=bindings), adds_on_device=True
    )
    program.check(batch)
    values = gradients(program, batch)
    dispatches = sum(len(ready.plan.dispatches) for ready in program._plans.values())
    program.close()
    return values, dispatches


def test_merged_block_has_the_same_bits(device):
    torch.manual_seed(0)
    module = Block()
    draws = np.random.default_rng(0)
    arrays = {name: draws.normal(size=(2, 5, 128)).astype(np.float32) for name in "xy"}
    batch = Batch(arrays, 2.0)

    (separate, before), (merged, after) = (
        results(device, trainable(module, block_loss), batch, n) for n in (ALONE, FEW)
    )
    assert all(np.array_equal(merged[number], values) for number, values in separate.items())
    assert after < 0.7 * before
    assert_like_the_cpu(module, trainable(module, block_loss).blocks, block_loss, batch, merged)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_merged_kernels_equal_separate_kernels(device, kind):
    if kind == "decoder":
        module, loss, batch = llama(**WIDE, num_key_value_heads=1), next_token_loss, text()
    else:
        module, loss, batch = bert(dropout=0.1, **WIDE), class_loss, labeled()
    bits_by_name, counts = {}, {}
    for bindings in (ALONE, FEW, MANY):
        job = trainable(module, loss)
        bits_by_name[bindings], counts[bindings] = results(device, job, batch, bindings)
    for bindings in (FEW, MANY):
        for number, values in bits_by_name[ALONE].items():
            assert np.array_equal(bits_by_name[bindings][number], values)
    assert counts[MANY] <= counts[FEW] < 0.7 * counts[ALONE]
    if kind == "decoder":
        assert_like_the_cpu(module, job.blocks, loss, batch, bits_by_name[MANY])
