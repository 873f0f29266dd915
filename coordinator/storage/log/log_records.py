"""One record of the gradient log on disk: a head, then its payload.

    head      4 bytes  magic "SSLR"
              u32      kind
              u32      payload bytes
              u64      XXH3 of the payload
              u32      low half of XXH3 of the preceding 20 bytes
    payload   HEADER   msgpack of `SegmentHeader`
              CHUNK    u64 term, u64 step, u64 attempt, u32 block, u32 chunk, then float32 values
              COMMIT   msgpack of `CommitRecord`

Little-endian throughout. Both hashes are seeded with the record's offset in its file, so a record
is valid only at the offset where it was written. The head has a separate hash: a reader can walk a
log without reading payloads.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from coordinator.disk.older_names import with_term
from coordinator.run.outputs.restart import CommitRecord, MsgpackRecord
from protocol.base import limits
from protocol.base.fields import Digest, Number, ShortText
from protocol.wire.messages import AveragedGradient

Array = NDArray[np.float32]

FORMAT: Final = 1
MAGIC: Final = b"SSLR"
CHUNK_ID: Final = struct.Struct("<QQQII")
_HEAD: Final = struct.Struct("<4sIIQ")
_HEAD_CHECK: Final = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size + _HEAD_CHECK.size
_PAYLOAD_BYTES: Final = limits.BODY_BYTES + CHUNK_ID.size
_SEARCH_BYTES: Final = 1 * limits.MIB


class RecordKind(IntEnum):
    """The types of records, as numbered on disk."""

    HEADER = 1
    CHUNK = 2
    COMMIT = 3


_KINDS: Final = {int(kind): kind for kind in RecordKind}
T = TypeVar("T", bound=MsgpackRecord)


class SegmentHeader(MsgpackRecord):
    """The first record of a segment.

    `base_step` is the number of steps committed before the segment. A segment overrides this and
    later steps of earlier segments, except the commits in `redo`: they have no averages, and stay
    valid until their steps are redone.
    """

    format: Annotated[int, Field(ge=1)] = FORMAT
    run_id: ShortText
    manifest_digest: Digest
    term: Number
    base_step: Number
    mode: Annotated[str, Field(pattern="^(full|checkpoint)$")]
    redo: tuple[CommitRecord, ...] = ()


class ChunkId(NamedTuple):
    """Identifies the chunk of averaged gradients in a record."""

    term: int
    step: int
    attempt: int
    block: int
    chunk: int


def chunk_id(message: AveragedGradient) -> ChunkId:
    """Return the ID of a broadcast chunk."""
    return ChunkId(message.term, message.step, message.attempt, message.block, message.chunk)


class Head(NamedTuple):
    """The head of the record at `offset`."""

    offset: int
    kind: RecordKind
    payload_bytes: int
    checksum: int

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return self.offset + HEAD_BYTES + self.payload_bytes


def record_buffers(
    kind: RecordKind, payload: Sequence[memoryview], offset: int
) -> list[memoryview]:
    """Encode a record for this offset, without a copy of the payload's parts."""
    checksum = xxhash.xxh3_64(seed=offset)
    for part in payload:
        checksum.update(part)
    payload_bytes = sum(part.nbytes for part in payload)
    assert payload_bytes <= _PAYLOAD_BYTES
    head = _HEAD.pack(MAGIC, kind, payload_bytes, checksum.intdigest())
    return [memoryview(head + _head_checksum(head, offset)), *payload]


def chunk_payload(key: ChunkId, values: Array) -> list[memoryview]:
    """Encode a chunk record's payload, without a copy of the values on a little-endian machine."""
    assert values.dtype == np.float32
    flat = np.ascontiguousarray(values).reshape(-1).astype("<f4", copy=False)
    return [memoryview(CHUNK_ID.pack(*key)), flat.view(np.uint8).data]


def read_head(fd: int, offset: int) -> Head | None:
    """Read the head at this offset; None if it is missing, partial or damaged.

    Raises:
        OSError: The file cannot be read.
    """
    raw = os.pread(fd, HEAD_BYTES, offset)
    if len(raw) < HEAD_BYTES or raw[_HEAD.size :] != _head_checksum(raw[: _HEAD.size], offset):
        return None
    magic, kind, payload_bytes, checksum = _HEAD.unpack_from(raw)
    record_kind = _KINDS.get(kind)
    if magic != MAGIC or record_kind is None or payload_bytes > _PAYLOAD_BYTES:
        return None
    return Head(offset, record_kind, payload_bytes, checksum)


def read_payload(fd: int, head: Head) -> bytes | None:
    """Read the payload of a record; None if it is partial or damaged.

    Raises:
        OSError: The file cannot be read.
    """
    raw = os.pread(fd, head.payload_bytes, head.offset + HEAD_BYTES)
    if len(raw) < head.payload_bytes:
        return None
    is_intact = xxhash.xxh3_64_intdigest(raw, seed=head.offset) == head.checksum
    return raw if is_intact else None


def read_chunk_id(fd: int, head: Head) -> ChunkId | None:
    """Return the chunk ID in a record, unchecked; None if the record is not a chunk.

    Raises:
        OSError: The file cannot be read.
    """
    if head.kind is not RecordKind.CHUNK:
        return None
    raw = os.pread(fd, CHUNK_ID.size, head.offset + HEAD_BYTES)
    return ChunkId(*CHUNK_ID.unpack(raw)) if len(raw) == CHUNK_ID.size else None


def split_chunk(payload: bytes) -> tuple[ChunkId, Array] | None:
    """Return a chunk record's ID and values (a view of the payload); None if the payload is not a
    chunk."""
    if len(payload) < CHUNK_ID.size or (len(payload) - CHUNK_ID.size) % 4:
        return None
    values = np.frombuffer(payload, "<f4", offset=CHUNK_ID.size)
    return ChunkId(*CHUNK_ID.unpack_from(payload)), values.astype(np.float32, copy=False)


def read_commit(payload: bytes) -> CommitRecord | None:
    """Decode a commit record; None if it is invalid."""
    return _decode(CommitRecord, payload, _commit_with_term)


def step_of_commit(payload: bytes) -> int | None:
    """Decode only the step of a commit record; None if it is invalid."""
    try:
        step = msgpack.unpackb(payload)["commit"]["step"]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None
    return step if isinstance(step, int) else None


def read_header(payload: bytes) -> SegmentHeader | None:
    """Decode a segment's header; None if it is invalid."""
    return _decode(SegmentHeader, payload, _header_with_term)


def steps_after(fd: int, offset: int, size: int) -> Iterator[int]:
    """Yield the step of every intact record from an offset on, wherever the record begins.

    Raises:
        OSError: The file cannot be read.
    """
    position = offset
    while position < size:
        window = os.pread(fd, _SEARCH_BYTES, position)
        start = window.find(MAGIC)
        if start < 0:
            # The magic may cross the end of the window.
            position += max(1, len(window) - len(MAGIC) + 1)
            continue
        position += start
        head = read_head(fd, position)
        payload = read_payload(fd, head) if head is not None else None
        if head is None or payload is None:
            position += 1
            continue
        position = head.end
        if head.kind is RecordKind.CHUNK and (chunk := split_chunk(payload)) is not None:
            yield chunk[0].step
        elif head.kind is RecordKind.COMMIT and (record := read_commit(payload)) is not None:
            yield record.commit.step


def _commit_with_term(fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "commit": with_term(fields["commit"])}


def _header_with_term(fields: dict[str, Any]) -> dict[str, Any]:
    redo = tuple(_commit_with_term(commit_fields) for commit_fields in fields.get("redo", ()))
    return {**with_term(fields), "redo": redo}


def _decode(
    record_type: type[T], payload: bytes, translate: Callable[[dict[str, Any]], dict[str, Any]]
) -> T | None:
    try:
        fields = msgpack.unpackb(payload, raw=False, strict_map_key=True, use_list=False)
        return record_type.model_validate(translate(fields), strict=True)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        msgpack.UnpackException,
        ValidationError,
    ):
        return None


def _head_checksum(head: bytes, offset: int) -> bytes:
    return _HEAD_CHECK.pack(xxhash.xxh3_64_intdigest(head, seed=offset) & 0xFFFFFFFF)
