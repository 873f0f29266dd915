"""Ways to break frames, each from a seeded generator; none of them looks at what it breaks.

Two gates stop most broken bytes: the prefix and the checksum. So some ways break what is behind
them and make the gates right again.
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
"""One broken frame, out of legal ones."""

_BYTES: Final = (0, 1, 0x7F, 0x80, 0xC6, 0xFF)
_VALUES: Final[tuple[Any, ...]] = (
    0, 1, -1, 2, 3, 255, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0.0, -0.0, 1e-300, 1e308,
    -1e308, float("nan"), float("inf"), float("-inf"), True, False, None, "", "x", "x" * 64,
    "\x00", "../../x", "0" * 64, b"", b"x", bytes(32), (), ((0, 4),), ((4, 0),), ((0, 2**63),),
    ((0, 1),) * 64, {}, {"a": 1.0}, [[[[]]]],
)  # fmt: skip


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, taken out, put in or doubled."""
    content = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(5):
            case 0 if at < len(content):
                content[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(content):
                content[at] = rng.choice(_BYTES)
            case 2:
                del content[at : at + rng.randint(1, 20)]
            case 3:
                content[at:at] = rng.randbytes(rng.randint(1, 20))
            case _:
                content[at:at] = content[at : at + rng.randint(1, 40)]
    return bytes(content)


def noise(rng: random.Random, legal: Sequence[bytes]) -> bytes:
    """Any bytes, half of them behind the magic."""
    del legal
    data = rng.randbytes(rng.randint(0, 400))
    return b"ss" + bytes([PROTOCOL_VERSION]) + data if rng.randrange(2) else data


def changed(rng: random.Random, legal: Sequence[bytes]) -> bytes:
    """Bytes of the frame as it is, so that the checksum is mostly wrong."""
    return changed_bytes(rng, rng.choice(legal))


def cut(rng: random.Random, legal: Sequence[bytes]) -> bytes:
    """The start of one frame and the end of another."""
    one, other = rng.choice(legal), rng.choice(legal)
    return one[: rng.randrange(len(one))] + other[rng.randrange(len(other)) :]


def lying(rng: random.Random, legal: Sequence[bytes]) -> bytes:
    """Other lengths than the frame has."""
    data = bytearray(rng.choice(legal))
    data[4:10] = rng.randbytes(2) + (rng.randbytes(4) if rng.randrange(2) else bytes(4))
    return bytes(data)


def sealed(rng: random.Random, legal: Sequence[bytes]) -> bytes:
    """Another header, body or tag, with the lengths and the checksum that they must have."""
    tag, header, body = taken_apart(rng.choice(legal))
    if body and rng.randrange(4) == 0:
        body = changed_bytes(rng, body)[: limits.BODY_BYTES]
    else:
        header = changed_bytes(rng, header)[: limits.HEADER_BYTES]
    if rng.randrange(8) == 0:
        tag = rng.randrange(256)
    return put_together(tag, header, body)


def refilled(rng: random.Random, legal: Sequence[bytes]) -> bytes:
    """A well-formed frame with other values in one or two of its fields."""
    tag, header, body = taken_apart(rng.choice(legal))
    fields = msgpack.unpackb(header, use_list=False)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice([*fields, "more"])
        value = fields.get(name)
        if isinstance(value, int) and rng.randrange(2):
            fields[name] = min(max(value + rng.choice((-2, -1, 1, 2, 7)), -(2**63)), 2**64 - 1)
        else:
            fields[name] = rng.choice(_VALUES)
    header = msgpack.packb(fields)
    return put_together(tag, header[: limits.HEADER_BYTES], body)


MUTATIONS: Final[tuple[Mutation, ...]] = (noise, changed, cut, lying, sealed, refilled)


def taken_apart(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag, header and body of a legal frame."""
    tag, header_bytes = data[3], int.from_bytes(data[4:6], "big")
    at = frames.PREFIX_BYTES + header_bytes
    return tag, data[frames.PREFIX_BYTES : at], data[at + frames.MARKER_BYTES :]


def put_together(tag: int, header: bytes, body: bytes) -> bytes:
    """A frame that passes the gates; without a body if that is empty."""
    return frames.encode_head(tag, header, body or None) + body
