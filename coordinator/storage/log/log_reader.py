"""Open a gradient log: find the committed steps, and cut off the torn tail that a crash left.

All records of a step were on disk before the first of the next step was written. So if no record of
a later step follows the damage, it is the torn tail of a step that was not yet synced, and is cut
off. A crash cannot cause damage that later records follow: it is refused with file and offset.

Readable data may not be durable: the sync of a killed coordinator may have been unfinished, or may
have failed. This affects only the newest step of the newest segment: that step is rewritten in
place before it counts (`durable_file.write_again`).

`scan_log` reads only the heads of records, compares commits with their hashes, and reads averages
of the newest step only. Other averages are checked when they are read (`log_index`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.disk.durable_file import (
    open_to_read,
    remove_temporaries,
    storage_errors,
    write_again,
)
from coordinator.storage.log.log_index import LogIndex, SegmentIndex, segment_damage, segment_files
from coordinator.storage.log.log_records import (
    RecordKind,
    read_head,
    read_header,
    read_payload,
    step_of_commit,
    steps_after,
)
from protocol.base.errors import Mismatch
from protocol.spec.manifest import Manifest


@dataclass(frozen=True, slots=True)
class TornTail:
    """The torn tail of a segment: the bytes from `offset` on are not part of the log."""

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
    """The content of a log: the index of its committed steps, and its torn tails."""

    index: LogIndex
    torn_tails: tuple[TornTail, ...]


@dataclass(slots=True)
class _Segment(SegmentIndex):
    """The committed steps of one file, and its torn tail.

    Attributes:
        intact_bytes: Length of the intact part.
        size: Length of the file.
        torn_reason: Why the bytes after the intact part do not count; empty if there are none.
    """

    intact_bytes: int = 0
    size: int = 0
    torn_reason: str = ""


def scan_log(directory: Path, run_id: str, manifest: Manifest, *, repair: bool = False) -> LogScan:
    """Scan a log.

    Args:
        directory: The directory of the log's segments; it may be empty.
        run_id: The run's ID.
        manifest: The run's manifest.
        repair: Cut off torn tails, remove temporary files, and make the remaining data durable.
            Only the writer of the log may do this.

    Raises:
        StorageDamaged: Committed steps are damaged; names file and offset.
        StorageFailed: The log cannot be read or repaired.
        Mismatch: The log belongs to another run or manifest.
    """
    if repair:
        remove_temporaries(directory)
    with storage_errors("read", directory):
        paths = segment_files(directory)
    segments: list[_Segment] = []
    for path in reversed(paths):
        next_segment = segments[-1] if segments else None
        with storage_errors("read", path):
            segment = _scan_segment(path, next_segment)
        _check_run_and_manifest(segment, run_id, manifest)
        segments.append(segment)
    segments.reverse()
    torn_tails = [
        TornTail(s.path, s.intact_bytes, s.size - s.intact_bytes, s.torn_reason)
        for s in segments
        if s.torn_reason
    ]
    if repair:
        for tail in torn_tails:
            _truncate_segment(tail)
        for segment in segments:
            _sync(segment, is_newest=segment is segments[-1])
    return LogScan(LogIndex(segments), tuple(torn_tails))


def find_truncations(
    paths: Sequence[Path], step: int, run_id: str, manifest: Manifest
) -> list[tuple[Path, int]]:
    """Find where to cut each segment so that `step` and later steps are gone; change nothing.

    Args:
        paths: The segments that begin before `step`, in order.
        step: The first step to cut.
        run_id: The run's ID.
        manifest: The run's manifest.

    Raises:
        StorageDamaged: The remaining part is damaged.
        StorageFailed: The log cannot be read.
        Mismatch: The log belongs to another run or manifest.
    """
    cuts: list[tuple[Path, int]] = []
    next_segment: _Segment | None = None
    for path in reversed(paths):
        with storage_errors("read", path):
            segment = _walk_file(path)
            steps_before = step - segment.header.base_step
            if len(segment.ends) >= steps_before and segment.size > segment.ends[steps_before - 1]:
                del segment.ends[steps_before:]
                cuts.append((path, segment.end))
            else:
                segment = _scan_segment(path, next_segment)
        _check_run_and_manifest(segment, run_id, manifest)
        next_segment = segment
    return cuts


def _walk_file(path: Path) -> _Segment:
    fd = open_to_read(path)
    try:
        return _walk_records(fd, path)
    finally:
        os.close(fd)


def _scan_segment(path: Path, next_segment: _Segment | None) -> _Segment:
    fd = open_to_read(path)
    try:
        segment = _walk_records(fd, path)
        damage_offset = segment.intact_bytes
        if not (segment.torn_reason or next_segment):
            damage_offset = _damage_in_newest_step(fd, segment)
        if damage_offset < segment.size:
            _mark_torn_tail(fd, segment, damage_offset, next_segment)
    finally:
        os.close(fd)
    return segment


def _walk_records(fd: int, path: Path) -> _Segment:
    """Go from record to record; stop at the first damaged one."""
    size = os.fstat(fd).st_size
    head = read_head(fd, 0)
    payload = read_payload(fd, head) if head is not None else None
    header = read_header(payload) if payload is not None else None
    if head is None or header is None:
        # The header was synced before the file had its name.
        raise segment_damage(path, 0, "expected the header of a log segment")
    segment = _Segment(path, header, head.end, intact_bytes=head.end, size=size)
    while segment.intact_bytes < size:
        head = read_head(fd, segment.intact_bytes)
        if head is None or head.end > size or head.kind is RecordKind.HEADER:
            segment.torn_reason = "the last record is incomplete"
            break
        if head.kind is RecordKind.COMMIT:
            payload = read_payload(fd, head)
            step = step_of_commit(payload) if payload is not None else None
            if step is None:
                segment.torn_reason = "a commit does not match its checksum"
                break
            if step != segment.next_step:
                reason = f"expected the commit of step {segment.next_step}, got {step}"
                raise segment_damage(path, head.offset, reason)
            segment.ends.append(head.end)
        segment.intact_bytes = head.end
    return segment


def _damage_in_newest_step(fd: int, segment: _Segment) -> int:
    """Return the offset of damage in the newest step's averages; without damage, the file's end."""
    if segment.ends:
        for head in segment.read(fd, segment.next_step - 1).chunks:
            if read_payload(fd, head) is None:
                return head.offset
    return segment.size


def _mark_torn_tail(
    fd: int, segment: _Segment, damage_offset: int, next_segment: _Segment | None
) -> None:
    """Mark the segment as torn at the damage if a crash explains the damage.

    Raises:
        StorageDamaged: No crash explains the damage.
    """
    while segment.ends and segment.end > damage_offset:
        segment.ends.pop()
    step = segment.next_step
    if next_segment is not None and next_segment.header.base_step <= step:
        torn_reason = "left by a coordinator that was replaced"
    elif next_segment is None and all(
        later_step <= step for later_step in steps_after(fd, damage_offset, segment.size)
    ):
        torn_reason = segment.torn_reason or f"step {step} was not synced completely"
    else:
        raise segment_damage(
            segment.path,
            damage_offset,
            "a record does not match its checksum, and later records follow",
        )
    segment.intact_bytes, segment.torn_reason = damage_offset, torn_reason


def _check_run_and_manifest(segment: _Segment, run_id: str, manifest: Manifest) -> None:
    header, path = segment.header, str(segment.path)
    if header.run_id != run_id:
        raise Mismatch(
            f"expected a log of run {run_id!r} in {path!r}, got one of run {header.run_id!r}; move "
            "it away, and restore the log of this run from a copy"
        )
    if header.manifest_digest != manifest.digest():
        raise Mismatch(f"{path!r} belongs to another manifest; start a new run")


def _truncate_segment(tail: TornTail) -> None:
    with storage_errors("cut the torn tail of", tail.path):
        fd = os.open(tail.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, tail.offset)
            os.fsync(fd)
        finally:
            os.close(fd)


def _sync(segment: _Segment, *, is_newest: bool) -> None:
    """Make the data of a killed coordinator durable: readable data may not be on disk yet."""
    unsynced_offset = segment.newest_step_offset if is_newest else segment.intact_bytes
    with storage_errors("sync", segment.path):
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            write_again(fd, unsynced_offset, segment.intact_bytes)
        finally:
            os.close(fd)
