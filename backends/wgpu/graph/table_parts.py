"""Split a table that is larger than a shader may bind into parts of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_ROW_MULTIPLE: Final = 64
"""Parts have multiples of this many rows if possible, so that products read aligned rows."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows `first` to `end` - 1 of a table."""

    table: str
    first: int
    end: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.end - self.first

    def __str__(self) -> str:
        return f"{self.table}[{self.first}:{self.end}]"


Tables = Mapping[str, Sequence[RowPart]]


def split_rows(table: str, rows: int, nbytes: int, largest_bytes: int) -> list[RowPart]:
    """Split a table into parts of nearly equal size.

    Args:
        table: Name of the table.
        rows: Rows of the table.
        nbytes: Size of the table on the device.
        largest_bytes: Largest size of a part.

    Returns:
        The parts in order; one part if the table fits, or if not even one row fits.
    """
    rows_per_part = largest_bytes // max(1, nbytes // max(rows, 1))
    if nbytes <= largest_bytes or rows_per_part == 0:
        return [RowPart(table, 0, rows)]
    unit = _ROW_MULTIPLE if rows_per_part >= _ROW_MULTIPLE else 1
    count = -(-rows // (rows_per_part // unit * unit))
    part_rows = -(-rows // (count * unit)) * unit
    return [
        RowPart(table, start, min(start + part_rows, rows)) for start in range(0, rows, part_rows)
    ]
