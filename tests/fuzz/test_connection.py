"""Broken frames against both sides of a connection, before and after authentication.

For any input, only RemoteProtocolError escapes, and memory stays constant. 20,000 frames by
default, a million with `-m slow`; `SAMESTEP_FUZZ_SEED` selects others. A failure names the seed
that reproduces its frame.
"""

from __future__ import annotations

import contextlib
import os
import random

import pytest

from protocol.base import limits
from protocol.base.errors import FrameError, RemoteProtocolError
from protocol.wire.connection import Connection, Phase
from tests.fuzz.handshakes import STATES, connect_until, legal_frames
from tests.fuzz.mutations import MUTATIONS
from tests.message_samples import EXAMPLES, frame
from tests.resident_memory import MIB, measured_growth

SEED = int(os.environ.get("SAMESTEP_FUZZ_SEED", "0"))
MEMORY_GROWTH_BYTES = 32 * MIB
READ_SIZES = (1, 3, 18, 100, *[70_000] * 12)
"""Bytes per read; mostly more than a frame, which is fast."""

each_role_and_phase = pytest.mark.parametrize(
    ("role", "phase"),
    STATES,
    ids=lambda value: value if isinstance(value, str) else value.value,
)
COMBINATION_COUNT = len(STATES) * len(MUTATIONS)


def count_messages(reader: Connection, data: bytes, rng: random.Random) -> int:
    """Read the data in pieces; return the number of messages before the end or the error."""
    count = offset = 0
    read_bytes = rng.choice(READ_SIZES)
    with contextlib.suppress(RemoteProtocolError):
        while offset < len(data):
            buffer = reader.get_buffer()
            assert len(buffer) > 0
            size = min(len(buffer), len(data) - offset, read_bytes)
            buffer[:size] = data[offset : offset + size]
            count += len(reader.buffer_updated(size))
            offset += size
    if offset < len(data):
        assert reader.phase is Phase.CLOSED
        assert reader.receive_data(data) == []
    with contextlib.suppress(FrameError):
        reader.receive_eof()
    assert reader.phase is Phase.CLOSED
    assert reader.buffered_bytes <= 64 * limits.KIB
    return count


def count_parsed_messages(role, phase, frames_per_mutation):
    """Read this many frames of each mutation; return the numbers of parsed messages."""
    peer_frames = legal_frames(role, phase)
    parsed_counts = dict.fromkeys((mutation.__name__ for mutation in MUTATIONS), 0)
    for mutation in MUTATIONS:
        for number in range(SEED, SEED + frames_per_mutation):
            rng = random.Random(number)
            data = mutation(rng, peer_frames)
            try:
                count = count_messages(
                    connect_until(role, phase), data + rng.choice(peer_frames), rng
                )
            except Exception as error:
                raise AssertionError(f"{mutation.__name__}, seed {number}: {data!r}") from error
            parsed_counts[mutation.__name__] += count
    return parsed_counts


@each_role_and_phase
@pytest.mark.parametrize(
    "frames",  # in all tests together, the same number for each role, phase and mutation
    [
        pytest.param(20_016, id="20,000"),
        pytest.param(200_016, marks=pytest.mark.slow, id="200,000"),
        pytest.param(1_000_008, marks=[pytest.mark.slow, pytest.mark.release], id="million"),
    ],
)
def test_broken_frames_raise_protocol_errors_in_constant_memory(role, phase, frames):
    count_parsed_messages(role, phase, 20)
    with measured_growth() as growth:
        parsed_counts = count_parsed_messages(role, phase, frames // COMBINATION_COUNT)
    assert growth.peak_bytes <= MEMORY_GROWTH_BYTES
    if len(legal_frames(role, phase)) == 1:
        return  # a second message is not legal, so nothing after the first is parsed
    # Some frames must be parsed, or the mutations test only the checks of prefix and checksum.
    assert parsed_counts["random_bytes"] < parsed_counts["mutate_and_reseal"]
    assert parsed_counts["mutate_fields"] > 0


@each_role_and_phase
def test_long_conversation_does_not_grow_memory(role, phase):
    """Read many legal frames, then garbage."""
    reader = connect_until(role, phase)
    heartbeat = frame(EXAMPLES[next(k for k in EXAMPLES if k.__name__ == "Heartbeat")])
    with measured_growth() as growth:
        if phase is Phase.OPEN:
            for _ in range(10):
                assert len(reader.receive_data(heartbeat * 400)) == 400
        with pytest.raises(FrameError):
            reader.receive_data(bytes(100))
    assert growth.peak_bytes <= MEMORY_GROWTH_BYTES
