"""Rows of the journal: one per step, also after restarts."""

from __future__ import annotations

from pathlib import Path

from coordinator.run.outputs.events import Committed, Evaluated, Record
from coordinator.storage.directory.journal import Journal
from coordinator.storage.directory.journal_records import Ended, Resumed
from coordinator.tracking.rows import Row, Rows

DIGEST = "0" * 64


def commit(step: int, loss: float | None) -> Record:
    return Committed(
        term=1, step=step, attempt=0, optimizer_step=step, loss=loss, skipped=loss is None,
        averages_digest=DIGEST,
    )  # fmt: skip


def evaluation(step: int, value: float) -> Record:
    return Evaluated(term=1, step=step, metrics={"accuracy": value, "f1": float("nan")})


def end(step: int, outcome: str) -> Record:
    return Ended(term=1, step=step, outcome=outcome, reason="")


class GrowingJournal:
    """A journal that grows while `Rows` follows it."""

    def __init__(self, directory: Path) -> None:
        self._journal = Journal(directory / "journal.jsonl")
        self.rows = Rows(directory / "journal.jsonl")

    def read(self, *records: Record) -> list[tuple[int, dict[str, float]]]:
        for record in records:
            self._journal.append(record)
        self._journal.sync()
        return [step_and_values(row) for row in self.rows.read()]


def step_and_values(row: Row) -> tuple[int, dict[str, float]]:
    assert row.at_s > 1_700_000_000
    return row.step, row.values


def test_row_is_reported_once_it_is_complete(tmp_path):
    assert [*Rows(tmp_path / "none").read()] == []
    growing = GrowingJournal(tmp_path)
    assert growing.read(evaluation(0, 0.5)) == []
    assert growing.read(commit(0, 2.0)) == [(0, {"held_out/accuracy": 0.5})]
    assert growing.read(evaluation(1, 0.6)) == []
    complete_row = (1, {"loss": 2.0, "held_out/accuracy": 0.6})
    assert growing.read(commit(1, None), commit(2, 1.0)) == [complete_row]
    assert growing.rows.outcome == ""
    assert growing.read(end(3, "drained")) == [(3, {"loss": 1.0})]
    assert growing.rows.outcome == "drained"


def test_repeated_steps_are_reported_once(tmp_path):
    growing = GrowingJournal(tmp_path)
    before = growing.read(commit(0, 3.0), commit(1, 2.0), commit(2, 1.0))
    assert [step for step, _ in before] == [1, 2]
    resumed = Resumed(term=2, step=1, optimizer_step=1)
    after = growing.read(resumed, commit(1, 2.0), commit(2, 1.0), end(3, "finished"))
    assert after == [(3, {"loss": 1.0})]
    new_rows = Rows(tmp_path / "journal.jsonl")
    assert [step_and_values(row) for row in new_rows.read()] == [*before, *after]
