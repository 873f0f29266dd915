"""The index of the gradient log: where each committed step is, and how to read it.

A segment's steps follow each other without a gap, so the index holds only the offset at which each
step ends: eight bytes a step. `log_reader` builds the index once, when a log is opened;
`gradient_log` updates it with every commit. Readers therefore read only the steps that they need,
however long the log is.
"""

from __future__ import annotations

import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from coordinator.disk.durable_file import storage_errors
from coordinator.disk.older_names import OLDER_TERM
from coordinator.run.outputs.restart import CommitRecord
from coordinator.storage.log.log_records import (
    CHUNK_ID,
    Array,
    Head,
    RecordKind,
    SegmentHeader,
    read_chunk_id,
    read_commit,
    read_head,
    read_payload,
    split_chunk,
)
from protocol.base.errors import StorageDamaged
from protocol.base.regular_file import open_regular
from protocol.exact.replica import Replica
from protocol.spec.manifest import Block

SEGMENT_SUFFIX: Final = ".log"

_NAME: Final = re.compile(rf"(?:term|{OLDER_TERM})-(\d{{6,}})-step-(\d{{10,}})\.log")


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A committed step in file `path`: commit, heads of its chunks, and the offset of its end."""

    path: Path
    record: CommitRecord
    chunks: tuple[Head, ...]
    has_averages: bool
    end: int

    @property
    def step(self) -> int:
        """The step's number, from 0."""
        return self.record.commit.step


@dataclass(slots=True)
class SegmentIndex:
    """The committed steps of one file.

    Attributes:
        path: The file.
        header: The first record of the file.
        start: The offset at which the header ends.
        ends: The offset at which each step ends, from step `header.base_step` on.
    """

    path: Path
    header: SegmentHeader
    start: int
    ends: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def next_step(self) -> int:
        """The step after those in this segment."""
        return self.header.base_step + len(self.ends)

    @property
    def end(self) -> int:
        """The offset at which the next step begins."""
        return self.ends[-1] if self.ends else self.start

    @property
    def newest_step_offset(self) -> int:
        """The offset at which the newest step begins."""
        return self.ends[-2] if len(self.ends) > 1 else self.start

    def read(self, fd: int, step: int) -> LoggedStep:
        """Read one step of the segment: heads and the commit, no gradients.

        Raises:
            StorageDamaged: The records are damaged.
            OSError: The file cannot be read.
        """
        number = step - self.header.base_step
        offset, end = self.ends[number - 1] if number else self.start, self.ends[number]
        chunks: list[Head] = []
        while offset < end:
            head = read_head(fd, offset)
            if head is None or head.end > end:
                raise segment_damage(self.path, offset, "a record does not match its checksum")
            if head.kind is RecordKind.COMMIT:
                payload = read_payload(fd, head)
                record = read_commit(payload) if payload is not None else None
                if record is None or record.commit.step != step or head.end != end:
                    raise segment_damage(self.path, offset, f"expected the commit of step {step}")
                has_gradients = self.header.mode == "full"
                return LoggedStep(self.path, record, tuple(chunks), has_gradients, end)
            chunks.append(head)
            offset = head.end
        raise segment_damage(self.path, offset, f"expected the commit of step {step}")


class LogIndex:
    """The committed steps of a log; a segment overrides older ones from its base step on.

    Args:
        segments: In the order of their names.
    """

    def __init__(self, segments: Sequence[SegmentIndex] = ()) -> None:
        self._segments: list[SegmentIndex] = []
        for segment in segments:
            self.add_segment(segment)

    @property
    def last_step(self) -> int | None:
        """The highest known step; None without steps."""
        if not self._segments:
            return None
        newest = self._segments[-1]
        last = max(newest.next_step - 1, *(r.commit.step for r in newest.header.redo), -1)
        return last if last >= 0 else None

    def add_segment(self, segment: SegmentIndex) -> None:
        """Add a newer segment, which overrides older ones from its base step on."""
        base = segment.header.base_step
        while self._segments and self._segments[-1].header.base_step >= base:
            self._segments.pop()
        self._segments.append(segment)

    def add_step(self, end: int) -> None:
        """Add a committed step, which ends at offset `end` of the newest segment."""
        self._segments[-1].ends.append(end)

    def remove_segments(self, paths: Sequence[Path]) -> None:
        """Remove segments from the index."""
        self._segments = [segment for segment in self._segments if segment.path not in paths]

    def step_ranges(self) -> list[range]:
        """Return the steps that have records, segment by segment."""
        return [
            range(segment.header.base_step, min(limit, segment.next_step))
            for segment, limit in self._segments_from(0)
        ]

    @property
    def first_step_with_averages(self) -> int:
        """The step from which all segments keep averages."""
        base = sys.maxsize
        for segment in reversed(self._segments):
            if segment.header.mode != "full":
                break
            base = segment.header.base_step
        return base

    def steps_from(self, step: int) -> Iterator[LoggedStep]:
        """Yield committed steps from `step` on, up to the first gap; read each when it is needed.

        Raises:
            StorageDamaged: A record is damaged.
            StorageFailed: The log cannot be read.
        """
        number = bisect_right(self._segments, step, key=lambda s: s.header.base_step) - 1
        for segment, limit in self._segments_from(max(number, 0)):
            if step < segment.header.base_step:
                return
            yield from self._read_steps(segment, step, min(limit, segment.next_step))
            step = max(step, min(limit, segment.next_step))
            redo = {record.commit.step: record for record in segment.header.redo}
            while step < limit and step in redo:
                yield LoggedStep(segment.path, redo[step], (), False, 0)
                step += 1
            if step < limit:
                return

    def _segments_from(self, number: int) -> Iterator[tuple[SegmentIndex, int]]:
        """Yield the segments from index `number` on, each with the base step of the next."""
        for index in range(number, len(self._segments)):
            newer = self._segments[index + 1 : index + 2]
            yield self._segments[index], newer[0].header.base_step if newer else sys.maxsize

    def _read_steps(self, segment: SegmentIndex, step: int, stop: int) -> Iterator[LoggedStep]:
        if step >= stop:
            return
        with storage_errors("read", segment.path), open_regular(segment.path) as file:
            while step < stop:
                yield segment.read(file.fileno(), step)
                step += 1


def read_averages(logged_step: LoggedStep, blocks: tuple[Block, ...]) -> list[Array] | None:
    """Read the averaged gradients of a step, one flat float32 array per block.

    Returns:
        None if the log has none, or the step was skipped.

    Raises:
        StorageDamaged: A record is damaged or missing.
        StorageFailed: The log cannot be read.
    """
    if logged_step.record.commit.scalars is None or not logged_step.has_averages:
        return None
    averages = [np.empty(block.elements, np.float32) for block in blocks]
    for block, chunk, values in read_chunks(logged_step, blocks):
        averages[block][blocks[block].chunk_slice(chunk)] = values
    return averages


def read_chunks(
    logged_step: LoggedStep, blocks: tuple[Block, ...]
) -> Iterator[tuple[int, int, Array]]:
    """Read the averaged gradients of a step chunk by chunk.

    A block whose logged chunks have another size is yielded in new chunks, once it is complete.

    Yields:
        The index of the block, that of the chunk, and the chunk's values, flat.

    Raises:
        StorageDamaged: A record is damaged; or, after the last chunk, a record is missing.
        StorageFailed: The log cannot be read.
    """
    commit = logged_step.record.commit
    with storage_errors("read", logged_step.path):
        file = open_regular(logged_step.path)
    with file:
        lengths = _chunk_lengths(file.fileno(), logged_step, blocks)
        missing = {
            (number, chunk)
            for number, (block, length) in enumerate(zip(blocks, lengths, strict=True))
            for chunk in range(max(1, -(-block.elements // length)))
        }
        rechunked_blocks: dict[int, Array] = {}
        for head in logged_step.chunks:
            with storage_errors("read", logged_step.path):
                payload = read_payload(file.fileno(), head)
            record = split_chunk(payload) if payload is not None else None
            if record is None:
                raise segment_damage(
                    logged_step.path, head.offset, "a chunk does not match its checksum"
                )
            key, values = record
            if (key.term, key.attempt) != (commit.term, commit.attempt):
                continue
            number, chunk = key.block, key.chunk
            if key.step != commit.step or (number, chunk) not in missing:
                raise segment_damage(
                    logged_step.path, head.offset, "a chunk does not fit the manifest"
                )
            block, length = blocks[number], lengths[number]
            start = chunk * length
            if values.size != min(length, block.elements - start):
                raise segment_damage(
                    logged_step.path, head.offset, "a chunk does not fit the manifest"
                )
            missing.discard((number, chunk))
            if length == block.chunk_elements:
                yield number, chunk, values
                continue
            block_values = rechunked_blocks.setdefault(number, np.empty(block.elements, np.float32))
            block_values[start : start + length] = values
            if all(missing_block != number for missing_block, _ in missing):
                for part in range(block.chunks):
                    yield number, part, block_values[block.chunk_slice(part)]
                del rechunked_blocks[number], block_values
    if missing:
        reason = f"step {commit.step} is committed without {len(missing)} of its chunks"
        raise segment_damage(logged_step.path, None, reason)


def _chunk_lengths(fd: int, logged_step: LoggedStep, blocks: tuple[Block, ...]) -> list[int]:
    """Return the elements per chunk with which each block was logged, from its first chunk."""
    lengths = [block.chunk_elements for block in blocks]
    for head in logged_step.chunks:
        with storage_errors("read", logged_step.path):
            key = read_chunk_id(fd, head)
        if key is None or key.chunk or key.block >= len(blocks):
            continue
        elements = (head.payload_bytes - CHUNK_ID.size) // 4
        if 0 < elements != blocks[key.block].chunk_slice(0).stop:
            lengths[key.block] = elements
    return lengths


def segment_name(term: int, base_step: int) -> str:
    """Return a segment's file name; names sort in the order of the segments."""
    return f"term-{term:06d}-step-{base_step:010d}{SEGMENT_SUFFIX}"


def segment_files(directory: Path) -> list[Path]:
    """Return the segments of a log, in order.

    Raises:
        OSError: The directory cannot be read.
    """
    if not directory.is_dir():
        return []
    names = (path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    return sorted(names, key=_numbers)


def segment_term(path: Path) -> int:
    """Return the term of the coordinator that made a segment, from its name."""
    return _numbers(path)[0]


def segment_base(path: Path) -> int:
    """Return the number of steps before a segment, from its name."""
    return _numbers(path)[1]


def segment_damage(path: Path, offset: int | None, reason: str) -> StorageDamaged:
    """Make the error of a damaged segment."""
    location = "" if offset is None else f"byte {offset}"
    remedy = "restore it from a copy, or roll back to a checkpoint before it (--from-step N)"
    return StorageDamaged(str(path), location, f"{reason}; {remedy}")


def _numbers(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def apply_logged_step(
    replica: Replica, record: CommitRecord, averages: Sequence[Array] | None
) -> None:
    """Apply a logged step to a replica that has applied all earlier steps, or skip it."""
    commit = record.commit
    assert commit.step == replica.step
    if commit.scalars is None:
        replica.skip()
    else:
        assert averages is not None
        replica.apply(averages, commit.scalars)
    assert replica.optimizer_step == record.optimizer_step
