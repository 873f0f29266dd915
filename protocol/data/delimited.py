"""Tables as text: CSV, TSV and what spreadsheets make of them.

What parts the cells is seen from the header, whatever the file's name ends with.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from protocol.base.errors import DataError
from protocol.data.text_file import stream_lines

_CELL_CHARACTERS: Final = 1 << 28
csv.field_size_limit(_CELL_CHARACTERS)  # for the process: its own limit is 131,072
_TAB: Final = "\t"
_DELIMITERS: Final = (",", _TAB, ";", "|")

Row = tuple[int, list[str]]
"""The cells of a row, with the number of its last line."""
Rows = list[Row]


def read_table(path: Path, wanted: Collection[str]) -> Iterator[Row]:
    """Every row that is not empty, the header first; one after the other, for tables larger than
    memory.

    Args:
        path: The file.
        wanted: Columns asked for: what parts the header into them parts the cells.

    Raises:
        DataError: It is not UTF-8, or quotes or the number of columns are wrong somewhere.
    """
    delimiter = _delimiter(path, wanted)
    quoting = csv.QUOTE_MINIMAL
    if delimiter == _TAB and _quotes_are_text(path):
        quoting = csv.QUOTE_NONE
    yield from _rows(path, delimiter, quoting)


def _delimiter(path: Path, wanted: Collection[str]) -> str:
    """What parts the header into the columns asked for; without them what the name says."""
    usual = _TAB if path.suffix == ".tsv" else ","
    first = next((line for line in stream_lines(path) if line.strip()), "")
    by_cells = {
        each: column_names(next(csv.reader([first], delimiter=each))) for each in _DELIMITERS
    }
    fitting = [each for each, cells in by_cells.items() if {*wanted} <= {*cells}]
    if fitting:
        return fitting[0]
    if all(_TAB in line for line in stream_lines(path) if line.strip()):
        return _TAB
    return max((usual, *_DELIMITERS), key=lambda each: len(by_cells[each]))


def _quotes_are_text(path: Path) -> bool:
    """A TSV file may hold quotes that only are part of the text: read as such it has more rows, and
    no column of quoted cells alone."""
    if not any(line[0] == '"' or '\t"' in line for line in stream_lines(path) if line):
        return False
    rows, quoted = 0, list[bool]()
    try:
        for _, cells in _rows(path, _TAB, csv.QUOTE_NONE):
            there = [*map(_is_quoted, cells)]
            quoted = [a and b for a, b in zip(quoted or there, there, strict=True)]
            rows += 1
    except DataError:
        return False
    if any(quoted):
        return False
    try:
        return sum(1 for _ in _rows(path, _TAB, csv.QUOTE_MINIMAL)) < rows
    except DataError:
        return True


def _is_quoted(cell: str) -> bool:
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def _rows(path: Path, delimiter: str, quoting: Any) -> Iterator[Row]:
    table = csv.reader(stream_lines(path), delimiter=delimiter, quoting=quoting, strict=True)
    columns = 0
    try:
        for row in table:
            if not row:
                continue
            columns = columns or len(row)
            if len(row) != columns:
                raise DataError(
                    f"{str(path)!r} line {table.line_num}: expected {columns} columns, got "
                    f"{len(row)}; quote cells that hold {delimiter!r}, or write the data as JSONL"
                )
            yield table.line_num, row
    except csv.Error as error:
        if "field limit" in str(error):
            raise DataError(
                f"{str(path)!r} line {table.line_num}: expected cells of at most "
                f"{_CELL_CHARACTERS} characters, got a longer one; is a quote left open?"
            ) from None
        raise DataError(
            f"{str(path)!r} line {table.line_num} is not a table: {error}; is a quote left open, "
            "or not doubled inside a cell? JSONL knows no such question"
        ) from None


def column_names(cells: Sequence[str]) -> list[str]:
    """Spaces around a column's name are no part of it."""
    return [cell.strip() for cell in cells]
