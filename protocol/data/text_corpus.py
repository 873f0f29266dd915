"""Running text for language modelling: documents out of files, without those that come twice.

A text file is a document, and so is a row of a JSONL, CSV, TSV or Parquet file, by its column
`data.text`. A text file that is named alone is read as parts, so that some of it can be held out:
together they are one document, all of it, which begins with the first and ends with the last.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from protocol.base.errors import DataError
from protocol.data.disk_texts import DiskTexts, DistinctTexts
from protocol.data.rows import JSON_REMEDY, JSON_SUFFIXES, ROW_SUFFIXES, place_of, read_rows
from protocol.data.text_file import read_text, shown, text_pieces
from protocol.spec import sources
from protocol.spec.run_spec import COLUMNS_OF_FORMAT, OPTIONAL_COLUMNS, DataSpec

LONE_FILE_CHARACTERS: Final = 4_096
"""A text file named alone is cut at the first line end after so many."""
_USUAL_COLUMN: Final = DataSpec.model_fields["text"].default
_USUAL_PATTERN: Final = DataSpec.model_fields["pattern"].default


class TextPart(NamedTuple):
    """A document, or a part of one.

    Attributes:
        text: Not of spaces alone.
        begins: Whether the document begins here.
        ends: Whether it ends here.
    """

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Documents, all different, or parts of one, in the order of the files' names.

    They lie on disk: a corpus may be larger than memory.

    Attributes:
        documents: Their texts.
        begins: Of each, whether a document begins with it.
        ends: Of each, whether a document ends with it.
        duplicates: How many came again.
    """

    documents: DiskTexts
    begins: Sequence[int]
    ends: Sequence[int]
    duplicates: int


def read_text_corpus(spec: DataSpec) -> TextCorpus:
    """Read what the run spec names.

    Raises:
        DataError: There is no such file, it is not UTF-8, is of a kind that is not read, lacks the
            column, or holds no text.
    """
    found, begins, ends = DistinctTexts(), array("b"), array("b")
    for part in parts(spec):
        if not (part.begins and part.ends):
            found.texts.append(part.text)  # a document may say the same twice
        elif not found.add(part.text):
            continue
        begins.append(part.begins)
        ends.append(part.ends)
    if not found.texts:
        raise DataError(f"expected text in {spec.train!r}, found none")
    return TextCorpus(found.texts, begins, ends, found.duplicates)


def parts(spec: DataSpec) -> Iterator[TextPart]:
    """Every document as it is read, or its parts; errors as of `read_text_corpus`, if there is
    text at all."""
    paths = sources.corpus_files(spec.train, spec.pattern)
    if spec.pattern != _USUAL_PATTERN and not sources.is_directory(spec.train):
        raise DataError(
            "data.pattern chooses among the files of a directory, but data.train is "
            f"{spec.train!r}; leave data.pattern out"
        )
    if spec.text != _USUAL_COLUMN and not any(map(_has_rows, paths)):
        raise DataError(
            f"data.text names a column, {spec.text!r}, but {str(paths[0])!r} is plain text, which "
            "has none; leave data.text out"
        )
    for path in paths:
        if _has_rows(path):
            yield from map(TextPart, filter(str.strip, _column(path, spec.text)))
        elif path.suffix.lower() in JSON_SUFFIXES:
            raise DataError(
                f"expected text, or rows ({', '.join(ROW_SUFFIXES)}), got {str(path)!r}: "
                f"{JSON_REMEDY}"
            )
        elif len(paths) == 1:
            yield from _joined(_pieces(text_pieces(path)))
        elif (text := read_text(path)).strip():
            yield TextPart(text)


def _has_rows(path: Path) -> bool:
    return path.suffix.lower() in ROW_SUFFIXES


def _column(path: Path, column: str) -> Iterator[str]:
    def notice_conversations(line: int, there: Sequence[str]) -> None:
        for form, columns in COLUMNS_OF_FORMAT.items():
            if column not in there and columns and {*columns} - OPTIONAL_COLUMNS <= {*there}:
                raise DataError(
                    f"{place_of(path, line)}: expected running text, got a conversation; say how "
                    f"it is written: --set data.format={form}"
                )

    for number, record in read_rows(path, {"text": column}, [column], notice_conversations):
        text = record[column]
        if not isinstance(text, str):
            raise DataError(f"{place_of(path, number)}: expected text, got {shown(text)}")
        yield text


def _joined(texts: Iterator[str]) -> Iterator[TextPart]:
    """Parts of one document; a piece of spaces alone goes with its neighbor. None of them if that
    is all."""
    text, blank, begins = "", True, True
    for piece in texts:
        piece_blank = not piece.strip()
        if blank or piece_blank:
            text, blank = text + piece, blank and piece_blank
        else:
            yield TextPart(text, begins, ends=False)
            text, begins = piece, False
    if not blank:
        yield TextPart(text, begins)


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
