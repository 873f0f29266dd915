"""A task that reads its data and computes nothing: its manifest shows the data."""

from __future__ import annotations

from pathlib import Path

from protocol.base.errors import DataError
from protocol.spec.files.file_digest import file_digest
from protocol.spec.run_spec import RunSpec
from worker.tasks.small.scripted import Scripted

NAME = "tests.reading_task:Reads"


class Reads(Scripted):
    """Its data is one file; a file with the word `bad` is refused."""

    def __init__(self, spec: RunSpec) -> None:
        assert spec.data is not None
        path = Path(spec.data.train)
        if not path.is_file():
            raise DataError(f"expected a data file at {str(path)!r}, found none")
        if path.read_bytes() == b"bad":
            raise DataError(f"{str(path)!r} line 1: expected something good")
        super().__init__(spec)
        self.manifest = self.manifest.model_copy(update={"digests": {"data": file_digest(path)[1]}})
