"""A coordinator that writes no log and no journal, to measure their cost; for benchmarks only.

It is the real coordinator, except that it appends no gradients, syncs no commit, and writes no
journal. It still writes the checkpoints at the start and end of a run, which are not part of a
step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final
from unittest.mock import patch

import coordinator.service.execution
import coordinator.service.service
from coordinator.cli import main
from coordinator.run.outputs.events import Record
from coordinator.run.outputs.restart import CommitRecord
from coordinator.run.outputs.side_outputs import Bytes
from coordinator.storage.log.log_records import Array, ChunkId
from coordinator.storage.run_storage import RunStorage

_NO_JOURNAL_HEAD: Final = "0" * 64


class _UndurableStorage(RunStorage):
    """Reports every commit as durable without writing it."""

    def append(self, chunk: ChunkId, values: Array) -> None:
        del chunk, values

    async def commit(self, record: CommitRecord, kept: Sequence[Bytes] = ()) -> None:
        del record, kept
        await asyncio.sleep(0)

    def record(self, records: Sequence[Record]) -> None:
        del records

    def begin_journal(self, lines: Callable[[], Sequence[Record]]) -> None:
        del lines

    async def end_journal(self, record: Record) -> str:
        del record
        return _NO_JOURNAL_HEAD

    async def roll(self) -> None:
        pass


if __name__ == "__main__":
    with (
        patch.object(coordinator.service.service, "RunStorage", _UndurableStorage),
        patch.object(coordinator.service.execution, "records_of", lambda *_: []),
    ):
        main()
