"""`capture.json`: the files of a capture, their samples by row group, and their digests.

The index is written last, so a directory that has an index contains a complete capture. A run is
planned from the index alone; a file of logits is opened when a step needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.base import limits
from protocol.base.errors import DataError
from protocol.base.fields import Digest
from protocol.base.regular_file import read_regular
from protocol.datasets.logits_file import CaptureMetadata
from protocol.spec.files.blob_list import name_fault
from protocol.spec.files.run_files import CAPTURE_INDEX
from protocol.spec.sections.data import LOGITS_SUFFIX


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CapturedFile(_Document):
    """One file of logits: the BLAKE3 digest of its bytes, and the samples of each row group."""

    name: str
    size: Annotated[int, Field(ge=1, le=limits.BLOB_BYTES)]
    digest: Digest
    row_groups: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1)


class CaptureIndex(_Document):
    """The index of a capture."""

    facts: CaptureMetadata
    files: tuple[CapturedFile, ...] = Field(min_length=1, max_length=limits.FILES_PER_RUN)

    @property
    def samples(self) -> int:
        return sum(sum(file.row_groups) for file in self.files)

    def to_bytes(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()


def read_index(directory: Path) -> CaptureIndex:
    """Read the index of a capture's directory.

    Raises:
        DataError: There is no index, or it cannot be read.
    """
    path = directory / CAPTURE_INDEX
    try:
        document = read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"expected a capture of teacher logits in {str(directory)!r}, found no {CAPTURE_INDEX} "
            "there; give the directory 'logits' of a finished run of task teacher-logits"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    try:
        index = CaptureIndex.model_validate_json(document, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "the document"
        raise DataError(
            f"{str(path)!r} is not the index of a capture: {location}: {first['msg']}"
        ) from None
    for file in index.files:
        if name_fault(file.name) or "/" in file.name or not file.name.endswith(LOGITS_SUFFIX):
            raise DataError(
                f"{str(path)!r} names a file {file.name!r}, which is not a file of logits"
            )
    return index
