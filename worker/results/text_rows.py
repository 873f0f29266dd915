"""Read the texts of a file: a column of a file of rows, or the lines of a text file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from protocol.base.errors import DataError
from protocol.datasets.rows import BadRows, Location, read_rows
from protocol.datasets.text_file import format_value, read_lines
from protocol.spec.files import sources


def is_file(texts: Sequence[str]) -> bool:
    """Return whether the only argument is a file name rather than a text.

    Raises:
        DataError: The argument looks like a file name, but the file does not exist.
    """
    if len(texts) != 1:
        return False
    if "\n" not in texts[0] and len(texts[0]) < 4_096 and Path(texts[0]).is_file():
        return True
    file_type = sources.file_format(Path(texts[0]))
    resembles_file = difflib.get_close_matches(file_type, (*sources.ROW_FORMATS, "txt"), n=1)
    if resembles_file and not any(map(str.isspace, texts[0])):
        raise DataError(f"expected a file of texts at {texts[0]!r}, found none; check the path")
    return False


def check_texts(texts: list[str], *, has_columns: bool) -> list[str]:
    """Check texts that are arguments, and return them.

    Args:
        texts: The texts.
        has_columns: Whether columns of a file are named.

    Raises:
        DataError: A text is empty, or columns are named although there is no file.
    """
    if has_columns:
        raise DataError(
            f"--column: expected a file of rows, got {'a text' if len(texts) == 1 else 'texts'}; "
            "name a file, or leave out --column and --pair-column"
        )
    if not all(text.strip() for text in texts):
        raise DataError("expected a text, got an empty one; leave it out")
    return texts


def read_texts(path: Path, columns: Sequence[str]) -> list[str]:
    """Read all texts in order; empty lines of plain text are skipped.

    Args:
        path: A file of rows; any other file has one text per line.
        columns: Column or key of the text, and of the second text of a pair; the result has the
            texts of each row in this order.

    Raises:
        DataError: The file cannot be read, lacks a column, or has a row without text.
    """
    texts = []
    for location, text in _rows(path, columns):
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{location}: expected text, got {format_value(text)}")
        texts.append(text.strip())
    if not texts:
        raise DataError(f"expected texts in {str(path)!r}, found none")
    return texts


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    def check(location: Location, column_names: Sequence[str]) -> None:
        for column in columns:
            if column_names.count(column) != 1:
                names = (
                    ", ".join(repr(str(name)[:40]) for name in column_names[:10]) or "no columns"
                )
                raise DataError(
                    f"{location}: expected one column {column!r}, found {names}; name the column: "
                    "--column NAME"
                )

    if sources.file_format(path) in sources.ROW_FORMATS:
        bad_rows = BadRows(skip=False)
        fields = {name: name for name in columns}
        for location, record in read_rows([path], fields, columns, bad_rows, check):
            yield from ((str(location), record[name]) for name in columns)
        bad_rows.report()
    else:
        for number, text in enumerate(read_lines(path), start=1):
            if text.strip():
                yield f"{str(path)!r} line {number}", text
