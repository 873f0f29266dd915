"""Which models fit into a device's memory, checked against a real model, and the report lines."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from backends.base.interface import DeviceInfo
from backends.quantization.frozen_base import frozen_base
from backends.quantization.quantize import STORAGE, stored_bytes
from protocol.machine.memory import Memory
from worker.cli import app
from worker.device_table import (
    BASE_DTYPES,
    base_parameters,
    bytes_per_parameter,
    device_document,
    device_lines,
    without_swap,
)

GIB = 2**30
FITTING = (
    "  fits with LoRA: a base of about 28 billion parameters in float32, "
    "53 in bfloat16 or float16, 91 in int8, 146 in int4 or nf4, 87 in q8_0, 136 in q4_0"
)


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    """Llama 3 8B, without its values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("base_dtype", BASE_DTYPES)
def test_rule_matches_the_memory_of_a_model(llama, base_dtype):
    base_names = frozen_base(llama)
    total_bytes = 0
    for name, parameter in llama.named_parameters():
        rows, columns = parameter.shape if name in base_names else (1, parameter.numel())
        total_bytes += stored_bytes(
            rows, columns, STORAGE[base_dtype if name in base_names else "float32"]
        )
    count = sum(parameter.numel() for parameter in llama.parameters())
    assert count == 8_030_261_248
    assert bytes_per_parameter(base_dtype) == pytest.approx(total_bytes / count, rel=0.02)


def test_rule_leaves_a_quarter_free():
    candidates = base_parameters(24 * GIB)
    assert {name: round(count / 1e9, 1) for name, count in candidates.items()} == {
        "float32": 4.8, "bfloat16": 9.1, "float16": 9.1, "int8": 15.5, "int4": 24.9, "nf4": 24.9,
        "q8_0": 14.8, "q4_0": 23.1,
    }  # fmt: skip


def test_unknown_memory_is_omitted():
    """The number of parameters is also omitted for an unusable device."""
    card = DeviceInfo("cuda", "Card", True, "", 1, 141 * GIB)
    unknown = DeviceInfo("vulkan", "Other", True, "")
    absent = DeviceInfo("cuda", "CUDA", False, "no driver", memory_bytes=GIB)
    assert [*device_lines([card, unknown, absent])] == [
        "cuda 1: Card, 141.00 GiB: usable",
        FITTING,
        "vulkan 0: Other: usable",
        "cuda 0: CUDA, 1.00 GiB: not usable: no driver",
    ]
    rows = device_document([card, unknown, absent])["devices"]
    assert [row["base_parameters"] != {} for row in rows] == [True, False, False]
    assert [row["own_memory"] for row in rows] == [True, False, True]


def test_json_is_one_document(monkeypatch):
    rows = [DeviceInfo("cpu", "CPU", True, "")]
    monkeypatch.setattr("backends.registry.devices", lambda: rows)
    [row] = json.loads(CliRunner().invoke(app, ["devices", "--json"]).stdout)["devices"]
    assert (row["backend"], row["own_memory"]) == ("cpu", False)
    assert row["base_parameters"]["float32"] == row["memory_bytes"] * 3 // 16
    assert [*row["base_parameters"]] == [*BASE_DTYPES]


def test_json_with_trials_is_one_document(monkeypatch):
    rows = [DeviceInfo("cpu", "CPU", True, ""), DeviceInfo("cuda", "CUDA", False, "no driver")]
    monkeypatch.setattr("backends.registry.devices", lambda: rows)
    monkeypatch.setattr(
        "backends.canonical_devices.describe_canonical_support", lambda info: [info.name]
    )
    output = CliRunner().invoke(app, ["devices", "--canonical", "--json"]).stdout
    assert [row["canonical"] for row in json.loads(output)["devices"]] == [["CPU"], []]
    output = CliRunner().invoke(app, ["devices", "--canonical"]).stdout
    assert output == "cpu 0: CPU\n  CPU\n"


def test_host_memory_is_limited_by_the_control_group():
    assert without_swap(Memory(9 * GIB, GIB, None, None, None)) == 9 * GIB
    assert without_swap(Memory(9 * GIB, GIB, 4 * GIB, 0, 3 * GIB)) == 4 * GIB
