"""A document's tokens equal those of one tokenizer call on its whole text.

That holds however the document is divided into windows or files.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from protocol.base.errors import DataError
from protocol.datasets.text_corpus import PART_CHARACTERS, read_text_corpus
from protocol.spec.run_spec import RunSpec, parse_run_spec
from protocol.spec.sections.data import DataSpec
from worker.data.document_tokens import encode_text
from worker.data.language_data import CutDocuments, TextStream, read_language_data
from worker.models.tokens import IGNORED_LABEL

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = [
    "the", "cat", "sat", "on", "a", "red", "mat", "while", "12345", "birds", "sing:", "Café,",
    "naïve!", "🙂", "don't", "(see", "below)",
]  # fmt: skip
SPECIAL = ["<unk>", "<s>", "</s>"]


def text_of(kind: str, characters: int, seed: int = 3) -> str:
    rng = random.Random(seed)
    separators = {
        "paragraphs": [" "] * 7 + ["\n\n", "\n", "\n\n\n"],
        "crlf": [" "] * 7 + ["\r\n", "\r\n\r\n"],
        "long lines": [" "] * 300 + ["\n"],
        "no line end": [" ", "  "],
        "emoji": [" ", "🙂", "👩‍👩‍👧", "\n", "é", "e\u0301"],
        "code": [" ", "\n    ", "\n\n        ", "\t", "();\n", "0x1f2e3d4c"],
        "special tokens": [" ", "\n", "</s>", " <s> "],
        "spaces": [" ", " " * 40, "\n" * 40],
    }[kind]
    text = ""
    while len(text) < characters:
        text += rng.choice(WORDS) + rng.choice(separators)
    return text[:characters]


KINDS = [
    "paragraphs", "crlf", "long lines", "no line end", "emoji", "code", "special tokens", "spaces",
]  # fmt: skip


def tokenizer_of(name: str) -> Any:
    """Return a tiny tokenizer that is built like those of the named model family."""
    unigram = trainers.UnigramTrainer(
        vocab_size=250, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    bpe = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if "byte" in name else [],
    )
    trainer: Any = bpe
    new_tokenizer = Tokenizer(
        models.BPE(unk_token=None if "byte" in name else "<unk>", fuse_unk=True)
    )
    match name:
        case "llama 3, byte":
            split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            new_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        case "roberta, byte":
            new_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "unigram":
            new_tokenizer, trainer = Tokenizer(models.Unigram()), unigram
            new_tokenizer.normalizer = normalizers.NFKC()
            new_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        case "unigram without words":
            new_tokenizer, trainer = Tokenizer(models.Unigram()), unigram
        case "llama 2":
            metaspace_steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            new_tokenizer.normalizer = normalizers.Sequence(metaspace_steps)
            texts = [text.replace(" ", "▁") for text in "".join(corpus()).split("\n")]
            new_tokenizer.train_from_iterator(texts, trainer)
            return fast_tokenizer(new_tokenizer)
        case "bert":
            new_tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
            new_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
            new_tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            trainer = trainers.WordPieceTrainer(
                vocab_size=300, special_tokens=SPECIAL, show_progress=False
            )
    new_tokenizer.train_from_iterator(corpus(), trainer)
    return fast_tokenizer(new_tokenizer)


def corpus() -> list[str]:
    return [text_of(kind, 2_000, seed=1) for kind in ("paragraphs", "crlf", "code")]


def fast_tokenizer(new_tokenizer: Tokenizer) -> Any:
    new_tokenizer.decoder = decoders.ByteLevel()
    new_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=new_tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="</s>",
    )  # fmt: skip


NAMES = ["llama 3, byte", "roberta, byte", "unigram", "unigram without words", "llama 2", "bert"]


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request) -> Any:
    return tokenizer_of(request.param)


@pytest.fixture(scope="module")
def saved_tokenizer(tokenizer, tmp_path_factory) -> Path:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(directory)
    return directory


def encode_whole(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def encode_in_windows(tokenizer: Any, text: str, window: int) -> list[int]:
    encoded_windows = [*encode_text(tokenizer, len(text), lambda lo, hi: text[lo:hi], window)]
    starts = np.concatenate([starts for _, starts in encoded_windows])
    assert (np.diff(starts) >= 0).all()
    return [int(token) for ids, _ in encoded_windows for token in ids]


@pytest.mark.parametrize("kind", KINDS)
def test_windows_give_the_tokens_of_the_whole_text(tokenizer, kind):
    for length in (900, 4_001):
        text = text_of(kind, length, seed=length)
        expected = encode_whole(tokenizer, text)
        for window in (300, 777, 2_000):
            assert encode_in_windows(tokenizer, text, window) == expected


@pytest.mark.parametrize("unit", ["a", "1", "\n", " ", "ab", "12 ", "🙂", "x\n\n", "\r\n"])
def test_windows_of_repetitive_text(tokenizer, unit):
    text = "the cat " + unit * (1_500 // len(unit)) + " sat."
    assert encode_in_windows(tokenizer, text, 400) == encode_whole(tokenizer, text)


class RecordingTokenizer:
    """A tokenizer that records the length of its texts."""

    is_fast = True

    def __init__(self, tokenizer: Any) -> None:
        self.backend_tokenizer = tokenizer.backend_tokenizer
        self.tokenizer, self.longest = tokenizer, 0

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.longest = max(self.longest, *map(len, texts))
        return self.tokenizer(texts, **options)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "unigram without words"])
@pytest.mark.parametrize("kind", ["paragraphs", "long lines", "code"])
def test_memory_is_bounded_where_texts_have_words(name, kind):
    recorder = RecordingTokenizer(tokenizer_of(name))
    text = text_of(kind, 20_000)
    assert encode_in_windows(recorder, text, 2_000) == encode_whole(recorder.tokenizer, text)
    assert recorder.longest <= 4_000


def test_inconsistent_tokenizer_is_refused():
    class InconsistentTokenizer(RecordingTokenizer):
        def __call__(self, texts: list[str], **options: Any) -> Any:
            encoding = super().__call__(texts, **options)
            return (
                encoding
                if len(texts[0]) <= 400
                else super().__call__([texts[0].upper()], **options)
            )

    text = text_of("paragraphs", 800) + "a" * 700
    with pytest.raises(DataError, match="split the document into several of at most 400"):
        encode_in_windows(InconsistentTokenizer(tokenizer_of("unigram")), text, 400)


def spec_of(tokenizer_directory: Path, train: Path, **data: Any) -> RunSpec:
    return parse_run_spec({
        "task": "causal-lm", "steps": 1, "seed": 3,
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"source": str(tokenizer_directory)}, "batch": {"samples": 2, "microbatch": 2},
        "data": {"train": str(train), "max_tokens": 16, **data},
    })  # fmt: skip


def stream(samples: Any) -> list[int]:
    """Return all tokens; a sample's last token is the first of the next one."""
    rows = [samples.sample(number)[0].tolist() for number in range(len(samples))]
    return [token for tokens in rows for token in tokens[:-1]] + rows[-1][-1:]


def write_text(path: Path, text: str) -> Path:
    jsonl = json.dumps({"text": text}) + "\n" if path.suffix == ".jsonl" else text
    path.write_bytes(jsonl.encode())
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_single_file_has_the_tokens_of_its_text(tokenizer, saved_tokenizer, tmp_path, kind):
    text = text_of(kind, 9_500)
    expected = [1, *encode_whole(tokenizer, text), 2]
    for name in ("a.txt", "a.jsonl"):
        spec = spec_of(saved_tokenizer, write_text(tmp_path / name, text))
        assert stream(read_language_data(spec, 0.0).train) == expected


def test_splitting_a_single_file_changes_no_token(tokenizer, saved_tokenizer, tmp_path):
    """The split falls between two line ends, which some tokenizers encode as one token."""
    text = ("the cat sat on a mat. " * 200)[: PART_CHARACTERS - 1] + "a\n\nthe cat " * 3
    assert text[PART_CHARACTERS : PART_CHARACTERS + 2] == "\n\n"
    for content in (text, text * 3):
        spec = spec_of(saved_tokenizer, write_text(tmp_path / "a.txt", content))
        assert stream(read_language_data(spec, 0.0).train) == [
            1,
            *encode_whole(tokenizer, content),
            2,
        ]


@pytest.mark.parametrize(
    "text",
    ["\n" * 9_000 + "the cat\n" + " \n" * 9_000, "the cat sat on a mat.\n" * 900],
    ids=["spaces", "repeated line"],
)
def test_no_text_of_a_single_file_is_dropped(tokenizer, saved_tokenizer, tmp_path, text):
    spec = spec_of(saved_tokenizer, write_text(tmp_path / "a.txt", text))
    language_data = read_language_data(spec, 0.0)
    assert stream(language_data.train) == [1, *encode_whole(tokenizer, text), 2]
    assert language_data.notes["duplicates_removed"] == 0


def test_split_of_a_single_file_keeps_all_its_tokens(tokenizer, tmp_path):
    text = text_of("paragraphs", 40_000)
    text_corpus = read_text_corpus(DataSpec(train=str(write_text(tmp_path / "a.txt", text))))
    count = len(text_corpus.documents)
    assert count > 5
    split_streams = TextStream.of(tokenizer, text_corpus, [*range(0, count, 3)], [1, 2, 4, 5])
    (whole_stream,) = TextStream.of(tokenizer, text_corpus, range(count))
    document_streams = TextStream.of(tokenizer, text_corpus, *([number] for number in range(count)))
    expected = [1, *encode_whole(tokenizer, text), 2]
    assert whole_stream.tokens.read(0, whole_stream.tokens.elements).tolist() == expected
    assert len(whole_stream.tokens) == 1
    parts = [
        text_stream.tokens.read(0, text_stream.tokens.elements).tolist()
        for text_stream in document_streams
    ]
    assert [token for part in parts for token in part] == expected
    token_lists = [
        text_stream.tokens.read(0, text_stream.tokens.elements).tolist()
        for text_stream in split_streams
    ]
    assert token_lists[0] == [token for part in parts[::3] for token in part]
    assert token_lists[1] == [token for n in (1, 2, 4, 5) for token in parts[n]]
    assert [len(text_stream.tokens) for text_stream in split_streams] == [len(parts[::3]), 2]


def test_packing_splits_a_single_file_like_a_row(tokenizer, tmp_path):
    text = text_of("paragraphs", 9_500)
    piece_lists = []
    for name in ("a.txt", "a.jsonl"):
        path = str(write_text(tmp_path / name, text))
        text_corpus = read_text_corpus(DataSpec(train=path))
        (text_stream,) = TextStream.of(tokenizer, text_corpus, range(len(text_corpus.documents)))
        documents = CutDocuments.of(text_stream, 64)
        piece_lists.append([documents.piece(n)[1].tolist() for n in range(len(documents.lengths))])
    assert piece_lists[0] == piece_lists[1]
    labels = [label for document in piece_lists[0] for label in document]
    assert IGNORED_LABEL not in labels
    assert labels == [*encode_whole(tokenizer, text), 2]


def test_tokenizer_without_offsets_reads_the_whole_text(tokenizer, tmp_path):
    class SlowTokenizer(RecordingTokenizer):
        is_fast = False

        def __call__(self, texts: Any, **options: Any) -> Any:
            return {"input_ids": self.tokenizer(texts, **options).input_ids}

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tokenizer, name)

    text = text_of("paragraphs", 9_500)
    text_corpus = read_text_corpus(DataSpec(train=str(write_text(tmp_path / "a.txt", text))))
    (text_stream,) = TextStream.of(
        SlowTokenizer(tokenizer), text_corpus, range(len(text_corpus.documents))
    )
    expected = [1, *encode_whole(tokenizer, text), 2]
    assert text_stream.tokens.read(0, text_stream.tokens.elements).tolist() == expected
