"""Running text for language modelling: documents out of files, without those that come twice.

A file is a document, and so is a line of JSONL. A text file that is named alone is cut into
documents, so that some of it can be held out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.base.errors import DataError
from protocol.data.disk_texts import DiskTexts, DistinctTexts
from protocol.data.text_file import check_columns, json_records, read_text, shown, text_pieces
from protocol.spec import sources
from protocol.spec.run_spec import COLUMNS_OF_FORMAT, DataSpec

LONE_FILE_CHARACTERS: Final = 4_096
"""A text file named alone is cut at the first line end after so many."""


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Documents, all different and none of spaces alone, in the order of the files' names.

    They lie on disk: a corpus may be larger than memory.
    """

    documents: DiskTexts
    duplicates: int


def read_text_corpus(spec: DataSpec) -> TextCorpus:
    """Read what the run spec names.

    Raises:
        DataError: There is no such file, it is not UTF-8, lacks the column, or holds no text.
    """
    found = DistinctTexts()
    for document in documents(spec):
        if document.strip():
            found.add(document)
    if not found.texts:
        raise DataError(f"expected text in {spec.train!r}, found none")
    return TextCorpus(found.texts, found.duplicates)


def documents(spec: DataSpec) -> Iterator[str]:
    """Every document as it is read; errors as of `read_text_corpus`, if there is text at all."""
    paths = sources.corpus_files(spec.train, spec.pattern)
    for path in paths:
        if path.suffix == ".jsonl":
            yield from _json_documents(path, spec.text)
        elif len(paths) == 1:
            yield from _pieces(text_pieces(path))
        else:
            yield read_text(path)


def _json_documents(path: Path, key: str) -> Iterator[str]:
    for line, record in json_records(path):
        if key not in record:
            _notice_conversations(path, line, record)
        check_columns(path, line, list(record), {"text": key})
        text = record[key]
        if not isinstance(text, str):
            raise DataError(f"{str(path)!r} line {line}: expected text, got {shown(text)}")
        yield text


def _notice_conversations(path: Path, line: int, record: Mapping[str, object]) -> None:
    for form, columns in COLUMNS_OF_FORMAT.items():
        if columns and {*columns} - {"input"} <= record.keys():
            raise DataError(
                f"{str(path)!r} line {line}: expected running text, got a conversation; say how "
                f"it is written: --set data.format={form}"
            )


def _pieces(read: Iterable[str]) -> Iterator[str]:
    """Cut after a line end; a line longer than a piece stays whole.

    Args:
        read: The text, in whatever parts.
    """
    text = ""
    for part in read:
        text, at = text + part, 0
        while end := text.find("\n", at + LONE_FILE_CHARACTERS) + 1:
            yield text[at:end]
            at = end
        text = text[at:]
    if text:
        yield text
