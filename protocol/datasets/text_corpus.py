"""Read running text for language modeling: distinct documents from files.

A text file is a document, and so is a row of a file of rows, by its column `data.text`. A text file
that is named alone is read in parts, so that some of it can be held out: together they are one
document, which begins with the first part and ends with the last.
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
from protocol.datasets.text_file import read_text, shown, text_pieces
from protocol.spec.files import sources
from protocol.spec.sections.data import COLUMNS_OF_FORMAT, OPTIONAL_COLUMNS, USUAL_PATTERN, DataSpec

LONE_FILE_CHARACTERS: Final = 4_096
"""Characters after which a text file that is named alone is cut, at the next line end."""
_USUAL_COLUMN: Final = DataSpec.model_fields["text"].default


class TextPart(NamedTuple):
    """A document, or a part of one.

    Attributes:
        text: Not blank.
        begins: Whether the document begins here.
        ends: Whether it ends here.
    """

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True, slots=True)
class TextCorpus:
    """Distinct documents, or parts of one, in the order of the files' names.

    On disk: a corpus may be larger than memory.

    Attributes:
        documents: Their texts.
        begins: Whether a document begins with each.
        ends: Whether a document ends with each.
        duplicates: Number of repeated documents.
        bad_rows: How many rows were skipped.
    """

    documents: DiskTexts
    begins: Sequence[int]
    ends: Sequence[int]
    duplicates: int
    bad_rows: int


def read_text_corpus(spec: DataSpec) -> TextCorpus:
    """Read what the run spec names.

    Raises:
        DataError: There is no such file, it is not UTF-8, is of a kind that is not read, lacks the
            column, or holds no text.
    """
    corpus, begins, ends = DistinctTexts(), array("b"), array("b")
    bad_rows = BadRows(skip=spec.skip_bad_rows)
    for part in parts(spec, bad_rows):
        if not (part.begins and part.ends):
            corpus.texts.append(part.text)  # a document may say the same twice
        elif not corpus.add(part.text):
            continue
        begins.append(part.begins)
        ends.append(part.ends)
    if not corpus.texts:
        raise DataError(
            f"expected text in {spec.train!r}, found none; name other data: --set data.train=FILE"
        )
    return TextCorpus(corpus.texts, begins, ends, corpus.duplicates, bad_rows.count)


def parts(spec: DataSpec, bad_rows: BadRows) -> Iterator[TextPart]:
    """Read every document, or its parts; errors as of `read_text_corpus`.

    Args:
        spec: Names files and column.
        bad_rows: Where rows that cannot be used are reported.
    """
    paths = sources.corpus_files(spec.train, spec.pattern)
    if spec.pattern != USUAL_PATTERN and not sources.is_directory(spec.train):
        raise DataError(
            "data.pattern chooses among the files of a directory, but data.train is "
            f"{spec.train!r}; leave data.pattern out"
        )
    if spec.text != _USUAL_COLUMN and not any(map(_has_rows, paths)):
        raise DataError(
            f"data.text names a column, {spec.text!r}, but {str(paths[0])!r} is plain text, which "
            "has none; leave data.text out"
        )
    rows = [path for path in paths if _has_rows(path)]
    for path in paths:
        if path in rows:
            texts = (text for text in _column([path], spec.text, bad_rows) if text.strip())
            yield from map(TextPart, texts)
        elif len(paths) == 1:
            yield from _join_blank_pieces(_pieces(text_pieces(path)))
        elif (text := read_text(path)).strip():
            yield TextPart(text)
    bad_rows.report()


def _has_rows(path: Path) -> bool:
    return sources.kind_of(path) in sources.ROW_KINDS


def _column(paths: Sequence[Path], column: str, bad_rows: BadRows) -> Iterator[str]:
    def notice_conversations(location: Location, columns_found: Sequence[str]) -> None:
        for form, columns in COLUMNS_OF_FORMAT.items():
            if (
                column not in columns_found
                and columns
                and {*columns} - OPTIONAL_COLUMNS <= {*columns_found}
            ):
                raise DataError(
                    f"{location}: expected running text, got a conversation; say how "
                    f"it is written: --set data.format={form}"
                )

    def text_of(location: Location, record: Record) -> str:
        text = record[column]
        if not isinstance(text, str):
            raise DataError(f"{location}: expected text, got {shown(text)}")
        return text

    rows = read_rows(paths, {"text": column}, [column], bad_rows, notice_conversations)
    return (text for _, text in bad_rows.parse(rows, text_of))


def _join_blank_pieces(texts: Iterator[str]) -> Iterator[TextPart]:
    """Join blank pieces of a document to their neighbors; a blank document has no parts."""
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
    """Cut a text at line ends; a line longer than a piece stays whole.

    Args:
        read: The text, in pieces of any length.
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
