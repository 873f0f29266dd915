"""The shell of `worker.logic.fetching`: does its file actions in a thread of its own, one by one.

Hashing and writing hold up neither the network nor the device.
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
from protocol.host.cache_directory import cache_directory
from protocol.host.machine import Machine
from protocol.host.scratch import ScratchDirectory
from protocol.spec.blob_list import BlobFile, Role
from protocol.spec.file_digest import FileDigests
from protocol.spec.run_files import source_files
from protocol.spec.run_spec import RunSpec
from worker.logic.actions import Assemble, DropFiles, FileAction, Locate, OpenPart, StoreChunk
from worker.logic.fetching import (
    Assembled,
    BlobDamaged,
    BlobPresent,
    ChunkStored,
    FileEvent,
    FilesFailed,
    Located,
    PartOpened,
)
from worker.shell.blob_cache import BlobCache, Part, storing
from worker.shell.input_directory import assemble, placed_spec

_BUSY_PAUSE_S: Final = 0.25
_BUSY_PATIENCE_S: Final = 10.0
"""Another worker's part that has not grown for so long is not waited for."""


class Obtainer:
    """Finds, keeps and links a run's files.

    Args:
        emit: Called in the event loop with what came of each action.
        cache: Its directory; by default where the environment says.
        machine: Gives the thread and the time.
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
        # From here on in the thread alone.
        self._digests = FileDigests()
        self._failed = -1
        self._cache: BlobCache | None = None
        self._part: Part | None = None
        self._watched: tuple[str, int, float] = ("", 0, 0.0)
        self._inputs: ScratchDirectory | None = None

    def do(self, action: FileAction) -> None:
        """Do it after those before it."""
        if isinstance(action, DropFiles):
            self.forget()
        else:
            self._thread.submit(self._work, self._generation, action)

    def forget(self) -> None:
        """Nobody wants to know what comes of earlier actions; other workers may take the part."""
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
            self._loop.call_later(_BUSY_PAUSE_S, self._again, generation, action)
        else:
            self._emit(event)

    def _again(self, generation: int, action: FileAction) -> None:
        if generation == self._generation:
            self.do(action)

    # In the thread.

    def _work(self, generation: int, action: FileAction) -> None:
        # Chunks that have come are written even so: another attempt goes on behind them.
        late = generation != self._generation and not isinstance(action, StoreChunk)
        if late or generation == self._failed:
            return
        event: FileEvent | None
        try:
            event = self._perform(action)
        except Exception as error:  # noqa: BLE001 -- the coordinator must hear of it, or it waits
            self._failed = generation
            reason = f"the run's files cannot be had: {error!r}"
            event = FilesFailed(error if isinstance(error, SamestepError) else DataError(reason))
        self._loop.call_soon_threadsafe(self._deliver, generation, action, event)

    def _perform(self, action: FileAction) -> FileEvent | None:
        """Gives None where it is to be tried again later."""
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
        found = self._found(action, cache)
        missing = {
            file.digest: file
            for source in action.listing.sources
            for file in source.files
            if (source.role, file.name) not in found and file.digest not in action.later
        }
        if missing:
            # What other workers of this machine are fetching into the same parts counts as there.
            parts = sum(min(cache.part_bytes(file.digest), file.size) for file in missing.values())
            cache.reserve(sum(file.size for file in missing.values()) - parts)
        return Located(tuple(missing.values()))

    def _found(self, action: Locate | Assemble, cache: BlobCache) -> dict[tuple[Role, str], Path]:
        """Where each listed file is: as the run spec names it, or in the cache."""
        found: dict[tuple[Role, str], Path] = {}
        for source in action.listing.sources:
            local = _local_files(action.spec, source.role)
            for file in source.files:
                if file.digest in action.later:
                    continue
                path = local.get(file.name)
                if path is None or not self._digests.holds(path, file.size, file.digest):
                    path = cache.find(file.digest, file.size)
                if path is not None:
                    found[source.role, file.name] = path
        return found

    def _open_part(self, file: BlobFile, cache: BlobCache) -> FileEvent | None:
        self._close_part()
        if cache.find(file.digest, file.size) is not None:
            return BlobPresent(file.digest)
        part = cache.open_part(file.digest, file.size)
        if part is None:
            have, now_s = cache.part_bytes(file.digest), self._machine.now_s()
            if self._watched[:2] != (file.digest, have):
                self._watched = (file.digest, have, now_s)
            if now_s - self._watched[2] < _BUSY_PATIENCE_S:
                return None
            part = cache.open_part(file.digest, file.size, own=True)
            if part is None:
                return None
        if part.complete:
            if part.finish():
                return BlobPresent(file.digest)
            return None
        self._part = part
        return PartOpened(file.digest, part.have)

    def _store(self, action: StoreChunk, cache: BlobCache) -> FileEvent:
        file = action.file
        if file.size <= limits.BODY_BYTES:
            if not cache.put(file.digest, action.values):
                return BlobDamaged(file.digest, resumed=False)
            return ChunkStored(file.digest, complete=True)
        part = self._part
        assert part is not None
        assert part.have == action.offset
        part.append(action.values)
        if not part.complete:
            return ChunkStored(file.digest, complete=False)
        self._part = None
        if part.finish():
            return ChunkStored(file.digest, complete=True)
        return BlobDamaged(file.digest, part.resumed)

    def _assemble(self, action: Assemble, cache: BlobCache) -> FileEvent:
        found = self._found(action, cache)
        for source in action.listing.sources:
            for file in source.files:
                if (source.role, file.name) not in found and file.digest not in action.later:
                    raise DataError(
                        f"the {source.role} file {file.name!r} has changed or vanished on this "
                        "machine while the run was being prepared; start it again"
                    )
        if self._inputs is None:
            with storing("make a directory in", Path(tempfile.gettempdir())):
                self._inputs = ScratchDirectory()
        directory = Path(self._inputs.name) / action.list_digest[:16]
        assemble(directory, action.listing, found)
        return Assembled(*placed_spec(action.spec, action.listing, directory))

    def _close_part(self) -> None:
        if self._part is not None:
            self._part.close()
            self._part = None

    def _remove_inputs(self) -> None:
        if self._inputs is not None:
            self._inputs.cleanup()


def _local_files(spec: RunSpec, role: Role) -> dict[str, Path]:
    """The files that the run spec names, as far as they are on this machine."""
    try:
        files = source_files(spec, role)
    except (SamestepError, OSError, ValueError):
        return {}
    return {name: path.absolute() for name, path in files.files} if files is not None else {}
