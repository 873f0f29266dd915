"""Write a decoder as a GGUF file for llama.cpp, then read it back and compare.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names of tensors are those of
llama.cpp's library `gguf`. Some families need further changes, such as a different row order of
Llama's queries and keys; families that `gguf_families` does not list are refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from backends.base.interface import Array
from protocol.base.errors import DataError, StorageDamaged
from worker.models.gguf_families import FAMILIES, Family, check_config, context_length, rope
from worker.results.gguf_vocabulary import Vocabulary

Storage = Literal["f32", "f16", "bf16", "q8_0"]

_FILE_TYPES: Final = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
}
_Q8_GROUP: Final = 32
_KEYS: Final = {
    "attention_multiplier": "add_attention_scale",
    "attn_logit_softcapping": "add_attn_logit_softcapping",
    "embedding_multiplier": "add_embedding_scale",
    "final_logit_softcapping": "add_final_logit_softcapping",
    "logits_scaling": "add_logit_scale",
    "moe_intermediate_size": "add_expert_feed_forward_length",
    "num_experts": "add_expert_count",
    "num_experts_per_tok": "add_expert_used_count",
    "num_local_experts": "add_expert_count",
    "residual_multiplier": "add_residual_scale",
    "shared_expert_intermediate_size": "add_expert_shared_feed_forward_length",
    "sliding_window": "add_sliding_window",
}
"""Settings that only some families have, and the library's methods that write them."""
_FLOAT32_MATRICES: Final = ("ffn_gate_inp.weight",)
"""Matrices that llama.cpp requires in float32: the router of experts."""


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """Summary of a written file.

    Attributes:
        tensors: Number of tensors.
        f16_tensors: Number of tensors that are f16 because q8_0 cannot store them.
        tokens_without_row: Number of special tokens without a row in the model.
        window: The context length, if it is shorter than the model's positions.
    """

    tensors: int
    f16_tensors: int
    tokens_without_row: int
    window: int | None


def write_gguf(model: Any, tokenizer: Any, path: Path, storage: Storage, name: str) -> GgufSummary:
    """Write a model and its tokenizer, then read the file and compare every tensor and token.

    Args:
        model: A causal language model, float32, without an adapter.
        tokenizer: The model's tokenizer.
        path: The new file.
        storage: Encoding of matrices; vectors are float32. A matrix whose rows q8_0 cannot divide
            into groups is f16.
        name: The model's name in the file.

    Raises:
        DataError: The library is missing, or llama.cpp does not support the model or tokenizer.
        StorageDamaged: The file read back differs from what was written.
    """
    gguf = _import_gguf()
    family = check_config(model.config)
    architecture = gguf.MODEL_ARCH[family.architecture]
    vocabulary = Vocabulary.of(tokenizer, _vocabulary(model))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _describe(writer, gguf, model, name, storage)
    vocabulary.write_to(writer, tokenizer)
    tensors = {tensor.name: tensor for tensor in _encode_tensors(gguf, family, model, storage)}
    for tensor in tensors.values():
        writer.add_tensor(tensor.name, tensor.content, raw_dtype=tensor.encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _verify_file(gguf, path, tensors, vocabulary)
    longest = context_length(model.config)
    return GgufSummary(
        len(tensors),
        sum(tensor.is_f16_fallback for tensor in tensors.values()),
        vocabulary.tokens_without_row,
        longest if longest < model.config.max_position_embeddings else None,
    )


def check_gguf() -> None:
    """Check that the library `gguf` is installed.

    Raises:
        DataError: The library is not installed.
    """
    _import_gguf()


def _import_gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise DataError(
            "expected llama.cpp's library gguf, found none: pip install 'samestep[gguf]'"
        ) from None


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _head_width(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def _describe(writer: Any, gguf: Any, model: Any, name: str, storage: Storage) -> None:
    config = model.config
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    metadata = {
        method_name: getattr(config, key)
        for key, method_name in _KEYS.items()
        if key in FAMILIES[config.model_type].stored_keys and getattr(config, key, None) is not None
    }
    for method_name, value in metadata.items():
        getattr(writer, method_name)(value)
    _describe_rope(writer, gguf, config)
    writer.add_rope_dimension_count(_head_width(config))
    writer.add_key_length(_head_width(config))
    writer.add_value_length(_head_width(config))
    writer.add_vocab_size(_vocabulary(model))
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[storage]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _describe_rope(writer: Any, gguf: Any, config: Any) -> None:
    """Describe rotary positions; Llama 3's frequencies are written as a tensor."""
    scaling = rope(config)
    writer.add_rope_freq_base(scaling["rope_theta"])
    longest = config.max_position_embeddings
    original = scaling.get("original_max_position_embeddings") or longest
    if scaling["rope_type"] in {"linear", "yarn"}:
        writer.add_rope_scaling_type(gguf.RopeScalingType[scaling["rope_type"].upper()])
        writer.add_rope_scaling_factor(scaling.get("factor") or longest / original)
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(original)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in the file.

    Attributes:
        content: The encoded values.
        encoding: The library's constant for the encoding.
        values: The decoded values, float32.
        is_f16_fallback: Whether the tensor is f16 because q8_0 cannot store it.
    """

    name: str
    content: NDArray[Any]
    encoding: Any
    values: Array
    is_f16_fallback: bool


def _encode_tensors(gguf: Any, family: Family, model: Any, storage: Storage) -> Iterator[_Tensor]:
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[family.architecture], model.config.num_hidden_layers
    )
    skipped_names = _tied_head(model, family)
    for name, tensor in model.state_dict().items():
        if name in skipped_names:
            continue
        for part, values in _split_experts(name, tensor.float().numpy()):
            tensor_name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            if tensor_name is None:
                raise DataError(
                    f"expected tensors that llama.cpp supports, got {name!r}; use the model's "
                    "directory as it is"
                )
            tensor_name += "" if tensor_name.endswith((".weight", ".bias")) else ".weight"
            yield _encode(gguf, tensor_name, _convert(family, part, values, model.config), storage)
    if rope(model.config)["rope_type"] == "llama3":
        yield _encode(gguf, "rope_freqs.weight", _frequencies(model), "f32")


def _split_experts(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Yield a tensor, or the two halves of an experts' gate_up_proj, with transformers' names."""
    experts, separator, _ = name.partition("experts.gate_up_proj")
    if not separator:
        yield name, values
        return
    for part, half in zip(("gate_proj", "up_proj"), np.split(values, 2, axis=1), strict=True):
        yield f"{experts}experts.{part}", half


def _tied_head(model: Any, family: Family) -> frozenset[str]:
    """Return the name of the head if it must not be written, because it is the embedding.

    Raises:
        DataError: llama.cpp uses the embedding as head, but the model has a separate head.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and torch.equal(head.weight, embedding.weight)
    if family.head == "tied" and not is_tied:
        raise DataError(
            f"expected a {model.config.model_type} whose head is tied to its embedding for GGUF, "
            "got one with a separate head (an adapter on either separates them); use the model's "
            "directory as it is"
        )
    return frozenset({"lm_head.weight"} if is_tied and family.head != "separate" else ())


def _convert(family: Family, name: str, values: Array, config: Any) -> Array:
    """Return a tensor with the values and row order that llama.cpp expects."""
    if family.adds_one_to_norms and name.endswith("norm.weight"):
        return values + np.float32(1)
    if name.endswith("shared_expert_gate.weight"):
        return values.reshape(-1)
    return _interleave_halves(name, values, config) if family.rotates_pairs else values


def _interleave_halves(name: str, values: Array, config: Any) -> Array:
    """Interleave the two halves of each head: llama.cpp rotates pairs, transformers halves."""
    part = name.rsplit(".", 2)[-2]
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    }.get(part)
    if heads is None:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _frequencies(model: Any) -> Array:
    """Return Llama 3's divisors of the rotary frequencies, from transformers' values."""
    width, theta = _head_width(model.config), rope(model.config)["rope_theta"]
    unscaled = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    model_frequencies = model.get_decoder().rotary_emb.inv_freq.float()
    return np.asarray((unscaled / model_frequencies).numpy(), np.float32)


def _encode(gguf: Any, name: str, values: Array, storage: Storage) -> _Tensor:
    is_divisible = storage != "q8_0" or values.shape[-1] % _Q8_GROUP == 0
    is_float32 = values.ndim < 2 or name.endswith(_FLOAT32_MATRICES)
    encoding_name = "f32" if is_float32 else storage if is_divisible else "f16"
    encoding = gguf.GGMLQuantizationType[encoding_name.upper()]
    values = np.ascontiguousarray(values, np.float32)
    with np.errstate(over="ignore"):  # checked below
        content = gguf.quants.quantize(values, encoding)
    decoded_values = np.asarray(gguf.quants.dequantize(content, encoding), np.float32).reshape(
        values.shape
    )
    if not np.isfinite(decoded_values).all():
        raise DataError(
            f"expected values of {name!r} in the range of {encoding_name}, got larger ones; use "
            "another type: --gguf bf16"
        )
    return _Tensor(name, content, encoding, decoded_values, not is_divisible and not is_float32)


def _verify_file(
    gguf: Any, path: Path, tensors: Mapping[str, _Tensor], vocabulary: Vocabulary
) -> None:
    """Read the file back and compare tensors, tokens and merges.

    Raises:
        StorageDamaged: They differ.
    """
    reader = gguf.GGUFReader(path)
    file_tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name in file_tensors.keys() ^ tensors.keys():
        raise StorageDamaged(str(path), f"tensor {name!r}", "it is missing or unexpected")
    for name, tensor in file_tensors.items():
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if not np.array_equal(
            np.asarray(values).reshape(tensors[name].values.shape), tensors[name].values
        ):
            raise StorageDamaged(str(path), f"tensor {name!r}", "values other than those written")
    if reader.get_field("tokenizer.ggml.tokens").contents() != vocabulary.tokens:
        raise StorageDamaged(str(path), "tokens", "entries other than those written")
    if vocabulary.scores:
        is_equal = reader.get_field("tokenizer.ggml.scores").contents() == vocabulary.scores
    else:
        is_equal = reader.get_field("tokenizer.ggml.merges").contents() == vocabulary.merges
    if not is_equal:
        raise StorageDamaged(str(path), "scores or merges", "entries other than those written")
