"""Tokenizers: loading, training on a corpus, encoding text, and saving."""

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
from worker.models.added_tokens import add_to_tokenizer, add_token_rows
from worker.models.pretrained import Pretrained, load_error, locate, silence_libraries

END_OF_TEXT: Final = "<|endoftext|>"
EXPORT_CHARACTERS: Final = 3_000_000
"""Size above which a tokenizer is not saved with a model: a manifest must fit in one frame."""

_LOCAL_KEYS: Final = {"is_local", "local_files_only", "name_or_path"}
"""Keys of tokenizer_config.json that depend on the machine."""

SAMPLE_TEXTS: Final = 1_000
"""Most texts to sample from a data set, to check whether the tokenizer knows its language."""
SAMPLE_CHARACTERS: Final = 4_096
"""Most characters of each sampled text."""

_BATCH_CHARACTERS: Final = 1_000_000
"""Characters to encode at once; the last text of a batch may exceed this."""

Tokens = NDArray[np.int64]

IGNORED_LABEL: Final = -100
"""The label of a token that is not predicted."""


def load_tokenizer(source: str, added_tokens: Sequence[str] = ()) -> Any:
    """Load the fast tokenizer of a model's source, with a padding token.

    Args:
        source: Source of the model, or of the tokenizer.
        added_tokens: `model.added_tokens` of the run spec.

    Raises:
        DataError: The tokenizer cannot be loaded, has neither a padding nor an end token, or has an
            added token as an ordinary token.
    """
    tokenizer = _load(source, *locate(source, tokenizer=True))
    add_to_tokenizer(tokenizer, added_tokens)
    return tokenizer


def add_tokens_to_model(
    loaded: Pretrained, model: ModelSpec, tokenizer: Any, source: str | None = None
) -> Pretrained:
    """Add rows for `model.added_tokens` to a model; return the model.

    Args:
        loaded: The model; changed in place.
        model: The section `model` of the run spec.
        tokenizer: The tokenizer with the added tokens.
        source: Source of the tokenizer, if it is not the model's.
    """
    if not model.added_tokens:
        return loaded
    source = source or model.source
    has_new_table = model.config is not None or source is None
    return add_token_rows(
        loaded, model, tokenizer, None if has_new_table else load_tokenizer(str(source))
    )


def load_saved_tokenizer(directory: Path) -> Any:
    """Load the tokenizer that a run saved in a directory, with or without a model.

    Raises:
        DataError: The tokenizer cannot be loaded.
    """
    return _load(str(directory), str(directory), {"local_files_only": True})


def _load(source: str, location: str, keywords: Mapping[str, Any]) -> Any:
    silence_libraries()
    try:
        tokenizer = _tokenizer_class(location).from_pretrained(location, use_fast=True, **keywords)
    except Exception as error:  # noqa: BLE001  (a truncated file raises errors of many kinds)
        raise load_error("tokenizer", source, error) from None
    # Without files, transformers creates a tokenizer of special tokens only.
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise DataError(
            f"expected a tokenizer with the model in {source!r}, found no vocabulary; "
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


def _tokenizer_class(location: str) -> Any:
    """Return the class that loads a tokenizer.

    Without configuration files, `AutoTokenizer` cannot choose one.
    """
    directory = Path(location)
    config_files = directory / "tokenizer_config.json", directory / "config.json"
    if (directory / "tokenizer.json").is_file() and not any(map(Path.is_file, config_files)):
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909), which can encode any text.

    Ties are broken by the tokens themselves, so the result depends only on the texts; the digest in
    the manifest verifies that.

    Args:
        texts: The texts to train on.
        vocabulary: Largest number of tokens: 256 bytes, the end of a text, and merges.
    """
    silence_libraries()
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


def check_tokens(highest_token: int, vocabulary: int) -> None:
    """Refuse a tokenizer with more tokens than the model: it belongs to another model.

    Args:
        highest_token: The highest token in use, padding included.
        vocabulary: Number of tokens of the model: rows of its embedding.

    Raises:
        DataError: The embedding has no row for the highest token.
    """
    if highest_token >= vocabulary:
        raise DataError(
            f"expected tokens below {vocabulary}, the rows of the model's embedding, got "
            f"{highest_token}; give the tokenizer that belongs to the model"
        )


def measure_unknown_tokens_in_sample(tokenizer: Any, texts: Sequence[str]) -> int:
    """Return the unknown tokens per thousand in an evenly spaced sample of the texts.

    Raises:
        DataError: See `measure_unknown_tokens`.
    """
    return measure_unknown_tokens(tokenizer, [*texts[:: sampling_stride(len(texts))]])


def sampling_stride(count: int) -> int:
    """Return the stride with which `count` texts are sampled."""
    return -(-count // SAMPLE_TEXTS)


def measure_unknown_tokens(tokenizer: Any, texts: Iterable[str]) -> int:
    """Return the unknown tokens per thousand in the beginnings of these texts.

    Raises:
        DataError: At least half of the tokens are unknown. The tokenizer is for another language,
            or its files are damaged.
    """
    # Some tokenizers return no tokens for spaces alone.
    stripped_texts = (
        text.lstrip() if text[:SAMPLE_CHARACTERS].isspace() else text for text in texts
    )
    sample = [text[:SAMPLE_CHARACTERS] for text in stripped_texts]
    ids = tokenizer(sample, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = np.concatenate([np.array(text_ids, np.int64) for text_ids in ids])
    unknown_count = int(np.count_nonzero(tokens == tokenizer.unk_token_id))
    if 2 * unknown_count >= len(tokens):
        raise DataError(
            f"the tokenizer does not know {unknown_count} of {len(tokens)} tokens of the data; use "
            "the tokenizer that belongs to the model, and a model of the data's language"
        )
    return 1000 * unknown_count // len(tokens)


def encode_truncated(
    tokenizer: Any,
    texts: Iterable[str],
    max_tokens: int,
    describe_position: Callable[[int], str] = "text {}".format,
) -> Iterator[tuple[Tokens, bool]]:
    """Yield the tokens of each text, truncated to `max_tokens`, and whether they were truncated.

    Tokens include special tokens. Texts are encoded in batches.

    Args:
        tokenizer: The model's tokenizer.
        texts: Any number of texts.
        max_tokens: Largest number of tokens per text.
        describe_position: Describes the position of a text in errors, by its number.

    Raises:
        DataError: The tokenizer returns no tokens for a text.
    """
    encoded_count = 0
    for batch in _batches_of_texts(texts):
        encoded = tokenizer(batch, truncation=True, max_length=max_tokens)
        for index, ids in enumerate(encoded["input_ids"]):
            if not ids:
                raise DataError(
                    f"{describe_position(encoded_count + index)}: expected text, got "
                    f"{batch[index][:40]!r}, for which the tokenizer has no tokens; leave it out"
                )
            is_cut = encoded.encodings is not None and bool(encoded.encodings[index].overflowing)
            yield np.array(ids, np.int64), is_cut
        encoded_count += len(batch)


def encode_each(tokenizer: Any, texts: Iterable[str]) -> Iterator[Tokens]:
    """Yield the tokens of each text without special tokens. Texts are encoded in batches."""
    for batch in _batches_of_texts(texts):
        batch_ids = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        yield from (np.array(ids, np.int64) for ids in batch_ids)


def marks_around_text(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special tokens before a text, and those that end a text.

    The first are the tokens that the tokenizer puts before a text (Llama's <s>, Gemma's <bos>; none
    for GPT-2). The second are the end token, or else the tokens that the tokenizer appends.
    """
    plain_ids, marked_ids = (
        [int(token_id) for token_id in tokenizer("a", add_special_tokens=with_marks)["input_ids"]]
        for with_marks in (False, True)
    )
    count = len(plain_ids)
    text_start = next(
        (
            start
            for start in range(len(marked_ids))
            if marked_ids[start : start + count] == plain_ids
        ),
        None,
    )
    leading_marks, trailing_marks = (
        ([], [])
        if text_start is None
        else (marked_ids[:text_start], marked_ids[text_start + count :])
    )
    return leading_marks, trailing_marks if tokenizer.eos_token_id is None else [
        int(tokenizer.eos_token_id)
    ]


def find_message_end(template_output: str, content: str) -> int:
    """Return the end of a message's content in the output of a chat template; -1 if it is absent.

    Args:
        template_output: The template's output without whitespace: see `remove_whitespace`.
        content: The message's content. The template may have stripped it, or written it as JSON or
            HTML.
    """
    forms = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
    for form in map(remove_whitespace, (*forms, html.escape(content))):
        start = template_output.find(form)
        if start >= 0:
            return start + len(form)
    return -1


def remove_whitespace(text: str) -> str:
    """Return a text without whitespace: templates remove and add whitespace."""
    return "".join(text.split())


def answer_end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the end token, and the chat template's end mark."""
    _, trailing_marks = marks_around_text(tokenizer)
    end_mark = _answer_end_mark(tokenizer) if tokenizer.chat_template else None
    return frozenset(trailing_marks[:1] if end_mark is None else [*trailing_marks[:1], end_mark])


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a generated text: those of the model and those of training."""
    model_ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {
        *answer_end_tokens(tokenizer),
        *(model_ends if isinstance(model_ends, list) else [model_ends]),
    }
    return frozenset(token for token in ends if token is not None)


def _answer_end_mark(tokenizer: Any) -> int | None:
    """Return the first token after an assistant's message, if it is a special token."""
    answer = "unlikely words"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (jinja2.TemplateError, TypeError, ValueError):
        return None
    ids_after_answer = tokenizer(text.rpartition(answer)[2], add_special_tokens=False)["input_ids"]
    special_tokens = tokenizer.added_tokens_decoder
    return (
        int(ids_after_answer[0])
        if ids_after_answer and ids_after_answer[0] in special_tokens
        else None
    )


def _batches_of_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def tokenizer_files(tokenizer: Any) -> dict[str, str]:
    """Return names and content of the files from which `AutoTokenizer` loads the tokenizer.

    The mapping is empty for a tokenizer that has no `tokenizer.json` or is too large.
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
    config = {key: value for key, value in config.items() if key not in _LOCAL_KEYS}
    files["tokenizer_config.json"] = json.dumps(config, indent=2, sort_keys=True) + "\n"
    total_characters = sum(len(json.dumps(text)) for text in files.values())
    return files if total_characters <= EXPORT_CHARACTERS else {}
