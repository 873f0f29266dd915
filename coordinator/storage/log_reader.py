"""Reading the gradient log: what is committed, and the averages of each step.

What a crash can leave is told from what it cannot. All records of a step were on disk before
the first of the next step was written. So damage that no record of a later step follows is a torn
tail, of a step whose sync had not ended: it is cut. Damage that one follows is no crash's, and is
refused with file and place.

`scan_log` walks the heads alone (and reads commits), and looks closely at the newest step only:
quick, however long the log is. Averages are checked when they are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from coordinator.disk.durable_file import remove_temporaries, storing
from coordinator.run.commit_record import CommitRecord
from coordinator.storage.gradient_log import segment_files
from coordinator.storage.log_records import (
    Array,
    Head,
    RecordKind,
    SegmentHeader,
    read_commit,
    read_head,
    read_header,
    read_payload,
    split_chunk,
    steps_after,
)
from protocol.base.errors import Mismatch, StorageDamaged
from protocol.spec.manifest import Block, Manifest


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


@dataclass(frozen=True, slots=True)
class Cut:
    """A torn tail: what lies after `offset` is no part of the log."""

    path: Path
    offset: int
    dropped_bytes: int
    reason: str

    def __str__(self) -> str:
        return (
            f"{self.path.name}: {self.dropped_bytes} bytes cut at byte {self.offset}: {self.reason}"
        )


@dataclass(frozen=True, slots=True)
class LogScan:
    """What a log holds: committed steps by number, and the torn tails that were found."""

    steps: dict[int, LoggedStep]
    cuts: tuple[Cut, ...]

    def following(self, step: int) -> list[LoggedStep]:
        """The unbroken row of committed steps from this one on."""
        row: list[LoggedStep] = []
        while step in self.steps:
            row.append(self.steps[step])
            step += 1
        return row


@dataclass(slots=True)
class _Segment:
    """What one file holds."""

    path: Path
    header: SegmentHeader
    steps: list[LoggedStep] = field(default_factory=list)
    end: int = 0
    size: int = 0
    torn: str = ""


def scan_log(
    directory: Path,
    run_id: str,
    manifest: Manifest,
    *,
    thorough: bool = False,
    repair: bool = False,
) -> LogScan:
    """See what a log holds.

    Args:
        directory: Where its segments are; there may be none.
        run_id: The run's.
        manifest: The run's; also settles where averages belong.
        thorough: Read and check every record, not only the newest step's.
        repair: Cut torn tails off and remove half made files. Only who writes the log may.

    Raises:
        StorageDamaged: A file and the place in it where committed steps are damaged.
        StorageFailed: It cannot be read, or not be repaired.
        Mismatch: It is of another run or manifest.
    """
    if repair:
        remove_temporaries(directory)
    with storing("read", directory):
        paths = segment_files(directory)
    steps: dict[int, LoggedStep] = {}
    cuts: list[Cut] = []
    following: _Segment | None = None
    segments: list[_Segment] = []
    for path in reversed(paths):
        with storing("read", path):
            segment = _scan_segment(path, manifest, following, thorough=thorough)
        _check_owner(segment, run_id, manifest)
        segments.append(segment)
        following = segment
    for segment in reversed(segments):
        # A segment replaces what was there from its base on.
        for step in [step for step in steps if step >= segment.header.base_step]:
            del steps[step]
        for record in segment.header.redo:
            steps[record.commit.step] = LoggedStep(segment.path, record, (), False, 0)
        steps.update({logged.step: logged for logged in segment.steps})
        if segment.torn:
            dropped = segment.size - segment.end
            cuts.append(Cut(segment.path, segment.end, dropped, segment.torn))
    if repair:
        for cut in cuts:
            _cut(cut)
        for path in paths:
            _sync(path)
    return LogScan(steps, tuple(cuts))


def read_averages(logged: LoggedStep, blocks: tuple[Block, ...]) -> list[Array] | None:
    """The averaged gradients of a step, one flat float32 array per block.

    Returns:
        None if the log keeps none, or the step was skipped.

    Raises:
        StorageDamaged: A record is not what was written, or one is missing.
        StorageFailed: It cannot be read.
    """
    commit = logged.record.commit
    if commit.scalars is None or not logged.has_averages:
        return None
    averages = [np.empty(block.elements, np.float32) for block in blocks]
    missing = {(b, c) for b, block in enumerate(blocks) for c in range(block.chunks)}
    with storing("read", logged.path), logged.path.open("rb") as file:
        for head in logged.chunks:
            payload = read_payload(file.fileno(), head)
            chunk = split_chunk(payload) if payload is not None else None
            if chunk is None:
                raise _damaged(logged.path, head.offset, "a chunk is not what was written")
            place, values = chunk
            if (place.epoch, place.attempt) != (commit.epoch, commit.attempt):
                continue
            known = place.step == commit.step and (place.block, place.chunk) in missing
            part = blocks[place.block].chunk_slice(place.chunk) if known else slice(0)
            if not known or part.stop - part.start != values.size:
                raise _damaged(logged.path, head.offset, "a chunk that does not fit the manifest")
            missing.discard((place.block, place.chunk))
            averages[place.block][part] = values
    if missing:
        reason = f"step {commit.step} is committed without {len(missing)} of its chunks"
        raise StorageDamaged(str(logged.path), "", reason)
    return averages


def committed_steps(
    scan: LogScan, blocks: tuple[Block, ...], step: int
) -> Iterator[tuple[CommitRecord, list[Array] | None]]:
    """Committed steps from this one on, in order, with their averages.

    Yields:
        The commit, and its averages as `read_averages` gives them.

    Raises:
        StorageDamaged: As `read_averages`.
    """
    for logged in scan.following(step):
        yield logged.record, read_averages(logged, blocks)


def _scan_segment(
    path: Path, manifest: Manifest, following: _Segment | None, *, thorough: bool
) -> _Segment:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        segment = _walk(fd, path, thorough=thorough)
        damage = segment.end
        if not (segment.torn or thorough or following):
            damage = _damage_in_newest(fd, segment)
        if damage < segment.size:
            _judge(fd, segment, damage, following)
    finally:
        os.close(fd)
    for logged in segment.steps if thorough else ():
        read_averages(logged, manifest.blocks)
    return segment


def _walk(fd: int, path: Path, *, thorough: bool) -> _Segment:
    """Go from record to record; stop at the first that is not whole."""
    size = os.fstat(fd).st_size
    head = read_head(fd, 0)
    payload = read_payload(fd, head) if head is not None else None
    header = read_header(payload) if payload is not None else None
    if head is None or header is None:
        # The header was synced before the file had its name.
        raise _damaged(path, 0, "expected the header of a log segment")
    segment = _Segment(path, header, end=head.end, size=size)
    chunks: list[Head] = []
    while segment.end < size:
        head = read_head(fd, segment.end)
        if head is None or head.end > size or head.kind is RecordKind.HEADER:
            segment.torn = "the last record is not whole"
            break
        if head.kind is RecordKind.CHUNK:
            if thorough and read_payload(fd, head) is None:
                segment.torn = "a chunk is not what was written"
                break
            chunks.append(head)
        else:
            payload = read_payload(fd, head)
            record = read_commit(payload) if payload is not None else None
            if record is None:
                segment.torn = "a commit is not what was written"
                break
            expected = header.base_step + len(segment.steps)
            if record.commit.step != expected:
                reason = f"expected the commit of step {expected}, got {record.commit.step}"
                raise _damaged(path, head.offset, reason)
            full = header.mode == "full"
            segment.steps.append(LoggedStep(path, record, tuple(chunks), full, head.end))
            chunks = []
        segment.end = head.end
    return segment


def _damage_in_newest(fd: int, segment: _Segment) -> int:
    """Where the newest step's averages are damaged; the file's end if they are not."""
    if segment.steps:
        for head in segment.steps[-1].chunks:
            if read_payload(fd, head) is None:
                return head.offset
    return segment.size


def _judge(fd: int, segment: _Segment, damage: int, following: _Segment | None) -> None:
    """Cut the segment at the damage if a crash explains it.

    Raises:
        StorageDamaged: Nothing explains it.
    """
    kept = [logged for logged in segment.steps if logged.end <= damage]
    step = segment.header.base_step + len(kept)
    if following is not None and following.header.base_step <= step:
        torn = "left by a coordinator that was replaced"
    elif following is None and all(s <= step for s in steps_after(fd, damage, segment.size)):
        torn = segment.torn or f"step {step} was not wholly synced"
    else:
        raise _damaged(
            segment.path, damage, "a record is not what was written, and later ones follow"
        )
    segment.steps, segment.end, segment.torn = kept, damage, torn


def _check_owner(segment: _Segment, run_id: str, manifest: Manifest) -> None:
    header = segment.header
    if header.run_id != run_id:
        raise Mismatch(f"{segment.path.name} is of run {header.run_id!r}, expected {run_id!r}")
    if header.manifest_digest != manifest.digest():
        raise Mismatch(f"{segment.path.name} is of another manifest; start a new run")


def _cut(cut: Cut) -> None:
    with storing("cut the torn tail of", cut.path):
        fd = os.open(cut.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, cut.offset)
            os.fsync(fd)
        finally:
            os.close(fd)


def _sync(path: Path) -> None:
    """What a killed coordinator wrote can be read, but may not be durable yet."""
    with storing("sync", path):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _damaged(path: Path, offset: int, reason: str) -> StorageDamaged:
    return StorageDamaged(str(path), f"byte {offset}", reason)
