"""Execute the file actions of `worker.logic.file_fetch` in a separate thread, in order.

Hashing and writing thus delay neither the network nor the device.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from protocol.base import limits
from protocol.base.errors import DataError, SamestepError
from protocol.machine.cache_directory import cache_directory
from protocol.machine.machine import Machine
from protocol.machine.scratch import ScratchDirectory
from protocol.spec.files.blob_list import BlobFile
from protocol.spec.files.file_digest import FileDigests
from protocol.spec.files.run_files import source_files
from protocol.spec.run_spec import Role, RunSpec
from worker.logic.actions import Assemble, DropFiles, FileAction, Locate, OpenPart, StoreChunk
from worker.logic.file_fetch import (
    Assembled,
    BlobDamaged,
    BlobPresent,
    ChunkStored,
    FileEvent,
    FilesFailed,
    Located,
    PartOpened,
)
from worker.shell.blob_cache import BlobCache, PartialDownload, storage_errors
from worker.shell.input_directory import link_files, local_spec

_BUSY_PAUSE_S: Final = 0.25
_BUSY_PATIENCE_S: Final = 10.0
"""Time without growth after which another worker's partial download is no longer awaited."""


class FileFetcher:
    """Locates, caches and links a run's files.

    Args:
        emit: Called in the event loop with the result of each action.
        cache: The cache directory; default: see `cache_directory`.
        machine: Threads and clock.
    """

    def __init__(
        self,
        emit: Callable[[FileEvent], None],
        cache: Path | None = None,
        machine: Machine | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._emit = emit
        self._cache_directory = cache
        self._machine = machine or Machine()
        self._thread = self._machine.thread("files")
        self._generation = 0
        # The attributes below are used in the thread only.
        self._digests = FileDigests()
        self._failed_generation = -1
        self._cache: BlobCache | None = None
        self._part: PartialDownload | None = None
        self._awaited_part: tuple[str, int, float] = ("", 0, 0.0)
        self._inputs: ScratchDirectory | None = None

    def do(self, action: FileAction) -> None:
        """Queue an action."""
        if isinstance(action, DropFiles):
            self.forget()
        else:
            self._thread.submit(self._work, self._generation, action)

    def forget(self) -> None:
        """Drop the results of earlier actions, and release the partial download."""
        self._generation += 1
        self._thread.submit(self._close_part)

    def close(self) -> None:
        """End the thread and remove the links."""
        self.forget()
        self._thread.submit(self._remove_inputs)
        self._thread.shutdown(wait=True)

    def _deliver(self, generation: int, action: FileAction, event: FileEvent | None) -> None:
        if generation != self._generation:
            return
        if event is None:
            self._loop.call_later(_BUSY_PAUSE_S, self._retry, generation, action)
        else:
            self._emit(event)

    def _retry(self, generation: int, action: FileAction) -> None:
        if generation == self._generation:
            self.do(action)

    # In the thread.

    def _work(self, generation: int, action: FileAction) -> None:
        # Received chunks are written even if stale: the next attempt continues after them.
        is_stale = generation != self._generation and not isinstance(action, StoreChunk)
        if is_stale or generation == self._failed_generation:
            return
        event: FileEvent | None
        try:
            event = self._perform(action)
        except Exception as error:  # noqa: BLE001 -- the coordinator waits for a report
            self._failed_generation = generation
            reason = f"cannot provide the run's files: {error!r}"
            event = FilesFailed(error if isinstance(error, SamestepError) else DataError(reason))
        self._loop.call_soon_threadsafe(self._deliver, generation, action, event)

    def _perform(self, action: FileAction) -> FileEvent | None:
        """Execute an action; return None if it must be retried later."""
        if self._cache is None:
            directory = self._cache_directory or cache_directory(os.environ)
            self._cache = BlobCache(directory, self._digests)
        match action:
            case Locate():
                return self._locate(action, self._cache)
            case OpenPart():
                return self._open_part(action.file, self._cache)
            case StoreChunk():
                return self._store(action, self._cache)
            case Assemble():
                return self._assemble(action, self._cache)
            case DropFiles():
                raise AssertionError("done by forget")

    def _locate(self, action: Locate, cache: BlobCache) -> Located:
        locations = self._locate_all(action, cache)
        missing_files = {
            file.digest: file
            for source in action.listing.sources
            for file in source.files
            if (source.role, file.name) not in locations
            and file.digest not in action.deferred_digests
        }
        if missing_files:
            # Partial downloads of other workers on this machine count: they share the cache.
            partial_bytes = sum(
                min(cache.part_bytes(file.digest), file.size) for file in missing_files.values()
            )
            cache.reserve(sum(file.size for file in missing_files.values()) - partial_bytes)
        return Located(tuple(missing_files.values()))

    def _locate_all(
        self, action: Locate | Assemble, cache: BlobCache
    ) -> dict[tuple[Role, str], Path]:
        """Return the path of each listed file, as in the run spec or in the cache."""
        locations: dict[tuple[Role, str], Path] = {}
        for source in action.listing.sources:
            local = _local_files(action.spec, source.role)
            for file in source.files:
                if file.digest in action.deferred_digests:
                    continue
                path = local.get(file.name)
                if path is None or not self._digests.matches(path, file.size, file.digest):
                    path = cache.find(file.digest, file.size)
                if path is not None:
                    locations[source.role, file.name] = path
        return locations

    def _open_part(self, file: BlobFile, cache: BlobCache) -> FileEvent | None:
        self._close_part()
        if cache.find(file.digest, file.size) is not None:
            return BlobPresent(file.digest)
        part = cache.open_part(file.digest, file.size)
        if part is None:
            size, now_s = cache.part_bytes(file.digest), self._machine.now_s()
            if self._awaited_part[:2] != (file.digest, size):
                self._awaited_part = (file.digest, size, now_s)
            if now_s - self._awaited_part[2] < _BUSY_PATIENCE_S:
                return None
            part = cache.open_part(file.digest, file.size, exclusive=True)
            if part is None:
                return None
        if part.is_complete:
            if part.finish():
                return BlobPresent(file.digest)
            return None
        self._part = part
        return PartOpened(file.digest, part.size)

    def _store(self, action: StoreChunk, cache: BlobCache) -> FileEvent:
        file = action.file
        if file.size <= limits.BODY_BYTES:
            if not cache.put(file.digest, action.values):
                return BlobDamaged(file.digest, was_resumed=False)
            return ChunkStored(file.digest, is_complete=True)
        part = self._part
        assert part is not None
        assert part.size == action.offset
        part.append(action.values)
        if not part.is_complete:
            return ChunkStored(file.digest, is_complete=False)
        self._part = None
        if part.finish():
            return ChunkStored(file.digest, is_complete=True)
        return BlobDamaged(file.digest, part.was_resumed)

    def _assemble(self, action: Assemble, cache: BlobCache) -> FileEvent:
        locations = self._locate_all(action, cache)
        for source in action.listing.sources:
            for file in source.files:
                if (
                    source.role,
                    file.name,
                ) not in locations and file.digest not in action.deferred_digests:
                    raise DataError(
                        f"the {source.role} file {file.name!r} was changed or removed on this "
                        "machine while the run was being prepared; restore it and start the run "
                        "again"
                    )
        if self._inputs is None:
            with storage_errors("make a directory in", Path(tempfile.gettempdir())):
                self._inputs = ScratchDirectory()
        directory = Path(self._inputs.name) / action.list_digest[:16]
        link_files(directory, action.listing, locations)
        return Assembled(*local_spec(action.spec, action.listing, directory))

    def _close_part(self) -> None:
        if self._part is not None:
            self._part.close()
            self._part = None

    def _remove_inputs(self) -> None:
        if self._inputs is not None:
            self._inputs.cleanup()


def _local_files(spec: RunSpec, role: Role) -> dict[str, Path]:
    """Return a source's files by name, if they exist on this machine where the run spec says."""
    try:
        files = source_files(spec, role)
    except (SamestepError, OSError, ValueError):
        return {}
    return {name: path.absolute() for name, path in files.files} if files is not None else {}
