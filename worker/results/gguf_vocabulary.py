"""A tokenizer in llama.cpp's terms: a byte-level BPE, or a BPE with byte fallback (SentencePiece).

llama.cpp has two algorithms. One merges pairs by a list, as tokenizer.json does. The other, for
SentencePiece, merges any two neighbors that together are a token, the token with the highest score
first; a list of merges is the same only where it has every such pair, token by token.
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
_BY_PATTERN: Final = {_LETTERS % r"\p{N}{1,3}": "dbrx", _LETTERS % r"\p{N}": "qwen2"}
"""llama.cpp's names for pre-tokenizers, by their regular expression."""
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_INSTEAD: Final = "use the model's directory as it is"
_OF_MARKS: Final = -1000.0
"""The score of tokens that no merge makes."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer in llama.cpp's terms.

    Attributes:
        kind: llama.cpp's name for the algorithm.
        tokens: By number, up to the model's vocabulary.
        kinds: Of each: plain, a mark, one of the user's, or unused.
        pre_tokenizer: llama.cpp's name for how text is split before.
        left_out: How many marks the model has no row for.
        merges: Pairs, the first to be merged first; none of SentencePiece.
        scores: Of each token, for SentencePiece.
        space_before: Whether SentencePiece puts a space before text.
    """

    kind: str
    tokens: list[str]
    kinds: list[int]
    pre_tokenizer: str
    left_out: int
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    space_before: bool = False

    @staticmethod
    def of(tokenizer: Any, vocabulary: int) -> Vocabulary:
        """Translate a fast tokenizer, without marks that the model has no row for.

        Raises:
            DataError: It is of another kind or another model's, or splits text as llama.cpp cannot.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        document = json.loads(backend.to_str()) if backend is not None else {}
        model = document.get("model", {})
        if model.get("type") != "BPE":
            raise DataError(
                f"expected a BPE as tokenizer for GGUF, got {model.get('type')}; {_INSTEAD}"
            )
        added = tokenizer.added_tokens_decoder
        highest = max(set(tokenizer.get_vocab().values()) - added.keys())
        check_tokens(highest, vocabulary)
        merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        tokens, kinds = _tokens(tokenizer, vocabulary)
        left_out = sum(number >= vocabulary for number in added)
        if model.get("byte_fallback"):
            _refuse_stripped(added)
            space_before = _puts_space_before(document)
            plain = {number: t for t, number in model["vocab"].items() if number not in added}
            return Vocabulary(
                "llama", tokens, _with_bytes(tokens, kinds, model), "default", left_out,
                scores=_scores([*map(_pair, model["merges"])], plain, vocabulary),
                space_before=space_before,
            )  # fmt: skip
        pre_tokenizer = _pre_tokenizer(document.get("pre_tokenizer"))
        if pre_tokenizer == "dbrx" and model.get("ignore_merges"):
            pre_tokenizer = "llama-bpe"
        _check_bpe(document, pre_tokenizer)
        return Vocabulary("gpt2", tokens, kinds, pre_tokenizer, left_out, merges)

    def put(self, writer: Any, tokenizer: Any) -> None:
        """Put it into a file that is being written, with marks and the chat template."""
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.scores:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.space_before)
        else:
            writer.add_token_merges(self.merges)
        for add, number in (
            (writer.add_bos_token_id, tokenizer.bos_token_id),
            (writer.add_eos_token_id, tokenizer.eos_token_id),
            (writer.add_unk_token_id, tokenizer.unk_token_id),
            (writer.add_pad_token_id, tokenizer.pad_token_id),
        ):
            if number is not None and number < len(self.tokens):
                add(number)
        encoded = tokenizer("a", verbose=False)["input_ids"]
        writer.add_add_bos_token(encoded[:1] == [tokenizer.bos_token_id])
        writer.add_add_eos_token(encoded[-1:] == [tokenizer.eos_token_id])
        if isinstance(tokenizer.chat_template, str):
            writer.add_chat_template(tokenizer.chat_template)


def _tokens(tokenizer: Any, vocabulary: int) -> tuple[list[str], list[int]]:
    """Return the tokens and their kinds, by number."""
    types = importlib.import_module("gguf").TokenType
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    kinds = [int(types.UNUSED)] * vocabulary
    for token, number in tokenizer.get_vocab().items():
        if number < vocabulary:
            tokens[number], kinds[number] = token, int(types.NORMAL)
    for number, mark in tokenizer.added_tokens_decoder.items():
        if number < vocabulary:
            tokens[number] = mark.content
            kinds[number] = int(types.CONTROL if mark.special else types.USER_DEFINED)
    return tokens, kinds


def _pair(merge: Any) -> tuple[str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second


def _with_bytes(tokens: Sequence[str], kinds: Sequence[int], model: Mapping[str, Any]) -> list[int]:
    """Return the kinds with those of bytes and of the unknown token.

    Raises:
        DataError: A byte has no token.
    """
    types = importlib.import_module("gguf").TokenType
    token_numbers = {token: number for number, token in enumerate(tokens)}
    token_kinds = [*kinds]
    for byte in range(256):
        number = token_numbers.get(f"<0x{byte:02X}>")
        if number is None:
            raise DataError(
                f"expected a token for each byte for GGUF, got none for 0x{byte:02X}; {_INSTEAD}"
            )
        token_kinds[number] = int(types.BYTE)
    if model.get("unk_token") in token_numbers:
        token_kinds[token_numbers[model["unk_token"]]] = int(types.UNKNOWN)
    return token_kinds


def _puts_space_before(document: Mapping[str, Any]) -> bool:
    """Return whether a SentencePiece tokenizer puts a space before text.

    Raises:
        DataError: It does something else to text, or puts it before some texts only.
    """
    normalizer = document.get("normalizer") or {}
    splits = document.get("pre_tokenizer")
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    no_spaces_left = {"type": "Split", "pattern": {"String": " "}, "invert": False}
    if steps in ([spaces], [prepend, spaces]) and (
        splits is None or no_spaces_left.items() <= splits.items()
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
        "expected a SentencePiece tokenizer that puts a space before every text or none for GGUF, "
        f"got {_name_of(steps, splits)}; llama.cpp would produce different tokens; {_INSTEAD}"
    )


def _name_of(steps: Sequence[Mapping[str, Any]], splits: Mapping[str, Any] | None) -> str:
    found = [*steps, *([splits] if splits else [])]
    shown = [
        f"{each['type']} {each['prepend_scheme']!r}" if "prepend_scheme" in each else each["type"]
        for each in found
    ]
    return " and ".join(shown) or "one that keeps spaces"


def _refuse_stripped(added: Mapping[int, Any]) -> None:
    """Refuse marks that take the spaces around them along, which no file says.

    Raises:
        DataError: There is one.
    """
    for mark in added.values():
        if mark.lstrip or mark.rstrip or mark.single_word:
            raise DataError(
                "expected special tokens that leave the text around them alone for GGUF, got "
                f"{mark.content!r}; llama.cpp would produce different tokens; {_INSTEAD}"
            )


def _scores(
    merges: Sequence[tuple[str, str]], plain: Mapping[int, str], vocabulary: int
) -> list[float]:
    """Return scores by which llama.cpp merges what a list of merges does, in that order.

    Args:
        merges: The list.
        plain: The tokens that text is made of, by number.
        vocabulary: How many scores there are.

    Raises:
        DataError: No scores do.
    """
    merged = [first + second for first, second in merges]
    order = [token for token, _ in groupby(merged)]
    rank = {token: number for number, token in enumerate(order)}
    merge_set = {*merges}
    parts = {*plain.values()}
    unlisted = (
        token
        for token in plain.values()
        if not _is_byte(token)
        for at in range(1, len(token))
        if (token[:at], token[at:]) not in merge_set
        and all(len(part) == 1 or part in parts for part in (token[:at], token[at:]))
    )
    odd = next(unlisted, None)
    if len(rank) != len(order) or odd is not None:
        problem = (
            f"{odd!r} is made of more pairs" if odd is not None else "pairs of equal tokens apart"
        )
        raise DataError(
            f"expected the merges of a SentencePiece model for GGUF, got others ({problem}); "
            f"llama.cpp would produce different tokens; {_INSTEAD}"
        )
    scores = [_OF_MARKS] * vocabulary
    for number, token in plain.items():
        if number < vocabulary:
            scores[number] = float(-rank.get(token, 0))
    return scores


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x")


def _check_bpe(document: Mapping[str, Any], pre_tokenizer: str) -> None:
    """Check that a tokenizer does only what llama.cpp does for its pre-tokenizer's name.

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
    if bool(model.get("ignore_merges")) != (pre_tokenizer == "llama-bpe"):
        odd.append("ignore_merges True")
    if odd:
        raise DataError(
            f"expected a tokenizer without {odd[0]} for GGUF, as llama.cpp has none and would make "
            "other tokens; use the model's directory as it is"
        )


def _pre_tokenizer(document: Any) -> str:
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
        "expected a tokenizer that splits text as those of GPT-2, SmolLM, Llama 3 or Qwen 2 for "
        "GGUF, got another way; llama.cpp would produce different tokens; use the model's "
        "directory as it is"
    )
