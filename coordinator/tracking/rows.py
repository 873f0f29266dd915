"""What a tracker is told: a row for each step, out of the journal as it grows.

A row holds what a step was (loss, norm, rate) and what was measured after it, so it is complete
once the journal speaks of what came next, or ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from coordinator.storage.directory.journal_tail import JournalTail


@dataclass(slots=True)
class Row:
    """Figures after `step` steps; `at_s` is when, in seconds since 1970."""

    step: int
    at_s: float
    figures: dict[str, float] = field(default_factory=dict)


class Rows:
    """Follows one journal.

    Args:
        journal: The file; it need not be there yet.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = JournalTail(journal)
        self._open: Row | None = None
        self._told = -1
        self.outcome = ""
        """How the run has ended; empty while it goes on."""

    def read(self) -> Iterator[Row]:
        """The rows that have become complete since the last reading, each step once and rising."""
        self._journal.was_cut()  # steps that were told are not told again
        for time, record in self._journal.new_records():
            with suppress(ValueError, KeyError, TypeError):  # the audit names it
                yield from self._take(datetime.fromisoformat(time).timestamp(), record)

    def _take(self, at_s: float, record: dict[str, Any]) -> Iterator[Row]:
        match record["kind"]:
            case "commit":
                self.outcome = ""
                figures = {name: record.get(name) for name in ("loss", "norm", "rate")}
                yield from self._add(record["step"] + 1, at_s, figures)
            case "evaluation":
                held_out = {f"held_out/{name}": value for name, value in record["metrics"].items()}
                yield from self._add(record["step"], at_s, held_out)
            case "resumed":
                # What came after that step is done again, with the same bits.
                self.outcome = ""
                if self._open is not None and self._open.step > record["step"]:
                    self._open = None
            case "end":
                self.outcome = record["outcome"]
                yield from self._complete()

    def _add(self, step: int, at_s: float, figures: dict[str, float | None]) -> Iterator[Row]:
        if step <= self._told:
            return
        if self._open is not None and self._open.step != step:
            yield from self._complete()
        if self._open is None:
            self._open = Row(step, at_s)
        self._open.figures |= {
            name: value
            for name, value in figures.items()
            if value is not None and math.isfinite(value)
        }

    def _complete(self) -> Iterator[Row]:
        row, self._open = self._open, None
        if row is not None and row.step > self._told:
            self._told = row.step
            if row.figures:
                yield row
