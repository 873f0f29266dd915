"""A task that reads its data and computes nothing; its manifest contains the data's digest."""

from __future__ import annotations

from pathlib import Path

from protocol.base.errors import DataError
from protocol.spec.files.file_digest import file_digest
from protocol.spec.run_spec import RunSpec
from worker.tasks.small.scripted import Scripted

NAME = "tests.reading_task:ReadingTask"


class ReadingTask(Scripted):
    """A task that reads one file, and rejects the content `bad`."""

    def __init__(self, spec: RunSpec) -> None:
        assert spec.data is not None
        path = Path(spec.data.train)
        if not path.is_file():
            raise DataError(f"expected a data file at {str(path)!r}, found none")
        if path.read_bytes() == b"bad":
            raise DataError(f"{str(path)!r} line 1: expected valid data, got 'bad'")
        super().__init__(spec)
        self.manifest = self.manifest.model_copy(update={"digests": {"data": file_digest(path)[1]}})
