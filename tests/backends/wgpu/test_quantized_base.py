"""A quantized frozen base takes less memory, and gives the gradients of the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch, Loss, Trainable
from backends.eager.eager import EagerBackend
from backends.quantization.quantize import GROUP, quantize, stored_bytes
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.lowering.estimate import Estimate, refuse_insufficient_memory
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from backends.wgpu.weights.quantized_base import QuantizedBase
from protocol.base.errors import SamestepError
from worker.models.blocks import cut_into_blocks

WIDTH, RANK, SAMPLES = 64, 4, 6


class AdaptedLayer(nn.Module):
    """A frozen linear layer in parallel with a trained low-rank path."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


class AdaptedModel(nn.Module):
    """Three adapted layers and a trained head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([AdaptedLayer() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(module, arrays):
    return ((module(arrays["x"]) - arrays["y"]) ** 2).sum()


def trainable(module, base_dtype):
    return Trainable(cut_into_blocks(module), module, loss, base_dtype=base_dtype)


def loss_and_gradients(program, batch):
    """Return the loss sum, and the gradients in the order of arrival."""
    items = list(program.gradients([(batch, 0)]))
    assert isinstance(items[-1], Loss)
    return items[-1].loss_sum, [item.values for item in items[:-1]]


@pytest.mark.parametrize("base_dtype", ["bfloat16", "float16", "int8", "int4", "nf4", "q4_0"])
def test_gradients_equal_those_of_the_cpu_with_the_same_weights(device, base_dtype):
    torch.manual_seed(5)
    module = AdaptedModel()
    rng = np.random.default_rng(2)
    arrays = {
        "x": rng.standard_normal((SAMPLES, WIDTH)).astype(np.float32),
        "y": rng.standard_normal((SAMPLES, 1)).astype(np.float32),
    }
    batch = Batch(arrays, SAMPLES)
    float32_program = EagerBackend("cpu").compile(
        trainable(copy.deepcopy(module), "float32"), batch
    )
    float32_loss, _ = loss_and_gradients(float32_program, batch)
    reference = EagerBackend("cpu").compile(trainable(copy.deepcopy(module), base_dtype), batch)
    kernel_options = KernelOptions(not device.adapter.software, MatmulTuner(device).shader)
    program = CompiledProgram(
        device, trainable(module, base_dtype), kernel_options, adds_on_device=True
    )
    program.check(batch)
    expected_loss, expected_gradients = loss_and_gradients(reference, batch)
    actual_loss, actual_gradients = loss_and_gradients(program, batch)
    program.close()
    assert actual_loss == pytest.approx(expected_loss, rel=1e-5)
    for actual, expected in zip(actual_gradients, expected_gradients, strict=True):
        assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)
    assert float32_loss != pytest.approx(expected_loss, rel=1e-5), "quantization has an effect"
    (estimate,) = program.estimates
    float32_bytes = sum(p.numel() * 4 for p in module.parameters())
    storage = {"bfloat16": "bf16", "float16": "f16"}.get(base_dtype, base_dtype)
    saved_bytes = 3 * (WIDTH * WIDTH * 4 - stored_bytes(WIDTH, WIDTH, storage))
    assert GROUP == WIDTH, "a row is one group"
    assert estimate.weights == float32_bytes - saved_bytes


def test_a_16_bit_base_is_not_copied_before_it_is_quantized():
    """The quantized words can be taken once."""
    frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
    module = nn.Sequential(frozen, nn.Linear(WIDTH, 1))
    values = frozen.weight.detach().bfloat16()
    frozen.weight.data = values
    base = QuantizedBase(module, "int4")
    source = base._sources["0.weight"]
    assert source.data_ptr() == values.data_ptr(), "not copied before the upload"
    assert frozen.weight.dtype == torch.float32
    assert frozen.weight.untyped_storage().nbytes() == 4, (
        "one expanded element: a trace needs only shape and dtype"
    )
    expected = quantize(values.float().numpy(), "int4").pack()
    packed_words = base.take_words("0.weight")
    assert packed_words is not None
    assert packed_words.tobytes() == expected.tobytes()
    assert base.take_words("0.weight") is None


GIB = 2**30


@pytest.mark.parametrize(
    ("memory_bytes", "largest_bytes", "message"),
    [
        (8 * GIB, 4 * GIB, None),
        (0, 4 * GIB, None),
        (6 * GIB, 4 * GIB, r"at most 5.70 GiB for 'a card', .* 819.2 MiB too much; lower"),
        (8 * GIB, 2 * GIB, r"at most 2.00 GiB for 'a card', got 3.00 GiB for 'embedding'"),
    ],
)
def test_refusal_of_insufficient_memory_states_the_sizes(memory_bytes, largest_bytes, message):
    """A memory of 0 is unknown, and only the size of buffers is checked."""
    estimates = [
        Estimate(GIB, GIB, 0, (GIB // 2, "head")),
        Estimate(5 * GIB, GIB, GIB // 2, (3 * GIB, "embedding")),
    ]
    if message is None:
        refuse_insufficient_memory(estimates, memory_bytes, largest_bytes, "a card")
        return
    with pytest.raises(SamestepError, match=message):
        refuse_insufficient_memory(estimates, memory_bytes, largest_bytes, "a card")
