"""A journal as it grows: each reading gives the records that came since the last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from protocol.base import limits
from protocol.base.regular_file import open_regular, parse_json

_READ_BYTES: Final = 1 * limits.MIB


class JournalTail:
    """Follows one journal.

    Args:
        journal: The file; it need not be there yet.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._offset = 0
        self._rest = b""

    def was_cut(self) -> bool:
        """Whether a restart has cut off what was read; if so, `new_records` begins again."""
        try:
            cut = self._journal.stat().st_size < self._offset
        except FileNotFoundError:
            return False
        if cut:
            self._offset, self._rest = 0, b""
        return cut

    def new_records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Time and record of each new line. Blocks for as long as they take to read.

        A line that is no record is passed over: the audit names it.
        """
        for line in self._new_lines():
            try:
                entry = parse_json(line)
                time, record = entry["time"], entry["record"]
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(time, str) and isinstance(record, dict):
                yield time, record

    def _new_lines(self) -> Iterator[bytes]:
        try:
            with open_regular(self._journal) as file:
                file.seek(self._offset)
                while part := file.read(_READ_BYTES):
                    self._offset += len(part)
                    *lines, self._rest = (self._rest + part).split(b"\n")
                    yield from lines
        except FileNotFoundError:
            return
