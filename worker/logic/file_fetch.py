"""Decide which of a run's files to fetch and in which order, and handle the answers.

Pure: actions come out, their results come in. Files that fit one chunk are requested whole. Larger
ones are fetched one at a time, from the end of an earlier partial download. The number of chunks
that are requested or not yet written is bounded, and so are their bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from protocol.base import limits
from protocol.base.errors import DataError, ExitCode, MessageError, OutOfOrder, SamestepError
from protocol.base.fields import cut_text
from protocol.spec.files.blob_list import BlobFile, BlobList, document_digest
from protocol.spec.run_spec import RunSpec, is_fetched_later, source_of
from protocol.wire.connection import Body
from protocol.wire.messages import BlobChunk, BlobRequest, Goodbye, StartRun, Unready
from worker.logic.actions import (
    Action,
    Assemble,
    Build,
    Compute,
    DropFiles,
    Evaluate,
    Leave,
    Locate,
    OpenPart,
    PrintLine,
    StoreChunk,
    Transmit,
)

PROGRESS_BYTES: Final = 16 * limits.MIB
"""Larger downloads print their progress at every quarter."""


@dataclass(frozen=True, slots=True)
class Located:
    """The files that are neither on this machine nor in the cache; each digest once."""

    missing_files: tuple[BlobFile, ...]


@dataclass(frozen=True, slots=True)
class PartOpened:
    """A large file's partial download is open for writing; `size` bytes are in it already."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class BlobPresent:
    """The file is in the cache now: another worker on this machine fetched it."""

    digest: str


@dataclass(frozen=True, slots=True)
class ChunkStored:
    """A chunk is written. `is_complete`: it completed a file, whose digest is right."""

    digest: str
    is_complete: bool


@dataclass(frozen=True, slots=True)
class BlobDamaged:
    """A complete file had a wrong digest and was deleted.

    Attributes:
        digest: The expected digest.
        was_resumed: Whether an earlier attempt had downloaded a part of the file.
    """

    digest: str
    was_resumed: bool


@dataclass(frozen=True, slots=True)
class Assembled:
    """All files are linked. `spec` names local paths; `sources` maps each to its source."""

    spec: RunSpec
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FilesFailed:
    """This machine cannot provide the files."""

    error: SamestepError


FileEvent = Located | PartOpened | BlobPresent | ChunkStored | BlobDamaged | Assembled | FilesFailed


class _Request(NamedTuple):
    file: BlobFile
    offset: int

    @property
    def nbytes(self) -> int:
        return min(limits.BODY_BYTES, self.file.size - self.offset)


class RunFiles:
    """The files of a session's current run."""

    def __init__(self) -> None:
        self._run_id = ""
        self._fetch: FileFetch | None = None

    def begin(self, message: StartRun, spec: RunSpec) -> list[Action]:
        """Begin or resume a run: fetch its files, then build its task."""
        drop_actions = self.drop()
        self._run_id = message.run_id
        keep_state = message.step > 0
        if message.blobs is None:
            line = PrintLine(f"run {message.run_id}: building the task {spec.task!r}")
            return [*drop_actions, line, Build(message.run_id, spec, keep_state=keep_state)]
        self._fetch = FileFetch(message.run_id, spec, message.blobs, keep_state=keep_state)
        return [*drop_actions, *self._fetch.start()]

    def drop(self) -> list[Action]:
        """End the run."""
        self._run_id = ""
        fetch, self._fetch = self._fetch, None
        return [DropFiles()] if fetch is not None else []

    def chunk(self, message: BlobChunk, body: Body) -> list[Action]:
        """Handle a chunk from the coordinator.

        Raises:
            RemoteProtocolError: The chunk does not answer a request.
        """
        if message.run_id != self._run_id:
            return []  # the chunk of an earlier run, which ended while the request was in flight
        if self._fetch is None:
            raise OutOfOrder("expected no BlobChunk, got one that was not requested")
        return self._fetch.chunk(message, body)

    def event(self, event: FileEvent) -> list[Action]:
        """Handle the result of a file action."""
        return self._fetch.event(event) if self._fetch is not None else []

    def request(self, names: tuple[str, ...], work: Compute | Evaluate | None) -> list[Action]:
        """Fetch deferred files; `work` continues once they are on this machine."""
        if self._fetch is None:
            return give_up(f"expected the run's files {', '.join(names)}, found none of them")
        return self._fetch.request(names, work)

    def with_source_names(self, text: str) -> str:
        """Replace local paths in a text by the sources that the run spec names."""
        return self._fetch.with_source_names(text) if self._fetch is not None else text


class FileFetch:
    """Fetch of one run's files over one connection."""

    def __init__(
        self, run_id: str, spec: RunSpec, list_digest: str, *, keep_state: bool = False
    ) -> None:
        self._keep_state = keep_state
        self._run_id = run_id
        self._spec = spec
        self._list_digest = list_digest
        self._listing: BlobList | None = None
        self._requested: deque[_Request] = deque()
        self._unwritten: deque[_Request] = deque()
        self._small_files: deque[BlobFile] = deque()
        self._large_files: deque[BlobFile] = deque()
        self._open_file: BlobFile | None = None
        self._next_offset = 0
        self._missing_files: dict[str, BlobFile] = {}
        self._total_bytes = 0
        self._received_bytes = 0
        self._reported_quarters = 0
        self._is_over = False
        self._is_built = False
        self._is_idle = False
        self._deferred_digests: frozenset[str] = frozenset()
        self._pending: list[tuple[frozenset[str], Compute | Evaluate | None]] = []
        self._sources: Mapping[str, str] = {}
        self._retried_work: Compute | Evaluate | None = None

    @property
    def _file_list(self) -> BlobList:
        assert self._listing is not None, "files are requested only after their list"
        return self._listing

    def start(self) -> list[Action]:
        """Request the list of files."""
        return [Transmit(BlobRequest(run_id=self._run_id, digest=self._list_digest, offset=0))]

    def chunk(self, message: BlobChunk, body: Body) -> list[Action]:
        """Handle the coordinator's answer to the oldest request.

        Raises:
            RemoteProtocolError: The chunk answers another request.
        """
        if self._is_over:
            return []
        if self._listing is None:
            return self._read_list(message, body)
        if not self._requested:
            raise OutOfOrder("expected no BlobChunk, got one that was not requested")
        request = self._requested.popleft()
        file, offset = request
        if (message.digest, message.offset) != (file.digest, offset):
            raise OutOfOrder("expected BlobChunks in the order of the requests, got another order")
        if len(body) != request.nbytes:
            return self._fail(self._changed_file(file))
        self._unwritten.append(request)
        self._received_bytes += len(body)
        return [StoreChunk(file, offset, body), *self._progress(), *self._request_more()]

    def event(self, event: FileEvent) -> list[Action]:
        """Handle the result of a file action."""
        if self._is_over:
            return []
        match event:
            case Located():
                return self._files_located(event.missing_files)
            case PartOpened():
                assert self._open_file is not None
                self._next_offset = event.size
                self._received_bytes += event.size
            case BlobPresent():
                self._received_bytes += self._missing_files[event.digest].size
                return self._file_complete(event.digest)
            case ChunkStored():
                self._unwritten.popleft()
                if event.is_complete:
                    return self._file_complete(event.digest)
            case BlobDamaged():
                return self._blob_damaged(event)
            case Assembled():
                self._is_idle = True
                if self._is_built:
                    return self._next_round()
                self._sources, self._is_built = event.sources, True
                task = f"run {self._run_id}: building the task {self._spec.task!r}"
                build = Build(
                    self._run_id, event.spec, keep_state=self._keep_state, inputs=self._list_digest
                )
                return [PrintLine(task), build]
            case FilesFailed():
                return self._fail(event.error, is_local=True)
        return self._request_more()

    def with_source_names(self, text: str) -> str:
        """Replace local paths in a text by the sources that the run spec names."""
        for path, source in self._sources.items():
            text = text.replace(path, source)
        return text

    def _read_list(self, message: BlobChunk, body: Body) -> list[Action]:
        document = body.tobytes()
        if message.digest != self._list_digest or document_digest(document) != self._list_digest:
            raise MessageError("expected the list of files that StartRun names, got another")
        self._listing = BlobList.from_bytes(document)
        for source in self._listing.sources:
            if source_of(self._spec, source.role) is None:
                raise MessageError(
                    f"expected a list of files of this run, got one with a {source.role}, which "
                    "the run spec does not have"
                )
        self._deferred_digests = frozenset(
            file.digest
            for source in self._listing.sources
            for file in source.files
            if is_fetched_later(self._spec, source.role, file.name)
        )
        return [Locate(self._list_digest, self._spec, self._listing, self._deferred_digests)]

    def request(self, names: tuple[str, ...], work: Compute | Evaluate | None) -> list[Action]:
        """See `RunFiles.request`."""
        if self._is_over:
            return []
        # Files of other roles may have the same name; they were fetched at the start.
        deferred_files = {
            file.name: file.digest
            for source in self._file_list.sources
            for file in source.files
            if is_fetched_later(self._spec, source.role, file.name)
        }
        unknown_names = [name for name in names if name not in deferred_files]
        if unknown_names:
            return self._fail(
                DataError(
                    f"expected the file {unknown_names[0]!r} of the capture's index in the list of "
                    "files, got a list without it; restore it on the coordinator's machine"
                )
            )
        digests = frozenset(deferred_files[name] for name in names)
        if work is not None and not digests & self._deferred_digests:
            # The task does not find files that were fetched: retry once, not forever.
            if work == self._retried_work:
                return self._fail(
                    DataError(
                        f"the file {names[0]!r} was fetched, but the task does not find it; make "
                        "sure that nothing empties the cache or the temporary directory meanwhile"
                    )
                )
            self._retried_work = work
        self._pending.append((digests, work))
        return self._next_round()

    def _next_round(self) -> list[Action]:
        """Return work whose files have arrived, and fetch the files of the next request.

        Requests that block work come first, then those of upcoming steps.
        """
        if not self._is_idle:
            return []
        ready_work = [entry for entry in self._pending if not entry[0] & self._deferred_digests]
        self._pending = [entry for entry in self._pending if entry[0] & self._deferred_digests]
        actions: list[Action] = [work for _, work in ready_work if work is not None]
        if not self._pending:
            return actions
        self._is_idle, self._received_bytes, self._reported_quarters = False, 0, 0
        urgent = [digests for digests, work in self._pending if work is not None]
        self._deferred_digests -= (urgent or [self._pending[0][0]])[0]
        return [
            *actions,
            Locate(self._list_digest, self._spec, self._file_list, self._deferred_digests),
        ]

    def _files_located(self, missing_files: tuple[BlobFile, ...]) -> list[Action]:
        self._missing_files = {file.digest: file for file in missing_files}
        for file in missing_files:
            is_small = file.size <= limits.BODY_BYTES
            (self._small_files if is_small else self._large_files).append(file)
        self._total_bytes = sum(file.size for file in missing_files)
        if not missing_files:
            return self._assemble()
        roles = [
            source.role
            for source in self._file_list.sources
            if any(file.digest in self._missing_files for file in source.files)
        ]
        role_names = " and ".join(roles)
        size = _format_bytes(self._total_bytes)
        text = f"run {self._run_id}: fetching {size} of {role_names} from the coordinator"
        return [PrintLine(text), *self._request_more()]

    def _request_more(self) -> list[Action]:
        """Open the next large file and request as many chunks as the limits allow."""
        actions: list[Action] = []
        if self._open_file is None and self._large_files:
            self._open_file = self._large_files.popleft()
            self._next_offset = -1  # `PartOpened` sets it
            actions.append(OpenPart(self._open_file))
        while (request := self._next_chunk()) is not None and self._has_room(request):
            if request.file is self._open_file:
                self._next_offset += request.nbytes
            else:
                self._small_files.popleft()
            self._requested.append(request)
            message = BlobRequest(
                run_id=self._run_id, digest=request.file.digest, offset=request.offset
            )
            actions.append(Transmit(message))
        return actions

    def _next_chunk(self) -> _Request | None:
        if self._open_file is not None and 0 <= self._next_offset < self._open_file.size:
            return _Request(self._open_file, self._next_offset)
        return _Request(self._small_files[0], 0) if self._small_files else None

    def _has_room(self, next_request: _Request) -> bool:
        requests = (*self._requested, *self._unwritten)
        count = len(requests) + 1
        nbytes = sum(request.nbytes for request in requests) + next_request.nbytes
        return count <= limits.UNANSWERED_BLOB_CHUNKS and nbytes <= limits.UNANSWERED_BLOB_BYTES

    def _file_complete(self, digest: str) -> list[Action]:
        del self._missing_files[digest]
        if self._open_file is not None and self._open_file.digest == digest:
            self._open_file = None
        return self._request_more() if self._missing_files else self._assemble()

    def _blob_damaged(self, event: BlobDamaged) -> list[Action]:
        file = self._missing_files[event.digest]
        self._unwritten.popleft()
        if not event.was_resumed:
            return self._fail(self._changed_file(file))
        self._open_file = None
        self._received_bytes -= file.size
        self._reported_quarters = self._received_quarters
        self._large_files.appendleft(file)
        return self._request_more()

    def _assemble(self) -> list[Action]:
        return [Assemble(self._list_digest, self._spec, self._file_list, self._deferred_digests)]

    @property
    def _received_quarters(self) -> int:
        return 4 * self._received_bytes // max(self._total_bytes, 1)

    def _progress(self) -> list[Action]:
        quarters = self._received_quarters
        if self._total_bytes < PROGRESS_BYTES or quarters <= self._reported_quarters:
            return []
        self._reported_quarters = quarters
        received, total = _format_bytes(self._received_bytes), _format_bytes(self._total_bytes)
        return [PrintLine(f"fetched {received} of {total}")]

    def _changed_file(self, file: BlobFile) -> DataError:
        """Return the error for a file that changed after the coordinator listed it."""
        for source in self._file_list.sources:
            if file in source.files:
                source_name = source_of(self._spec, source.role)
                return DataError(
                    f"the {source.role} file {file.name!r} of {source_name!r} has changed at the "
                    "coordinator since the run was submitted; restore it, or submit a new run"
                )
        raise AssertionError(file)

    def _fail(self, error: SamestepError, *, is_local: bool = False) -> list[Action]:
        self._is_over = True
        reason = self.with_source_names(str(error))
        if self._is_built:
            return [DropFiles(), *give_up(reason, int(error.exit_code))]
        unready = Unready(
            run_id=self._run_id,
            reason=cut_text(reason),
            own=is_local,
            exit_code=int(error.exit_code),
        )
        return [
            DropFiles(),
            Transmit(unready),
            PrintLine(f"cannot take part in {self._run_id}: {reason}"),
        ]


def give_up(reason: str, exit_code: int = ExitCode.FAILED) -> list[Action]:
    """Leave because a file or device of this machine cannot be used; other workers continue."""
    goodbye = Goodbye(reason=cut_text(reason), retry=False, exit_code=exit_code)
    return [Transmit(goodbye), Leave(reason, retry=False, exit_code=exit_code, is_failure=True)]


def _format_bytes(count: int) -> str:
    """Format a number of bytes for the operator."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            value = count / 10**power
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{count} bytes"
