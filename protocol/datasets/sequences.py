"""Read rows whose labels are sequences: a tag for each word, or a target text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from protocol.base.errors import DataError
from protocol.datasets.conversations import DistinctRows, Row
from protocol.datasets.messages import require_text
from protocol.datasets.rows import BadRows, Location, Record, read_rows
from protocol.datasets.text_file import format_value
from protocol.spec.files import sources
from protocol.spec.sections.data import DataSpec


@dataclass(frozen=True, slots=True)
class TaggedWords:
    """The words of a sentence, with a tag for each word."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    location: str


@dataclass(frozen=True, slots=True)
class TextPair:
    """A source text, and the target text that a model learns to produce from it."""

    source: str
    target: str
    location: str


def read_tagged_words(spec: DataSpec) -> DistinctRows[TaggedWords]:
    """Read the columns `data.text` (words) and `data.label` (tags).

    Raises:
        DataError: A file is missing or damaged or lacks a column, or the numbers of words and tags
            of a row differ.
    """

    def parse_document(document: str, location: str) -> TaggedWords:
        words, tags = json.loads(document)
        return TaggedWords(tuple(words), tuple(tags), location)

    return _read(spec, _parse_tagged_words, parse_document, "words with tags")


def read_text_pairs(spec: DataSpec) -> DistinctRows[TextPair]:
    """Read the columns `data.text` (sources) and `data.label` (targets).

    Raises:
        DataError: A file is missing or damaged or lacks a column, or a row lacks a text.
    """

    def parse_document(document: str, location: str) -> TextPair:
        source, target = json.loads(document)
        return TextPair(source, target, location)

    return _read(spec, _parse_text_pair, parse_document, "pairs of texts")


def _read(
    spec: DataSpec,
    parse_cells: Callable[[Location, object, object], list[object]],
    parse_document: Callable[[str, str], Row],
    expected: str,
) -> DistinctRows[Row]:
    required_columns = {"text": spec.text, "label": spec.label}
    bad_rows = BadRows(skip=spec.skip_bad_rows)

    def to_document(location: Location, record: Record) -> str:
        row = parse_cells(location, record[spec.text], record[spec.label])
        return json.dumps(row, ensure_ascii=False)

    files = sources.row_files(spec.train)
    rows = bad_rows.parse(
        read_rows(files, required_columns, [*required_columns.values()], bad_rows), to_document
    )
    return DistinctRows(rows, parse_document, f"{expected} in {spec.train!r}", bad_rows)


def _parse_text_pair(location: Location, source: object, target: object) -> list[object]:
    location_text = str(location)
    return [
        require_text(location_text, source, "source"),
        require_text(location_text, target, "target"),
    ]


def _parse_tagged_words(location: Location, words: object, tags: object) -> list[object]:
    word_list = _parse_list(location, words, "words")
    tag_list = _parse_list(location, tags, "tags")
    if len(word_list) != len(tag_list):
        raise DataError(
            f"{location}: expected a tag for each word, got {len(word_list)} words and "
            f"{len(tag_list)} tags"
        )
    return [word_list, tag_list]


def _parse_list(location: Location, value: object, name: str) -> list[str]:
    """Parse a list of texts, its JSON text, or words separated by spaces."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise DataError(
                    f"{location}: expected a list of {name} as JSON, got {format_value(value)}"
                ) from None
        else:
            value = value.split()
    if not isinstance(value, list) or not value:
        raise DataError(f"{location}: expected a list of {name}, got {format_value(value)}")
    texts = [str(item).strip() if isinstance(item, str | int) else "" for item in value]
    if not all(texts):
        empty = value[texts.index("")]
        raise DataError(
            f"{location}: expected text as each of the {name}, got {format_value(empty)}"
        )
    return texts
