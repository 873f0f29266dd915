"""What one run keeps on disk while it goes on, away from the event loop.

Three threads, for their syncs are independent: the gradient log, which commits wait for; the
journal, which nothing waits for but the end; checkpoints, which take long. Each does its jobs one
after the other. What the disk refuses in a job that nobody waits for comes back through `failed`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from blake3 import blake3

from coordinator.capture.captured_files import CapturedFiles
from coordinator.disk.durable_file import MISSING
from coordinator.run.outputs.kept import Bytes
from coordinator.run.outputs.own_state import own_state_lengths
from coordinator.run.outputs.restart import CommitRecord, Terms
from coordinator.storage.directory.journal import Journal
from coordinator.storage.directory.journal_records import FilesKept, Record
from coordinator.storage.directory.run_directory import RunDirectory, terms_bytes
from coordinator.storage.disk_room import check_room
from coordinator.storage.kept_files import Digests, file_digest, kept_digests
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.log.log_index import LoggedStep, LogIndex, read_chunks
from coordinator.storage.log.log_records import Array, ChunkPlace
from coordinator.storage.states.checkpoint import (
    Checkpoint,
    checkpoint_steps,
    find_checkpoint,
    write_checkpoint,
    write_metrics,
)
from coordinator.storage.states.own_files import NOTHING_YET
from coordinator.storage.states.replica_states import ReplicaStates
from coordinator.storage.states.retention import best_step, prune
from coordinator.storage.states.saved_state import Piece, SavedState
from protocol.base import limits
from protocol.base.errors import SamestepError, StorageFailed
from protocol.exact.replica import Replica
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import Boundary, StretchRequest

T = TypeVar("T")
_STEPS_AT_ONCE: Final = 16
_THREADS: Final = ("log", "journal", "checkpoint", "capture")


class _LogStart(NamedTuple):
    """What there is once the manifest is settled; see `RunStorage.begin_log`."""

    manifest: Manifest
    next_step: int
    redo: Sequence[CommitRecord]
    log_index: LogIndex | None


def _some(items: Iterator[T], length: Callable[[T], int]) -> Iterator[T]:
    """As many as may wait for a worker to read: not a thread's turn for each of them."""
    left_bytes = limits.SEND_AHEAD_BYTES
    while left_bytes > 0 and (item := next(items, None)) is not None:
        left_bytes -= length(item)
        yield item


class RunStorage:
    """Log, journal and checkpoints of one run.

    Attributes:
        newest: The newest checkpoint that is whole.
        replica_states: Of a run with replicas, once its manifest is known.

    Args:
        directory: The run's, begun, and held by this process.
        run_id: The run's.
        spec: Settles the log's mode and which checkpoints are kept.
        epoch: The coordinator's.
        guard: Raises if the directory is not this coordinator's any more.
        failed: Called in the event loop with what the disk refused.
        thread: Gives a thread of that name.
    """

    def __init__(
        self,
        directory: RunDirectory,
        run_id: str,
        spec: RunSpec,
        *,
        epoch: int,
        guard: Callable[[], None],
        failed: Callable[[Exception], None],
        thread: Callable[[str], Executor] | None = None,
    ) -> None:
        self.directory = directory
        self._run_id = run_id
        self._spec = spec
        self._epoch = epoch
        self._guard = guard
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        thread = thread or partial(ThreadPoolExecutor, 1)
        self.newest: Checkpoint | None = None
        self._threads = {name: thread(name) for name in _THREADS}
        self._start: _LogStart | None = None
        self._log: GradientLog | None = None
        self._captured: CapturedFiles | None = None
        self.replica_states: ReplicaStates | None = None
        self._lost: dict[tuple[int, int], SamestepError] = {}
        self._appended: list[tuple[ChunkPlace, Array]] = []
        self._appended_bytes = 0
        self._writing: asyncio.TimerHandle | None = None
        self._terms: Terms | None = None
        self._journal: Journal | None = None
        self._unsynced = False
        self._first_lines: Callable[[], Sequence[Record]] | None = None
        self._lines: deque[Record] = deque()
        self._kept: Digests = {}
        self._ended = False
        self._metrics: dict[int, tuple[str, dict[str, float]]] = {}
        self._joining = 0
        self._needed: dict[object, int] = {}
        self._good = 0
        self._held: int | None = None
        self._boundary_bytes = 0
        self._boundary_room = asyncio.Event()
        self._boundary_room.set()

    # The gradient log.

    def begin_log(
        self,
        manifest: Manifest,
        next_step: int,
        redo: Sequence[CommitRecord] = (),
        index: LogIndex | None = None,
        newest: Checkpoint | None = None,
        *,
        own_digest: str | None = None,
    ) -> None:
        """The manifest is known: keep it, and begin the log after so many steps.

        Args:
            manifest: The run's.
            next_step: Steps committed that can be had back.
            redo: The commits after them.
            index: Where they lie; None if there are none.
            newest: The newest checkpoint that is whole, if there is one.
            own_digest: Of what replicas have of their own after those steps; None: nothing yet.
        """
        self.newest = newest
        self._start = _LogStart(manifest, next_step, redo, index)
        if self._spec.replicas is not None:
            own_lengths = own_state_lengths(self._spec, manifest)
            self.replica_states = ReplicaStates(
                self.directory, own_lengths, self._spec.checkpoint.every, self._guard,
                step=next_step, told=own_digest or NOTHING_YET,
            )  # fmt: skip
        if manifest.capture is not None:
            self._captured = CapturedFiles(
                self.directory.path, manifest, self._spec, next_step, self._guard
            )
        self._spawn("log", self._opened)

    async def log_begun(self) -> None:
        """Return once the log has begun.

        Raises:
            SamestepError: It cannot be; `begin_log` has led to the same error.
        """
        await self._do("log", self._opened)

    def append(self, place: ChunkPlace, values: Array) -> None:
        """Append a chunk of averages, which must not change until the step is committed."""
        self._appended.append((place, values))
        self._appended_bytes += values.nbytes
        if self._appended_bytes >= limits.LOGGED_TOGETHER_BYTES:
            self._write_appended()
        elif self._writing is None:
            seconds = limits.LOGGED_TOGETHER_MS / 1000
            self._writing = self._loop.call_later(seconds, self._write_appended)

    def _write_appended(self) -> None:
        chunks, self._appended, self._appended_bytes = self._appended, [], 0
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

        def work() -> None:
            for number, (place, values) in enumerate(chunks):
                try:
                    self._opened().append_chunk(place, values)
                except SamestepError as error:
                    left = {(place.step, place.attempt) for place, _ in chunks[number:]}
                    self._lost = dict.fromkeys(left, error)
                    raise

        if chunks:
            self._spawn("log", work)

    def keep_boundary(self, message: Boundary, content: Bytes) -> None:
        """Write a piece of a boundary; see `boundary_room`."""
        states = self.replica_states
        assert states is not None, "a run without replicas refuses it"
        self._count_boundary(content.nbytes)

        def work() -> None:
            try:
                states.write_boundary(message, content)
            finally:
                self._loop.call_soon_threadsafe(self._count_boundary, -content.nbytes)

        self._spawn("capture", work)

    def _count_boundary(self, nbytes: int) -> None:
        self._boundary_bytes += nbytes
        if self._boundary_bytes < limits.BOUNDARIES_BYTES:
            self._boundary_room.set()
        else:
            self._boundary_room.clear()

    @property
    def boundary_room(self) -> asyncio.Event:
        """Set while few pieces of boundaries wait for the disk, where workers send them faster."""
        return self._boundary_room

    async def answer_stretch(self, message: StretchRequest) -> tuple[int, AsyncIterator[bytes]]:
        """See `ReplicaStates.answer`; raises as that does, also while it is read."""
        states = self.replica_states
        assert states is not None, "a run without replicas refuses it"
        inner, reading = await self._do("capture", lambda: states.answer(message))

        async def pieces() -> AsyncIterator[bytes]:
            while piece := await self._do("capture", lambda: next(reading, b"")):
                yield piece

        return inner, pieces()

    async def commit(self, record: CommitRecord, kept: Sequence[Bytes] = ()) -> str | None:
        """Return when the step is durable, and before it what is kept of its microbatches.

        Returns:
            The digest that the commit names of what replicas have of their own now.

        Raises:
            StorageFailed: It is not.
            RunFailed: The directory has another coordinator now.
        """
        self._write_appended()
        terms, captured, states = self._terms, self._captured, self.replica_states
        if captured is not None:
            step = record.commit.step
            await self._do("capture", lambda: captured.keep(step, kept))
        if states is not None:
            after = record.commit.step + 1
            own = await self._do("capture", lambda: states.keep_own(after, kept))
            record = record.model_copy(update={"own_digest": own})
        if terms is not None:
            await self._do("journal", lambda: self._announce(terms))

        def work() -> None:
            lost = self._lost.get((record.commit.step, record.commit.attempt))
            if lost is not None:
                raise lost
            if terms is not None:
                self._guard()  # nothing of another coordinator's is written over
                self.directory.write_terms(terms)
                if self._terms is terms:
                    self._terms = None
            self._opened().commit(record)
            self._lost = {}

        await self._do("log", work)
        if terms is not None:
            self._spawn("journal", lambda: self._told_terms(terms))
        return record.own_digest

    def remember(self, terms: Terms) -> None:
        """Keep what workers were accepted by: it is written before the next commit."""
        self._terms = terms

    async def logged(self, step: int) -> list[LoggedStep]:
        """Some committed steps from this one on, as far as the log has them in a row.

        Raises:
            SamestepError: The log cannot be read.
        """

        def work() -> list[LoggedStep]:
            return list(islice(self._opened().index.following(step), _STEPS_AT_ONCE))

        return await self._do("log", work)

    async def chunks(self, logged: LoggedStep) -> AsyncIterator[tuple[int, int, Array]]:
        """What a logged step averaged: block, chunk, values; a few of them in memory at once.

        Raises:
            SamestepError: The log cannot be read, or is cut meanwhile.
        """
        reading = read_chunks(logged, self._begun.manifest.blocks)

        def some() -> list[tuple[int, int, Array]]:
            return list(_some(reading, lambda chunk: chunk[2].nbytes))

        while read := await self._loop.run_in_executor(None, some):
            for chunk in read:
                yield chunk

    async def averages_from(self) -> int:
        """The step from which on the log keeps averages.

        Raises:
            SamestepError: The log cannot be begun.
        """
        return await self._do("log", lambda: self._opened().index.averages_from)

    @asynccontextmanager
    async def joining(self) -> AsyncIterator[Callable[[int], None]]:
        """A worker is on its way to the run's state: meanwhile the log keeps averages.

        Yields:
            To be called with the step from which on the worker needs them. They are kept for it
            until a second checkpoint has come after that step: who takes longer begins anew.

        Raises:
            StorageFailed: The disk refuses.
        """
        sparse, worker = self._spec.log == "checkpoint", object()
        self._joining += 1
        try:
            if sparse:  # each sees to it: the disk may have refused it to an earlier one
                await self._do("log", self._keep_averages)
            yield partial(self._needed.__setitem__, worker)
        finally:
            self._needed.pop(worker, None)
            self._joining -= 1
            if sparse and not self._joining:
                self._spawn("log", lambda: self._opened().roll("checkpoint"))

    def _keep_averages(self) -> None:
        log = self._opened()
        if log.mode != "full":
            log.roll("full")

    @property
    def _begun(self) -> _LogStart:
        assert self._start is not None, "begin_log comes before all that needs a manifest"
        return self._start

    def _opened(self) -> GradientLog:
        """The log; where the disk refused to begin it, it is begun now."""
        if self._log is None:
            manifest, next_step, redo, index = self._begun
            self._guard()
            if index is None:
                check_room(self.directory.path, self._spec, manifest)
            self.directory.keep_manifest(manifest)
            self._log = GradientLog(
                self.directory.log, self._run_id, manifest, epoch=self._epoch,
                next_step=next_step, mode=self._spec.log, redo=redo, index=index,
                guard=self._guard,
            )  # fmt: skip
        return self._log

    @property
    def captures(self) -> bool:
        """Whether the run leaves captured logits, and no model."""
        return self._captured is not None

    async def end_capture(self, *, whole: bool) -> dict[str, str]:
        """Write the files of logits; see `CapturedFiles.finish`."""
        captured = self._captured
        assert captured is not None
        return await self._do("capture", lambda: captured.finish(whole=whole))

    # Checkpoints.

    async def roll(self) -> None:
        """Begin a new segment of the log, after all commits so far.

        Raises:
            StorageFailed: The disk refuses.
        """
        await self._do("log", lambda: self._opened().roll())

    async def save(
        self,
        replica: Replica,
        losses: Sequence[float],
        state_read: Callable[[], None] = lambda: None,
    ) -> Checkpoint:
        """Write a checkpoint; then remove what it has made needless.

        Args:
            replica: The state; nobody changes it before `state_read` is called.
            losses: Mean loss of each step so far.
            state_read: Called in the event loop, unless the disk refuses.

        Raises:
            StorageFailed: The disk refuses.
            RunFailed: The directory has another coordinator now.
        """
        manifest, root = self._begun.manifest, self.directory.checkpoints
        made_before = self.newest is not None

        def read() -> None:
            self._loop.call_soon_threadsafe(state_read)

        def work() -> tuple[Checkpoint, int | None]:
            self._guard()
            if made_before and not root.is_dir():  # made anew it could not be brought back
                raise StorageFailed("write to", str(root), MISSING)
            checkpoint = write_checkpoint(
                root, manifest, replica, run_id=self._run_id, epoch=self._epoch, losses=losses,
                state_read=read,
            )  # fmt: skip
            self._guard()
            step = checkpoint.info.step  # the replica may be further by now
            if (figures := self._metrics.get(step)) is not None:
                write_metrics(root, step, *figures)
            retention, held = self._spec.checkpoint, self._held
            return checkpoint, prune(root, self._run_id, manifest, retention, held).good

        # Before the log's commits go, and before a restart no longer looks at them.
        await self._do("journal", self._tell_files)
        checkpoint, good = await self._do("checkpoint", work)
        self.newest = checkpoint
        self._metrics = {s: each for s, each in self._metrics.items() if s > checkpoint.info.step}
        if good is not None and not self._spec.checkpoint.keep_log:
            await self._do("log", lambda: self._cut(good))
        return checkpoint

    async def best(self) -> Checkpoint | None:
        """The checkpoint with the best held-out figure, if the run spec says which figure.

        Raises:
            StorageDamaged: It is not what was written.
            StorageFailed: It cannot be read.
        """
        manifest, root = self._begun.manifest, self.directory.checkpoints

        def work() -> Checkpoint | None:
            step = best_step(root, self._spec.checkpoint)
            return None if step is None else find_checkpoint(root, step, self._run_id, manifest)

        return await self._do("checkpoint", work)

    @asynccontextmanager
    async def holding_newest(self) -> AsyncIterator[int]:
        """The newest checkpoint is kept while it is copied; the journal tells what led to it.
        One at a time.

        Yields:
            Its step.

        Raises:
            SamestepError: The disk refuses.
        """

        def hold() -> int:
            self._held = max(checkpoint_steps(self.directory.checkpoints), default=0)
            return self._held

        await self._do("journal", self._sync_journal)
        try:
            yield await self._do("checkpoint", hold)
        finally:
            self._held = None

    async def open_state(self, checkpoint: Checkpoint) -> SavedState:
        """A checkpoint's state, to be read by `read`.

        Raises:
            StorageDamaged: It is not what was written.
            StorageFailed: It cannot be read.
        """
        wanted = partial(SavedState, checkpoint, self._begun.manifest, self._spec.update)
        return await self._loop.run_in_executor(None, wanted)

    async def pieces(self, saved: SavedState) -> AsyncIterator[tuple[Piece, Array]]:
        """All of a state that is open, a few pieces in memory at once; raises as that does."""
        reading = ((piece, saved.read(piece)) for piece in saved.pieces())

        def some() -> list[tuple[Piece, Array]]:
            return list(_some(reading, lambda piece: piece[1].nbytes))

        while read := await self._loop.run_in_executor(None, some):
            for piece in read:
                yield piece

    def _cut(self, good: int) -> None:
        self._guard()  # another coordinator may be reading what it has found
        needed = min([good, *self._needed.values()])
        before, self._good = self._good, good
        self._opened().cut(max(needed, before))

    def keep_metrics(self, step: int, state_digest: str, metrics: dict[str, float]) -> None:
        """Keep the figures of an evaluation with the checkpoint of that state, if there is one."""
        # A checkpoint of it may be yet to come, after later figures.
        self._metrics[step] = (state_digest, metrics)
        root = self.directory.checkpoints
        self._spawn("checkpoint", lambda: write_metrics(root, step, state_digest, metrics))

    # The journal.

    def record(self, records: Sequence[Record]) -> None:
        """Add lines to the journal; they are synced soon, many at once."""
        if not records or self._ended:
            return

        self._lines.extend(records)
        self._spawn("journal", self._opened_journal)
        if not self._unsynced:
            self._unsynced = True
            self._spawn("journal", self._sync_journal)

    def begin_journal(self, lines: Callable[[], Sequence[Record]]) -> None:
        """Bring the journal up to date before anything else is added.

        Args:
            lines: Gives the lines to add; called once the journal's end is sound.
        """
        self._first_lines = lines
        self._spawn("journal", self._sync_journal)

    async def end_journal(self, record: Record) -> str:
        """Add the last line.

        Returns:
            The journal's head.

        Raises:
            StorageFailed: The disk refuses.
        """
        self._ended = True

        def work() -> str:
            journal = self._opened_journal()
            self._kept = kept_digests(self.directory)  # nothing of them is under way any more
            journal.append(FilesKept(epoch=self._epoch, digests=self._kept))
            head = journal.append(record)
            journal.sync()
            return head

        return await self._do("journal", work)

    def reopen_journal(self) -> None:
        """The run goes on after all: lines count again."""
        self._ended = False

    def _opened_journal(self) -> Journal:
        """The journal, with all lines that came so far; what cannot be opened is so later."""
        if self._journal is None:
            self._journal = Journal(self.directory.journal, guard=self._guard)
        if self._first_lines is not None:
            for record in self._first_lines():
                self._journal.append(record)
            self._first_lines = None
            self._kept = kept_digests(self.directory)
            self._journal.append(FilesKept(epoch=self._epoch, digests=self._kept))
        while self._lines:
            self._journal.append(self._lines.popleft())
        return self._journal

    def _announce(self, terms: Terms) -> None:
        """The journal tells what the terms' file is about to hold; a crash may leave either."""
        name, new = self.directory.terms_file.name, blake3(terms_bytes(terms)).hexdigest()
        journal = self._opened_journal()
        told = (file_digest(self.directory.terms_file), new)
        if self._kept.get(name) != told:
            self._kept[name] = told
            journal.append(FilesKept(epoch=self._epoch, digests=self._kept))
        self._sync_journal()

    def _told_terms(self, terms: Terms) -> None:
        """They are written: from here on the file may hold nothing else, nor be missing."""
        told = (blake3(terms_bytes(terms)).hexdigest(),)
        if self._terms is None and self._kept.get(self.directory.terms_file.name) != told:
            self._kept[self.directory.terms_file.name] = told
            self._opened_journal().append(FilesKept(epoch=self._epoch, digests=self._kept))

    def _tell_files(self) -> None:
        """So that a restart, which looks back to the newest checkpoint, comes upon it."""
        journal = self._opened_journal()
        if self._kept:
            settled = file_digest(self.directory.manifest_file)
            if settled is not None:
                self._kept[self.directory.manifest_file.name] = (settled,)
            journal.append(FilesKept(epoch=self._epoch, digests=self._kept))
        self._sync_journal()

    def _sync_journal(self) -> None:
        self._unsynced = False
        self._opened_journal().sync()

    async def check(self) -> None:
        """See that the directory is still ours.

        Raises:
            StorageFailed: It is not there.
            RunFailed: It has another coordinator now.
        """
        await asyncio.to_thread(self._guard)

    # Threads.

    async def close(self) -> None:
        """Do what was asked for, then close the files."""
        self._write_appended()

        def work() -> None:
            for thread in self._threads.values():
                thread.shutdown()
            for file in (self._log, self._journal, self._captured):
                if file is not None:
                    file.close()

        await asyncio.to_thread(work)

    async def _do(self, thread: str, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads[thread], work)

    def _spawn(self, thread: str, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 -- nobody else would hear of it
                self._loop.call_soon_threadsafe(self._failed, error)

        self._threads[thread].submit(guarded)
