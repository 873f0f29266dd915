"""Writes a decoder as a GGUF file for llama.cpp, then reads it back and compares.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names of tensors are those of
llama.cpp's own library, `gguf`. What a family needs besides its names (Llama's queries and keys in
another order of rows) is known for those of `gguf_families`; others are refused.
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
"""What some families have: settings by name, and the library's methods that write them."""
_PLAIN_NUMBERS: Final = ("ffn_gate_inp.weight",)
"""Matrices that llama.cpp wants in float32: which expert a token goes to."""


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """What was written.

    Attributes:
        tensors: Number of tensors.
        stored_as_f16: How many of them q8_0 could not store.
        left_out: Special tokens that have no row in the model.
        window: The longest text, where it is shorter than the model's positions.
    """

    tensors: int
    stored_as_f16: int
    left_out: int
    window: int | None


def write_gguf(model: Any, tokenizer: Any, path: Path, storage: Storage, name: str) -> GgufSummary:
    """Write a model and its tokenizer, then read the file and compare every tensor and token.

    Args:
        model: A causal language model, float32, without an adapter.
        tokenizer: Its own.
        path: The new file.
        storage: Of matrices; vectors are float32. A matrix whose rows q8_0 cannot part is f16.
        name: What it is called in the file.

    Raises:
        DataError: The library is missing, or llama.cpp has nothing for this model or tokenizer.
        StorageDamaged: The file does not hold what was written.
    """
    gguf = _library()
    family = check_config(model.config)
    architecture = gguf.MODEL_ARCH[family.architecture]
    vocabulary = Vocabulary.of(tokenizer, _vocabulary(model))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _describe(writer, gguf, model, name, storage)
    vocabulary.put(writer, tokenizer)
    tensors = {each.name: each for each in _tensors(gguf, family, model, storage)}
    for each in tensors.values():
        writer.add_tensor(each.name, each.stored, raw_dtype=each.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _compare(gguf, path, tensors, vocabulary)
    longest = context_length(model.config)
    return GgufSummary(
        len(tensors),
        sum(each.stored_as_f16 for each in tensors.values()),
        vocabulary.left_out,
        longest if longest < model.config.max_position_embeddings else None,
    )


def check_gguf() -> None:
    """Check that the library `gguf` is installed.

    Raises:
        DataError: It is not.
    """
    _library()


def _library() -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError:
        raise DataError(
            "a GGUF file needs llama.cpp's library: pip install 'samestep[gguf]'"
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
        add: getattr(config, key)
        for key, add in _KEYS.items()
        if key in FAMILIES[config.model_type].written and getattr(config, key, None) is not None
    }
    for add, value in metadata.items():
        getattr(writer, add)(value)
    _describe_rope(writer, gguf, config)
    writer.add_rope_dimension_count(_head_width(config))
    writer.add_key_length(_head_width(config))
    writer.add_value_length(_head_width(config))
    writer.add_vocab_size(_vocabulary(model))
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[storage]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _describe_rope(writer: Any, gguf: Any, config: Any) -> None:
    """Rotary positions; those of Llama 3 are a tensor besides."""
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
    """A tensor as it is in the file.

    Attributes:
        stored: Its encoded values.
        kind: The library's constant for the encoding.
        values: The decoded values, float32.
        stored_as_f16: Whether q8_0 could not store it.
    """

    name: str
    stored: NDArray[Any]
    kind: Any
    values: Array
    stored_as_f16: bool


def _tensors(gguf: Any, family: Family, model: Any, storage: Storage) -> Iterator[_Tensor]:
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[family.architecture], model.config.num_hidden_layers
    )
    shared = _tied(model, family)
    for name, tensor in model.state_dict().items():
        if name in shared:
            continue
        for part, values in _parts(name, tensor.float().numpy()):
            tensor_name = names.get_name(part, try_suffixes=(".weight", ".bias"))
            if tensor_name is None:
                raise DataError(
                    f"llama.cpp does not support the tensor {name!r}; use the model's directory as "
                    "it is"
                )
            tensor_name += "" if tensor_name.endswith((".weight", ".bias")) else ".weight"
            yield _stored(
                gguf, tensor_name, _as_computed(family, part, values, model.config), storage
            )
    if rope(model.config)["rope_type"] == "llama3":
        yield _stored(gguf, "rope_freqs.weight", _frequencies(model), "f32")


def _parts(name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Yield a tensor by the name that llama.cpp knows; experts' gates and the rest apart."""
    experts, separator, _ = name.partition("experts.gate_up_proj")
    if not separator:
        yield name, values
        return
    for part, half in zip(("gate_proj", "up_proj"), np.split(values, 2, axis=1), strict=True):
        yield f"{experts}experts.{part}", half


def _tied(model: Any, family: Family) -> frozenset[str]:
    """Return the head that is not written, as it is the embedding.

    Raises:
        DataError: llama.cpp takes the embedding, and the model has another.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and torch.equal(head.weight, embedding.weight)
    if family.head == "tied" and not is_tied:
        raise DataError(
            f"expected a {model.config.model_type} whose head is its embedding for GGUF, got one "
            "with another (an adapter on either makes them two); use the model's directory as it is"
        )
    return frozenset({"lm_head.weight"} if is_tied and family.head != "separate" else ())


def _as_computed(family: Family, name: str, values: Array, config: Any) -> Array:
    """Return a tensor as llama.cpp computes with it."""
    if family.adds_one_to_norms and name.endswith("norm.weight"):
        return values + np.float32(1)
    if name.endswith("shared_expert_gate.weight"):
        return values.reshape(-1)
    return _rows_in_order(name, values, config) if family.rotates_pairs else values


def _rows_in_order(name: str, values: Array, config: Any) -> Array:
    """Put rows in the order of pairs: transformers turns the two halves of a head."""
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
    """What Llama 3 divides the plain frequencies by, as transformers has computed it."""
    width, theta = _head_width(model.config), rope(model.config)["rope_theta"]
    plain = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    scaled = model.get_decoder().rotary_emb.inv_freq.float()
    return np.asarray((plain / scaled).numpy(), np.float32)


def _stored(gguf: Any, name: str, values: Array, storage: Storage) -> _Tensor:
    is_divisible = storage != "q8_0" or values.shape[-1] % _Q8_GROUP == 0
    is_plain = values.ndim < 2 or name.endswith(_PLAIN_NUMBERS)
    requested = "f32" if is_plain else storage if is_divisible else "f16"
    kind = gguf.GGMLQuantizationType[requested.upper()]
    values = np.ascontiguousarray(values, np.float32)
    with np.errstate(over="ignore"):
        stored = gguf.quants.quantize(values, kind)
    decoded = np.asarray(gguf.quants.dequantize(stored, kind), np.float32).reshape(values.shape)
    if not np.isfinite(decoded).all():
        raise DataError(
            f"expected values of {name!r} within {requested}, got larger ones; use another type: "
            "--gguf bf16"
        )
    return _Tensor(name, stored, kind, decoded, not is_divisible and not is_plain)


def _compare(gguf: Any, path: Path, tensors: Mapping[str, _Tensor], vocabulary: Vocabulary) -> None:
    """Read the file back and compare tensors, tokens and merges.

    Raises:
        StorageDamaged: Something differs.
    """
    reader = gguf.GGUFReader(path)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name in stored.keys() ^ tensors.keys():
        raise StorageDamaged(str(path), f"tensor {name!r}", "it is missing, or should not be there")
    for name, tensor in stored.items():
        read = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if not np.array_equal(
            np.asarray(read).reshape(tensors[name].values.shape), tensors[name].values
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
