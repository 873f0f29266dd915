"""Read running text for language modeling: distinct documents from files.

A text file is a document; in a file of rows, the column `data.text` of each row is one. If the run
spec names a single text file, the file is read in parts, so that some of them can be held out. The
document begins with the first part and ends with the last.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from protocol.base.errors import DataError
from protocol.datasets.disk_texts import DiskTexts, DistinctTexts
from protocol.datasets.rows import BadRows, Location, Record, read_rows
from protocol.datasets.text_file import format_value, read_text, text_pieces
from protocol.spec.files import sources
from protocol.spec.sections.data import (
    COLUMNS_OF_FORMAT,
    DEFAULT_PATTERN,
    OPTIONAL_COLUMNS,
    DataSpec,
)

PART_CHARACTERS: Final = 4_096
"""Minimum length of a part of a single text file, which is cut at the next line end."""
_DEFAULT_COLUMN: Final = DataSpec.model_fields["text"].default


class TextPart(NamedTuple):
    """A document, or a part of one.

    Attributes:
        text: The text, which is not blank.
        begins: Whether the document begins with this part.
        ends: Whether the document ends with this part.
    """

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Distinct documents, or the parts of one, in the order of the files' names.

    The texts are stored on disk: a corpus may be larger than memory.

    Attributes:
        documents: The text of each document or part.
        begins: Whether a document begins with each text.
        ends: Whether a document ends with each text.
        duplicates: Number of repeated documents.
        bad_rows: Number of skipped rows.
    """

    documents: DiskTexts
    begins: Sequence[int]
    ends: Sequence[int]
    duplicates: int
    bad_rows: int


def read_text_corpus(spec: DataSpec) -> TextCorpus:
    """Read the running text of the files that the run spec names.

    Raises:
        DataError: A file is missing, is not UTF-8, has an unsupported format or lacks the column,
            or there is no text.
    """
    corpus, begins, ends = DistinctTexts(), array("b"), array("b")
    bad_rows = BadRows(skip=spec.skip_bad_rows)
    for part in read_parts(spec, bad_rows):
        if not (part.begins and part.ends):
            corpus.texts.append(part.text)  # parts of one document may be equal
        elif not corpus.add(part.text):
            continue
        begins.append(part.begins)
        ends.append(part.ends)
    if not corpus.texts:
        raise DataError(
            f"expected text in {spec.train!r}, found none; name other data: --set data.train=FILE"
        )
    return TextCorpus(corpus.texts, begins, ends, corpus.duplicates, bad_rows.count)


def read_parts(spec: DataSpec, bad_rows: BadRows) -> Iterator[TextPart]:
    """Yield every document, or the parts of a single text file.

    Args:
        spec: Names files and column.
        bad_rows: Receives the rows that cannot be used.

    Raises:
        DataError: See `read_text_corpus`.
    """
    paths = sources.corpus_files(spec.train, spec.pattern)
    if spec.pattern != DEFAULT_PATTERN and not sources.is_directory(spec.train):
        raise DataError(
            f"data.pattern selects files of a directory, but data.train is {spec.train!r}; remove "
            "data.pattern"
        )
    if spec.text != _DEFAULT_COLUMN and not any(map(_has_rows, paths)):
        raise DataError(
            f"data.text names a column, {spec.text!r}, but {str(paths[0])!r} is plain text, which "
            "has none; remove data.text"
        )
    for path in paths:
        if _has_rows(path):
            texts = (text for text in _read_column([path], spec.text, bad_rows) if text.strip())
            yield from map(TextPart, texts)
        elif len(paths) == 1:
            yield from _join_blank_pieces(_cut_at_line_ends(text_pieces(path)))
        elif (text := read_text(path)).strip():
            yield TextPart(text)
    bad_rows.report()


def _has_rows(path: Path) -> bool:
    return sources.file_format(path) in sources.ROW_FORMATS


def _read_column(paths: Sequence[Path], column: str, bad_rows: BadRows) -> Iterator[str]:
    def refuse_conversations(location: Location, actual_columns: Sequence[str]) -> None:
        for format_name, columns in COLUMNS_OF_FORMAT.items():
            if (
                column not in actual_columns
                and columns
                and {*columns} - OPTIONAL_COLUMNS <= {*actual_columns}
            ):
                raise DataError(
                    f"{location}: expected running text, got a conversation; set its format: --set "
                    f"data.format={format_name}"
                )

    def parse_text(location: Location, record: Record) -> str:
        text = record[column]
        if not isinstance(text, str):
            raise DataError(f"{location}: expected text, got {format_value(text)}")
        return text

    rows = read_rows(paths, {"text": column}, [column], bad_rows, refuse_conversations)
    return (text for _, text in bad_rows.parse(rows, parse_text))


def _join_blank_pieces(texts: Iterator[str]) -> Iterator[TextPart]:
    """Join blank pieces of a document to their neighbors; a blank document has no parts."""
    text, is_blank, begins = "", True, True
    for piece in texts:
        is_piece_blank = not piece.strip()
        if is_blank or is_piece_blank:
            text, is_blank = text + piece, is_blank and is_piece_blank
        else:
            yield TextPart(text, begins, ends=False)
            text, begins = piece, False
    if not is_blank:
        yield TextPart(text, begins)


def _cut_at_line_ends(pieces: Iterable[str]) -> Iterator[str]:
    """Cut a text at line ends; a line longer than `PART_CHARACTERS` stays whole.

    Args:
        pieces: The text, in pieces of any length.
    """
    text = ""
    for piece in pieces:
        text, start = text + piece, 0
        while end := text.find("\n", start + PART_CHARACTERS) + 1:
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text
