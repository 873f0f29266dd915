"""Measure the host memory of a model with frozen layers, in a process that does nothing else."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from backends.base.interface import Batch, Trainable
from backends.wgpu.device.adapters import adapters
from backends.wgpu.device.device import Device
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from protocol.machine.allocator import keep_freed_memory
from tests.resident_memory import measured_growth
from worker.models.blocks import cut_into_blocks

WIDTH, LAYERS = 128, 3
LARGE_WIDTH, LARGE_LAYERS = 2048, 10


class FrozenLayers(nn.Module):
    """Frozen layers after one trained scale."""

    def __init__(self, width=WIDTH, layers=LAYERS):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
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


def trainable(module, base_dtype):
    blocks = cut_into_blocks(module)
    return Trainable(blocks, module, loss, evaluate, base_dtype=base_dtype)


def random_batch(width=WIDTH):
    x = np.random.default_rng(0).standard_normal((2, width)).astype(np.float32)
    return Batch({"x": x}, 2.0)


def compile_program(device, module, base_dtype, example):
    kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(
        device, trainable(module, base_dtype), kernel_options, adds_on_device=True
    )
    program.check(example)
    return program


def measure_growth(base_dtype: str) -> int:
    """Return by how many bytes this process grows when a large model moves to the device."""
    keep_freed_memory()  # as the worker does
    available = adapters()
    assert not isinstance(available, str), available
    device = Device(available[0])
    small = FrozenLayers(), random_batch()
    large = FrozenLayers(LARGE_WIDTH, LARGE_LAYERS), random_batch(LARGE_WIDTH)
    # The small model first: its growth includes imports and caches.
    for module, example in (small, large):
        with measured_growth() as growth:
            program = compile_program(device, module, base_dtype, example)
            list(program.gradients([(example, 0)]))
            program.evaluate(example)
        program.close()
    device.close()
    return growth.remaining_bytes
