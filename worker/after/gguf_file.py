"""A decoder as a GGUF file, for llama.cpp and what is built on it; read back and compared.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names of tensors are those of
llama.cpp's own library, `gguf`. What a family needs besides its names (Llama's queries and keys in
another order of rows) is known here for those of `gguf_support`; others are refused.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from backends.base.interface import Array
from protocol.base.errors import DataError, StorageDamaged
from worker.after.gguf_support import check_config, rope
from worker.models.tokens import check_tokens

Storage = Literal["f32", "f16", "bf16", "q8_0"]
STORAGES: Final[tuple[Storage, ...]] = ("f32", "f16", "bf16", "q8_0")

_FILE_TYPES: Final = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
}
_Q8_GROUP: Final = 32

_LETTERS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_BY_PATTERN: Final = {_LETTERS % r"\p{N}{1,3}": "llama-bpe", _LETTERS % r"\p{N}": "qwen2"}
"""How text is parted before it becomes tokens: llama.cpp knows that by name alone."""


@dataclass(frozen=True, slots=True)
class Written:
    """What came of it.

    Attributes:
        tensors: How many there are.
        otherwise: How many of them could not be stored as asked.
        left_out: How many of the tokenizer's marks the model has no row for.
    """

    tensors: int
    otherwise: int
    left_out: int


def write_gguf(model: Any, tokenizer: Any, path: Path, storage: Storage, name: str) -> Written:
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
    architecture = gguf.MODEL_ARCH[check_config(model.config)]
    words = _Words.of(tokenizer, _vocabulary(model))
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _describe(writer, gguf, model, name, storage)
    words.put(writer, tokenizer)
    told = {each.name: each for each in _tensors(gguf, architecture, model, storage)}
    for each in told.values():
        writer.add_tensor(each.name, each.stored, raw_dtype=each.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _compare(gguf, path, told, words)
    return Written(len(told), sum(each.otherwise for each in told.values()), words.left_out)


def check_gguf() -> None:
    """Say at once if there is no library.

    Raises:
        DataError: There is none.
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
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _describe_rope(writer, gguf, config)
    writer.add_rope_dimension_count(_head_width(config))
    writer.add_key_length(_head_width(config))
    writer.add_value_length(_head_width(config))
    writer.add_vocab_size(_vocabulary(model))
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[storage]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _describe_rope(writer: Any, gguf: Any, config: Any) -> None:
    """Rotary positions; those of Llama 3 are a tensor besides."""
    found = rope(config)
    writer.add_rope_freq_base(found["rope_theta"])
    longest = config.max_position_embeddings
    original = found.get("original_max_position_embeddings") or longest
    if found["rope_type"] in {"linear", "yarn"}:
        writer.add_rope_scaling_type(gguf.RopeScalingType[found["rope_type"].upper()])
        writer.add_rope_scaling_factor(found.get("factor") or longest / original)
    if found["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(original)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One as it is in the file.

    Attributes:
        stored: In its few bits.
        kind: The library's name for them.
        values: What it stands for then.
        otherwise: Whether it could not be stored as asked.
    """

    name: str
    stored: NDArray[Any]
    kind: Any
    values: Array
    otherwise: bool


def _tensors(gguf: Any, architecture: Any, model: Any, storage: Storage) -> Iterator[_Tensor]:
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    shared = _tied(model)
    for name, tensor in model.state_dict().items():
        if name in shared:
            continue
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if there is None:
            raise DataError(
                f"llama.cpp has no place for the tensor {name!r}; use the model's directory "
                "as it is"
            )
        values = _rows_in_order(architecture.name, name, tensor.float().numpy(), model.config)
        yield _stored(gguf, there, values, storage)
    if rope(model.config)["rope_type"] == "llama3":
        yield _stored(gguf, "rope_freqs.weight", _frequencies(model), "f32")


def _tied(model: Any) -> frozenset[str]:
    """A head that is the embedding: llama.cpp takes that where there is no head."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return frozenset({"lm_head.weight"} if tied else ())


def _rows_in_order(architecture: str, name: str, values: Array, config: Any) -> Array:
    """llama.cpp turns neighbouring pairs of a head of Llama, transformers its two halves."""
    if architecture != "LLAMA":
        return values
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
    fits = storage != "q8_0" or values.shape[-1] % _Q8_GROUP == 0
    asked = storage if fits else "f16"
    kind = gguf.GGMLQuantizationType["F32" if values.ndim < 2 else asked.upper()]
    values = np.ascontiguousarray(values, np.float32)
    with np.errstate(over="ignore"):
        stored = gguf.quants.quantize(values, kind)
    meant = np.asarray(gguf.quants.dequantize(stored, kind), np.float32).reshape(values.shape)
    if not np.isfinite(meant).all():
        raise DataError(
            f"expected values of {name!r} within {asked}, got larger ones; store them otherwise: "
            "--gguf bf16"
        )
    return _Tensor(name, stored, kind, meant, not fits and values.ndim > 1)


@dataclass(frozen=True, slots=True)
class _Words:
    """A byte-level BPE as llama.cpp wants it.

    Attributes:
        tokens: By number, up to the model's vocabulary.
        kinds: Of each: plain, a mark, one of the user's, or unused.
        merges: Pairs, the first to be merged first.
        parting: llama.cpp's name for how text is parted before.
        left_out: How many marks the model has no row for.
    """

    tokens: list[str]
    kinds: list[int]
    merges: list[str]
    parting: str
    left_out: int

    @staticmethod
    def of(tokenizer: Any, vocabulary: int) -> _Words:
        """Of a fast tokenizer, without marks that the model has no row for.

        Raises:
            DataError: It is of another kind or another model's, or parts text as llama.cpp cannot.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        document = json.loads(backend.to_str()) if backend is not None else {}
        model = document.get("model", {})
        if model.get("type") != "BPE" or model.get("byte_fallback"):
            raise DataError(
                "expected a byte-level BPE as tokenizer for GGUF, got "
                f"{'BPE with byte fallback' if model.get('type') == 'BPE' else model.get('type')}; "
                "use the model's directory as it is"
            )
        parting = _parting(document.get("pre_tokenizer"))
        _check_bpe(document, parting)
        added = tokenizer.added_tokens_decoder
        highest = max(set(tokenizer.get_vocab().values()) - added.keys())
        check_tokens(highest, vocabulary)
        kinds = _library().TokenType
        tokens = [f"[PAD{number}]" for number in range(vocabulary)]
        which = [int(kinds.UNUSED)] * vocabulary
        for token, number in tokenizer.get_vocab().items():
            if number < vocabulary:
                tokens[number], which[number] = token, int(kinds.NORMAL)
        for number, mark in added.items():
            if number < vocabulary:
                tokens[number] = mark.content
                which[number] = int(kinds.CONTROL if mark.special else kinds.USER_DEFINED)
        merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        left_out = sum(number >= vocabulary for number in added)
        return _Words(tokens, which, merges, parting, left_out)

    def put(self, writer: Any, tokenizer: Any) -> None:
        """Into a file that is being written, with marks and the chat template."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.parting)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        writer.add_token_merges(self.merges)
        for add, number in (
            (writer.add_bos_token_id, tokenizer.bos_token_id),
            (writer.add_eos_token_id, tokenizer.eos_token_id),
            (writer.add_unk_token_id, tokenizer.unk_token_id),
            (writer.add_pad_token_id, tokenizer.pad_token_id),
        ):
            if number is not None and number < len(self.tokens):
                add(number)
        marked = tokenizer("a", verbose=False)["input_ids"]
        writer.add_add_bos_token(marked[:1] == [tokenizer.bos_token_id])
        writer.add_add_eos_token(marked[-1:] == [tokenizer.eos_token_id])
        if isinstance(tokenizer.chat_template, str):
            writer.add_chat_template(tokenizer.chat_template)


def _check_bpe(document: Mapping[str, Any], parting: str) -> None:
    """See that a tokenizer does nothing besides what llama.cpp does by the name of its parting.

    Raises:
        DataError: It changes the text before, or looks up whole words where llama.cpp merges.
    """
    normalizer = document.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    odd = [f"the normalizer {step['type']}" for step in steps if step["type"] != "NFC"]
    model = document["model"]
    odd += [
        f"{key} {model[key]!r}"
        for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
        if model.get(key)
    ]
    if bool(model.get("ignore_merges")) != (parting == "llama-bpe"):
        odd.append(f"ignore_merges {bool(model.get('ignore_merges'))}")
    if odd:
        raise DataError(
            f"expected a tokenizer without {odd[0]} for GGUF, as llama.cpp has none and would make "
            "other tokens; use the model's directory as it is"
        )


def _parting(document: Any) -> str:
    """llama.cpp's name for a pre-tokenizer of tokenizer.json.

    Raises:
        DataError: It has none that is known here.
    """
    steps = document["pretokenizers"] if document and document["type"] == "Sequence" else [document]
    match steps:
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return "gpt-2"
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ] if pattern in _BY_PATTERN:
            return _BY_PATTERN[pattern]
    raise DataError(
        "expected a tokenizer that parts text as those of GPT-2, SmolLM, Llama 3 or Qwen 2 for "
        "GGUF, got another way; llama.cpp would make other tokens; use the model's directory as it "
        "is"
    )


def _compare(gguf: Any, path: Path, told: Mapping[str, _Tensor], words: _Words) -> None:
    """Whether the file holds just that.

    Raises:
        StorageDamaged: It does not.
    """
    reader = gguf.GGUFReader(path)
    there = {tensor.name: tensor for tensor in reader.tensors}
    for name in there.keys() ^ told.keys():
        raise StorageDamaged(str(path), f"tensor {name!r}", "it is missing, or should not be there")
    for name, tensor in there.items():
        read = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if not np.array_equal(np.asarray(read).reshape(told[name].values.shape), told[name].values):
            raise StorageDamaged(str(path), f"tensor {name!r}", "other values than were written")
    if reader.get_field("tokenizer.ggml.tokens").contents() != words.tokens:
        raise StorageDamaged(str(path), "tokens", "others than were written")
    if reader.get_field("tokenizer.ggml.merges").contents() != words.merges:
        raise StorageDamaged(str(path), "merges", "others than were written")
