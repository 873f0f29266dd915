"""The files that a run names, found on the coordinator's machine and hashed, before any worker is
asked: what is missing is an error at once, and later everyone reads the same bytes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from coordinator.files.permitted import PermittedFiles
from protocol.base.errors import DataError
from protocol.data.capture_check import check_digests
from protocol.data.data_check import check_data
from protocol.spec.blob_list import BlobFile, BlobList, BlobSource, document_digest
from protocol.spec.file_digest import lasting_identity, open_file_digest, open_plain
from protocol.spec.run_files import ROLES, SourceFiles, refuse_links_out, source_files
from protocol.spec.run_spec import RunSpec, source_of


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that workers may ask for: a file, or a document in memory.

    Attributes:
        size: In bytes.
        content: The file, no link, or the document.
        identity: Of the file when its digest was taken; empty if a change might not change it.
    """

    size: int
    content: Path | bytes
    identity: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class BlobIndex:
    """What a run's workers may ask for.

    Attributes:
        digest: Of the list's document.
        listing: The list.
        blobs: By digest; the list's own document is among them.
    """

    digest: str
    listing: BlobList
    blobs: Mapping[str, Blob]


async def find_blobs(spec: RunSpec, permitted: PermittedFiles) -> BlobIndex | None:
    """`index_blobs` in a thread of its own: large models take seconds to hash."""
    return await asyncio.to_thread(index_blobs, spec, permitted)


def index_blobs(spec: RunSpec, permitted: PermittedFiles | None = None) -> BlobIndex | None:
    """Find and hash every file that the run spec names; None if it names none.

    Args:
        spec: The run spec.
        permitted: Which files it may name; None for all, as on the operator's own command line.

    Raises:
        DataError: One is missing, cannot be read or sent to workers, holds no usable data, or is
            none that the run spec may name.
    """
    blobs: dict[str, Blob] = {}
    for named in filter(None, (source_of(spec, role) for role in ROLES)):
        if permitted is not None:
            permitted.check_source(named)
    found = [files for role in ROLES if (files := source_files(spec, role)) is not None]
    for files in found:
        refuse_links_out(files)
        _check_permitted(files, permitted)
    try:
        check_data(spec)
    except DataError:
        for files in found:  # what it says may quote a file that was put there meanwhile
            _check_permitted(files, permitted)
        raise
    if not found:
        return None
    listed = tuple(_hash(files, blobs, permitted) for files in found)
    if spec.task == "distil":
        for source in listed:
            if source.role in {"data", "validation"}:
                check_digests(str(source_of(spec, source.role)), source.files)
    try:
        listing = BlobList(sources=listed)
    except ValidationError as error:
        first = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DataError(f"the run's files cannot be sent to workers: {first}") from None
    document = listing.to_bytes()
    digest = document_digest(document)
    blobs[digest] = Blob(len(document), document)
    return BlobIndex(digest, listing, blobs)


def _check_permitted(files: SourceFiles, permitted: PermittedFiles | None) -> None:
    if permitted is not None:
        for _, path in files.files:
            permitted.check(path, files.source)


def _hash(
    files: SourceFiles, blobs: dict[str, Blob], permitted: PermittedFiles | None
) -> BlobSource:
    listed = []
    for name, path in files.files:
        try:
            place = path.resolve()
            with open_plain(place) as file:
                if permitted is not None:
                    permitted.check_open(file.fileno(), place, files.source)
                known = lasting_identity(os.fstat(file.fileno()), time.time_ns())
                size, digest = open_file_digest(file)
        except OSError as error:
            raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
        blobs.setdefault(digest, Blob(size, place, known))
        listed.append(BlobFile(name=name, size=size, digest=digest))
    return BlobSource(role=files.role, form=files.form, files=tuple(listed))
