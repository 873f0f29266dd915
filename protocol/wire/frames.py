"""Frames: the encoding of a message on the wire.

    offset  bytes  field
    0       2      magic, b"ss"
    2       1      protocol version
    3       1      message tag (`protocol.wire.messages`)
    4       2      header length, big-endian
    6       4      body length, big-endian
    10      8      xxh3-64 over header and body, big-endian
    18      ...    header: a msgpack map
    ...     5      msgpack bin32 marker with the body's length, if there is a body
    ...     ...    body: raw bytes (float32 little-endian for gradients, else a JSON document)

If two processes of one machine share memory, the body may be in that memory. Such a frame begins
with b"sm" and has the body's length as usual; marker and body are replaced by

    ...     8      the body's offset in the sender's memory, big-endian

The checksum then covers header and offset: the body is not transmitted.

All lengths are checked before memory is allocated. The checksum detects flipped bits that leave a
value finite: these change all replicas in the same way, so that digests do not show them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from xxhash import xxh3_64

from protocol import PROTOCOL_VERSION
from protocol.base import limits
from protocol.base.errors import FrameError, LocalProtocolError, VersionMismatch

Buffer = bytes | bytearray | memoryview

_PREFIX = struct.Struct(">2sBBHIQ")
_BODY_MARKER = struct.Struct(">BI")
_BIN32 = 0xC6
_OFFSET = struct.Struct(">Q")
MAGIC = b"ss"
MAGIC_SHARED = b"sm"

PREFIX_BYTES = _PREFIX.size
MARKER_BYTES = _BODY_MARKER.size
OFFSET_BYTES = _OFFSET.size


@dataclass(frozen=True, slots=True)
class Prefix:
    """The fixed start of a frame, checked against the limits."""

    tag: int
    header_bytes: int
    body_bytes: int
    checksum: int
    is_shared: bool = False

    @property
    def head_bytes(self) -> int:
        """Bytes of the frame before its body starts."""
        suffix_bytes = OFFSET_BYTES if self.is_shared else MARKER_BYTES if self.body_bytes else 0
        return PREFIX_BYTES + self.header_bytes + suffix_bytes


def frame_bytes(header: bytes, body: Buffer | None) -> int:
    """Return the length of a frame.

    Raises:
        LocalProtocolError: The frame is longer than the limits allow.
    """
    body_bytes = 0 if body is None else len(body)
    if len(header) > limits.HEADER_BYTES or body_bytes > limits.BODY_BYTES:
        raise LocalProtocolError(
            f"a frame of {len(header)} header and {body_bytes} body bytes is over the limits "
            f"of {limits.HEADER_BYTES} and {limits.BODY_BYTES}"
        )
    return PREFIX_BYTES + len(header) + (MARKER_BYTES if body_bytes else 0) + body_bytes


def encode_head(tag: int, header: bytes, body: Buffer | None) -> bytes:
    """Return prefix, header and body marker; the raw body follows them."""
    frame_bytes(header, body)
    body_bytes = 0 if body is None else len(body)
    checksum = checksum_of(header, body)
    prefix = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, tag, len(header), body_bytes, checksum)
    marker = _BODY_MARKER.pack(_BIN32, body_bytes) if body_bytes else b""
    return prefix + header + marker


def encode_shared(tag: int, header: bytes, body_bytes: int, offset: int) -> bytes:
    """Return a whole frame whose body is in shared memory."""
    offset_bytes = _OFFSET.pack(offset)
    checksum = checksum_of(header, offset_bytes)
    prefix = _PREFIX.pack(MAGIC_SHARED, PROTOCOL_VERSION, tag, len(header), body_bytes, checksum)
    return prefix + header + offset_bytes


def decode_offset(data: Buffer) -> int:
    """Return the offset of a body in shared memory."""
    offset: int = _OFFSET.unpack_from(data)[0]
    return offset


def decode_prefix(data: Buffer, header_limit_bytes: int, body_limit_bytes: int) -> Prefix:
    """Read the first `PREFIX_BYTES` of a frame.

    Raises:
        FrameError: Wrong magic, or a length over the limit.
        VersionMismatch: The other side speaks another version.
    """
    magic, version, tag, header_bytes, body_bytes, checksum = _PREFIX.unpack_from(data)
    if magic not in (MAGIC, MAGIC_SHARED):
        raise FrameError(f"expected a samestep frame, got bytes that start with {magic!r}")
    if version != PROTOCOL_VERSION:
        raise VersionMismatch(PROTOCOL_VERSION, version)
    if header_bytes > header_limit_bytes:
        raise FrameError(f"expected a header of <= {header_limit_bytes} bytes, got {header_bytes}")
    if body_bytes > body_limit_bytes:
        raise FrameError(f"expected a body of <= {body_limit_bytes} bytes, got {body_bytes}")
    return Prefix(tag, header_bytes, body_bytes, checksum, magic == MAGIC_SHARED)


def check_marker(data: Buffer, body_bytes: int) -> None:
    """Check the msgpack marker before a body.

    Raises:
        FrameError: The marker is not a bin32 of the prefix's length.
    """
    marker, length = _BODY_MARKER.unpack_from(data)
    if marker != _BIN32 or length != body_bytes:
        raise FrameError(f"expected a bin32 marker for {body_bytes} bytes, got {bytes(data[:5])!r}")


def checksum_of(header: Buffer, body: Buffer | None) -> int:
    """Return xxh3-64 over header and body (https://xxhash.com)."""
    hasher = xxh3_64(header)
    if body is not None:
        hasher.update(body)
    return hasher.intdigest()
