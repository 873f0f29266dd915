"""A tracker's rows: one for each step, from the journal as it grows.

A row has a step's values (loss, norm, rate) and the evaluation after that step, so a row is
complete once the journal has a later step, or the end of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from coordinator.storage.directory.journal import JournalTail


@dataclass(slots=True)
class Row:
    """Values after `step` steps; `at_s` is the time, in seconds since 1970."""

    step: int
    at_s: float
    values: dict[str, float] = field(default_factory=dict)


class Rows:
    """Follows one journal.

    Args:
        journal: The file; it may not exist yet.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = JournalTail(journal)
        self._open: Row | None = None
        self._newest = -1
        self.outcome = ""
        """How the run ended; empty while it is in progress."""

    def read(self) -> Iterator[Row]:
        """Yield the rows completed since the last call, in ascending order; each step only once."""
        self._journal.restart_if_cut()  # steps are never sent twice
        for time, record in self._journal.read_new_records():
            with suppress(ValueError, KeyError, TypeError):  # the audit reports it
                yield from self._take(datetime.fromisoformat(time).timestamp(), record)

    def _take(self, at_s: float, record: dict[str, Any]) -> Iterator[Row]:
        match record["kind"]:
            case "commit":
                self.outcome = ""
                values = {name: record.get(name) for name in ("loss", "norm", "rate")}
                yield from self._add(record["step"] + 1, at_s, values)
            case "evaluation":
                held_out = {f"held_out/{name}": value for name, value in record["metrics"].items()}
                yield from self._add(record["step"], at_s, held_out)
            case "resumed":
                # Later steps are redone, with the same bits.
                self.outcome = ""
                if self._open is not None and self._open.step > record["step"]:
                    self._open = None
            case "end":
                self.outcome = record["outcome"]
                yield from self._complete()

    def _add(self, step: int, at_s: float, values: dict[str, float | None]) -> Iterator[Row]:
        if step <= self._newest:
            return
        if self._open is not None and self._open.step != step:
            yield from self._complete()
        if self._open is None:
            self._open = Row(step, at_s)
        self._open.values |= {
            name: value
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        }

    def _complete(self) -> Iterator[Row]:
        row, self._open = self._open, None
        if row is not None and row.step > self._newest:
            self._newest = row.step
            if row.values:
                yield row
