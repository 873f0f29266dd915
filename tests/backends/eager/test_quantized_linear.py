"""Quantized frozen weights give the same bits as their values in float32."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch, BlockGradient, Trainable
from backends.eager import eager
from backends.eager.quantized_base import quantize_frozen_base
from backends.eager.quantized_linear import QuantizedLinear, QuantizedWeight, ScratchBuffer
from backends.quantization.frozen_base import round_frozen_base
from backends.quantization.quantize import dequantize, quantize
from protocol.spec.files.run_spec_file import load_run_spec
from protocol.spec.manifest import Block, TensorSpec
from tests.resident_memory import MIB, Growth, measured_growth
from tests.small_chat import write_chat_run
from tests.tested_backend import BACKEND
from worker.tasks.registry import build

CPU = torch.device("cpu")


@pytest.mark.parametrize("storage", ["bf16", "f16", "int8", "int4", "nf4", "q8_0", "q4_0"])
@pytest.mark.parametrize("shape", [(3, 8), (5, 64), (64, 192)])
def test_dequantizing_on_a_device_equals_numpy(storage, shape):
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    quantized = quantize(values, storage)
    dequantized = QuantizedWeight(quantized, CPU).dequantize_into(torch.empty(shape))
    assert dequantized.is_contiguous()
    assert np.array_equal(
        dequantized.numpy().view(np.uint32), dequantize(quantized).view(np.uint32)
    )


def compute_results(spec: Any) -> list[bytes]:
    """Return the bytes of gradients, loss and evaluation of a run's model."""
    task = build(spec)
    program = eager.EagerBackend(BACKEND).compile(task.trainable, task.batch([0, 1]))
    program.load([values + np.float32(0.01) for values in task.initial_parameters()])
    contents = [
        item.values.tobytes() if isinstance(item, BlockGradient) else repr(item).encode()
        for item in program.gradients([(task.batch([n, n + 1]), n) for n in (0, 2, 4)])
    ]
    contents.append(repr(program.evaluate(task.evaluation_batch(0))).encode())
    program.close()
    return contents


@pytest.mark.parametrize(
    ("base_dtype", "overrides"),
    [
        ("bfloat16", {}),
        ("bfloat16", {"precision": "bfloat16"}),
        ("float16", {}),
        ("float16", {"precision": "float16"}),
        ("int8", {}),
        ("int4", {"precision": "bfloat16"}),
        ("int4", {"gradient_checkpointing": True}),
        ("nf4", {}),
        ("q8_0", {}),
        ("q4_0", {"precision": "float16"}),
    ],
)
def test_quantized_base_has_the_bits_of_the_dequantized_base(
    tmp_path, monkeypatch, base_dtype, overrides
):
    run = write_chat_run(tmp_path)
    model = {"source": str(tmp_path / "model"), "base_dtype": base_dtype, **overrides}
    spec = load_run_spec(run, [f"model={json.dumps(model)}"])
    expected = compute_results(spec)
    monkeypatch.setattr(
        eager, "quantize_frozen_base", lambda module, dtype, _: round_frozen_base(module, dtype)
    )
    assert compute_results(spec) == expected


class TiedLayers(nn.Module):
    """Two frozen layers that share a weight, frozen attention, and a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.trained = nn.Linear(16, 16)
        for layer in (self.first, self.second, self.attention):
            layer.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(self.trained(x)))[None]
        out: torch.Tensor = self.attention(y, y, y)[0]
        return out


def test_layers_that_share_a_weight_share_the_quantized_weight():
    torch.manual_seed(0)
    rounded, quantized = TiedLayers(), TiedLayers()
    quantized.load_state_dict(rounded.state_dict())
    round_frozen_base(rounded, "int4")
    quantize_frozen_base(quantized, "int4", CPU)
    assert isinstance(quantized.first, QuantizedLinear)
    assert isinstance(quantized.second, QuantizedLinear)
    assert quantized.first.quantized_weight is quantized.second.quantized_weight
    assert not isinstance(quantized.attention.out_proj, QuantizedLinear)
    assert torch.equal(quantized.first.weight, rounded.first.weight)
    x = torch.randn(4, 16)
    results = []
    for module in (rounded, quantized):
        out = module(x)
        out.sum().backward()
        assert module.trained.weight.grad is not None
        results.append((out.detach(), module.trained.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class DeepModel(nn.Module):
    """A trained layer, then many frozen ones."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.trained = nn.Linear(8, width)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.layers.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.trained(x))
        return out


def test_conversion_again_in_backward_has_the_bits_of_torch_autocast(tmp_path, monkeypatch):
    run = write_chat_run(tmp_path)
    model = {"source": str(tmp_path / "model"), "precision": "bfloat16"}
    spec = load_run_spec(run, [f"model={json.dumps(model)}"])
    converted = compute_results(spec)
    monkeypatch.setattr(eager, "convert_again_in_backward", lambda *_: None)
    assert compute_results(spec) == converted


def test_weight_stored_in_the_compute_dtype_is_not_copied():
    quantized = quantize(np.ones((8, 64), np.float32), "bf16")
    weight, scratch = QuantizedWeight(quantized, CPU), ScratchBuffer(8 * 64, CPU)
    assert scratch.operand(weight, torch.bfloat16).data_ptr() == weight.matrix.data_ptr()
    assert scratch.operand(weight, torch.float16).data_ptr() != weight.matrix.data_ptr()


def growth_of_step(module: DeepModel, **options: Any) -> Growth:
    """Measure the memory growth of one microbatch."""
    tensors = tuple(
        TensorSpec(name=name, shape=tuple(parameter.shape))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    )
    trainable = Trainable(
        (Block(name="head", kind="block", tensors=tensors),), module,
        lambda m, arrays: (m(arrays["x"]) ** 2).sum(), **options,
    )  # fmt: skip
    batch = Batch({"x": np.ones((2, 8), np.float32)}, 2.0)
    program = eager.EagerBackend(BACKEND).compile(trainable, batch)
    with measured_growth() as growth:
        [*program.gradients([(batch, 0)])]
    program.close()
    return growth


def test_int4_base_takes_a_seventh_and_is_dequantized_layer_by_layer():
    """The 16 frozen layers take 64 MiB in float32."""
    module = DeepModel(16, 1024)
    assert growth_of_step(module, base_dtype="int4").peak_bytes < 64 * MIB / 2
    stored_bytes = sum(
        layer.quantized_weight.nbytes
        for layer in module.layers
        if isinstance(layer, QuantizedLinear)
    )
    assert stored_bytes < 64 * MIB / 7


def test_bfloat16_copies_of_a_float32_base_are_not_stored_for_backward():
    """The 16 frozen layers take 64 MiB in float32; their bfloat16 copies would take 32 MiB."""
    assert growth_of_step(DeepModel(16, 1024), precision="bfloat16").peak_bytes < 64 * MIB / 4
