"""Broken bytes against the connection: whatever comes, nothing but RemoteProtocolError escapes.

`SAMESTEP_FUZZ_FRAMES` (default 4000) says how many streams each test reads; a failing one prints
its seed. 200000 take a few minutes.
"""

from __future__ import annotations

import contextlib
import os
import random

import pytest

from protocol import frames, limits
from protocol.connection import FROM_COORDINATOR, FROM_WORKER, Connection, Phase, Role
from protocol.errors import FrameError, RemoteProtocolError
from tests.message_samples import BLOCKS, EXAMPLES, frame

STREAMS = int(os.environ.get("SAMESTEP_FUZZ_FRAMES", "4000"))
ROLES: tuple[Role, ...] = ("coordinator", "worker")
PHASES = (Phase.GREETING, Phase.PROVING, Phase.OPEN)
INTERESTING = (0, 1, 0x7F, 0x80, 0xC6, 0xFF)

pytestmark = [
    pytest.mark.fuzz,
    pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.value),
    pytest.mark.parametrize("role", ROLES),
]


def legal_frames(role: Role, phase: Phase) -> list[bytes]:
    """What the peer may say in this phase."""
    table = FROM_WORKER if role == "coordinator" else FROM_COORDINATOR
    kinds = sorted(table[phase], key=lambda kind: kind.tag)
    return [frame(EXAMPLES[kind]) for kind in kinds]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed, taken out, put in or doubled."""
    broken = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(broken) + 1)
        match rng.randrange(5):
            case 0 if at < len(broken):
                broken[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(broken):
                broken[at] = rng.choice(INTERESTING)
            case 2:
                del broken[at : at + rng.randint(1, 20)]
            case 3:
                broken[at:at] = rng.randbytes(rng.randint(1, 20))
            case _:
                broken[at:at] = broken[at : at + rng.randint(1, 40)]
    return bytes(broken)


def sealed(rng: random.Random, data: bytes) -> bytes:
    """The first frame's header changed and its checksum made right again: past the first gate."""
    tag, header_bytes = data[3], int.from_bytes(data[4:6], "big")
    at = frames.PREFIX_BYTES + header_bytes
    header = mutated(rng, data[frames.PREFIX_BYTES : at])[: limits.HEADER_BYTES]
    body_bytes = int.from_bytes(data[6:10], "big")
    body = data[at + frames.MARKER_BYTES :][:body_bytes] if body_bytes else None
    if rng.randrange(4) == 0:
        tag = rng.randrange(256)
    return frames.encode_head(tag, header, body) + (body or b"")


def read(role: Role, phase: Phase, data: bytes, rng: random.Random) -> int:
    """Read it in random pieces; how many messages came out before the end or the error."""
    reader, count, at = Connection(role), 0, 0
    reader.phase, reader.blocks = phase, BLOCKS
    with contextlib.suppress(RemoteProtocolError):
        while at < len(data):
            buffer = reader.get_buffer()
            assert len(buffer) > 0
            size = min(len(buffer), len(data) - at, rng.choice((1, 3, 18, 100, 70_000)))
            buffer[:size] = data[at : at + size]
            count += len(reader.buffer_updated(size))
            at += size
    if at < len(data):
        assert reader.phase is Phase.CLOSED
        assert reader.receive_data(data) == []
    with contextlib.suppress(FrameError):
        reader.receive_eof()
    assert reader.phase is Phase.CLOSED
    assert len(reader._scratch) == 64 * limits.KIB
    return count


def test_random_bytes(role, phase):
    for seed in range(STREAMS):
        rng = random.Random(seed)
        data = rng.randbytes(rng.randint(0, 400))
        if rng.randrange(2):
            data = b"ss\x01" + data
        assert read(role, phase, data, rng) == 0, f"seed {seed}"


@pytest.mark.parametrize("change", [mutated, sealed], ids=["mutated", "sealed"])
def test_changed_frames(role, phase, change):
    legal = legal_frames(role, phase)
    survivors = 0
    for seed in range(STREAMS):
        rng = random.Random(seed)
        data = change(rng, rng.choice(legal)) + rng.choice(legal)
        try:
            survivors += read(role, phase, data, rng) > 0
        except Exception as error:
            raise AssertionError(f"seed {seed}: {data!r}") from error
    # Some must pass, or the changes test no more than the first gate.
    assert survivors > 0


def test_frames_that_lie_about_their_length(role, phase):
    for seed in range(STREAMS):
        rng = random.Random(seed)
        data = bytearray(rng.choice(legal_frames(role, phase)))
        data[4:10] = rng.randbytes(6)
        read(role, phase, bytes(data), rng)


def test_a_long_conversation_leaves_nothing_behind(role, phase):
    """Many legal frames one after the other, then garbage; memory stays one scratch buffer."""
    reader = Connection(role)
    reader.phase, reader.blocks = phase, BLOCKS
    heartbeat = frame(EXAMPLES[next(k for k in EXAMPLES if k.__name__ == "Heartbeat")])
    if phase is Phase.OPEN:
        assert len(reader.receive_data(heartbeat * STREAMS)) == STREAMS
        assert reader._filled == 0
    with pytest.raises(FrameError):
        reader.receive_data(bytes(100))
