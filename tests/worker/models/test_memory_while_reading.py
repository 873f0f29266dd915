"""A base is quantized while it is read: memory holds the quantized base and one full weight.

`python -m benchmarks.quantized_base_memory` measures the peak at the size of real models, on Vulkan
too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from protocol.spec.sections.model import ModelSpec
from tests.processes import run_to_end
from tests.resident_memory import MIB
from worker.models.base_tensors import base_tensors
from worker.models.pretrained import load_causal_lm

OVERHEAD_BYTES = 12 * MIB
"""Memory of Python, torch and four parts of a weight."""


@pytest.fixture(scope="module", params=["bfloat16", "float32", "mixed"])
def source(request, tmp_path_factory) -> Path:
    """A decoder of 15 million parameters, most of them in its layers."""
    directory: Path = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=640, intermediate_size=1920, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    config.save_pretrained(directory)
    model_class: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = model_class.from_config(config)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    values = {}
    for name, shape in shapes.items():
        row = torch.randn(shape[-1], dtype=torch.bfloat16)
        is_float32 = request.param == "float32" or (request.param == "mixed" and "norm" in name)
        values[name] = (row.float() if is_float32 else row).expand(shape).contiguous()
    safetensors.torch.save_file(values, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_peak_is_the_quantized_base_and_one_weight(source):
    tensors = base_tensors(source).values()
    quantized_bytes = sum(tensor.bytes_in("int4") for tensor in tensors)
    largest_weight_bytes = 4 * max(tensor.matrix_elements for tensor in tensors)
    peak_bytes = peak_in_a_fresh_process(source)
    assert peak_bytes < quantized_bytes + largest_weight_bytes + OVERHEAD_BYTES
    assert peak_bytes < (source / "model.safetensors").stat().st_size


def peak_in_a_fresh_process(source: Path) -> int:
    """Measure the peak of reading in a fresh process; in this one, earlier tests have set the
    allocator."""
    process = run_to_end("tests.quantized_reading", str(source))
    assert process.returncode == 0, process.stderr
    return int(process.stdout)


def test_files_of_several_dtypes_keep_their_values(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = safetensors.torch.load_file(source / "model.safetensors")
    float32_values = {name: value.float() for name, value in values.items()}
    safetensors.torch.save_file(float32_values, tmp_path / "model.safetensors", {"format": "pt"})
    spec = ModelSpec(source=str(source), base_dtype="int4")
    digest = load_causal_lm(spec, 0).weights_digest
    float32_spec = ModelSpec(source=str(tmp_path), base_dtype="float32")
    assert digest == load_causal_lm(float32_spec, 0).weights_digest
