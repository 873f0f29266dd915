"""A 16-bit base is quantized without a float32 copy, with an equal result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from protocol.base.errors import DataError
from protocol.spec.sections.model import ModelSpec
from tests.small_chat import save_chat_model
from worker.models.pretrained import load_causal_lm
from worker.models.stored_dtypes import dtype_of


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_chat_model(directory / "first")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory / "first")
    model.to(torch.bfloat16).save_pretrained(directory / "bfloat16")
    model.float().save_pretrained(directory / "float32")
    return directory


def test_body_matrices_keep_the_dtype_of_the_file(models):
    loaded = load_causal_lm(ModelSpec(source=str(models / "bfloat16"), base_dtype="int4"), 0)
    bfloat16_names = {n for n, p in loaded.model.named_parameters() if p.dtype == torch.bfloat16}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in bfloat16_names} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    other_dtypes = {p.dtype for n, p in loaded.model.named_parameters() if n not in bfloat16_names}
    assert other_dtypes == {torch.float32}
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())


@pytest.mark.parametrize("base_dtype", ["float32", "int4"])
def test_digest_depends_only_on_values(models, base_dtype):
    bfloat16_model, float32_model = (
        load_causal_lm(ModelSpec(source=str(models / name), base_dtype=base_dtype), 0)
        for name in ("bfloat16", "float32")
    )
    assert bfloat16_model.weights_digest == float32_model.weights_digest


def test_files_without_a_common_16_bit_dtype_are_read_as_float32(models, tmp_path):
    assert dtype_of(str(models / "bfloat16")) == torch.bfloat16
    assert dtype_of(str(models / "float32")) == torch.float32
    assert dtype_of(str(tmp_path)) == torch.float32
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    assert dtype_of(str(tmp_path)) == torch.float32


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq"])
def test_foreign_quantization_names_an_alternative(models, tmp_path, method):
    config = json.loads((models / "first" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "load_in_4bit": True, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(models / "first" / "model.safetensors")
    with pytest.raises(DataError, match=f"quantized with {method}, which only its own kernels"):
        load_causal_lm(ModelSpec(source=str(tmp_path)), 0)
