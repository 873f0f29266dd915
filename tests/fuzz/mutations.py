"""Mutations of frames by a seeded generator, without knowledge of their content.

Prefix and checksum reject most broken bytes, so some mutations change the content and repair both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack

from protocol import PROTOCOL_VERSION
from protocol.base import limits
from protocol.wire import frames

Mutation = Callable[[random.Random, Sequence[bytes]], bytes]
"""Makes one broken frame from legal frames."""

_BYTES: Final = (0, 1, 0x7F, 0x80, 0xC6, 0xFF)
_VALUES: Final[tuple[Any, ...]] = (
    0, 1, -1, 2, 3, 255, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0.0, -0.0, 1e-300, 1e308,
    -1e308, float("nan"), float("inf"), float("-inf"), True, False, None, "", "x", "x" * 64,
    "\x00", "../../x", "0" * 64, b"", b"x", bytes(32), (), ((0, 4),), ((4, 0),), ((0, 2**63),),
    ((0, 1),) * 64, {}, {"a": 1.0}, [[[[]]]],
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, remove, insert or duplicate a few bytes."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        offset = rng.randrange(len(content) + 1)
        match rng.randrange(5):
            case 0 if offset < len(content):
                content[offset] ^= 1 << rng.randrange(8)
            case 1 if offset < len(content):
                content[offset] = rng.choice(_BYTES)
            case 2:
                del content[offset : offset + rng.randint(1, 20)]
            case 3:
                content[offset:offset] = rng.randbytes(rng.randint(1, 20))
            case _:
                content[offset:offset] = content[offset : offset + rng.randint(1, 40)]
    return bytes(content)


def random_bytes(rng: random.Random, legal_frames: Sequence[bytes]) -> bytes:
    """Return random bytes, half of them after the magic."""
    del legal_frames
    data = rng.randbytes(rng.randint(0, 400))
    return b"ss" + bytes([PROTOCOL_VERSION]) + data if rng.randrange(2) else data


def mutate_frame(rng: random.Random, legal_frames: Sequence[bytes]) -> bytes:
    """Change bytes anywhere in a frame, so the checksum is mostly wrong."""
    return mutate_bytes(rng, rng.choice(legal_frames))


def splice_frames(rng: random.Random, legal_frames: Sequence[bytes]) -> bytes:
    """Join the start of one frame to the end of another."""
    first, second = rng.choice(legal_frames), rng.choice(legal_frames)
    return first[: rng.randrange(len(first))] + second[rng.randrange(len(second)) :]


def corrupt_lengths(rng: random.Random, legal_frames: Sequence[bytes]) -> bytes:
    """Declare other lengths than the frame has."""
    data = bytearray(rng.choice(legal_frames))
    data[4:10] = rng.randbytes(2) + (rng.randbytes(4) if rng.randrange(2) else bytes(4))
    return bytes(data)


def mutate_and_reseal(rng: random.Random, legal_frames: Sequence[bytes]) -> bytes:
    """Change header, body or tag, and repair lengths and checksum."""
    tag, header, body = split_frame(rng.choice(legal_frames))
    if body and rng.randrange(4) == 0:
        body = mutate_bytes(rng, body)[: limits.BODY_BYTES]
    else:
        header = mutate_bytes(rng, header)[: limits.HEADER_BYTES]
    if rng.randrange(8) == 0:
        tag = rng.randrange(256)
    return join_frame(tag, header, body)


def mutate_fields(rng: random.Random, legal_frames: Sequence[bytes]) -> bytes:
    """Make a well-formed frame with other values in one or two of its fields."""
    tag, header, body = split_frame(rng.choice(legal_frames))
    fields = msgpack.unpackb(header, use_list=False)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice([*fields, "more"])
        value = fields.get(name)
        if isinstance(value, int) and rng.randrange(2):
            fields[name] = min(max(value + rng.choice((-2, -1, 1, 2, 7)), -(2**63)), 2**64 - 1)
        else:
            fields[name] = rng.choice(_VALUES)
    header = msgpack.packb(fields)
    return join_frame(tag, header[: limits.HEADER_BYTES], body)


MUTATIONS: Final[tuple[Mutation, ...]] = (
    random_bytes,
    mutate_frame,
    splice_frames,
    corrupt_lengths,
    mutate_and_reseal,
    mutate_fields,
)


def split_frame(data: bytes) -> tuple[int, bytes, bytes]:
    """Split a legal frame into tag, header and body."""
    tag, header_bytes = data[3], int.from_bytes(data[4:6], "big")
    offset = frames.PREFIX_BYTES + header_bytes
    return tag, data[frames.PREFIX_BYTES : offset], data[offset + frames.MARKER_BYTES :]


def join_frame(tag: int, header: bytes, body: bytes) -> bytes:
    """Return a frame with valid prefix and checksum; an empty body is omitted."""
    return frames.encode_head(tag, header, body or None) + body
