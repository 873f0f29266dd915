"""The index of a run's files, which the coordinator finds and hashes before it asks any worker.

So a missing file is an error at once, and all workers read the same bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from coordinator.disk.durable_file import replace_file, storage_errors
from coordinator.files.permitted_files import PermittedFiles
from protocol.base.errors import DataError, MessageError, StorageDamaged
from protocol.base.regular_file import parse_json, read_regular
from protocol.datasets.capture_check import check_digests
from protocol.datasets.data_check import check_data
from protocol.spec.files.blob_list import BlobFile, BlobList, BlobSource, document_digest
from protocol.spec.files.file_digest import lasting_identity, open_file_digest, open_plain
from protocol.spec.files.run_files import ROLES, SourceFiles, refuse_links_out, source_files
from protocol.spec.manifest import SCRIPT_DIRECTORY
from protocol.spec.run_spec import RunSpec, source_of


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that workers may request: a file, or a document in memory.

    Attributes:
        size: Size in bytes.
        content: The file (not a link), or the document.
        identity: Identity of the file when it was hashed; empty if a change of the file might leave
            the identity as it is.
    """

    size: int
    content: Path | bytes
    identity: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class BlobIndex:
    """The blobs that a run's workers may request.

    Attributes:
        digest: Digest of the list's document.
        listing: The list.
        blobs: The blobs by digest, including the document of the list.
    """

    digest: str
    listing: BlobList
    blobs: Mapping[str, Blob]


async def find_blobs(spec: RunSpec, permitted_files: PermittedFiles) -> BlobIndex | None:
    """Call `index_blobs` in a thread: large models take seconds to hash."""
    return await asyncio.to_thread(index_blobs, spec, permitted_files)


def index_blobs(spec: RunSpec, permitted_files: PermittedFiles | None = None) -> BlobIndex | None:
    """Find and hash every file that the run spec names; None if it names no files.

    Args:
        spec: The run spec.
        permitted_files: The files that the run spec may name; None: all, as on the operator's
            command line.

    Raises:
        DataError: A file is missing, cannot be read or sent to workers, holds no usable data, or
            may not be named.
    """
    blobs: dict[str, Blob] = {}
    for named_source in filter(None, (source_of(spec, role) for role in ROLES)):
        if permitted_files is not None:
            permitted_files.check_source(named_source)
    file_lists = [files for role in ROLES if (files := source_files(spec, role)) is not None]
    for files in file_lists:
        refuse_links_out(files)
        _check_permitted(files, permitted_files)
    try:
        check_data(spec)
    except DataError:
        # The error may quote a file that has appeared since the check.
        for files in file_lists:
            _check_permitted(files, permitted_files)
        raise
    if not file_lists:
        return None
    blob_sources = tuple(_hash(files, blobs, permitted_files) for files in file_lists)
    if spec.task == "distil":
        for source in blob_sources:
            if source.role in {"data", "validation"}:
                check_digests(str(source_of(spec, source.role)), source.files)
    try:
        listing = BlobList(sources=blob_sources)
    except ValidationError as error:
        first = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DataError(f"the run's files cannot be sent to workers: {first}") from None
    document = listing.to_bytes()
    digest = document_digest(document)
    blobs[digest] = Blob(len(document), document)
    return BlobIndex(digest, listing, blobs)


def _check_permitted(files: SourceFiles, permitted_files: PermittedFiles | None) -> None:
    if permitted_files is not None:
        for _, path in files.files:
            permitted_files.check(path, files.source)


def _hash(
    files: SourceFiles, blobs: dict[str, Blob], permitted_files: PermittedFiles | None
) -> BlobSource:
    blob_files = []
    for name, path in files.files:
        try:
            real_path = path.resolve()
            with open_plain(real_path) as file:
                if permitted_files is not None:
                    permitted_files.check_open(file.fileno(), real_path, files.source)
                identity = lasting_identity(os.fstat(file.fileno()), time.time_ns())
                size, digest = open_file_digest(file)
        except OSError as error:
            raise DataError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
        blobs.setdefault(digest, Blob(size, real_path, identity))
        blob_files.append(BlobFile(name=name, size=size, digest=digest))
    return BlobSource(role=files.role, form=files.form, files=tuple(blob_files))


def write_index(path: Path, index: BlobIndex) -> None:
    """Write the list of a run's files into the run's directory.

    A coordinator that resumes the run, in any working directory, serves the same list without
    reading every file; workers notice changed files.

    Raises:
        StorageFailed: A write failed.
    """
    document = index.blobs[index.digest].content
    assert isinstance(document, bytes)
    files = {d: str(blob.content) for d, blob in index.blobs.items() if d != index.digest}
    replace_file(path, json.dumps({"list": document.decode(), "files": files}).encode())


def read_or_build_index(
    path: Path, spec: RunSpec, permitted_files: PermittedFiles | None = None
) -> BlobIndex | None:
    """Read the list of a run's files; if it is missing, find the files as for a new run and write
    the list.

    Args:
        path: Path of the list.
        spec: The run spec.
        permitted_files: See `index_blobs`.

    Raises:
        StorageDamaged: The list is damaged.
        StorageFailed: A read or write failed.
        DataError: A file that the run spec names is missing.
    """
    with storage_errors("read", path):
        content = read_regular(path) if path.exists() else None
    if content is None:
        index = index_blobs(spec, permitted_files)
        if index is not None:
            write_index(path, index)
        return index
    try:
        parsed_document = parse_json(content)
        document = str(parsed_document["list"]).encode()
        listing = BlobList.from_bytes(document)
        blob_files = [file for source in listing.sources for file in source.files]
        blobs = {
            f.digest: Blob(
                f.size, _current_path(Path(parsed_document["files"][f.digest]), path.parent)
            )
            for f in blob_files
        }
    except (ValueError, KeyError, TypeError, MessageError):
        reason = (
            "expected the list of the run's files, got something else; restore it from a copy, or "
            "remove it: the run's files are hashed again"
        )
        raise StorageDamaged(str(path), "", reason) from None
    digest = document_digest(document)
    return BlobIndex(digest, listing, {**blobs, digest: Blob(len(document), document)})


def _current_path(path: Path, directory: Path) -> Path:
    """Return the current path of a file: a run's copy of its script moves with the directory."""
    copy = directory / SCRIPT_DIRECTORY / path.name
    return copy if not path.exists() and copy.is_file() else path
