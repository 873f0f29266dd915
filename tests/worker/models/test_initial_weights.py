"""A new model starts as its library initializes it, with the same draws everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from backends.base import draws
from protocol.base.errors import DataError
from protocol.spec.run_spec import parse_run_spec
from worker.models.pretrained import create_causal_lm

SIZES = {"hidden_size": 16, "num_hidden_layers": 2}
ATTENTION = {"intermediate_size": 32, "num_attention_heads": 2}
LLAMA = {**SIZES, **ATTENTION, "num_key_value_heads": 1, "tie_word_embeddings": True}
MAMBA = {**SIZES, "state_size": 8, "expand": 2}


def new_model(model_type: str, seed: int = 7, **config: Any) -> Any:
    spec = parse_run_spec({
        "task": "causal-lm", "steps": 1, "seed": seed, "data": {"train": "python-stdlib"},
        "model": {"config": {"model_type": model_type, **config}},
    })  # fmt: skip
    return create_causal_lm(spec, 300, 2).model


def library_model(model_type: str, seed: int, **config: Any) -> Any:
    torch.manual_seed(seed)
    model_config = transformers.AutoConfig.for_model(
        model_type, vocab_size=300, bos_token_id=2, eos_token_id=2, **config
    )
    return transformers.AutoModelForCausalLM.from_config(model_config)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "mamba": MAMBA,
    "mamba2": {**MAMBA, "num_heads": 4, "head_dim": 8, "n_groups": 1},
    "falcon_mamba": MAMBA,
    "rwkv": {"hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16},
    "opt": {**SIZES, "ffn_dim": 16, "num_attention_heads": 2, "word_embed_proj_dim": 16},
    "bert": {**SIZES, **ATTENTION, "is_decoder": True},
    "gpt_neox": {**SIZES, **ATTENTION},
    "recurrent_gemma": {
        **SIZES, **ATTENTION, "num_key_value_heads": 1, "lru_width": 16, "head_dim": 8,
    },
    "diffllama": {**SIZES, **ATTENTION, "num_key_value_heads": 2},
    "modernbert-decoder": {**SIZES, **ATTENTION, "pad_token_id": 0, "cls_token_id": 1,
                           "sep_token_id": 2},
    "qwen3_next": {
        **LLAMA, "head_dim": 8, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip


FAST_FAMILIES = ("llama", "gpt2", "mamba")


@pytest.mark.parametrize(
    "family",
    [
        name if name in FAST_FAMILIES else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_constants_and_distributions_equal_the_library(family):
    model_values = parameters(new_model(family, **FAMILIES[family]))
    one, other = (parameters(library_model(family, n, **FAMILIES[family])) for n in (1, 2))
    for name, value in one.items():
        drawn_value = model_values[name]
        if (value == other[name]).all():
            np.testing.assert_allclose(drawn_value, value, rtol=1e-6, err_msg=name)
            continue
        assert drawn_value.std() > 0, name
        if value.size >= 256:
            assert drawn_value.mean() == pytest.approx(
                float(value.mean()), abs=float(value.std()) / 4
            ), name
            assert drawn_value.std() == pytest.approx(float(value.std()), rel=0.2), name
        else:  # step biases, within the range of the library
            value_range = max(value.max() - value.min(), 4.0)
            assert value.min() - value_range < drawn_value.min(), name
            assert drawn_value.max() < value.max() + value_range, name


def parameters(model: Any) -> dict[str, Any]:
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def test_llama_draws_are_frozen():
    for name, value in new_model("llama", **LLAMA).named_parameters():
        if value.dim() == 1:
            assert (value == 1).all()
        else:
            key = draws.derive_key(7, name)
            expected = draws.uniforms_with_deviation(key, value.numel(), 0.02)
            assert value.detach().numpy().tobytes() == expected.tobytes()


@pytest.mark.slow
def test_draws_ignore_torch_generator_and_instruction_set():
    """torch's own logarithm has other bits on other instruction sets."""
    program = (
        "import hashlib, sys, torch\n"
        "from tests.worker.models.test_initial_weights import FAMILIES, new_model\n"
        "torch.manual_seed(int(sys.argv[1]))\n"
        "for family in ('mamba', 'mamba2', 'gpt2'):\n"
        "    state = new_model(family, **FAMILIES[family]).state_dict()\n"
        "    bits = b''.join(value.numpy().tobytes() for value in state.values())\n"
        "    print(family, hashlib.sha256(bits).hexdigest())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program, seed],
            env={**os.environ, **environment},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed, environment in (("1", {}), ("2", {"ATEN_CPU_CAPABILITY": "default"}))
    }  # fmt: skip
    assert len(outputs) == 1


def test_initial_logarithms_equal_rounded_float64():
    state = dict(new_model("mamba", **MAMBA).named_parameters())
    expected = np.log(np.arange(1, 9, dtype=np.float64)).astype(np.float32)
    assert (state["backbone.layers.0.mixer.A_log"].detach().numpy() == expected).all()


def test_different_seeds_give_different_weights():
    one, other = new_model("mamba", 1, **MAMBA), new_model("mamba", 2, **MAMBA)
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    assert {name.rpartition("mixer.")[2] for (name, a), b in pairs if not torch.equal(a, b)} >= {
        "dt_proj.bias", "in_proj.weight",
    }  # fmt: skip


def test_unsupported_random_functions_are_refused(monkeypatch):
    def initialize_by_permutation(_, module):
        if hasattr(module, "A_log"):
            module.D.data.copy_(torch.randperm(len(module.D)))

    monkeypatch.setattr(transformers.MambaForCausalLM, "_init_weights", initialize_by_permutation)
    monkeypatch.setattr(transformers.MambaModel, "_init_weights", initialize_by_permutation)
    with pytest.raises(DataError, match="randperm"):
        new_model("mamba", **MAMBA)
