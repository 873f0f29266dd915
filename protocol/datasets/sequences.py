"""Rows whose labels are sequences: words with a tag each, or a text with the text it becomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from protocol.base.errors import DataError
from protocol.datasets.conversations import DistinctRows, Row
from protocol.datasets.messages import read_words
from protocol.datasets.rows import BadRows, Location, Record, read_rows
from protocol.datasets.text_file import shown
from protocol.spec.files import sources
from protocol.spec.sections.data import DataSpec


@dataclass(frozen=True, slots=True)
class TaggedWords:
    """A sentence in words, with a tag of each."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    location: str


@dataclass(frozen=True, slots=True)
class TextPair:
    """A text, and the text that is to be made of it."""

    source: str
    target: str
    location: str


def read_tagged_words(spec: DataSpec) -> DistinctRows[TaggedWords]:
    """Read the columns `data.text` (words) and `data.label` (tags).

    Raises:
        DataError: A file is missing or damaged, lacks a column, or rows have other words than tags.
    """

    def row_of(document: str, location: str) -> TaggedWords:
        words, tags = json.loads(document)
        return TaggedWords(tuple(words), tuple(tags), location)

    return _read(spec, _tagged, row_of, "words with tags")


def read_text_pairs(spec: DataSpec) -> DistinctRows[TextPair]:
    """Read the columns `data.text` (sources) and `data.label` (targets).

    Raises:
        DataError: A file is missing or damaged, lacks a column, or rows lack a text.
    """

    def row_of(document: str, location: str) -> TextPair:
        source, target = json.loads(document)
        return TextPair(source, target, location)

    return _read(spec, _pair, row_of, "pairs of texts")


def _read(
    spec: DataSpec,
    parse: Callable[[Location, object, object], list[object]],
    row_of: Callable[[str, str], Row],
    expected: str,
) -> DistinctRows[Row]:
    required_columns = {"text": spec.text, "label": spec.label}
    bad_rows = BadRows(skip=spec.skip_bad_rows)

    def document(location: Location, record: Record) -> str:
        row = parse(location, record[spec.text], record[spec.label])
        return json.dumps(row, ensure_ascii=False)

    files = sources.row_files(spec.train)
    rows = bad_rows.parse(
        read_rows(files, required_columns, [*required_columns.values()], bad_rows), document
    )
    return DistinctRows(rows, row_of, f"{expected} in {spec.train!r}", bad_rows)


def _pair(location: Location, source: object, target: object) -> list[object]:
    location_text = str(location)
    return [
        read_words(location_text, source, "source"),
        read_words(location_text, target, "target"),
    ]


def _tagged(location: Location, words: object, tags: object) -> list[object]:
    lists = _read_list(location, words, "words"), _read_list(location, tags, "tags")
    if len(lists[0]) != len(lists[1]):
        raise DataError(
            f"{location}: expected a tag for each word, got {len(lists[0])} words and "
            f"{len(lists[1])} tags"
        )
    return [*lists]


def _read_list(location: Location, value: object, name: str) -> list[str]:
    """Read a list of texts, its JSON text, or words with spaces between them."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise DataError(
                    f"{location}: expected a list of {name} as JSON, got {shown(value)}"
                ) from None
        else:
            value = value.split()
    if not isinstance(value, list) or not value:
        raise DataError(f"{location}: expected a list of {name}, got {shown(value)}")
    texts = [str(item).strip() if isinstance(item, str | int) else "" for item in value]
    if not all(texts):
        at = texts.index("")
        raise DataError(f"{location}: expected text as each of the {name}, got {shown(value[at])}")
    return texts
