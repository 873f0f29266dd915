"""Memory while reading data larger than the limit, for each task and kind of file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from protocol.base.limits import MIB
from protocol.datasets.conversations import read_conversations
from protocol.datasets.labeled_text import read_labeled_text
from protocol.datasets.preferences import read_preferences
from protocol.datasets.rows import BadRows
from protocol.datasets.text_corpus import read_text_corpus
from protocol.exact.digest import digest_arrays
from protocol.spec.sections.data import DataSpec
from tests.resident_memory import measured_growth
from worker.data import holdout
from worker.data.chat_template import ChatTemplate, LossMask, RenderedConversation
from worker.data.labeled_data import data_digest, encode_texts
from worker.data.language_data import ConversationSamples, TextStream, Windows
from worker.data.preference_data import EncodedPairs
from worker.models.tokens import Tokens

SIZE: Final = 24 * MIB
MAX_GROWTH: Final = 5 * SIZE // 6
"""Allowed growth of memory, including what earlier tests left in the allocator: loading all data
would take more than its size."""
ROWS: Final = SIZE // 4096
WORDS: Final = "word " * 800


class ByteTokenizer:
    """A tokenizer with one token per eight bytes."""

    eos_token_id = 0
    is_fast = True

    def __call__(self, texts: str | list[str], **_: Any) -> Any:
        if isinstance(texts, str):
            return {"input_ids": list(texts.encode()[::8])}
        return BatchEncoding([Encoding(text.encode()) for text in texts])


class Encoding:
    """The encoding of ASCII text."""

    overflowing = ()

    def __init__(self, text: bytes) -> None:
        self.ids = list(text[::8])

    @property
    def offsets(self) -> Any:
        return 8 * np.arange(len(self.ids))[:, None] + [0, 8]

    @property
    def word_ids(self) -> range:
        return range(len(self.ids))


class BatchEncoding(dict[str, Any]):
    def __init__(self, encodings: list[Encoding]) -> None:
        super().__init__(input_ids=[encoding.ids for encoding in encodings])
        self.encodings = encodings


class PlainTemplate(ChatTemplate):
    """A template of plain text, with one token per eight bytes; the last half has loss."""

    def __init__(self) -> None:
        pass

    def render(self, conversation: Any) -> RenderedConversation:
        return RenderedConversation(
            "".join(message.content for message in conversation.messages), ((0, 1),)
        )

    def encode(self, rendered: Sequence[RenderedConversation]) -> Iterator[tuple[Tokens, LossMask]]:
        for each in rendered:
            ids = np.frombuffer(each.text.encode()[::8], np.uint8).astype(np.int64)
            yield ids, np.arange(len(ids)) >= len(ids) // 2


def write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> Path:
    """Write the rows in the format of the file's suffix."""
    if path.suffix == ".parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        # One row group, as in files of writers of whole tables.
        pq.write_table(pa.Table.from_pylist([*rows]), path, row_group_size=ROWS, compression="none")
        return path
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
            return path
        table = csv.writer(file, delimiter="," if path.suffix == ".csv" else "\t")
        for number, row in enumerate(rows):
            if not number:
                table.writerow(row.keys())
            table.writerow(row.values())
    return path


@pytest.mark.parametrize("form", ["t.txt", "t.jsonl"])
def test_memory_for_running_text_is_bounded(tmp_path, form):
    path, size = tmp_path / form, 48 * MIB
    with path.open("w") as file:
        for number in range(size // 4096):
            line = f"{number} {WORDS}{'word ' * 18}\n"
            file.write(line if form == "t.txt" else json.dumps({"text": line}) + "\n")
    with measured_growth() as growth:
        corpus = read_text_corpus(DataSpec(train=str(path)))
        (stream,) = TextStream.of(ByteTokenizer(), corpus, range(len(corpus.documents)))
        windows = Windows(stream, 512)
        assert windows.batch(np.array([5, len(windows) - 1])).weight > 512
    assert stream.tokens.elements > size // 9
    assert growth.peak_bytes < 32 * MIB


@pytest.fixture(autouse=True, scope="module")
def _libraries_are_loaded(tmp_path_factory):
    """Load libraries first. Their code counts as memory once it has run, and Arrow's allocator
    keeps freed memory: neither belongs to the data."""
    pa = pytest.importorskip("pyarrow")
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    rows = ({"prompt": f"{n}?", "completion": WORDS} for n in range(200))
    path = write_rows(tmp_path_factory.mktemp("small") / "t.parquet", rows)
    conversations = read_conversations(DataSpec(train=str(path), format="prompt-completion"))
    ConversationSamples.encode(
        PlainTemplate(),
        (conversations[n] for n in range(len(conversations))),
        4096,
        16,
        bad_rows=BadRows(skip=False),
    )
    yield
    pa.set_memory_pool(before)


# The tests of labeled text and of pairs read tables and Parquet.
@pytest.mark.parametrize(
    "form",
    [
        "jsonl",
        pytest.param("csv", marks=pytest.mark.slow),
        pytest.param("parquet", marks=pytest.mark.slow),
    ],
)
def test_memory_for_conversations_is_bounded(tmp_path, form):
    rows = ({"prompt": f"{n}?", "completion": f"{n} {WORDS}"} for n in range(ROWS))
    path = write_rows(tmp_path / f"t.{form}", rows)
    data = DataSpec.model_validate({"train": str(path), "format": "prompt-completion"})
    with measured_growth() as growth:
        conversations = read_conversations(data)
        rows_read = (conversations[n] for n in range(len(conversations)))
        encoded_turns = ConversationSamples.encode(
            PlainTemplate(), rows_read, 4096, 16, bad_rows=BadRows(skip=False)
        )
    assert len(encoded_turns) == len(conversations) == ROWS
    assert conversations[7].messages[1].content == f"7 {WORDS}"
    assert growth.peak_bytes < MAX_GROWTH


# Tables with commas and with tabs have one reader.
@pytest.mark.parametrize("form", ["jsonl", "csv", pytest.param("tsv", marks=pytest.mark.slow)])
def test_memory_for_labeled_text_is_bounded(tmp_path, form):
    rows = ({"text": f"{n} {WORDS}".strip(), "label": "ab"[n % 2]} for n in range(ROWS))
    path = write_rows(tmp_path / f"t.{form}", rows)
    with measured_growth() as growth:
        labeled_text = read_labeled_text(DataSpec(train=str(path)))
        train, _ = holdout.split(labeled_text.texts, 0, 0.2)
        tokens, is_truncated = encode_texts(ByteTokenizer(), labeled_text.texts, 4096, str)
        data_digest(labeled_text)
    assert (len(tokens), is_truncated, len(train)) == (ROWS, 0, ROWS - round(ROWS * 0.2))
    assert labeled_text.texts[7] == f"7 {WORDS}".strip()
    assert labeled_text.labels[7] == 1
    assert growth.peak_bytes < MAX_GROWTH


# Pairs and conversations have one reader.
@pytest.mark.parametrize(
    "form",
    [
        pytest.param("jsonl", marks=pytest.mark.slow),
        pytest.param("csv", marks=pytest.mark.slow),
        "parquet",
    ],
)
def test_memory_for_pairs_is_bounded(tmp_path, form):
    half = WORDS[: len(WORDS) // 2]
    rows = (
        {"prompt": f"{n}?", "chosen": f"{n} {half}", "rejected": f"-{n} {half}"}
        for n in range(ROWS)
    )
    data = DataSpec(train=str(write_rows(tmp_path / f"t.{form}", rows)), max_tokens=4096)
    pairs = EncodedPairs(data.max_tokens)
    with measured_growth() as growth:
        preferences = read_preferences(data)
        documents = pairs.add(PlainTemplate(), preferences, data)
        pairs.digests(0)
    assert len(documents) == len(pairs) == len(preferences) == ROWS
    assert preferences[7].rejected.messages[-1].content == f"-7 {half}"
    assert len(pairs.pair(7)[0][0]) > 250
    assert growth.peak_bytes < MAX_GROWTH


def test_a_digest_of_labeled_text_is_that_of_its_json(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [{"text": f'é "{n}"', "label": "cab"[n % 3]} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    labeled_text = read_labeled_text(DataSpec(train=str(path)))
    texts = [row["text"] for row in rows]
    document = json.dumps([texts, [2, 0, 1, 2, 0], ["a", "b", "c"]]).encode()
    expected = digest_arrays({"document": np.frombuffer(document, np.uint8)})
    assert data_digest(labeled_text) == expected
