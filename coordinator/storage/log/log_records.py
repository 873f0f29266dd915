"""One record of the gradient log on disk: a head, then its payload.

    head      4 bytes  magic "SSLR"
              u32      kind
              u32      payload bytes
              u64      XXH3 of the payload
              u32      low half of XXH3 of the 20 bytes before
    payload   HEADER   msgpack of `SegmentHeader`
              CHUNK    u64 epoch, u64 step, u64 attempt, u32 block, u32 chunk, then float32 values
              COMMIT   msgpack of `CommitRecord`

Little-endian throughout. Both hashes are seeded with the record's place in its file, so a record
counts only where it was written. The head has a hash of its own: a reader can walk a log without
reading what is in it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Annotated, Final, NamedTuple, TypeVar

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from coordinator.run.outputs.restart import CommitRecord, Packed
from protocol.base import limits
from protocol.base.fields import Digest, Number, Small
from protocol.wire.messages import AveragedGradient

Array = NDArray[np.float32]

FORMAT: Final = 1
MAGIC: Final = b"SSLR"
PLACE: Final = struct.Struct("<QQQII")
_HEAD: Final = struct.Struct("<4sIIQ")
_HEAD_CHECK: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _HEAD_CHECK.size
_PAYLOAD_BYTES: Final = limits.BODY_BYTES + PLACE.size
_SEARCH_BYTES: Final = 1 * limits.MIB


class RecordKind(IntEnum):
    """What a record is."""

    HEADER = 1
    CHUNK = 2
    COMMIT = 3


_KINDS: Final = {int(kind): kind for kind in RecordKind}
T = TypeVar("T", bound=Packed)


class SegmentHeader(Packed):
    """The first record of a segment.

    `base_step` is how many steps were committed before it. A segment replaces what earlier ones
    hold from that step on; `redo` are the commits among those that count all the same until the
    steps are done again: their averages were not kept.
    """

    format: Annotated[int, Field(ge=1)] = FORMAT
    run_id: Small
    manifest_digest: Digest
    epoch: Number
    base_step: Number
    mode: Annotated[str, Field(pattern="^(full|checkpoint)$")]
    redo: tuple[CommitRecord, ...] = ()


class ChunkPlace(NamedTuple):
    """Which chunk of averaged gradients a record holds."""

    epoch: int
    step: int
    attempt: int
    block: int
    chunk: int


def place_of(message: AveragedGradient) -> ChunkPlace:
    """Where a chunk that is broadcast belongs."""
    return ChunkPlace(message.epoch, message.step, message.attempt, message.block, message.chunk)


class Head(NamedTuple):
    """The head of the record at `offset`."""

    offset: int
    kind: RecordKind
    payload_bytes: int
    checksum: int

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return self.offset + HEAD_BYTES + self.payload_bytes


def record_buffers(
    kind: RecordKind, payload: Sequence[memoryview], offset: int
) -> list[memoryview]:
    """A record as it is written at that place; the payload's parts are not copied."""
    checksum = xxhash.xxh3_64(seed=offset)
    for part in payload:
        checksum.update(part)
    payload_bytes = sum(part.nbytes for part in payload)
    assert payload_bytes <= _PAYLOAD_BYTES
    head = _HEAD.pack(MAGIC, kind, payload_bytes, checksum.intdigest())
    return [memoryview(head + _head_check(head, offset)), *payload]


def chunk_payload(place: ChunkPlace, values: Array) -> list[memoryview]:
    """A chunk record's payload; on a little-endian machine the values themselves."""
    assert values.dtype == np.float32
    flat = np.ascontiguousarray(values).reshape(-1).astype("<f4", copy=False)
    return [memoryview(PLACE.pack(*place)), flat.view(np.uint8).data]


def read_head(fd: int, offset: int) -> Head | None:
    """The head at that place; None if there is none, or only a part of it.

    Raises:
        OSError: The file cannot be read.
    """
    raw = os.pread(fd, HEAD_BYTES, offset)
    if len(raw) < HEAD_BYTES or raw[_HEAD.size :] != _head_check(raw[: _HEAD.size], offset):
        return None
    magic, kind, payload_bytes, checksum = _HEAD.unpack_from(raw)
    known = _KINDS.get(kind)
    if magic != MAGIC or known is None or payload_bytes > _PAYLOAD_BYTES:
        return None
    return Head(offset, known, payload_bytes, checksum)


def read_payload(fd: int, head: Head) -> bytes | None:
    """The payload of a record; None if it is not all there, or not what was written.

    Raises:
        OSError: The file cannot be read.
    """
    raw = os.pread(fd, head.payload_bytes, head.offset + HEAD_BYTES)
    if len(raw) < head.payload_bytes:
        return None
    whole = xxhash.xxh3_64_intdigest(raw, seed=head.offset) == head.checksum
    return raw if whole else None


def split_chunk(payload: bytes) -> tuple[ChunkPlace, Array] | None:
    """A chunk record's place and values (a view of the payload); None if it is no chunk."""
    if len(payload) < PLACE.size or (len(payload) - PLACE.size) % 4:
        return None
    values = np.frombuffer(payload, "<f4", offset=PLACE.size)
    return ChunkPlace(*PLACE.unpack_from(payload)), values.astype(np.float32, copy=False)


def read_commit(payload: bytes) -> CommitRecord | None:
    """A commit record's content; None if it does not fit."""
    return _validated(CommitRecord, payload)


def step_of_commit(payload: bytes) -> int | None:
    """The step of a commit record, without the rest of it; None if it does not fit."""
    try:
        step = msgpack.unpackb(payload)["commit"]["step"]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None
    return step if isinstance(step, int) else None


def read_header(payload: bytes) -> SegmentHeader | None:
    """A segment's header; None if it does not fit."""
    return _validated(SegmentHeader, payload)


def steps_after(fd: int, offset: int, size: int) -> Iterator[int]:
    """The steps of all whole records at or after a place, found by looking at every byte.

    Raises:
        OSError: The file cannot be read.
    """
    at = offset
    while at < size:
        window = os.pread(fd, _SEARCH_BYTES, at)
        found = window.find(MAGIC)
        if found < 0:
            # The magic may lie across the end of the window.
            at += max(1, len(window) - len(MAGIC) + 1)
            continue
        at += found
        head = read_head(fd, at)
        payload = read_payload(fd, head) if head is not None else None
        if head is None or payload is None:
            at += 1
            continue
        at = head.end
        if head.kind is RecordKind.CHUNK and (chunk := split_chunk(payload)) is not None:
            yield chunk[0].step
        elif head.kind is RecordKind.COMMIT and (record := read_commit(payload)) is not None:
            yield record.commit.step


def _validated(kind: type[T], payload: bytes) -> T | None:
    try:
        fields = msgpack.unpackb(payload, raw=False, strict_map_key=True, use_list=False)
        return kind.model_validate(fields, strict=True)
    except (ValueError, TypeError, msgpack.UnpackException, ValidationError):
        return None


def _head_check(head: bytes, offset: int) -> bytes:
    return _HEAD_CHECK.pack(xxhash.xxh3_64_intdigest(head, seed=offset) & 0xFFFFFFFF)
