"""A coordinator that keeps no log and no journal, for measuring what they cost. Not a product.

It is the real one, but nothing is appended, no commit is synced, and no line is made. Checkpoints
at a run's start and end stay, as they are in no step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final
from unittest.mock import patch

import coordinator.service.execution
import coordinator.service.service
from coordinator.cli import main
from coordinator.run.outputs.kept import Bytes
from coordinator.run.outputs.restart import CommitRecord
from coordinator.storage.directory.journal_records import Record
from coordinator.storage.log.log_records import Array, ChunkPlace
from coordinator.storage.run_storage import RunStorage

_NO_HEAD: Final = "0" * 64


class _Forgetful(RunStorage):
    """Says that all is on disk."""

    def append(self, place: ChunkPlace, values: Array) -> None:
        del place, values

    async def commit(self, record: CommitRecord, kept: Sequence[Bytes] = ()) -> None:
        del record, kept
        await asyncio.sleep(0)

    def record(self, records: Sequence[Record]) -> None:
        del records

    def begin_journal(self, lines: Callable[[], Sequence[Record]]) -> None:
        del lines

    async def end_journal(self, record: Record) -> str:
        del record
        return _NO_HEAD

    async def roll(self) -> None:
        pass


if __name__ == "__main__":
    with (
        patch.object(coordinator.service.service, "RunStorage", _Forgetful),
        patch.object(coordinator.service.execution, "records_of", lambda *_: []),
    ):
        main()
