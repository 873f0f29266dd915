"""Which rows of a table larger than what a shader may bind lie together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_ROWS: Final = 64
"""Parts are of whole multiples of it where that fits: what a product reads is then aligned."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows `first` to `end` of a table; its name says so."""

    table: str
    first: int
    end: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.end - self.first

    def __str__(self) -> str:
        return f"{self.table}[{self.first}:{self.end}]"


Tables = Mapping[str, Sequence[RowPart]]


def row_parts(table: str, rows: int, nbytes: int, largest_bytes: int) -> list[RowPart]:
    """Parts of nearly the same size.

    Args:
        table: Its name.
        rows: Of the table.
        nbytes: Of the table on the device.
        largest_bytes: Of a part.

    Returns:
        The parts in order; one where the table fits, or where a single row would not.
    """
    most = largest_bytes // max(1, nbytes // max(rows, 1))
    if nbytes <= largest_bytes or most == 0:
        return [RowPart(table, 0, rows)]
    unit = _ROWS if most >= _ROWS else 1
    count = -(-rows // (most // unit * unit))
    each = -(-rows // (count * unit)) * unit
    return [RowPart(table, first, min(first + each, rows)) for first in range(0, rows, each)]
