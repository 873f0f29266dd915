"""A frozen base leaves main memory when the device has it, and no bit of a result changes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from backends.eager import EagerBackend
from backends.interface import Batch, Trainable
from backends.wgpu.lowering import Templates
from backends.wgpu.matmul_tuning import MatmulTuner
from backends.wgpu.program import VulkanProgram
from protocol.errors import SamestepError
from tests.backends.wgpu.small_models import gradients
from tests.resident_memory import MIB, measured_growth
from worker.blocks import cut_into_blocks

WIDTH, LAYERS = 2048, 10
LAYER_BYTES = 4 * WIDTH * WIDTH
ROOM_BYTES = 112 * MIB
"""For activations and staged uploads; less than the 160 MiB of the float32 base."""


class Model(nn.Module):
    """Frozen layers of 16 MiB each, and little that is trained."""

    def __init__(self, width=WIDTH):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.layers.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss(module, arrays):
    return (module(arrays["x"]) ** 2).sum()


def evaluate(module, arrays):
    return {"loss": float(loss(module, arrays))}


def job(module, base_dtype):
    blocks = cut_into_blocks(module)
    return Trainable(blocks, module, loss, evaluate, base_dtype=base_dtype)


def batch(width=WIDTH):
    x = np.random.default_rng(0).standard_normal((2, width)).astype(np.float32)
    return Batch({"x": x}, 2.0)


def first_use(device, template, base_dtype):
    """What is imported and kept by whatever computes first is none of the model's."""
    program = VulkanProgram(device, job(Model(64), base_dtype), template, adds=True)
    gradients(program, batch(64))
    program.evaluate(batch(64))
    program.close()


@pytest.mark.parametrize(("base_dtype", "bits"), [("float32", 32), ("int8", 8.5), ("int4", 4.5)])
def test_main_memory_holds_the_base_once_as_it_is_stored(device, base_dtype, bits):
    if not device.adapter.software:
        pytest.skip("what a card holds is not seen here")
    module = Model()
    taken = copy.deepcopy(module)
    template = Templates(cooperative=False, matmul=MatmulTuner(device).shader)
    first_use(device, template, base_dtype)
    with measured_growth() as growth:
        program = VulkanProgram(device, job(taken, base_dtype), template, adds=True)
        program.check(batch())
        found, sums = gradients(program, batch()), program.evaluate(batch())
    # On a software device the stored base is in main memory too, and comes on top of what was.
    stored = LAYERS * LAYER_BYTES * bits / 32
    assert growth.kept_bytes < stored - LAYERS * LAYER_BYTES + ROOM_BYTES
    frozen = [p for p in taken.parameters() if not p.requires_grad]
    assert len(frozen) == 2 * LAYERS
    assert all(parameter.isnan().all() for parameter in frozen)
    assert taken.scale.isfinite().all()

    reference = EagerBackend("cpu").compile(job(module, base_dtype), batch())
    expected = gradients(reference, batch())
    assert sums["loss"] == pytest.approx(reference.evaluate(batch())["loss"], rel=1e-5)
    reference.close()
    for block, values in expected.items():
        assert np.linalg.norm(found[block] - values) <= 1e-5 * np.linalg.norm(values)
    again = gradients(program, batch())
    assert all(np.array_equal(again[block], found[block]) for block in found)
    program.close()

    with pytest.raises(SamestepError, match=r"'layers.0.weight' were let go of .* build the task"):
        VulkanProgram(device, job(taken, base_dtype), template, adds=True)
