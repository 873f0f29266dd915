"""Open a gradient log: find the committed steps, and cut off what a crash left after them.

All records of a step were on disk before the first of the next step was written. So damage that no
record of a later step follows is a torn tail, of a step whose sync had not ended: it is cut. Damage
with later records cannot come from a crash, and is refused with file and offset.

Readable data need not be on disk: it may come from a killed coordinator whose sync had not ended,
or had failed. Only the newest step of the newest segment is affected. It is rewritten in place
before it counts (`durable_file.write_again`).

`scan_log` walks the heads alone, compares commits with their hashes, and reads averages of the
newest step only. Other averages are checked when they are read (`log_index`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.disk.durable_file import (
    open_to_read,
    remove_temporaries,
    storing,
    write_again,
)
from coordinator.storage.log.log_index import LogIndex, SegmentIndex, damaged, segment_files
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
class Cut:
    """A torn tail: what follows `offset` is not part of the log."""

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
    """The content of a log: where its committed steps are, and its torn tails."""

    index: LogIndex
    cuts: tuple[Cut, ...]


@dataclass(slots=True)
class _Segment(SegmentIndex):
    """The content of one file, and how much of it is intact."""

    intact_bytes: int = 0
    size: int = 0
    torn: str = ""


def scan_log(directory: Path, run_id: str, manifest: Manifest, *, repair: bool = False) -> LogScan:
    """Scan a log.

    Args:
        directory: The directory of its segments; there may be none.
        run_id: The run's ID.
        manifest: The run's manifest.
        repair: Cut torn tails off, remove temporary files and make the rest durable. Only for the
            writer of the log.

    Raises:
        StorageDamaged: Committed steps are damaged; names file and offset.
        StorageFailed: The log cannot be read, or not be repaired.
        Mismatch: The log belongs to another run or manifest.
    """
    if repair:
        remove_temporaries(directory)
    with storing("read", directory):
        paths = segment_files(directory)
    segments: list[_Segment] = []
    for path in reversed(paths):
        next_segment = segments[-1] if segments else None
        with storing("read", path):
            segment = _scan_segment(path, next_segment)
        _check_owner(segment, run_id, manifest)
        segments.append(segment)
    segments.reverse()
    cuts = [
        Cut(s.path, s.intact_bytes, s.size - s.intact_bytes, s.torn) for s in segments if s.torn
    ]
    if repair:
        for cut in cuts:
            _truncate_segment(cut)
        for segment in segments:
            _sync(segment, newest=segment is segments[-1])
    return LogScan(LogIndex(segments), tuple(cuts))


def cuts_before(
    paths: Sequence[Path], step: int, run_id: str, manifest: Manifest
) -> list[tuple[Path, int]]:
    """Find where to cut the segments that hold steps from this one on; nothing is changed.

    Args:
        paths: Segments that begin before that step, in order.
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
        with storing("read", path):
            segment = _walk_file(path)
            steps_before = step - segment.header.base_step
            if len(segment.ends) >= steps_before and segment.size > segment.ends[steps_before - 1]:
                del segment.ends[steps_before:]
                cuts.append((path, segment.end))
            else:
                segment = _scan_segment(path, next_segment)
        _check_owner(segment, run_id, manifest)
        next_segment = segment
    return cuts


def _walk_file(path: Path) -> _Segment:
    fd = open_to_read(path)
    try:
        return _walk(fd, path)
    finally:
        os.close(fd)


def _scan_segment(path: Path, following: _Segment | None) -> _Segment:
    fd = open_to_read(path)
    try:
        segment = _walk(fd, path)
        damage = segment.intact_bytes
        if not (segment.torn or following):
            damage = _damage_in_newest(fd, segment)
        if damage < segment.size:
            _mark_torn_tail(fd, segment, damage, following)
    finally:
        os.close(fd)
    return segment


def _walk(fd: int, path: Path) -> _Segment:
    """Go from record to record; stop at the first damaged one."""
    size = os.fstat(fd).st_size
    head = read_head(fd, 0)
    payload = read_payload(fd, head) if head is not None else None
    header = read_header(payload) if payload is not None else None
    if head is None or header is None:
        # The header was synced before the file had its name.
        raise damaged(path, 0, "expected the header of a log segment")
    segment = _Segment(path, header, head.end, intact_bytes=head.end, size=size)
    while segment.intact_bytes < size:
        head = read_head(fd, segment.intact_bytes)
        if head is None or head.end > size or head.kind is RecordKind.HEADER:
            segment.torn = "the last record is incomplete"
            break
        if head.kind is RecordKind.COMMIT:
            payload = read_payload(fd, head)
            step = step_of_commit(payload) if payload is not None else None
            if step is None:
                segment.torn = "a commit does not match its checksum"
                break
            if step != segment.next_step:
                reason = f"expected the commit of step {segment.next_step}, got {step}"
                raise damaged(path, head.offset, reason)
            segment.ends.append(head.end)
        segment.intact_bytes = head.end
    return segment


def _damage_in_newest(fd: int, segment: _Segment) -> int:
    """Return where the newest step's averages are damaged; the file's end if they are not."""
    if segment.ends:
        for head in segment.read(fd, segment.next_step - 1).chunks:
            if read_payload(fd, head) is None:
                return head.offset
    return segment.size


def _mark_torn_tail(fd: int, segment: _Segment, damage: int, following: _Segment | None) -> None:
    """Mark the segment as torn at the damage if a crash explains the damage.

    Raises:
        StorageDamaged: No crash explains the damage.
    """
    while segment.ends and segment.end > damage:
        segment.ends.pop()
    step = segment.next_step
    if following is not None and following.header.base_step <= step:
        torn = "left by a coordinator that was replaced"
    elif following is None and all(s <= step for s in steps_after(fd, damage, segment.size)):
        torn = segment.torn or f"step {step} was not synced completely"
    else:
        raise damaged(
            segment.path, damage, "a record does not match its checksum, and later ones follow"
        )
    segment.intact_bytes, segment.torn = damage, torn


def _check_owner(segment: _Segment, run_id: str, manifest: Manifest) -> None:
    header, path = segment.header, str(segment.path)
    if header.run_id != run_id:
        raise Mismatch(
            f"expected a log of run {run_id!r} in {path!r}, got one of run {header.run_id!r}; move "
            "it away, and restore the log of this run from a copy"
        )
    if header.manifest_digest != manifest.digest():
        raise Mismatch(f"{path!r} belongs to another manifest; start a new run")


def _truncate_segment(cut: Cut) -> None:
    with storing("cut the torn tail of", cut.path):
        fd = os.open(cut.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, cut.offset)
            os.fsync(fd)
        finally:
            os.close(fd)


def _sync(segment: _Segment, *, newest: bool) -> None:
    """Make durable what a killed coordinator wrote, which is readable but perhaps not on disk."""
    doubtful = segment.newest_begins if newest else segment.intact_bytes
    with storing("sync", segment.path):
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            write_again(fd, doubtful, segment.intact_bytes)
        finally:
            os.close(fd)
