"""The files of a run in progress, written outside the event loop.

The syncs of these files are independent, so there are four threads: for the gradient log, for which
every commit waits; for the journal, for which the end and checkpoints wait, and commits that change
the admission record; for checkpoints, which take long; and for captures and per-replica states. A
thread does its jobs in order. Errors of jobs that nothing waits for go to the callback `failed`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from blake3 import blake3

from coordinator.capture.captured_files import CapturedFiles
from coordinator.disk.durable_file import MISSING
from coordinator.run.outputs.events import Record
from coordinator.run.outputs.restart import AdmissionRecord, CommitRecord
from coordinator.run.outputs.side_outputs import Bytes, replica_state_sizes
from coordinator.storage.directory.journal import Journal
from coordinator.storage.directory.journal_records import FileDigests
from coordinator.storage.directory.run_directory import RunDirectory, admission_record_bytes
from coordinator.storage.disk_check import check_disk_space
from coordinator.storage.file_digests import Digests, file_digest, present_digests
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.log.log_index import LoggedStep, LogIndex, read_chunks
from coordinator.storage.log.log_records import Array, ChunkId
from coordinator.storage.states.checkpoint import (
    Checkpoint,
    checkpoint_steps,
    find_checkpoint,
    write_checkpoint,
    write_metrics,
)
from coordinator.storage.states.checkpoint_state import CheckpointState, StatePiece
from coordinator.storage.states.replica_states import EMPTY_DIGEST, ReplicaStates
from coordinator.storage.states.retention import best_step, prune_checkpoints
from protocol.base import limits
from protocol.base.errors import SamestepError, StorageFailed
from protocol.exact.replica import Replica
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import InnerCheckpointChunk, InnerStateRequest

T = TypeVar("T")
_STEPS_AT_ONCE: Final = 16
"""Most steps that one job reads from the log."""
_MOST_STATE_PARTS: Final = 3
"""Parameters and two moments: the state is at most as long as the averages of three steps."""
_THREADS: Final = ("log", "journal", "checkpoint", "capture")


class _LogStart(NamedTuple):
    """The arguments of `RunStorage.begin_log`."""

    manifest: Manifest
    next_step: int
    redo: Sequence[CommitRecord]
    log_index: LogIndex | None


def _batch_of(items: Iterator[T], length: Callable[[T], int]) -> Iterator[T]:
    """Yield as many items as fit into a send queue; `length` returns the bytes of one."""
    left_bytes = limits.SEND_AHEAD_BYTES
    while left_bytes > 0 and (item := next(items, None)) is not None:
        left_bytes -= length(item)
        yield item


def max_replay_bytes(manifest: Manifest) -> int:
    """Return the most bytes of averages that are sent to a worker instead of the state."""
    return max(limits.REPLAY_BYTES, _MOST_STATE_PARTS * manifest.elements * 4)


@dataclass(slots=True, eq=False)
class LogHold:
    """A hold on the log from a step on, for a worker that is receiving the run's state.

    Attributes:
        step: The next step that the worker needs; None if not known yet.
        is_dropped: Whether the run outpaced the worker: the log no longer has this step.
    """

    step: int | None = None
    is_dropped: bool = False

    def move_to(self, step: int) -> None:
        """Keep the log from this step on."""
        self.step, self.is_dropped = step, False


class RunStorage:
    """Log, journal and checkpoints of one run.

    Attributes:
        newest_checkpoint: The newest intact checkpoint.
        replica_states: The per-replica states of a run with replicas, once its manifest is known.

    Args:
        directory: Directory of the run, which has begun and is locked by this process.
        run_id: The run's ID.
        spec: The run spec, which sets the log's mode and which checkpoints are kept.
        term: Term of the coordinator.
        guard: Raises if this coordinator does not own the directory any more.
        failed: Called in the event loop with errors of writes that nothing waits for.
        thread: Returns an executor with one thread of the given name.
    """

    def __init__(
        self,
        directory: RunDirectory,
        run_id: str,
        spec: RunSpec,
        *,
        term: int,
        guard: Callable[[], None],
        failed: Callable[[Exception], None],
        thread: Callable[[str], Executor] | None = None,
    ) -> None:
        self.directory = directory
        self._run_id = run_id
        self._spec = spec
        self._term = term
        self._guard = guard
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        thread = thread or partial(ThreadPoolExecutor, 1)
        self.newest_checkpoint: Checkpoint | None = None
        self._threads = {name: thread(name) for name in _THREADS}
        self._start: _LogStart | None = None
        self._log: GradientLog | None = None
        self._captured_files: CapturedFiles | None = None
        self.replica_states: ReplicaStates | None = None
        self._failed_attempts: dict[tuple[int, int], SamestepError] = {}
        self._unwritten: list[tuple[ChunkId, Array]] = []
        self._unwritten_bytes = 0
        self._write_timer: asyncio.TimerHandle | None = None
        self._admission_record: AdmissionRecord | None = None
        self._journal: Journal | None = None
        self._unsynced = False
        self._first_lines: Callable[[], Sequence[Record]] | None = None
        self._lines: deque[Record] = deque()
        self._digests: Digests = {}
        self._has_ended = False
        self._metrics: dict[int, tuple[str, dict[str, float]]] = {}
        self._holds: set[LogHold] = set()
        self._copied_step: int | None = None
        self._inner_checkpoint_bytes = 0
        self._inner_checkpoint_room = asyncio.Event()
        self._inner_checkpoint_room.set()

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
        """Write the manifest and begin the log, in the log's thread.

        Args:
            manifest: The run's manifest.
            next_step: Number of committed steps whose state can be restored.
            redo: The commits of later steps.
            index: Index of the existing log; None for a new run.
            newest: The newest intact checkpoint, if there is one.
            own_digest: Digest of the per-replica state after these steps; None before the first.
        """
        self.newest_checkpoint = newest
        self._start = _LogStart(manifest, next_step, redo, index)
        if self._spec.replicas is not None:
            state_lengths = replica_state_sizes(self._spec, manifest)
            self.replica_states = ReplicaStates(
                self.directory, state_lengths, self._spec.checkpoint.every, self._guard,
                step=next_step, own_digest=own_digest or EMPTY_DIGEST,
            )  # fmt: skip
        if manifest.capture is not None:
            self._captured_files = CapturedFiles(
                self.directory.path, manifest, self._spec, next_step, self._guard
            )
        self._spawn("log", self._open_log)

    async def wait_for_log(self) -> None:
        """Return once the log has begun.

        Raises:
            SamestepError: The log cannot begin; `failed` was called with the same error.
        """
        await self._do("log", self._open_log)

    def append(self, key: ChunkId, values: Array) -> None:
        """Append a chunk of averages, which must not change until the step is committed."""
        self._unwritten.append((key, values))
        self._unwritten_bytes += values.nbytes
        if self._unwritten_bytes >= limits.LOG_BATCH_BYTES:
            self._write_chunks()
        elif self._write_timer is None:
            seconds = limits.LOG_BATCH_MS / 1000
            self._write_timer = self._loop.call_later(seconds, self._write_chunks)

    def _write_chunks(self) -> None:
        chunks, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

        def work() -> None:
            for number, (key, values) in enumerate(chunks):
                try:
                    self._open_log().append_chunk(key, values)
                except SamestepError as error:
                    remaining = {(key.step, key.attempt) for key, _ in chunks[number:]}
                    self._failed_attempts = dict.fromkeys(remaining, error)
                    raise

        if chunks:
            self._spawn("log", work)

    def write_inner_checkpoint(self, message: InnerCheckpointChunk, content: Bytes) -> None:
        """Write a piece of an inner checkpoint; see `inner_checkpoint_room`."""
        states = self.replica_states
        assert states is not None, "a run without replicas refuses it"
        self._count_inner_checkpoint_bytes(content.nbytes)

        def work() -> None:
            try:
                states.write_inner_checkpoint(message, content)
            finally:
                self._loop.call_soon_threadsafe(self._count_inner_checkpoint_bytes, -content.nbytes)

        self._spawn("capture", work)

    def _count_inner_checkpoint_bytes(self, nbytes: int) -> None:
        self._inner_checkpoint_bytes += nbytes
        if self._inner_checkpoint_bytes < limits.INNER_CHECKPOINTS_BYTES:
            self._inner_checkpoint_room.set()
        else:
            self._inner_checkpoint_room.clear()

    @property
    def inner_checkpoint_room(self) -> asyncio.Event:
        """Set while few pieces of inner checkpoints wait for the disk."""
        return self._inner_checkpoint_room

    async def open_inner_state(
        self, message: InnerStateRequest
    ) -> tuple[int, AsyncIterator[bytes]]:
        """See `ReplicaStates.read_inner_state`; reading may raise the same errors."""
        states = self.replica_states
        assert states is not None, "a run without replicas refuses it"
        inner, iterator = await self._do("capture", lambda: states.read_inner_state(message))

        async def pieces() -> AsyncIterator[bytes]:
            while piece := await self._do("capture", lambda: next(iterator, b"")):
                yield piece

        return inner, pieces()

    async def commit(self, record: CommitRecord, side_outputs: Sequence[Bytes] = ()) -> str | None:
        """Return when the step is durable; its side outputs become durable before it.

        Returns:
            The digest of the per-replica state, as the commit names it.

        Raises:
            StorageFailed: The step is not durable.
            RunFailed: Another coordinator owns the directory now.
        """
        self._write_chunks()
        admission, captured_files, states = (
            self._admission_record,
            self._captured_files,
            self.replica_states,
        )
        if captured_files is not None:
            step = record.commit.step
            await self._do("capture", lambda: captured_files.store_step(step, side_outputs))
        if states is not None:
            next_step = record.commit.step + 1
            own_digest = await self._do(
                "capture", lambda: states.save_round(next_step, side_outputs)
            )
            record = record.model_copy(update={"own_digest": own_digest})
        if admission is not None:
            await self._do("journal", lambda: self._announce_admission_record(admission))

        def work() -> None:
            error = self._failed_attempts.get((record.commit.step, record.commit.attempt))
            if error is not None:
                raise error
            if admission is not None:
                self._guard()  # do not overwrite another coordinator's record
                self.directory.write_admission_record(admission)
                if self._admission_record is admission:
                    self._admission_record = None
            self._open_log().commit(record)
            self._failed_attempts = {}

        await self._do("log", work)
        if admission is not None:
            self._spawn("journal", lambda: self._note_admission_record(admission))
        return record.own_digest

    def save_admission_record(self, record: AdmissionRecord) -> None:
        """Have the admission record written before the next commit is durable."""
        self._admission_record = record

    async def read_logged_steps(self, step: int) -> list[LoggedStep]:
        """Return at most 16 committed steps from `step` on, up to the first gap in the log.

        Raises:
            SamestepError: The log cannot be read.
        """

        def work() -> list[LoggedStep]:
            return list(islice(self._open_log().index.steps_from(step), _STEPS_AT_ONCE))

        return await self._do("log", work)

    async def stream_chunks(self, logged_step: LoggedStep) -> AsyncIterator[tuple[int, int, Array]]:
        """Yield block, chunk and values of a logged step's averages; a few are in memory at once.

        Raises:
            SamestepError: The log cannot be read, or was truncated meanwhile.
        """
        iterator = read_chunks(logged_step, self._log_start.manifest.blocks)

        def read_batch() -> list[tuple[int, int, Array]]:
            return list(_batch_of(iterator, lambda chunk: chunk[2].nbytes))

        while batch := await self._loop.run_in_executor(None, read_batch):
            for chunk in batch:
                yield chunk

    async def first_step_with_averages(self) -> int:
        """Return the step from which the log keeps averages.

        Raises:
            SamestepError: The log cannot begin.
        """
        return await self._do("log", lambda: self._open_log().index.first_step_with_averages)

    @asynccontextmanager
    async def hold_averages(self) -> AsyncIterator[LogHold]:
        """Make the log keep averages while a worker receives the run's state.

        Yields:
            The hold, to be moved to later steps as the worker progresses. The log keeps at most
            twice `max_replay_bytes` of averages for a worker: a worker that reads at least as fast
            as averages are made needs no more. A slower worker restarts from a newer checkpoint.

        Raises:
            StorageFailed: A write failed.
        """
        is_sparse, hold = self._spec.log == "checkpoint", LogHold()
        self._holds.add(hold)
        try:
            if is_sparse:  # for every worker: the change may have failed for an earlier one
                await self._do("log", self._keep_averages)
            yield hold
        finally:
            self._holds.discard(hold)
            if is_sparse and not self._holds:
                self._spawn("log", lambda: self._open_log().roll("checkpoint"))

    def _keep_averages(self) -> None:
        log = self._open_log()
        if log.mode != "full":
            log.roll("full")

    @property
    def _log_start(self) -> _LogStart:
        assert self._start is not None, "begin_log comes before any use of the manifest"
        return self._start

    def _open_log(self) -> GradientLog:
        """Return the log; begin it if that has not succeeded yet."""
        if self._log is None:
            manifest, next_step, redo, index = self._log_start
            self._guard()
            if index is None:
                check_disk_space(self.directory.path, self._spec, manifest)
            self.directory.write_manifest(manifest)
            self._log = GradientLog(
                self.directory.log, self._run_id, manifest, term=self._term,
                next_step=next_step, mode=self._spec.log, redo=redo, index=index,
                guard=self._guard,
            )  # fmt: skip
        return self._log

    @property
    def has_capture(self) -> bool:
        """Whether the result is captured logits instead of a model."""
        return self._captured_files is not None

    async def end_capture(self, *, is_complete: bool) -> dict[str, str]:
        """Write the files of logits; see `CapturedFiles.finish`."""
        captured_files = self._captured_files
        assert captured_files is not None
        return await self._do("capture", lambda: captured_files.finish(is_complete=is_complete))

    # Checkpoints.

    async def roll_log(self) -> None:
        """Begin a new segment of the log, after all commits so far.

        Raises:
            StorageFailed: A write failed.
        """
        await self._do("log", lambda: self._open_log().roll())

    async def save_checkpoint(
        self,
        replica: Replica,
        losses: Sequence[float],
        on_state_written: Callable[[], None] = lambda: None,
    ) -> Checkpoint:
        """Write a checkpoint, then remove files that it makes unnecessary.

        Args:
            replica: The state; it must not change before `on_state_written` is called.
            losses: Mean loss of each step so far.
            on_state_written: Called in the event loop, unless a write fails.

        Raises:
            StorageFailed: A write failed.
            RunFailed: Another coordinator owns the directory now.
        """
        manifest, root = self._log_start.manifest, self.directory.checkpoints
        has_checkpoint = self.newest_checkpoint is not None

        def notify() -> None:
            self._loop.call_soon_threadsafe(on_state_written)

        def work() -> tuple[Checkpoint, int | None]:
            self._guard()
            # If the directory were created again, the missing one could not be restored.
            if has_checkpoint and not root.is_dir():
                raise StorageFailed("write to", str(root), MISSING)
            checkpoint = write_checkpoint(
                root, manifest, replica, run_id=self._run_id, term=self._term, losses=losses,
                on_state_written=notify,
            )  # fmt: skip
            self._guard()
            step = checkpoint.info.step  # the replica may be further by now
            if (metrics := self._metrics.get(step)) is not None:
                write_metrics(root, step, *metrics)
            retention, copied_step = self._spec.checkpoint, self._copied_step
            return checkpoint, prune_checkpoints(
                root, self._run_id, manifest, retention, copied_step
            ).intact_step

        # Before the log loses these commits, and a restart stops reading them.
        await self._do("journal", self._note_files)
        checkpoint, intact = await self._do("checkpoint", work)
        self.newest_checkpoint = checkpoint
        self._metrics = {
            step: metrics for step, metrics in self._metrics.items() if step > checkpoint.info.step
        }
        if intact is not None and not self._spec.checkpoint.keep_log:
            await self._do("log", lambda: self._remove_segments(intact))
        return checkpoint

    async def best_checkpoint(self) -> Checkpoint | None:
        """Return the checkpoint with the best metric, if the run spec names a metric.

        Raises:
            StorageDamaged: The checkpoint is damaged.
            StorageFailed: The checkpoint cannot be read.
        """
        manifest, root = self._log_start.manifest, self.directory.checkpoints

        def work() -> Checkpoint | None:
            step = best_step(root, self._spec.checkpoint)
            return None if step is None else find_checkpoint(root, step, self._run_id, manifest)

        return await self._do("checkpoint", work)

    @asynccontextmanager
    async def hold_newest_checkpoint(self) -> AsyncIterator[int]:
        """Sync the journal, then keep the newest checkpoint while it is copied; only one hold at a
        time.

        Yields:
            The step of the checkpoint.

        Raises:
            SamestepError: A read or write failed.
        """

        def hold() -> int:
            self._copied_step = max(checkpoint_steps(self.directory.checkpoints), default=0)
            return self._copied_step

        await self._do("journal", self._sync_journal)
        try:
            yield await self._do("checkpoint", hold)
        finally:
            self._copied_step = None

    async def open_state(self, checkpoint: Checkpoint) -> CheckpointState:
        """Open a checkpoint's state.

        Raises:
            StorageDamaged: The state is damaged.
            StorageFailed: The state cannot be read.
        """
        open_checkpoint = partial(
            CheckpointState, checkpoint, self._log_start.manifest, self._spec.step_optimizer
        )
        return await self._loop.run_in_executor(None, open_checkpoint)

    async def stream_pieces(
        self, checkpoint_state: CheckpointState
    ) -> AsyncIterator[tuple[StatePiece, Array]]:
        """Yield the pieces of an open state, a few in memory at once; raises as
        `CheckpointState.read`."""
        iterator = ((piece, checkpoint_state.read(piece)) for piece in checkpoint_state.pieces())

        def read_batch() -> list[tuple[StatePiece, Array]]:
            return list(_batch_of(iterator, lambda piece: piece[1].nbytes))

        while batch := await self._loop.run_in_executor(None, read_batch):
            for piece in batch:
                yield piece

    def _remove_segments(self, intact: int) -> None:
        self._guard()  # another coordinator may be reading these segments
        manifest = self._log_start.manifest
        oldest = intact - 2 * max_replay_bytes(manifest) // (manifest.elements * 4)
        first = intact
        for hold in tuple(self._holds):
            if hold.step is None:
                continue
            hold.is_dropped |= hold.step < oldest
            if not hold.is_dropped:
                first = min(first, hold.step)
        self._open_log().remove_segments(first)

    def save_metrics(self, step: int, state_digest: str, metrics: dict[str, float]) -> None:
        """Save the metrics of an evaluation with the checkpoint of that state, if there is one."""
        # The checkpoint of the state may be written later, after newer metrics.
        self._metrics[step] = (state_digest, metrics)
        root = self.directory.checkpoints
        self._spawn("checkpoint", lambda: write_metrics(root, step, state_digest, metrics))

    # The journal.

    def append_records(self, records: Sequence[Record]) -> None:
        """Add lines to the journal; they are synced soon, in batches."""
        if not records or self._has_ended:
            return
        self._lines.extend(records)
        self._spawn("journal", self._open_journal)
        if not self._unsynced:
            self._unsynced = True
            self._spawn("journal", self._sync_journal)

    def begin_journal(self, lines: Callable[[], Sequence[Record]]) -> None:
        """Bring the journal up to date before other lines are added.

        Args:
            lines: Returns the lines to add; called once the journal's end is intact.
        """
        self._first_lines = lines
        self._spawn("journal", self._sync_journal)

    async def end_journal(self, record: Record) -> str:
        """Add the last line.

        Returns:
            The journal's head.

        Raises:
            StorageFailed: A write failed.
        """
        self._has_ended = True

        def work() -> str:
            journal = self._open_journal()
            self._digests = present_digests(self.directory)  # no write is in progress any more
            journal.append(FileDigests(term=self._term, digests=self._digests))
            head = journal.append(record)
            journal.sync()
            return head

        return await self._do("journal", work)

    def reopen_journal(self) -> None:
        """Accept lines again: the run is not over after all."""
        self._has_ended = False

    def _open_journal(self) -> Journal:
        """Return the journal, with all lines so far; if opening failed before, open it now."""
        if self._journal is None:
            self._journal = Journal(self.directory.journal, guard=self._guard)
        if self._first_lines is not None:
            for record in self._first_lines():
                self._journal.append(record)
            self._first_lines = None
            self._digests = present_digests(self.directory)
            self._journal.append(FileDigests(term=self._term, digests=self._digests))
        while self._lines:
            self._journal.append(self._lines.popleft())
        return self._journal

    def _announce_admission_record(self, record: AdmissionRecord) -> None:
        """Note the new digest of the admission record's file beside the old: a crash may leave
        either content."""
        name, new = (
            self.directory.admission_file.name,
            blake3(admission_record_bytes(record)).hexdigest(),
        )
        journal = self._open_journal()
        expected = (file_digest(self.directory.admission_file), new)
        if self._digests.get(name) != expected:
            self._digests[name] = expected
            journal.append(FileDigests(term=self._term, digests=self._digests))
        self._sync_journal()

    def _note_admission_record(self, record: AdmissionRecord) -> None:
        """Note the digest of the written admission record: from now on the file must match it."""
        name = self.directory.admission_file.name
        expected = (blake3(admission_record_bytes(record)).hexdigest(),)
        if self._admission_record is None and self._digests.get(name) != expected:
            self._digests[name] = expected
            self._open_journal().append(FileDigests(term=self._term, digests=self._digests))

    def _note_files(self) -> None:
        """Note the files' digests again, so that the lines since the newest checkpoint have
        them."""
        journal = self._open_journal()
        if self._digests:
            manifest_digest = file_digest(self.directory.manifest_file)
            if manifest_digest is not None:
                self._digests[self.directory.manifest_file.name] = (manifest_digest,)
            journal.append(FileDigests(term=self._term, digests=self._digests))
        self._sync_journal()

    def _sync_journal(self) -> None:
        self._unsynced = False
        self._open_journal().sync()

    async def check(self) -> None:
        """Check that this coordinator still owns the directory.

        Raises:
            StorageFailed: The directory is missing.
            RunFailed: Another coordinator owns the directory now.
        """
        await asyncio.to_thread(self._guard)

    # Threads.

    async def close(self) -> None:
        """Finish all jobs, then close the files."""
        self._write_chunks()

        def work() -> None:
            for thread in self._threads.values():
                thread.shutdown()
            for file in (self._log, self._journal, self._captured_files):
                if file is not None:
                    file.close()

        await asyncio.to_thread(work)

    async def _do(self, thread: str, work: Callable[[], T]) -> T:
        return await self._loop.run_in_executor(self._threads[thread], work)

    def _spawn(self, thread: str, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 -- would be lost otherwise
                self._loop.call_soon_threadsafe(self._failed, error)

        self._threads[thread].submit(guarded)
