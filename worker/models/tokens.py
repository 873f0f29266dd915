"""Tokenizers: loaded, or trained on a corpus; what they make of text; and how they are saved."""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2
import numpy as np
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from protocol.base.errors import DataError
from protocol.spec.sections.model import ModelSpec
from worker.models.added_tokens import add_to_tokenizer, with_rows
from worker.models.pretrained import Pretrained, locate, quiet, refusal

END_OF_TEXT: Final = "<|endoftext|>"
EXPORT_CHARACTERS: Final = 3_000_000
"""A manifest travels in one frame; a tokenizer larger than this is not saved with a model."""

_OF_THIS_MACHINE: Final = {"is_local", "local_files_only", "name_or_path"}

SAMPLE_TEXTS: Final = 1_000
SAMPLE_CHARACTERS: Final = 4_096
"""So much of a data set shows whether a tokenizer knows its language."""

_ENCODED_CHARACTERS: Final = 1_000_000
"""At once, or a little more."""

Tokens = NDArray[np.int64]

NOTHING: Final = -100
"""The label of what is not predicted."""


def load_tokenizer(source: str, added: Sequence[str] = ()) -> Any:
    """The fast tokenizer of a model's source, with a padding token.

    Args:
        source: The model's, or the tokenizer's own.
        added: `model.added_tokens` of the run spec.

    Raises:
        DataError: There is none, or it has neither a padding nor an end token.
    """
    tokenizer = _load(source, *locate(source, tokenizer=True))
    add_to_tokenizer(tokenizer, added)
    return tokenizer


def with_added_tokens(
    loaded: Pretrained, model: ModelSpec, tokenizer: Any, source: str | None = None
) -> Pretrained:
    """Return a model with rows for `model.added_tokens`; without any, as it is.

    Args:
        loaded: The model; changed in place.
        model: The section `model` of the run spec.
        tokenizer: With the added tokens.
        source: Of the tokenizer, if it is not the model's.
    """
    if not model.added_tokens:
        return loaded
    source = source or model.source
    is_new = model.config is not None or source is None
    return with_rows(loaded, model, tokenizer, None if is_new else load_tokenizer(str(source)))


def tokenizer_in(directory: Path) -> Any:
    """The tokenizer that a run has saved in a directory, where there need be no model.

    Raises:
        DataError: It cannot be loaded.
    """
    return _load(str(directory), str(directory), {"local_files_only": True})


def _load(source: str, place: str, keywords: Mapping[str, Any]) -> Any:
    quiet()
    try:
        tokenizer = _class_of(place).from_pretrained(place, use_fast=True, **keywords)
    except Exception as error:  # noqa: BLE001  (half a file raises errors of all kinds)
        raise refusal("tokenizer", source, error) from None
    # Without its files transformers makes up one that knows its own marks and no text.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise DataError(
            f"expected a tokenizer beside the model in {source!r}, found no vocabulary; "
            "put its tokenizer.json (or vocab.txt, tokenizer.model) there"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise DataError(
                f"expected a tokenizer with a padding or an end token in {source!r}, found "
                "neither; add one (pad_token in tokenizer_config.json)"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _class_of(place: str) -> Any:
    """Without a model's configuration, or a class by name, transformers would not know which."""
    known = Path(place) / "tokenizer_config.json", Path(place) / "config.json"
    lone = (Path(place) / "tokenizer.json").is_file() and not any(map(Path.is_file, known))
    return transformers.PreTrainedTokenizerFast if lone else transformers.AutoTokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909); any text can be written in it.

    Ties are broken by the tokens themselves, so texts decide everything; the digest in the
    manifest would show it if that were not so.

    Args:
        texts: What it is trained on.
        vocabulary: How many tokens at most: 256 bytes, the end of a text, and merges.
    """
    quiet()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def check_tokens(highest: int, vocabulary: int) -> None:
    """A tokenizer of another model would name tokens that this one has not.

    Args:
        highest: Of the tokens in use, padding included.
        vocabulary: How many tokens the model knows: rows of its embedding.

    Raises:
        DataError: It does.
    """
    if highest >= vocabulary:
        raise DataError(
            f"expected tokens below {vocabulary}, the rows of the model's embedding, got "
            f"{highest}; give the tokenizer that belongs to the model"
        )


def unknown_per_thousand(tokenizer: Any, texts: Sequence[str]) -> int:
    """How many of a thousand tokens of these texts stand for what the tokenizer does not know.

    Looks at texts evenly drawn from all of them: see `unknown_in`.
    """
    return unknown_in(tokenizer, [*texts[:: sampled_every(len(texts))]])


def sampled_every(count: int) -> int:
    """Of so many texts each which one is looked at."""
    return -(-count // SAMPLE_TEXTS)


def unknown_in(tokenizer: Any, texts: Iterable[str]) -> int:
    """How many of a thousand tokens of these texts stand for what the tokenizer does not know.

    Raises:
        DataError: Most of them do: the tokenizer is another language's, or its files are damaged.
    """
    # Of spaces alone some tokenizers make nothing.
    seen = (text.lstrip() if text[:SAMPLE_CHARACTERS].isspace() else text for text in texts)
    sample = [text[:SAMPLE_CHARACTERS] for text in seen]
    ids = tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = np.concatenate([np.array(each, np.int64) for each in ids])
    unknown = int(np.count_nonzero(tokens == tokenizer.unk_token_id))
    if 2 * unknown >= len(tokens):
        raise DataError(
            f"the tokenizer does not know {unknown} of {len(tokens)} tokens of the data, so the "
            "model would read next to nothing of it; give the tokenizer that belongs to the model, "
            "and a model of the data's language"
        )
    return 1000 * unknown // len(tokens)


def encode_cut(
    tokenizer: Any,
    texts: Iterable[str],
    max_tokens: int,
    place: Callable[[int], str] = "text {}".format,
) -> Iterator[tuple[Tokens, bool]]:
    """Tokens of each text with the model's own marks, cut to `max_tokens`, and whether they were
    cut; some texts are in memory at once.

    Args:
        tokenizer: Of the model.
        texts: Any number.
        max_tokens: No more than these of each.
        place: Where a text stands, in words, by its number.

    Raises:
        DataError: The tokenizer makes nothing of a text.
    """
    done = 0
    for some in _some_at_a_time(texts):
        encoded = tokenizer(some, truncation=True, max_length=max_tokens)
        for number, ids in enumerate(encoded["input_ids"]):
            if not ids:
                raise DataError(
                    f"{place(done + number)}: expected text, got {some[number][:40]!r}, for which "
                    "the tokenizer gives no tokens; leave it out"
                )
            cut = encoded.encodings is not None and bool(encoded.encodings[number].overflowing)
            yield np.array(ids, np.int64), cut
        done += len(some)


def encode_each(tokenizer: Any, texts: Iterable[str]) -> Iterator[Tokens]:
    """The tokens of each text without any marks; some texts are in memory at once."""
    for some in _some_at_a_time(texts):
        found = tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]
        yield from (np.array(ids, np.int64) for ids in found)


def marks_around_text(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before a text by itself, and what ends a text.

    The first are the marks that a model of this tokenizer was trained with (Llama's <s>, Gemma's
    <bos>; none for GPT-2). The end is the end token, or what the tokenizer puts behind a text.
    """
    plain, marked = (
        [int(each) for each in tokenizer("a", add_special_tokens=add)["input_ids"]]
        for add in (False, True)
    )
    count = len(plain)
    at = next((n for n in range(len(marked)) if marked[n : n + count] == plain), None)
    before, behind = ([], []) if at is None else (marked[:at], marked[at + count :])
    return before, behind if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]


def where_said(rendered: str, content: str) -> int:
    """Where a chat template has written a message, behind its last character; -1 if nowhere.

    Args:
        rendered: Without any spaces and line ends: see `without_spaces`.
        content: What the message says; a template may strip it, or write it as JSON or HTML.
    """
    forms = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
    for form in map(without_spaces, (*forms, html.escape(content))):
        at = rendered.find(form)
        if at >= 0:
            return at + len(form)
    return -1


def without_spaces(text: str) -> str:
    """A text without spaces and line ends, which templates strip and add."""
    return "".join(text.split())


def answer_ends(tokenizer: Any) -> frozenset[int]:
    """What ends an answer: the end token, and the mark behind an answer in the chat template."""
    _, behind = marks_around_text(tokenizer)
    mark = _mark_after_an_answer(tokenizer) if tokenizer.chat_template else None
    return frozenset(behind[:1] if mark is None else [*behind[:1], mark])


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """What ends a text that a model writes: the model's own tokens and those of training."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {*answer_ends(tokenizer), *(named if isinstance(named, list) else [named])}
    return frozenset(each for each in ends if each is not None)


def _mark_after_an_answer(tokenizer: Any) -> int | None:
    """The first token behind what the assistant says, if it is one of the tokenizer's marks."""
    said = "unlikely words"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (jinja2.TemplateError, TypeError, ValueError):
        return None
    behind = tokenizer(text.rpartition(said)[2], add_special_tokens=False)["input_ids"]
    marks = tokenizer.added_tokens_decoder
    return int(behind[0]) if behind and behind[0] in marks else None


def _some_at_a_time(texts: Iterable[str]) -> Iterator[list[str]]:
    waiting: list[str] = []
    characters = 0
    for text in texts:
        waiting.append(text)
        characters += len(text)
        if characters >= _ENCODED_CHARACTERS:
            yield waiting
            waiting, characters = [], 0
    if waiting:
        yield waiting


def tokenizer_files(tokenizer: Any) -> dict[str, str]:
    """The files from which `AutoTokenizer.from_pretrained` makes it again, the same everywhere.

    None of a tokenizer without a `tokenizer.json`, or of one that is too large.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return {}
    backend.no_truncation()
    backend.no_padding()
    files = {"tokenizer.json": backend.to_str()}
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        config = json.loads((Path(directory) / "tokenizer_config.json").read_text("utf-8"))
        template = Path(directory) / "chat_template.jinja"
        if template.is_file():
            files[template.name] = template.read_text("utf-8")
    config = {key: value for key, value in config.items() if key not in _OF_THIS_MACHINE}
    files["tokenizer_config.json"] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    written = sum(len(json.dumps(text)) for text in files.values())
    return files if written <= EXPORT_CHARACTERS else {}
