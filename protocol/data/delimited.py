"""Tables as text: CSV, TSV and what spreadsheets make of them.

What parts the cells is seen from the header, whatever the file's name ends with.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from protocol.base.errors import DataError
from protocol.data.text_file import read_lines

_TAB: Final = "\t"
_DELIMITERS: Final = (",", _TAB, ";", "|")

Rows = list[tuple[int, list[str]]]
"""The cells of each row, with the number of its last line."""


def read_table(path: Path, wanted: Collection[str]) -> Rows:
    """Every row that is not empty, the header first.

    Args:
        path: The file.
        wanted: Columns asked for: what parts the header into them parts the cells.

    Raises:
        DataError: It is not UTF-8, or quotes or the number of columns are wrong somewhere.
    """
    lines = read_lines(path)
    return _cells(path, lines, _delimiter(path, lines, wanted))


def _delimiter(path: Path, lines: Sequence[str], wanted: Collection[str]) -> str:
    """What parts the header into the columns asked for; without them what the name says."""
    usual = _TAB if path.suffix == ".tsv" else ","
    first = next((line for line in lines if line.strip()), "")
    by_cells = {
        each: column_names(next(csv.reader([first], delimiter=each))) for each in _DELIMITERS
    }
    fitting = [each for each, cells in by_cells.items() if {*wanted} <= {*cells}]
    if fitting:
        return fitting[0]
    if all(_TAB in line for line in lines if line.strip()):
        return _TAB
    return max((usual, *_DELIMITERS), key=lambda each: len(by_cells[each]))


def _cells(path: Path, lines: Sequence[str], delimiter: str) -> Rows:
    """The cells of every row that is not empty, with the number of its last line.

    Raises:
        DataError: Quotes or the number of columns are wrong somewhere.
    """
    quoted, fault = _read(path, lines, delimiter, quoting=csv.QUOTE_MINIMAL)
    if delimiter != _TAB or not any(line[0] == '"' or '\t"' in line for line in lines if line):
        return _sound(quoted, fault)
    # A TSV file may hold quotes that only are part of the text.
    plain, ragged = _read(path, lines, delimiter, quoting=csv.QUOTE_NONE)
    if ragged is None and (fault is not None or len(quoted) < len(plain)):
        columns = zip(*(row for _, row in plain), strict=True)
        if not any(all(map(_is_quoted, column)) for column in columns):
            return plain
    return _sound(quoted, fault)


def _sound(rows: Rows, fault: DataError | None) -> Rows:
    if fault is not None:
        raise fault
    return rows


def _is_quoted(cell: str) -> bool:
    return len(cell) > 1 and cell[0] == cell[-1] == '"'


def _read(
    path: Path, lines: Sequence[str], delimiter: str, quoting: Any
) -> tuple[Rows, DataError | None]:
    """Rows, and what is wrong behind them."""
    table = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    rows: Rows = []
    try:
        for row in table:
            if not row:
                continue
            rows.append((table.line_num, row))
            if len(row) != len(rows[0][1]):
                expected = f"expected {len(rows[0][1])} columns, got {len(row)}"
                remedy = f"quote cells that hold {delimiter!r}"
                place = f"{str(path)!r} line {table.line_num}"
                return rows, DataError(f"{place}: {expected}; {remedy}, or write the data as JSONL")
    except csv.Error as error:
        return rows, DataError(
            f"{str(path)!r} line {table.line_num} is not a table: {error}; is a quote left open, "
            "or not doubled inside a cell? JSONL knows no such question"
        )
    return rows, None


def column_names(cells: Sequence[str]) -> list[str]:
    """Spaces around a column's name are no part of it."""
    return [cell.strip() for cell in cells]
