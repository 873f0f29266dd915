"""Base tensors described by file headers equal those of the module, also for experts."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers

from backends.quantization.frozen_base import frozen_base
from worker.models.base_tensors import base_tensors

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE: Final[dict[str, Any]] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "llama": {},
    "qwen3_moe": MOE,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 40},
    "qwen3_moe, its rows without groups": MOE | {"moe_intermediate_size": 20},
    "qwen3_moe, one layer without experts": MOE | {"mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": MOE,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": None},
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 48,
    },
    "nemotron_h": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24, "layers_block_type": ["attention", "moe"],
    },
}  # fmt: skip


def model_of(family: str) -> Any:
    config = transformers.AutoConfig.for_model(
        family.partition(",")[0], **{**SIZES, **FAMILIES[family]}
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_base_tensors_equal_those_of_the_module(family: str, tmp_path: Path):
    model = model_of(family)
    model.save_pretrained(tmp_path)
    tensors = base_tensors(tmp_path)
    module_state = model.state_dict()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tuple(value.shape) for name, value in module_state.items()
    }
    model.requires_grad_(requires_grad=False)
    quantized_names = {name for name, tensor in tensors.items() if tensor.is_low_precision("int4")}
    assert quantized_names == frozen_base(model).keys()
    assert sum(tensor.bytes_in("float32") for tensor in tensors.values()) == 4 * sum(
        parameter.numel() for parameter in module_state.values()
    )
