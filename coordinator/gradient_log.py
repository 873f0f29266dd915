"""The gradient log: every step's averaged gradients, durable before anyone is told to take it.

A run's write-ahead log. Chunks are appended as they are broadcast; a step's commit record after
them is the only commit point: `commit` returns when all of it is on disk. A segment (a file of
`log_records`) holds the steps from one checkpoint to the next, so that what a checkpoint has made
needless goes with whole files. `log_reader` reads it.

With mode `checkpoint` only commit records are kept, without gradients: a run that resumes does
the steps since the last checkpoint again, and can compare their digests.

A disk that refuses (full, read-only, gone) is a `StorageFailed`. Nothing before is damaged, and
the call can be made again: what has been written since the last commit is kept in memory (by
reference, the arrays must not change) and written anew, from the last synced place on. After a
failed sync nothing less will do: the system may have dropped what it could not write.

One thread at a time; every call may block on the disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal, NamedTuple

from coordinator.durable_file import (
    TEMPORARY_SUFFIX,
    is_same_file,
    storing,
    sync_directory,
    write_all,
)
from coordinator.log_records import (
    Array,
    ChunkPlace,
    CommitRecord,
    RecordKind,
    SegmentHeader,
    chunk_payload,
    record_buffers,
)
from protocol.errors import StorageFailed
from protocol.manifest import Manifest
from protocol.messages import Commit

LogMode = Literal["full", "checkpoint"]
SEGMENT_SUFFIX: Final = ".log"

_NAME: Final = re.compile(r"epoch-(\d{6,})-step-(\d{10,})\.log")


class _Pending(NamedTuple):
    place: ChunkPlace
    values: Array


class GradientLog:
    """The log of one run, as its coordinator writes it; begins with a new segment.

    Attributes:
        next_step: The step that is committed next.

    Args:
        directory: Where segments are; made if it is not there.
        run_id: The run's.
        manifest: Says which chunks a step has.
        epoch: The coordinator's, above that of all segments there.
        next_step: Steps committed so far. What older segments hold from there on is replaced.
        mode: See the module's text.
        guard: Called after each sync, before `commit` returns; raises if the directory is not
            this coordinator's any more (`Claim.check`).

    Raises:
        StorageFailed: The first segment cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        run_id: str,
        manifest: Manifest,
        *,
        epoch: int,
        next_step: int,
        mode: LogMode = "full",
        guard: Callable[[], None] | None = None,
    ) -> None:
        self.next_step = next_step
        self._directory = directory
        self._epoch = epoch
        self._mode = mode
        self._guard = guard
        self._run_id = run_id
        self._manifest_digest = manifest.digest()
        self._chunks = {
            (index, chunk)
            for index, block in enumerate(manifest.blocks)
            for chunk in range(block.chunks)
        }
        self._pending: list[_Pending] = []
        self._path, self._fd = directory, -1
        self._synced = 0
        self._end = 0
        self._broken = False
        with storing("make", directory):
            directory.mkdir(parents=True, exist_ok=True)
            sync_directory(directory.parent)
        self._begin_segment()

    @property
    def segment(self) -> Path:
        """The file that is written to."""
        return self._path

    @property
    def segment_bytes(self) -> int:
        """How long that file is."""
        return self._end

    def append_chunk(self, place: ChunkPlace, values: Array) -> None:
        """Append a chunk of averaged gradients, of the next step; not synced yet.

        Args:
            place: Which chunk. One of a newer attempt makes those of older ones void.
            values: Flat float32, shape (n,), n at most `limits.CHUNK_ELEMENTS`. Must not change
                until the step is committed.

        Raises:
            StorageFailed: The chunk is not in the log; the call can be made again.
        """
        assert place.step == self.next_step
        assert (place.block, place.chunk) in self._chunks
        if self._mode == "checkpoint":
            return
        attempt = (place.epoch, place.attempt)
        self._pending = [p for p in self._pending if (p.place.epoch, p.place.attempt) == attempt]
        with self._writing("append to"):
            self._write(RecordKind.CHUNK, chunk_payload(place, values))
        self._pending.append(_Pending(place, values))

    def flush(self) -> None:
        """Sync what was appended, so that `commit` has less left to do.

        Raises:
            StorageFailed: As with `append_chunk`.
        """
        with self._writing("sync"):
            os.fdatasync(self._fd)

    def commit(self, commit: Commit, optimizer_step: int, state_before: str | None = None) -> None:
        """Commit the next step, and return when it is durable.

        Args:
            commit: The message that may go out then. Unless it skips the step (no scalars), every
                chunk of its attempt was appended.
            optimizer_step: Updates after this step.
            state_before: Digest of the state that the step starts from, if it is known.

        Raises:
            StorageFailed: The step is not committed; the call can be made again.
            RunFailed: Another coordinator has taken over; this one may tell nobody.
        """
        assert commit.step == self.next_step
        if commit.scalars is not None and self._mode == "full":
            attempt = (commit.epoch, commit.attempt)
            mine = {
                (p.place.block, p.place.chunk)
                for p in self._pending
                if (p.place.epoch, p.place.attempt) == attempt
            }
            assert mine == self._chunks, "a step is committed only with all of its gradients"
        record = CommitRecord(
            commit=commit, optimizer_step=optimizer_step, state_before=state_before
        )
        with self._writing("append to"):
            self._write(RecordKind.COMMIT, [memoryview(record.to_bytes())])
        with self._writing("sync"):
            os.fdatasync(self._fd)
            self._check_place()
            if self._guard is not None:
                self._guard()
        self._synced = self._end
        self._pending.clear()
        self.next_step += 1

    def roll(self) -> Path:
        """Begin a new segment: a checkpoint of the present step is about to be made.

        Returns:
            The new segment.

        Raises:
            StorageFailed: The log goes on in the old segment.
        """
        old = self._fd
        self._begin_segment()
        os.close(old)
        # Chunks of the step in progress go along; they are written with the next record.
        self._broken = bool(self._pending)
        return self._path

    def cut(self, step: int) -> list[Path]:
        """Remove the segments that a checkpoint after `step` steps has made needless.

        Returns:
            What was removed.

        Raises:
            StorageFailed: Some may be left; the call can be made again.
        """
        removed: list[Path] = []
        with storing("remove segments from", self._directory):
            segments = segment_files(self._directory)
            for path, following in pairwise(segments):
                # What a segment holds from the next one's base on is void.
                if segment_base(following) > step:
                    break
                path.unlink()
                removed.append(path)
            if removed:
                sync_directory(self._directory)
        return removed

    def close(self) -> None:
        """Close the file; the log is not used after that."""
        os.close(self._fd)

    def _begin_segment(self) -> None:
        """Make a segment with its header, durable, under its name."""
        header = SegmentHeader(
            run_id=self._run_id,
            manifest_digest=self._manifest_digest,
            epoch=self._epoch,
            base_step=self.next_step,
            mode=self._mode,
        )
        path = self._directory / segment_name(self._epoch, self.next_step)
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        buffers = record_buffers(RecordKind.HEADER, [memoryview(header.to_bytes())], 0)
        with storing("make", path):
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                write_all(fd, buffers)
                os.fsync(fd)
                temporary.replace(path)
                sync_directory(self._directory)
            except OSError:
                os.close(fd)
                raise
        self._path, self._fd = path, fd
        self._synced = self._end = sum(buffer.nbytes for buffer in buffers)

    def _write(self, kind: RecordKind, payload: list[memoryview]) -> None:
        buffers = record_buffers(kind, payload, self._end)
        write_all(self._fd, buffers)
        self._end += sum(buffer.nbytes for buffer in buffers)

    @contextmanager
    def _writing(self, doing: str) -> Iterator[None]:
        """Mend the log first if the last write failed; remember it if this one does."""
        try:
            with storing(doing, self._path):
                if self._broken:
                    self._mend()
                yield
        except BaseException:
            self._broken = True
            raise

    def _mend(self) -> None:
        """After a failure: open the segment anew, cut it to what is synced, write the rest again.

        Raises:
            OSError: It is not mended yet.
        """
        if not is_same_file(self._fd, self._path):
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            os.close(self._fd)
            self._fd = fd
        size = os.fstat(self._fd).st_size
        if size < self._synced:
            raise StorageFailed(
                "go on with", str(self._path),
                f"it has {size} of the {self._synced} bytes that were synced; resume the run",
            )  # fmt: skip
        os.ftruncate(self._fd, self._synced)
        os.lseek(self._fd, self._synced, os.SEEK_SET)
        self._end = self._synced
        for pending in self._pending:
            self._write(RecordKind.CHUNK, chunk_payload(pending.place, pending.values))
        self._broken = False

    def _check_place(self) -> None:
        if not is_same_file(self._fd, self._path):
            raise FileNotFoundError(2, "the file was removed or its directory moved")


def segment_name(epoch: int, base_step: int) -> str:
    """A segment's file name; names sort as segments follow each other."""
    return f"epoch-{epoch:06d}-step-{base_step:010d}{SEGMENT_SUFFIX}"


def segment_files(directory: Path) -> list[Path]:
    """The segments of a log, in order; empty if there is none.

    Raises:
        OSError: The directory cannot be read.
    """
    if not directory.is_dir():
        return []
    names = (path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    return sorted(names, key=lambda path: tuple(map(int, _numbers(path))))


def segment_epoch(path: Path) -> int:
    """The epoch in a segment's name."""
    return int(_numbers(path)[0])


def segment_base(path: Path) -> int:
    """The number of steps before it, in a segment's name."""
    return int(_numbers(path)[1])


def _numbers(path: Path) -> tuple[str, ...]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return match.groups()
