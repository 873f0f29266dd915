"""The configuration of a model in a GGUF file, with the keys that transformers ignores.

transformers reads a GGUF file's keys by a table, which lacks some keys that change logits: Llama
3's scaling of rotary positions, biases, windows. This module adds these keys to the configuration,
or refuses the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import transformers
from numpy.typing import NDArray
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from protocol.base.errors import DataError
from worker.models.gguf_families import FAMILIES, ROPE_OF_WINDOWS

_SCALABLE_ARCHITECTURES: Final = {"llama", "qwen2", "qwen3"}
"""Architectures whose configurations can express every scaling of rotary positions."""
_FREQUENCIES: Final = "rope_freqs.weight"
_LLAMA_3_FACTORS: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ORIGINAL_CONTEXTS: Final = tuple(2**power for power in range(3, 18))
"""Context lengths that a model may have had before it was scaled: 8192 for Llama 3."""
_ATTRIBUTES: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""GGUF keys, each with the configuration's attribute for its value, which some families lack."""
_SCALES: Final = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")
_NEUTRAL_VALUES: Final = (None, 0, 0.0, 1.0, "none")


def read_config(directory: str, file: str, labels: Mapping[str, Any]) -> Any:
    """Return the configuration of the model in a GGUF file.

    Args:
        directory: Directory of the file.
        file: Name of the file.
        labels: The settings `id2label` and `label2id` of a classifier; empty for other models.

    Raises:
        DataError: The file asks for something that transformers does not compute for its family.
        ValueError: The file cannot be read. transformers also raises other errors.
    """
    import gguf  # noqa: PLC0415 -- of an extra

    reader = gguf.GGUFReader(Path(directory) / file)
    architecture = str(reader.fields["general.architecture"].contents())
    config = transformers.AutoConfig.from_pretrained(directory, gguf_file=file)
    if architecture == "llama" and config.model_type != "llama":
        # transformers goes by the model's name, and adds a window that the file does not have.
        dropped_keys = {"model_type", "sliding_window"}
        settings = {
            key: value for key, value in config.to_dict().items() if key not in dropped_keys
        }
        config = transformers.LlamaConfig(**settings)
    keys = {
        name.removeprefix(f"{architecture}."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(f"{architecture}.")
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tables: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    read_keys = tables.get(config.model_type.removesuffix("_text"), {})
    _set_attributes(config, {k: content for k, content in keys.items() if read_keys.get(k) is None})
    if config.model_type in FAMILIES:
        for key, value in FAMILIES[config.model_type].fixed_settings(config).items():
            setattr(config, key, value)
    if config.model_type != "gpt_oss":  # transformers reads its scaling
        _set_rope(config, architecture, keys, tensors)
    _set_biases(config, architecture, tensors)
    config.update(dict(labels))
    return config


def _unsupported(feature: str) -> DataError:
    return DataError(
        f"expected a GGUF file without settings that transformers ignores, got one with {feature}; "
        "set model.source to the model's own directory (config.json and safetensors)"
    )


def _set_attributes(config: Any, keys: Mapping[str, Any]) -> None:
    for key, attribute in _ATTRIBUTES.items():
        value = keys.get(key)
        if value in _NEUTRAL_VALUES:
            continue
        if key == "attention.sliding_window" and value >= keys.get("context_length", value + 1):
            continue
        if hasattr(config, attribute):
            setattr(config, attribute, value)
        elif key != "attention.key_length":
            raise _unsupported(f"{key} {value}")
        elif value * config.num_attention_heads != config.hidden_size:
            config.head_dim = value
    for key in (*_SCALES, "expert_count" if config.model_type == "llama" else ""):
        if keys.get(key) not in _NEUTRAL_VALUES:
            raise _unsupported(f"{key} {keys[key]}")


def _set_rope(
    config: Any, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    rope_type, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    if architecture == "gemma3":
        theta = float(keys.get("rope.freq_base", 1e6))
        scaling = {"rope_type": "linear", "factor": factor} if rope_type == "linear" else {}
        full_attention = {"rope_type": "default", "rope_theta": theta, **scaling}
        config.rope_parameters = {
            "full_attention": full_attention, "sliding_attention": dict(ROPE_OF_WINDOWS)
        }  # fmt: skip
        rope_type = None if scaling else rope_type
    if rope_type in {"linear", "yarn"} and architecture in _SCALABLE_ARCHITECTURES:
        context = config.max_position_embeddings
        original = int(keys.get("rope.scaling.original_context_length", context))
        scaling = {"rope_type": rope_type, "factor": factor}
        if rope_type == "yarn":
            scaling["original_max_position_embeddings"] = original
        config.rope_parameters = {**config.rope_parameters, **scaling}
    elif rope_type not in _NEUTRAL_VALUES and factor not in _NEUTRAL_VALUES:
        raise _unsupported(f"rotary positions scaled as {rope_type}")
    for name in tensors.keys() & {"rope_factors_long.weight", "rope_factors_short.weight"}:
        raise _unsupported(f"the tensor {name}")
    if _FREQUENCIES not in tensors:
        return
    divisors = np.asarray(tensors[_FREQUENCIES].data, np.float32).reshape(-1)
    if (divisors != 1).any():
        llama_3_keys = (
            _llama_3_scaling(config, divisors) if architecture in _SCALABLE_ARCHITECTURES else None
        )
        if llama_3_keys is None:
            raise _unsupported(f"the tensor {_FREQUENCIES}")
        config.rope_parameters = {**config.rope_parameters, **llama_3_keys}


def _llama_3_scaling(config: Any, divisors: NDArray[np.float32]) -> dict[str, Any] | None:
    """Return the settings of Llama 3's scaling that result in these divisors of the frequencies.

    Returns None if no settings do. A file holds only the divisors. Source:
    `_compute_llama3_parameters` of transformers.
    """
    theta, width = float(config.rope_parameters["rope_theta"]), 2 * len(divisors)
    waves = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    low_factor, high_factor = (
        _LLAMA_3_FACTORS["low_freq_factor"],
        _LLAMA_3_FACTORS["high_freq_factor"],
    )
    largest_divisor = float(divisors.max())
    for factor, original in itertools.product(
        (float(round(largest_divisor)), largest_divisor), _ORIGINAL_CONTEXTS
    ):
        blend = np.clip((original / waves - low_factor) / (high_factor - low_factor), 0, 1)
        if np.allclose(1 / ((1 - blend) / factor + blend), divisors, rtol=1e-4):
            context_keys = {"factor": factor, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", **_LLAMA_3_FACTORS, **context_keys}
    return None


def _set_biases(config: Any, architecture: str, tensors: Mapping[str, Any]) -> None:
    if architecture not in _SCALABLE_ARCHITECTURES:
        return
    attention_biases = {"blk.0.attn_q.bias", "blk.0.attn_output.bias"}
    if architecture == "llama":
        config.attention_bias = bool(tensors.keys() & attention_biases)
        config.mlp_bias = "blk.0.ffn_up.bias" in tensors
    elif architecture == "qwen3" and tensors.keys() & attention_biases:
        config.attention_bias = True
