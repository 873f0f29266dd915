"""The configuration of a model in a GGUF file, as far as transformers passes parts of it over.

transformers reads a GGUF file's keys by a table, which lacks some that change logits: it drops
Llama 3's scaling of rotary positions, biases, windows. What it drops is put into the configuration
here, or the file is refused.
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

_PLAIN: Final = {"llama", "qwen2", "qwen3"}
"""Architectures whose configurations hold any scaling of rotary positions."""
_FREQUENCIES: Final = "rope_freqs.weight"
_LLAMA_3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ORIGINALS: Final = tuple(2**power for power in range(3, 18))
"""Contexts that a scaled model may have had before, 8192 with Llama 3."""
_ATTRIBUTES: Final = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Keys whose value an attribute of that name has, where the configuration has such a one."""
_SCALES: Final = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")
_NOTHING: Final = (None, 0, 0.0, 1.0, "none")


def read_config(directory: str, file: str, labels: Mapping[str, Any]) -> Any:
    """Return the configuration of the model in a GGUF file.

    Args:
        directory: Where it is.
        file: Its name.
        labels: Further settings, of a classifier.

    Raises:
        DataError: The file asks for something that transformers does not compute for its family.
        ValueError: It cannot be read; transformers raises errors of other kinds, too.
    """
    import gguf  # noqa: PLC0415 -- of an extra

    reader = gguf.GGUFReader(Path(directory) / file)
    architecture = str(reader.fields["general.architecture"].contents())
    config = transformers.AutoConfig.from_pretrained(directory, gguf_file=file)
    if architecture == "llama" and config.model_type != "llama":
        # transformers goes by the model's name, and gives it a window that the file has not.
        apart = {"model_type", "sliding_window"}
        settings = {key: value for key, value in config.to_dict().items() if key not in apart}
        config = transformers.LlamaConfig(**settings)
    keys = {
        name.removeprefix(f"{architecture}."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(f"{architecture}.")
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    tables: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    read = tables.get(config.model_type.removesuffix("_text"), {})
    _put_attributes(config, {k: v for k, v in keys.items() if read.get(k) is None})
    if config.model_type in FAMILIES:
        for key, value in FAMILIES[config.model_type].fixed(config).items():
            setattr(config, key, value)
    if config.model_type != "gpt_oss":  # (whose scaling transformers reads)
        _put_rope(config, architecture, keys, tensors)
    _put_biases(config, architecture, tensors)
    config.update(dict(labels))
    return config


def _refuse(what: str) -> DataError:
    return DataError(
        f"expected a GGUF file that transformers reads whole, got one with {what}, which it "
        "ignores; give the model's own directory (config.json and safetensors) as model.source"
    )


def _put_attributes(config: Any, keys: Mapping[str, Any]) -> None:
    for key, attribute in _ATTRIBUTES.items():
        value = keys.get(key)
        if value in _NOTHING:
            continue
        if key == "attention.sliding_window" and value >= keys.get("context_length", value + 1):
            continue
        if hasattr(config, attribute):
            setattr(config, attribute, value)
        elif key != "attention.key_length":
            raise _refuse(f"{key} {value}")
        elif value * config.num_attention_heads != config.hidden_size:
            config.head_dim = value
    for key in (*_SCALES, "expert_count" if config.model_type == "llama" else ""):
        if keys.get(key) not in _NOTHING:
            raise _refuse(f"{key} {keys[key]}")


def _put_rope(
    config: Any, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Any]
) -> None:
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    if architecture == "gemma3":
        theta = float(keys.get("rope.freq_base", 1e6))
        scaling = {"rope_type": "linear", "factor": factor} if kind == "linear" else {}
        of_all = {"rope_type": "default", "rope_theta": theta, **scaling}
        config.rope_parameters = {
            "full_attention": of_all, "sliding_attention": dict(ROPE_OF_WINDOWS)
        }  # fmt: skip
        kind = None if scaling else kind
    if kind in {"linear", "yarn"} and architecture in _PLAIN:
        longest = config.max_position_embeddings
        original = int(keys.get("rope.scaling.original_context_length", longest))
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = original
        config.rope_parameters = {**config.rope_parameters, **scaling}
    elif kind not in _NOTHING and factor not in _NOTHING:
        raise _refuse(f"rotary positions scaled as {kind}")
    for name in tensors.keys() & {"rope_factors_long.weight", "rope_factors_short.weight"}:
        raise _refuse(f"the tensor {name}")
    if _FREQUENCIES not in tensors:
        return
    divisors = np.asarray(tensors[_FREQUENCIES].data, np.float32).reshape(-1)
    if (divisors != 1).any():
        found = _llama_3(config, divisors) if architecture in _PLAIN else None
        if found is None:
            raise _refuse(f"the tensor {_FREQUENCIES}")
        config.rope_parameters = {**config.rope_parameters, **found}


def _llama_3(config: Any, divisors: NDArray[np.float32]) -> dict[str, Any] | None:
    """Return the settings of Llama 3's scaling that divide the plain frequencies by these.

    Source: `_compute_llama3_parameters` of transformers; a file holds only what comes of them.
    """
    theta, width = float(config.rope_parameters["rope_theta"]), 2 * len(divisors)
    waves = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
    low, high = _LLAMA_3["low_freq_factor"], _LLAMA_3["high_freq_factor"]
    given = float(divisors.max())
    for factor, original in itertools.product((float(round(given)), given), _ORIGINALS):
        smooth = np.clip((original / waves - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4):
            own = {"factor": factor, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", **_LLAMA_3, **own}
    return None


def _put_biases(config: Any, architecture: str, tensors: Mapping[str, Any]) -> None:
    if architecture not in _PLAIN:
        return
    of_attention = {"blk.0.attn_q.bias", "blk.0.attn_output.bias"}
    if architecture == "llama":
        config.attention_bias = bool(tensors.keys() & of_attention)
        config.mlp_bias = "blk.0.ffn_up.bias" in tensors
    elif architecture == "qwen3" and tensors.keys() & of_attention:
        config.attention_bias = True
