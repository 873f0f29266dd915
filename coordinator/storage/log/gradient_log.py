"""The gradient log: every step's averaged gradients, durable before any worker applies them.

A run's write-ahead log. Chunks are appended as they are broadcast; the commit record that follows
them is the step's only commit point: `commit` returns when the whole step is on disk. A segment (a
file of `log_records`) holds the steps from one checkpoint to the next, so a checkpoint makes whole
files unnecessary. `log_reader` reads the log.

Mode `checkpoint` keeps only commit records, without gradients: a resumed run recomputes the steps
since the last checkpoint, and can compare their digests. Each segment has its own mode: while a
worker joins such a run, the log keeps the averages that the worker will need.

A failed write (disk full, read-only, gone) is a `StorageFailed`. Earlier data is not damaged, and
the call can be repeated: everything written since the last commit is kept in memory (by reference,
so the arrays must not change) and rewritten (see `append_file`).

Use it from one thread at a time; every call may block on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from coordinator.disk.append_file import AppendFile
from coordinator.disk.durable_file import (
    TEMPORARY_SUFFIX,
    make_below,
    storage_errors,
    sync_directory,
    write_all,
)
from coordinator.run.outputs.restart import CommitRecord
from coordinator.storage.log.log_index import (
    LogIndex,
    SegmentIndex,
    segment_base,
    segment_files,
    segment_name,
)
from coordinator.storage.log.log_records import (
    Array,
    ChunkId,
    RecordKind,
    SegmentHeader,
    chunk_payload,
    record_buffers,
)
from protocol.base.errors import StorageFailed
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import LogMode


class GradientLog:
    """Writes the log of one run, beginning with a new segment.

    Attributes:
        next_step: The step that is committed next.
        index: The committed steps and their offsets.

    Args:
        directory: Directory of the segments; created if missing.
        run_id: The run's ID.
        manifest: The run's manifest, which lists the chunks of a step.
        term: Term of the coordinator, above that of all existing segments.
        next_step: Steps committed so far. Later steps in older segments are overridden.
        mode: See the module's docstring.
        redo: Commits of later steps that will be redone; they stay valid until then.
        index: Index of the existing segments, as `scan_log` returns it; this log updates it.
        guard: Called after each sync, before `commit` returns; raises if this coordinator does not
            own the directory any more (`DirectoryLock.check`).

    Raises:
        StorageFailed: The first segment cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        manifest: Manifest,
        *,
        term: int,
        next_step: int,
        mode: LogMode = "full",
        redo: Sequence[CommitRecord] = (),
        index: LogIndex | None = None,
        guard: Callable[[], None] | None = None,
    ) -> None:
        self.next_step = next_step
        self.index = index if index is not None else LogIndex()
        self._directory = directory
        self._term = term
        self._mode = mode
        self._redo = tuple(redo)
        self._guard = guard
        self._run_id = run_id
        self._manifest_digest = manifest.digest()
        self._chunks = {
            (index, chunk)
            for index, block in enumerate(manifest.blocks)
            for chunk in range(block.chunks)
        }
        self._attempt: tuple[int, int] | None = None
        self._pending: dict[ChunkId, Array] = {}
        with storage_errors("make", directory):
            make_below(directory.parent, directory)
        self._file = self._new_segment()
        try:
            self._sync_name()
        except StorageFailed:
            self._file.close()
            raise

    @property
    def segment(self) -> Path:
        """The file that is being written."""
        return self._file.path

    @property
    def mode(self) -> LogMode:
        """The mode of the current segment: whether it keeps averages, or only commits."""
        return self._mode

    def append_chunk(self, key: ChunkId, values: Array) -> None:
        """Append a chunk of averaged gradients of the next step, without a sync.

        Args:
            key: Identifies the chunk. A chunk of a newer attempt replaces all chunks of older
                attempts; a chunk that was already appended changes nothing.
            values: Flat float32, shape (n,), n at most `limits.CHUNK_ELEMENTS`. Must not change
                until the step is committed.

        Raises:
            StorageFailed: The chunk is not in the log; the call can be repeated.
        """
        assert key.step == self.next_step
        assert (key.block, key.chunk) in self._chunks
        if key in self._pending:
            return
        attempt = (key.term, key.attempt)
        if attempt != self._attempt:
            self._pending.clear()
            self._attempt = attempt
        if self._mode == "full":
            self._check_before_rewrite()
            with self._file.use("append to"):
                self._write(RecordKind.CHUNK, chunk_payload(key, values))
        self._pending[key] = values

    def commit(self, record: CommitRecord) -> None:
        """Commit the next step, and return when it is durable.

        Args:
            record: The commit record. After the return, `record.commit` may be sent. Unless the
                step is skipped (no scalars), every chunk of its attempt was appended.

        Raises:
            StorageFailed: The step is not committed; the call can be repeated.
            RunFailed: Another coordinator has taken over; no worker may receive the commit.
        """
        commit = record.commit
        assert commit.step == self.next_step
        if commit.scalars is not None and self._mode == "full":
            assert self._attempt == (commit.term, commit.attempt)
            appended_chunks = {(key.block, key.chunk) for key in self._pending}
            assert appended_chunks == self._chunks, (
                "a step is committed only with all of its gradients"
            )
        self._check_before_rewrite()
        self._sync_name()
        with self._file.use("append to"):
            self._write(RecordKind.COMMIT, [memoryview(record.to_bytes())])
        with self._file.use("sync"):
            self._file.sync()
            if self._guard is not None:
                self._guard()
        self._file.confirm()
        self.index.add_step(self._file.end)
        self._pending.clear()
        self.next_step += 1

    def roll(self, mode: LogMode | None = None) -> Path:
        """Begin a new segment: a checkpoint of the current step is about to be written.

        Args:
            mode: The mode of the new segment; None: the current mode.

        Returns:
            The new segment.

        Raises:
            StorageFailed: The log continues in the old segment or in the new one; the call can be
                repeated.
        """
        mode, self._mode = self._mode, mode or self._mode
        try:
            old_file, self._file = self._file, self._new_segment()
        except StorageFailed:
            self._mode = mode
            raise
        old_file.close()
        # Chunks of the step in progress are rewritten here before the next record.
        self._file.is_broken = bool(self._pending)
        self._sync_name()
        return self._file.path

    def remove_segments(self, step: int) -> list[Path]:
        """Remove the segments that a checkpoint after `step` steps makes unnecessary.

        Returns:
            The removed segments.

        Raises:
            StorageFailed: Some may remain; the call can be repeated.
        """
        removed_files: list[Path] = []
        with storage_errors("remove segments from", self._directory):
            try:
                for path, next_path in pairwise(segment_files(self._directory)):
                    # The next segment overrides this one from its base step on.
                    if segment_base(next_path) > step:
                        break
                    path.unlink()
                    removed_files.append(path)
            finally:
                self.index.remove_segments(removed_files)
            if removed_files:
                sync_directory(self._directory)
        return removed_files

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _new_segment(self) -> AppendFile:
        """Make a segment with a durable header; its name may not be durable yet.

        The name overrides later steps of older segments, so the log continues in the new segment
        from then on.
        """
        header = SegmentHeader(
            run_id=self._run_id,
            manifest_digest=self._manifest_digest,
            term=self._term,
            base_step=self.next_step,
            mode=self._mode,
            redo=tuple(record for record in self._redo if record.commit.step >= self.next_step),
        )
        path = self._directory / segment_name(self._term, self.next_step)
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        buffers = record_buffers(RecordKind.HEADER, [memoryview(header.to_bytes())], 0)
        with storage_errors("make", path):
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                write_all(fd, buffers)
                os.fsync(fd)
                temporary.replace(path)
            except OSError:
                os.close(fd)
                raise
        self._is_name_durable = False
        end = sum(buffer.nbytes for buffer in buffers)
        self.index.add_segment(SegmentIndex(path, header, end))
        return AppendFile(path, fd, end, self._rewrite)

    def _sync_name(self) -> None:
        """Make the segment's name durable: nothing in it counts before that."""
        if not self._is_name_durable:
            with storage_errors("make", self.segment):
                sync_directory(self._directory)
            self._is_name_durable = True

    def _check_before_rewrite(self) -> None:
        """Check ownership before a rewrite: another coordinator may have read a commit in the part
        that is rewritten."""
        if self._file.is_broken and self._guard is not None:
            self._guard()

    def _write(self, kind: RecordKind, payload: list[memoryview]) -> None:
        self._file.write(record_buffers(kind, payload, self._file.end))

    def _rewrite(self) -> None:
        chunks = self._pending if self._mode == "full" else {}
        for key, values in chunks.items():
            self._write(RecordKind.CHUNK, chunk_payload(key, values))
