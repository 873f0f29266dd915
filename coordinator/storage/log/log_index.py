"""Where in the gradient log each committed step lies, and reading it there.

A segment's steps follow each other without a gap, so where each ends is all that is kept: eight
bytes a step. `log_reader` builds the index once, when a log is opened, and `gradient_log` keeps it
up while it writes: what is read of a log, however long, is what was asked for.
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

from coordinator.disk.durable_file import storing
from coordinator.run.outputs.restart import CommitRecord
from coordinator.storage.log.log_records import (
    Array,
    Head,
    RecordKind,
    SegmentHeader,
    read_commit,
    read_head,
    read_payload,
    split_chunk,
)
from protocol.base.errors import StorageDamaged
from protocol.base.regular_file import open_regular
from protocol.spec.manifest import Block

SEGMENT_SUFFIX: Final = ".log"

_NAME: Final = re.compile(r"epoch-(\d{6,})-step-(\d{10,})\.log")


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A committed step: its commit, where in `path` its chunks may be, and where it ends."""

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
        header: Its first record.
        start: Where that ends.
        ends: Where each step ends, from step `header.base_step` on.
    """

    path: Path
    header: SegmentHeader
    start: int
    ends: array[int] = field(default_factory=lambda: array("Q"))

    @property
    def next_step(self) -> int:
        """The step after those that are here."""
        return self.header.base_step + len(self.ends)

    @property
    def end(self) -> int:
        """Where the next step begins."""
        return self.ends[-1] if self.ends else self.start

    @property
    def newest_begins(self) -> int:
        """Where the newest step begins."""
        return self.ends[-2] if len(self.ends) > 1 else self.start

    def read(self, fd: int, step: int) -> LoggedStep:
        """Read one of its steps: heads and the commit, no gradients.

        Raises:
            StorageDamaged: The records there are not what was written.
            OSError: The file cannot be read.
        """
        number = step - self.header.base_step
        at, end = self.ends[number - 1] if number else self.start, self.ends[number]
        chunks: list[Head] = []
        while at < end:
            head = read_head(fd, at)
            if head is None or head.end > end:
                raise damaged(self.path, at, "a record is not what was written")
            if head.kind is RecordKind.COMMIT:
                payload = read_payload(fd, head)
                record = read_commit(payload) if payload is not None else None
                if record is None or record.commit.step != step or head.end != end:
                    raise damaged(self.path, at, f"expected the commit of step {step}")
                full = self.header.mode == "full"
                return LoggedStep(self.path, record, tuple(chunks), full, end)
            chunks.append(head)
            at = head.end
        raise damaged(self.path, at, f"expected the commit of step {step}")


class LogIndex:
    """The committed steps of a log; a segment replaces what older ones hold from its base on.

    Args:
        segments: In the order of their names.
    """

    def __init__(self, segments: Sequence[SegmentIndex] = ()) -> None:
        self._segments: list[SegmentIndex] = []
        for segment in segments:
            self.begin(segment)

    @property
    def last(self) -> int | None:
        """The greatest step that is known; None if there is none."""
        if not self._segments:
            return None
        newest = self._segments[-1]
        last = max(newest.next_step - 1, *(r.commit.step for r in newest.header.redo), -1)
        return last if last >= 0 else None

    def begin(self, segment: SegmentIndex) -> None:
        """A newer segment: what older ones hold from its base on is void."""
        base = segment.header.base_step
        while self._segments and self._segments[-1].header.base_step >= base:
            self._segments.pop()
        self._segments.append(segment)

    def committed(self, end: int) -> None:
        """One more step is in the newest segment, up to this byte."""
        self._segments[-1].ends.append(end)

    def forget(self, paths: Sequence[Path]) -> None:
        """These segments are removed."""
        self._segments = [each for each in self._segments if each.path not in paths]

    def ranges(self) -> list[range]:
        """The steps whose records are there, segment by segment."""
        return [
            range(segment.header.base_step, min(limit, segment.next_step))
            for segment, limit in self._from(0)
        ]

    @property
    def averages_from(self) -> int:
        """The first step from which on all segments keep averages."""
        base = sys.maxsize
        for segment in reversed(self._segments):
            if segment.header.mode != "full":
                break
            base = segment.header.base_step
        return base

    def following(self, step: int) -> Iterator[LoggedStep]:
        """The unbroken row of committed steps from this one on, read as they are asked for.

        Raises:
            StorageDamaged: A record is not what was written.
            StorageFailed: It cannot be read.
        """
        at = bisect_right(self._segments, step, key=lambda each: each.header.base_step) - 1
        for segment, limit in self._from(max(at, 0)):
            if step < segment.header.base_step:
                return
            yield from self._of_segment(segment, step, min(limit, segment.next_step))
            step = max(step, min(limit, segment.next_step))
            redo = {record.commit.step: record for record in segment.header.redo}
            while step < limit and step in redo:
                yield LoggedStep(segment.path, redo[step], (), False, 0)
                step += 1
            if step < limit:
                return

    def _from(self, at: int) -> Iterator[tuple[SegmentIndex, int]]:
        """Segments from this one on, each with the base of the one that follows it."""
        for index in range(at, len(self._segments)):
            newer = self._segments[index + 1 : index + 2]
            yield self._segments[index], newer[0].header.base_step if newer else sys.maxsize

    def _of_segment(self, segment: SegmentIndex, step: int, until: int) -> Iterator[LoggedStep]:
        if step >= until:
            return
        with storing("read", segment.path), open_regular(segment.path) as file:
            while step < until:
                yield segment.read(file.fileno(), step)
                step += 1


def read_averages(logged: LoggedStep, blocks: tuple[Block, ...]) -> list[Array] | None:
    """The averaged gradients of a step, one flat float32 array per block.

    Returns:
        None if the log keeps none, or the step was skipped.

    Raises:
        StorageDamaged: A record is not what was written, or one is missing.
        StorageFailed: It cannot be read.
    """
    if logged.record.commit.scalars is None or not logged.has_averages:
        return None
    averages = [np.empty(block.elements, np.float32) for block in blocks]
    for block, chunk, values in read_chunks(logged, blocks):
        averages[block][blocks[block].chunk_slice(chunk)] = values
    return averages


def read_chunks(logged: LoggedStep, blocks: tuple[Block, ...]) -> Iterator[tuple[int, int, Array]]:
    """The averaged gradients of a step of which the log has them, chunk by chunk.

    Yields:
        Block, chunk, and its values, flat.

    Raises:
        StorageDamaged: A record is not what was written, or at the end: one is missing.
        StorageFailed: It cannot be read.
    """
    commit = logged.record.commit
    missing = {(b, c) for b, block in enumerate(blocks) for c in range(block.chunks)}
    with storing("read", logged.path):
        file = open_regular(logged.path)
    with file:
        for head in logged.chunks:
            with storing("read", logged.path):
                payload = read_payload(file.fileno(), head)
            chunk = split_chunk(payload) if payload is not None else None
            if chunk is None:
                raise damaged(logged.path, head.offset, "a chunk is not what was written")
            place, values = chunk
            if (place.epoch, place.attempt) != (commit.epoch, commit.attempt):
                continue
            known = place.step == commit.step and (place.block, place.chunk) in missing
            part = blocks[place.block].chunk_slice(place.chunk) if known else slice(0)
            if not known or part.stop - part.start != values.size:
                raise damaged(logged.path, head.offset, "a chunk that does not fit the manifest")
            missing.discard((place.block, place.chunk))
            yield place.block, place.chunk, values
    if missing:
        reason = f"step {commit.step} is committed without {len(missing)} of its chunks"
        raise damaged(logged.path, None, reason)


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
    return sorted(names, key=_numbers)


def segment_epoch(path: Path) -> int:
    """The epoch of the coordinator that made it, in a segment's name."""
    return _numbers(path)[0]


def segment_base(path: Path) -> int:
    """The number of steps before it, in a segment's name."""
    return _numbers(path)[1]


def damaged(path: Path, offset: int | None, reason: str) -> StorageDamaged:
    """A segment does not hold what was written to it."""
    place = "" if offset is None else f"byte {offset}"
    remedy = "bring it back from a copy, or go back to a checkpoint before it (--from-step N)"
    return StorageDamaged(str(path), place, f"{reason}; {remedy}")


def _numbers(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])
