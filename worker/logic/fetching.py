"""Which of a run's files are fetched, in which order, and what an answer means.

Pure: no clock, socket, file or thread. It gives the actions to be done, and is told what came of
them. Files that fit one chunk are taken whole; of the larger ones one at a time is open, and goes
on where an earlier attempt ended. Few chunks are on their way or unwritten at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from protocol.base import limits
from protocol.base.errors import DataError, ExitCode, MessageError, OutOfPlace, SamestepError
from protocol.base.fields import cut_text
from protocol.spec.blob_list import BlobFile, BlobList, document_digest
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
    StoreChunk,
    Tell,
    Transmit,
)

PROGRESS_BYTES: Final = 16 * limits.MIB
"""Of more than this a person is told when a quarter of it has come."""


@dataclass(frozen=True, slots=True)
class Located:
    """Files that are neither here nor in the cache; each digest once."""

    missing: tuple[BlobFile, ...]


@dataclass(frozen=True, slots=True)
class PartOpened:
    """A large file is ours to write, and has so many bytes already."""

    digest: str
    have: int


@dataclass(frozen=True, slots=True)
class BlobPresent:
    """It is in the cache after all: another worker of this machine has fetched it."""

    digest: str


@dataclass(frozen=True, slots=True)
class ChunkStored:
    """A chunk is written; with the last one the file is whole, and has its digest."""

    digest: str
    complete: bool


@dataclass(frozen=True, slots=True)
class BlobDamaged:
    """The whole file has another digest and is thrown away; `resumed`: its start was older."""

    digest: str
    resumed: bool


@dataclass(frozen=True, slots=True)
class Assembled:
    """All files are in place: the run spec that names the places, and what they are called."""

    spec: RunSpec
    places: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FilesFailed:
    """The files cannot be had here."""

    error: SamestepError


FileEvent = Located | PartOpened | BlobPresent | ChunkStored | BlobDamaged | Assembled | FilesFailed


class _Asked(NamedTuple):
    file: BlobFile
    offset: int

    @property
    def nbytes(self) -> int:
        return min(limits.BODY_BYTES, self.file.size - self.offset)


class RunFiles:
    """The files of the run that a session is in."""

    def __init__(self) -> None:
        self._run_id = ""
        self._fetching: Fetching | None = None

    def begin(self, message: StartRun, spec: RunSpec) -> list[Action]:
        """A run begins, or goes on after `step` steps: have its files, then build its task."""
        dropped = self.drop()
        self._run_id = message.run_id
        keep = message.step > 0
        if message.blobs is None:
            told = Tell(f"run {message.run_id}: building the task {spec.task!r}")
            return [*dropped, told, Build(message.run_id, spec, keep=keep)]
        self._fetching = Fetching(message.run_id, spec, message.blobs, keep=keep)
        return [*dropped, *self._fetching.start()]

    def drop(self) -> list[Action]:
        """The run is over."""
        self._run_id = ""
        fetching, self._fetching = self._fetching, None
        return [DropFiles()] if fetching is not None else []

    def chunk(self, message: BlobChunk, body: Body) -> list[Action]:
        """A chunk from the coordinator.

        Raises:
            RemoteProtocolError: It was not asked for, or is not what was.
        """
        if message.run_id != self._run_id:
            return []  # of the run before: its end crossed the request
        if self._fetching is None:
            raise OutOfPlace("BlobChunk was not asked for")
        return self._fetching.chunk(message, body)

    def event(self, event: FileEvent) -> list[Action]:
        """What came of a file action."""
        return self._fetching.event(event) if self._fetching is not None else []

    def want(self, names: tuple[str, ...], waiting: Compute | Evaluate | None) -> list[Action]:
        """Files for later are needed now; `waiting` is done once they are there."""
        if self._fetching is None:
            return give_up(f"the run's files {', '.join(names)} are not here")
        return self._fetching.want(names, waiting)

    def in_the_users_words(self, text: str) -> str:
        """A text about the places where files are, with what the run spec calls them."""
        return self._fetching.in_the_users_words(text) if self._fetching is not None else text


class Fetching:
    """One run's files on one connection."""

    def __init__(self, run_id: str, spec: RunSpec, list_digest: str, *, keep: bool = False) -> None:
        self._keep = keep
        self._run_id = run_id
        self._spec = spec
        self._list_digest = list_digest
        self._listing: BlobList | None = None
        self._asked: deque[_Asked] = deque()
        self._unwritten: deque[_Asked] = deque()
        self._small: deque[BlobFile] = deque()
        self._large: deque[BlobFile] = deque()
        self._open: BlobFile | None = None
        self._next = 0
        self._missing: dict[str, BlobFile] = {}
        self._total = 0
        self._come = 0
        self._quarters = 0
        self._over = False
        self._built = False
        self._idle = False
        self._later: frozenset[str] = frozenset()
        self._waiting: list[tuple[frozenset[str], Compute | Evaluate | None]] = []
        self._places: Mapping[str, str] = {}
        self._released: Compute | Evaluate | None = None

    @property
    def _known(self) -> BlobList:
        assert self._listing is not None, "nothing is located or asked for before the list came"
        return self._listing

    def start(self) -> list[Action]:
        """Ask for the list."""
        return [Transmit(BlobRequest(run_id=self._run_id, digest=self._list_digest, offset=0))]

    def chunk(self, message: BlobChunk, body: Body) -> list[Action]:
        """The coordinator's answer to the oldest request.

        Raises:
            RemoteProtocolError: It is not what was asked for.
        """
        if self._over:
            return []
        if self._listing is None:
            return self._list_came(message, body)
        if not self._asked:
            raise OutOfPlace("BlobChunk was not asked for")
        asked = self._asked.popleft()
        file, offset = asked
        if (message.digest, message.offset) != (file.digest, offset):
            raise OutOfPlace("BlobChunk: expected the chunks in the order they were asked for")
        if len(body) != asked.nbytes:
            return self._fail(self._changed(file))
        self._unwritten.append(asked)
        self._come += len(body)
        return [StoreChunk(file, offset, body), *self._progress(), *self._more()]

    def event(self, event: FileEvent) -> list[Action]:
        """What came of an action."""
        if self._over:
            return []
        match event:
            case Located():
                return self._located(event.missing)
            case PartOpened():
                assert self._open is not None
                self._next = event.have
                self._come += event.have
            case BlobPresent():
                self._come += self._missing[event.digest].size
                return self._have(event.digest)
            case ChunkStored():
                self._unwritten.popleft()
                if event.complete:
                    return self._have(event.digest)
            case BlobDamaged():
                return self._damaged(event)
            case Assembled():
                self._idle = True
                if self._built:
                    return self._next_round()
                self._places, self._built = event.places, True
                task = f"run {self._run_id}: building the task {self._spec.task!r}"
                build = Build(self._run_id, event.spec, keep=self._keep, inputs=self._list_digest)
                return [Tell(task), build]
            case FilesFailed():
                return self._fail(event.error, own=True)
        return self._more()

    def in_the_users_words(self, text: str) -> str:
        """A text about the places where files are, with what the run spec calls them."""
        for place, words in self._places.items():
            text = text.replace(place, words)
        return text

    def _list_came(self, message: BlobChunk, body: Body) -> list[Action]:
        document = body.tobytes()
        if message.digest != self._list_digest or document_digest(document) != self._list_digest:
            raise MessageError("expected the list of blobs that StartRun names, got another")
        self._listing = BlobList.from_bytes(document)
        for source in self._listing.sources:
            if source_of(self._spec, source.role) is None:
                raise MessageError(f"the list of blobs has a {source.role} that the run has not")
        self._later = frozenset(
            file.digest
            for source in self._listing.sources
            for file in source.files
            if is_fetched_later(self._spec, source.role, file.name)
        )
        return [Locate(self._list_digest, self._spec, self._listing, self._later)]

    def want(self, names: tuple[str, ...], waiting: Compute | Evaluate | None) -> list[Action]:
        """See `RunFiles.want`."""
        if self._over:
            return []
        # Other roles may have files of the same name, which were fetched at once.
        known = {
            file.name: file.digest
            for source in self._known.sources
            for file in source.files
            if is_fetched_later(self._spec, source.role, file.name)
        }
        unknown = [name for name in names if name not in known]
        if unknown:
            return self._fail(DataError(f"the data have no file {unknown[0]!r}, which they list"))
        wanted = frozenset(known[name] for name in names)
        if waiting is not None and not wanted & self._later:
            if waiting == self._released:  # or it would be asked for, and come, for ever
                return self._fail(DataError(f"the file {names[0]!r} has come, and is not found"))
            self._released = waiting
        self._waiting.append((wanted, waiting))
        return self._next_round()

    def _next_round(self) -> list[Action]:
        """What has waited for files that are there goes on; files that are wanted are fetched.

        Those that something waits for come first, then those that will be needed soon.
        """
        if not self._idle:
            return []
        ready = [entry for entry in self._waiting if not entry[0] & self._later]
        self._waiting = [entry for entry in self._waiting if entry[0] & self._later]
        actions: list[Action] = [waiting for _, waiting in ready if waiting is not None]
        if not self._waiting:
            return actions
        self._idle, self._come, self._quarters = False, 0, 0
        urgent = [digests for digests, waiting in self._waiting if waiting is not None]
        self._later -= (urgent or [self._waiting[0][0]])[0]
        return [*actions, Locate(self._list_digest, self._spec, self._known, self._later)]

    def _located(self, missing: tuple[BlobFile, ...]) -> list[Action]:
        self._missing = {file.digest: file for file in missing}
        for file in missing:
            (self._small if file.size <= limits.BODY_BYTES else self._large).append(file)
        self._total = sum(file.size for file in missing)
        if not missing:
            return self._assemble()
        roles = [
            source.role
            for source in self._known.sources
            if any(file.digest in self._missing for file in source.files)
        ]
        what = " and ".join(roles)
        told = f"run {self._run_id}: fetching {_size(self._total)} of {what} from the coordinator"
        return [Tell(told), *self._more()]

    def _more(self) -> list[Action]:
        """Open the next large file, and ask for as many chunks as may be on their way."""
        actions: list[Action] = []
        if self._open is None and self._large:
            self._open, self._next = self._large.popleft(), -1  # until it is known how much is here
            actions.append(OpenPart(self._open))
        while (asked := self._next_chunk()) is not None and self._has_room(asked):
            if asked.file is self._open:
                self._next += asked.nbytes
            else:
                self._small.popleft()
            self._asked.append(asked)
            request = BlobRequest(
                run_id=self._run_id, digest=asked.file.digest, offset=asked.offset
            )
            actions.append(Transmit(request))
        return actions

    def _next_chunk(self) -> _Asked | None:
        if self._open is not None and 0 <= self._next < self._open.size:
            return _Asked(self._open, self._next)
        return _Asked(self._small[0], 0) if self._small else None

    def _has_room(self, another: _Asked) -> bool:
        under_way = (*self._asked, *self._unwritten)
        count = len(under_way) + 1
        nbytes = sum(each.nbytes for each in under_way) + another.nbytes
        return count <= limits.UNANSWERED_BLOB_CHUNKS and nbytes <= limits.UNANSWERED_BLOB_BYTES

    def _have(self, digest: str) -> list[Action]:
        del self._missing[digest]
        if self._open is not None and self._open.digest == digest:
            self._open = None
        return self._more() if self._missing else self._assemble()

    def _damaged(self, event: BlobDamaged) -> list[Action]:
        file = self._missing[event.digest]
        self._unwritten.popleft()
        if not event.resumed:
            return self._fail(self._changed(file))
        self._open = None
        self._come -= file.size
        self._large.appendleft(file)
        return self._more()

    def _assemble(self) -> list[Action]:
        return [Assemble(self._list_digest, self._spec, self._known, self._later)]

    def _progress(self) -> list[Action]:
        quarters = 4 * self._come // max(self._total, 1)
        if self._total < PROGRESS_BYTES or quarters <= self._quarters:
            return []
        self._quarters = quarters
        return [Tell(f"fetched {_size(self._come)} of {_size(self._total)}")]

    def _changed(self, file: BlobFile) -> DataError:
        """The coordinator's file is no longer the one that it listed."""
        for source in self._known.sources:
            if file in source.files:
                named = source_of(self._spec, source.role)
                return DataError(
                    f"the {source.role} file {file.name!r} of {named!r} has changed at the "
                    "coordinator since the run was submitted; bring it back, or submit a new run"
                )
        raise AssertionError(file)

    def _fail(self, error: SamestepError, *, own: bool = False) -> list[Action]:
        self._over = True
        reason = self.in_the_users_words(str(error))
        if self._built:
            return [DropFiles(), *give_up(reason, int(error.exit_code))]
        unready = Unready(
            run_id=self._run_id, reason=cut_text(reason), own=own, exit_code=int(error.exit_code)
        )
        return [
            DropFiles(),
            Transmit(unready),
            Tell(f"cannot take part in {self._run_id}: {reason}"),
        ]


def give_up(reason: str, exit_code: int = ExitCode.FAILED) -> list[Action]:
    """A file cannot be had in the middle of a run, or the device is of no use: others go on."""
    goodbye = Goodbye(reason=cut_text(reason), retry=False, exit_code=exit_code)
    return [Transmit(goodbye), Leave(reason, retry=False, exit_code=exit_code, failed=True)]


def _size(count: int) -> str:
    """Bytes as a person reads them."""
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            value = count / 10**power
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{count} bytes"
