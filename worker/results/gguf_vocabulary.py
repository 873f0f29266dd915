"""Convert a tokenizer for llama.cpp: a byte-level BPE, or a BPE with byte fallback (SentencePiece).

llama.cpp has two algorithms. One merges pairs in the order of a list, like tokenizer.json. The
other, for SentencePiece, merges any two neighbors that together are a token, highest score first.
It equals a list of merges only if the list contains every such pair, grouped by token.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from protocol.base.errors import DataError
from worker.models.tokens import check_tokens

_LETTERS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: Final = {_LETTERS % r"\p{N}{1,3}": "dbrx", _LETTERS % r"\p{N}": "qwen2"}
"""llama.cpp's names for pre-tokenizers, by their regular expression."""
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_ALTERNATIVE: Final = "use the model's directory as it is"
_UNMERGED_SCORE: Final = -1000.0
"""The score of tokens that no merge produces."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer in llama.cpp's format.

    Attributes:
        algorithm: llama.cpp's name for the algorithm.
        tokens: Tokens by number, up to the model's vocabulary.
        token_types: The type of each token: normal, control, user-defined, unused, byte or unknown.
        pre_tokenizer: llama.cpp's name for the pre-tokenizer.
        tokens_without_row: Number of special tokens without a row in the model.
        merges: Pairs in the order of merging; empty for SentencePiece.
        scores: The score of each token, for SentencePiece.
        space_before: Whether SentencePiece puts a space before text.
    """

    algorithm: str
    tokens: list[str]
    token_types: list[int]
    pre_tokenizer: str
    tokens_without_row: int
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    space_before: bool = False

    @staticmethod
    def of(tokenizer: Any, vocabulary: int) -> Vocabulary:
        """Convert a fast tokenizer, without special tokens that have no row in the model.

        Raises:
            DataError: The tokenizer is not a BPE, belongs to another model, or splits text in a way
                that llama.cpp does not support.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        document = json.loads(backend.to_str()) if backend is not None else {}
        model = document.get("model", {})
        if model.get("type") != "BPE":
            raise DataError(
                f"expected a BPE tokenizer for GGUF, got {model.get('type')}; {_ALTERNATIVE}"
            )
        added_tokens = tokenizer.added_tokens_decoder
        highest = max(set(tokenizer.get_vocab().values()) - added_tokens.keys())
        check_tokens(highest, vocabulary)
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        tokens, token_types = _tokens(tokenizer, vocabulary)
        tokens_without_row = sum(number >= vocabulary for number in added_tokens)
        if model.get("byte_fallback"):
            _refuse_stripping_tokens(added_tokens)
            space_before = _puts_space_before(document)
            text_tokens = {
                number: t for t, number in model["vocab"].items() if number not in added_tokens
            }
            return Vocabulary(
                "llama", tokens, _mark_bytes(tokens, token_types, model), "default",
                tokens_without_row,
                scores=_scores([*map(_pair, model["merges"])], text_tokens, vocabulary),
                space_before=space_before,
            )  # fmt: skip
        pre_tokenizer = _pre_tokenizer(document.get("pre_tokenizer"))
        if pre_tokenizer == "dbrx" and model.get("ignore_merges"):
            pre_tokenizer = "llama-bpe"
        _check_bpe(document, pre_tokenizer)
        return Vocabulary("gpt2", tokens, token_types, pre_tokenizer, tokens_without_row, merges)

    def write_to(self, writer: Any, tokenizer: Any) -> None:
        """Write the vocabulary to a GGUF writer, with special tokens and the chat template."""
        writer.add_tokenizer_model(self.algorithm)
        writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.token_types)
        if self.scores:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.space_before)
        else:
            writer.add_token_merges(self.merges)
        for add_id, number in (
            (writer.add_bos_token_id, tokenizer.bos_token_id),
            (writer.add_eos_token_id, tokenizer.eos_token_id),
            (writer.add_unk_token_id, tokenizer.unk_token_id),
            (writer.add_pad_token_id, tokenizer.pad_token_id),
        ):
            if number is not None and number < len(self.tokens):
                add_id(number)
        ids = tokenizer("a", verbose=False)["input_ids"]
        writer.add_add_bos_token(ids[:1] == [tokenizer.bos_token_id])
        writer.add_add_eos_token(ids[-1:] == [tokenizer.eos_token_id])
        if isinstance(tokenizer.chat_template, str):
            writer.add_chat_template(tokenizer.chat_template)


def _tokens(tokenizer: Any, vocabulary: int) -> tuple[list[str], list[int]]:
    """Return the tokens and their types, by number."""
    types = importlib.import_module("gguf").TokenType
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    token_types = [int(types.UNUSED)] * vocabulary
    for token, number in tokenizer.get_vocab().items():
        if number < vocabulary:
            tokens[number], token_types[number] = token, int(types.NORMAL)
    for number, added_token in tokenizer.added_tokens_decoder.items():
        if number < vocabulary:
            tokens[number] = added_token.content
            token_types[number] = int(types.CONTROL if added_token.special else types.USER_DEFINED)
    return tokens, token_types


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _mark_bytes(
    tokens: Sequence[str], token_types: Sequence[int], model: Mapping[str, Any]
) -> list[int]:
    """Return the token types, with those of byte tokens and of the unknown token set.

    Raises:
        DataError: A byte has no token.
    """
    types = importlib.import_module("gguf").TokenType
    token_numbers = {token: number for number, token in enumerate(tokens)}
    marked_types = [*token_types]
    for byte in range(256):
        number = token_numbers.get(f"<0x{byte:02X}>")
        if number is None:
            raise DataError(
                f"expected a token for each byte, got none for 0x{byte:02X}; {_ALTERNATIVE}"
            )
        marked_types[number] = int(types.BYTE)
    if model.get("unk_token") in token_numbers:
        marked_types[token_numbers[model["unk_token"]]] = int(types.UNKNOWN)
    return marked_types


def _puts_space_before(document: Mapping[str, Any]) -> bool:
    """Return whether a SentencePiece tokenizer puts a space before text.

    Raises:
        DataError: The tokenizer changes text in another way, or puts a space only before some
            texts.
    """
    normalizer = document.get("normalizer") or {}
    splits = document.get("pre_tokenizer")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    split_at_spaces = {"type": "Split", "pattern": {"String": " "}, "invert": False}
    if steps in ([spaces], [prepend, spaces]) and (
        splits is None or split_at_spaces.items() <= splits.items()
    ):
        return prepend in steps
    metaspace = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "never",
        "split": False,
    }
    if not steps and splits == metaspace:
        return False
    raise DataError(
        "expected a SentencePiece tokenizer for GGUF that puts a space before every text or none, "
        f"got {_describe_steps(steps, splits)}; llama.cpp would produce different tokens; "
        f"{_ALTERNATIVE}"
    )


def _describe_steps(steps: Sequence[Mapping[str, Any]], splits: Mapping[str, Any] | None) -> str:
    parts = [*steps, *([splits] if splits else [])]
    names = [
        f"{part['type']} {part['prepend_scheme']!r}" if "prepend_scheme" in part else part["type"]
        for part in parts
    ]
    return " and ".join(names) or "one that keeps spaces"


def _refuse_stripping_tokens(added_tokens: Mapping[int, Any]) -> None:
    """Refuse special tokens that strip spaces around them, which GGUF cannot express.

    Raises:
        DataError: There is such a token.
    """
    for added_token in added_tokens.values():
        if added_token.lstrip or added_token.rstrip or added_token.single_word:
            raise DataError(
                "expected special tokens that do not change the text around them for GGUF, got "
                f"{added_token.content!r}; llama.cpp would produce different tokens; {_ALTERNATIVE}"
            )


def _scores(
    merges: Sequence[tuple[str, str]], text_tokens: Mapping[int, str], vocabulary: int
) -> list[float]:
    """Return scores with which llama.cpp makes the same merges as a list, in the same order.

    Args:
        merges: The list of merges.
        text_tokens: Tokens that occur in text, by number.
        vocabulary: Number of scores.

    Raises:
        DataError: No scores give the same merges.
    """
    merged_tokens = [left + right for left, right in merges]
    order = [token for token, _ in groupby(merged_tokens)]
    rank = {token: number for number, token in enumerate(order)}
    merge_set = {*merges}
    parts = {*text_tokens.values()}
    unlisted = (
        token
        for token in text_tokens.values()
        if not _is_byte(token)
        for position in range(1, len(token))
        if (token[:position], token[position:]) not in merge_set
        and all(len(part) == 1 or part in parts for part in (token[:position], token[position:]))
    )
    unlisted_token = next(unlisted, None)
    if len(rank) != len(order) or unlisted_token is not None:
        problem = (
            f"{unlisted_token!r} has more pairs than the list"
            if unlisted_token is not None
            else "pairs of one token are not adjacent"
        )
        raise DataError(
            f"expected the merges of a SentencePiece model for GGUF, got others ({problem}); "
            f"llama.cpp would produce different tokens; {_ALTERNATIVE}"
        )
    scores = [_UNMERGED_SCORE] * vocabulary
    for number, token in text_tokens.items():
        if number < vocabulary:
            scores[number] = float(-rank.get(token, 0))
    return scores


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x")


def _check_bpe(document: Mapping[str, Any], pre_tokenizer: str) -> None:
    """Check that a tokenizer works like llama.cpp's for the same pre-tokenizer.

    Raises:
        DataError: The tokenizer changes the text first, or looks up whole words where llama.cpp
            merges.
    """
    normalizer = document.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    unsupported = [f"the normalizer {step['type']}" for step in steps if step["type"] != "NFC"]
    model = document["model"]
    unsupported += [
        f"{key} {model[key]!r}"
        for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
        if model.get(key)
    ]
    if bool(model.get("ignore_merges")) != (pre_tokenizer == "llama-bpe"):
        unsupported.append("ignore_merges True")
    if unsupported:
        raise DataError(
            f"expected a tokenizer without {unsupported[0]} for GGUF, got one; llama.cpp does not "
            "support it and would produce different tokens; use the model's directory as it is"
        )


def _pre_tokenizer(document: Any) -> str:
    """Return llama.cpp's name for a pre-tokenizer of tokenizer.json.

    Raises:
        DataError: No name is known for it.
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
        ] if pattern in _PRE_TOKENIZERS:
            return _PRE_TOKENIZERS[pattern]
    raise DataError(
        "expected a tokenizer that splits text like that of GPT-2, SmolLM, Llama 3 or Qwen 2 for "
        "GGUF, got another one; llama.cpp would produce different tokens; use the model's "
        "directory as it is"
    )
