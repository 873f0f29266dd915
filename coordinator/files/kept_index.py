"""The list of a run's files, kept in the run's directory.

A coordinator that takes the run up again serves the same list without reading every file, and
from whichever directory it is started; what has changed meanwhile shows at the worker.
"""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.disk.durable_file import replace_file, storing
from coordinator.files.blob_index import Blob, BlobIndex, index_blobs
from coordinator.files.permitted import PermittedFiles
from protocol.base.errors import MessageError, StorageDamaged
from protocol.base.regular_file import parse_json, read_regular
from protocol.spec.blob_list import BlobList, document_digest
from protocol.spec.run_spec import RunSpec


def keep_index(path: Path, index: BlobIndex) -> None:
    """Write it.

    Raises:
        StorageFailed: The disk refuses.
    """
    document = index.blobs[index.digest].content
    assert isinstance(document, bytes)
    files = {d: str(blob.content) for d, blob in index.blobs.items() if d != index.digest}
    replace_file(path, json.dumps({"list": document.decode(), "files": files}).encode())


def kept_index(
    path: Path, spec: RunSpec, permitted: PermittedFiles | None = None
) -> BlobIndex | None:
    """Read it; where none was kept, find the files as for a new run, and keep that.

    Args:
        path: Where it is kept.
        spec: The run's.
        permitted: See `index_blobs`.

    Raises:
        StorageDamaged: It cannot be read as what was written.
        StorageFailed: The disk refuses.
        DataError: A file that the run spec names is missing.
    """
    with storing("read", path):
        content = read_regular(path) if path.exists() else None
    if content is None:
        index = index_blobs(spec, permitted)
        if index is not None:
            keep_index(path, index)
        return index
    try:
        kept = parse_json(content)
        document = str(kept["list"]).encode()
        listing = BlobList.from_bytes(document)
        listed = [file for source in listing.sources for file in source.files]
        blobs = {f.digest: Blob(f.size, Path(kept["files"][f.digest])) for f in listed}
    except (ValueError, KeyError, TypeError, MessageError) as error:
        reason = f"expected the list of the run's files, got {error}"
        raise StorageDamaged(str(path), "", reason) from None
    digest = document_digest(document)
    return BlobIndex(digest, listing, {**blobs, digest: Blob(len(document), document)})
