"""The connection without I/O: every reader gives the same events, and each side enforces the
order of messages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.base import limits
from protocol.base.errors import FrameError, LocalProtocolError, OutOfOrder, RemoteProtocolError
from protocol.spec.sections.exchange import ExchangeSpec
from protocol.wire import frames, messages
from protocol.wire.connection import (
    FROM_CLIENT,
    FROM_COORDINATOR,
    FROM_LISTENER,
    FROM_WORKER,
    Connection,
    Phase,
    encode,
)
from protocol.wire.messages import MESSAGES, Goodbye, Heartbeat
from tests.message_samples import (
    BLOCKS,
    EXAMPLES,
    PAYLOAD,
    body_for,
    frame,
    join_buffers,
    messages_of,
)

KINDS = sorted(MESSAGES.values(), key=lambda kind: kind.tag)
PEER_ROLE = {
    "coordinator": "worker", "worker": "coordinator", "client": "listener", "listener": "client",
}  # fmt: skip
TABLE = {
    "worker": FROM_WORKER, "coordinator": FROM_COORDINATOR, "client": FROM_CLIENT,
    "listener": FROM_LISTENER,
}  # fmt: skip

ONLY_WORKER = {
    "Hello", "Proof", "Ready", "Unready", "CapturedRows",
    "SubtreeLoss", "StepApplied", "EvalResult", "Drain", "BlobRequest", "PeerPort",
    "Linked", "LinkTraffic", "Unlinked", "ChunkReduced", "SumsArrived",
    "AveragesRequest", "AverageMismatch", "InnerPhaseProgress", "InnerCheckpointChunk",
    "InnerStateRequest", "NonFiniteSum", "DeviceNote", "Preparing",
}  # fmt: skip
GRADIENTS = {
    "BlockGradientPayload", "NonBlockGradientPayload", "AveragedBlockGradient",
    "AveragedNonBlockGradient",
}  # fmt: skip
BOTH = {*GRADIENTS, "StateChunk", "Heartbeat", "Goodbye", "MemoryReturned"}
BETWEEN_WORKERS = {*GRADIENTS, "PeerProbe", "Heartbeat", "Goodbye"}
IN_HANDSHAKE = {
    ("worker", Phase.GREETING): {"Hello", "Goodbye"},
    ("worker", Phase.CHALLENGING): {"Goodbye"},
    ("worker", Phase.PROVING): {"Proof", "Goodbye"},
    ("worker", Phase.ADMITTING): {"Goodbye"},
    ("coordinator", Phase.GREETING): {"Goodbye"},
    ("coordinator", Phase.CHALLENGING): {"Challenge", "Goodbye"},
    ("coordinator", Phase.PROVING): {"Goodbye"},
    ("coordinator", Phase.ADMITTING): {"Welcome", "Goodbye"},
    ("client", Phase.GREETING): {"PeerHello"},
    ("client", Phase.CHALLENGING): set(),
    ("client", Phase.PROVING): {"Proof"},
    ("client", Phase.ADMITTING): set(),
    ("listener", Phase.GREETING): {"Goodbye"},
    ("listener", Phase.CHALLENGING): {"Challenge", "Goodbye"},
    ("listener", Phase.PROVING): {"Goodbye"},
    ("listener", Phase.ADMITTING): {"PeerWelcome", "Goodbye"},
}

LIVE_PHASES = [phase for phase in Phase if phase is not Phase.CLOSED]

each_role = pytest.mark.parametrize("role", list(PEER_ROLE))


def connection(role, phase=Phase.OPEN):
    endpoint = Connection(role)
    endpoint.phase = phase
    endpoint.blocks = BLOCKS
    return endpoint


def comparable_events(received):
    """Return events in a form that compares bit for bit."""
    return [
        (type(message), message.to_header(), None if body is None else body.tobytes())
        for message, body in received
    ]


def read_at_once(reader, data):
    return comparable_events(reader.receive_data(data))


def read_in_pieces(reader, data, sizes):
    """Read through `get_buffer` and `buffer_updated`, as a transport does."""
    events, offset, size_index = [], 0, 0
    while offset < len(data):
        buffer = reader.get_buffer()
        assert len(buffer) > 0
        count = min(sizes[size_index % len(sizes)], len(buffer), len(data) - offset)
        buffer[:count] = data[offset : offset + count]
        events += reader.buffer_updated(count)
        offset, size_index = offset + count, size_index + 1
    return comparable_events(events)


def is_legal(role, name, phase):
    if phase is Phase.CLOSED:
        return False
    if phase is not Phase.OPEN:
        return name in IN_HANDSHAKE[role, phase]
    if role in {"client", "listener"}:
        return name in BETWEEN_WORKERS
    handshake = {"Hello", "Challenge", "Proof", "Welcome", "PeerHello", "PeerWelcome", "PeerProbe"}
    is_own_message = (name in ONLY_WORKER) == (role == "worker")
    return name not in handshake and (name in BOTH or is_own_message)


# The readers.


@st.composite
def streams(draw):
    """Draw a reader, and the messages and bytes that it reads after the handshake."""
    reader = draw(st.sampled_from(["coordinator", "worker"]))
    kinds = TABLE[PEER_ROLE[reader]][Phase.OPEN] - {Goodbye}
    messages_sent = draw(st.lists(messages_of(kinds), max_size=6))
    # After a Ready, sizes are unknown until the owner has seen the manifest.
    messages_sent.sort(key=lambda message: isinstance(message, messages.Ready))
    has_goodbye = draw(st.booleans())
    if has_goodbye:
        messages_sent.append(EXAMPLES[Goodbye])
    return reader, messages_sent, b"".join(frame(message) for message in messages_sent)


@settings(deadline=None, max_examples=40)
@given(streams(), st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_every_reader_gives_the_same_events(stream, sizes):
    role, messages_sent, data = stream
    expected = [
        (
            type(message),
            message.to_header(),
            None if (body := body_for(message)) is None else bytes(memoryview(body).cast("B")),
        )
        for message in messages_sent
    ]
    assert read_at_once(connection(role), data) == expected
    assert read_in_pieces(connection(role), data, [1]) == expected
    assert read_in_pieces(connection(role), data, sizes) == expected
    assert read_in_pieces(connection(role), data, [2**20]) == expected


@settings(deadline=None)
@given(streams(), st.data())
def test_trailing_bytes_wait_for_their_rest(stream, data):
    role, messages_sent, whole_stream = stream
    if messages_sent and isinstance(messages_sent[-1], Goodbye):
        return
    tail = frame(EXAMPLES[Heartbeat])
    split = data.draw(st.integers(1, len(tail) - 1))
    reader = connection(role)
    assert len(reader.receive_data(whole_stream + tail[:split])) == len(messages_sent)
    assert read_at_once(reader, tail[split:]) == [(Heartbeat, b"\x80", None)]
    reader.receive_eof()


def test_welcome_and_later_messages_may_arrive_together():
    messages_sent = [EXAMPLES[kind] for kind in (messages.Welcome, messages.StartRun)]
    data = b"".join(frame(message) for message in messages_sent)
    for sizes in ([len(data)], [1], [7, 60]):
        reader = connection("worker", Phase.ADMITTING)
        kinds = [kind for kind, _, _ in read_in_pieces(reader, data, sizes)]
        assert kinds == [messages.Welcome, messages.StartRun]
        assert reader.phase is Phase.OPEN


@pytest.mark.parametrize(
    ("role", "phase", "kinds"),
    [
        ("coordinator", Phase.GREETING, (messages.Hello, messages.Proof)),
        ("worker", Phase.GREETING, (messages.Challenge,)),
        ("worker", Phase.CHALLENGING, (messages.Challenge, messages.Welcome)),
        ("coordinator", Phase.PROVING, (messages.Proof, messages.Ready)),
    ],
)
def test_answer_before_its_request_is_refused(role, phase, kinds):
    """All messages arrive in one read, before the first can be answered."""
    data = b"".join(frame(EXAMPLES[kind]) for kind in kinds)
    with pytest.raises((OutOfOrder, FrameError)):
        connection(role, phase).receive_data(data)


def test_large_chunks_are_complete_in_every_reader():
    chunk = messages.BlockGradientPayload(**PAYLOAD, block=2)
    body = np.random.default_rng(0).integers(0, 256, limits.BODY_BYTES, np.uint8)
    data = join_buffers(encode(chunk, body)) * 2
    expected = [(type(chunk), chunk.to_header(), body.tobytes())] * 2
    assert read_at_once(connection("coordinator"), data) == expected
    assert read_in_pieces(connection("coordinator"), data, [65_537]) == expected
    assert read_in_pieces(connection("coordinator"), data, [3, 2**22 + 1]) == expected


def test_a_nan_in_a_body_keeps_its_bits():
    bits = np.array([0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x80000000] * 2, np.uint32)
    (received,) = connection("coordinator").receive_data(
        join_buffers(encode(EXAMPLES[messages.BlockGradientPayload], bits.view("<f4")))
    )
    assert received.body is not None
    assert received.body.view(np.uint32).tolist() == bits.tolist()


# Broken streams.


@pytest.mark.parametrize("kind", [messages.BlockGradientPayload, messages.SubtreeLoss])
def test_end_in_the_middle_of_a_frame_is_an_error(kind):
    data = frame(EXAMPLES[Heartbeat]) + frame(EXAMPLES[kind])
    boundaries = {0, len(frame(EXAMPLES[Heartbeat])), len(data)}
    for split in range(len(data) + 1):
        reader = connection("coordinator")
        assert len(reader.receive_data(data[:split])) == sum(0 < n <= split for n in boundaries)
        if split in boundaries:
            reader.receive_eof()
        else:
            with pytest.raises(FrameError, match="rest of a frame"):
                reader.receive_eof()
        assert reader.phase is Phase.CLOSED


@pytest.mark.parametrize(
    "kind", [messages.BlockGradientPayload, messages.StepApplied, messages.Ready]
)
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_flipped_bits_anywhere_are_detected(kind, mask):
    data = frame(EXAMPLES[kind])
    for offset in range(len(data)):
        flipped_frame = bytearray(data)
        flipped_frame[offset] ^= mask
        reader = connection("coordinator")
        with pytest.raises(RemoteProtocolError):  # noqa: PT012 -- a longer frame fails at its end
            assert reader.receive_data(flipped_frame) == []
            reader.receive_eof()
        assert reader.phase is Phase.CLOSED


def test_nothing_is_read_after_goodbye_or_an_error():
    reader = connection("coordinator")
    trailing = bytes(3 * 64 * limits.KIB)
    assert len(reader.receive_data(frame(EXAMPLES[Goodbye]) + trailing)) == 1
    assert reader.receive_data(trailing) == []
    assert len(reader.get_buffer()) > 0
    reader.receive_eof()
    reader = connection("coordinator")
    with pytest.raises(FrameError):
        reader.receive_data(trailing)
    assert reader.receive_data(frame(EXAMPLES[Heartbeat]) + trailing) == []


# Messages that each side may send in each phase.


@each_role
@pytest.mark.parametrize("phase", LIVE_PHASES)
def test_both_sides_agree_on_legal_messages(role, phase):
    for kind in KINDS:
        check_agreement(role, kind, phase)


def check_agreement(role, kind, phase):
    """Check that sender and receiver agree on whether one message is legal."""
    sender, reader = connection(role, phase), connection(PEER_ROLE[role], phase)
    message = EXAMPLES[kind]
    encoded = encode(message, body_for(message))
    if is_legal(role, kind.__name__, phase):
        sender.send(encoded)
        assert [event[0] for event in read_at_once(reader, join_buffers(encoded))] == [kind]
        assert sender.phase is reader.phase
        return
    with pytest.raises(LocalProtocolError, match=f"{role} sends {kind.__name__}"):
        sender.send(encoded)
    assert sender.phase is phase
    # For an unauthenticated body or large header, the size alone is a reason to refuse.
    with pytest.raises(OutOfOrder if phase is Phase.OPEN else (OutOfOrder, FrameError)):
        reader.receive_data(join_buffers(encoded))
    assert reader.phase is Phase.CLOSED


@each_role
def test_messages_of_later_phases_are_refused_before_the_handshake(role):
    for kind in KINDS:
        if not is_legal(PEER_ROLE[role], kind.__name__, Phase.GREETING):
            check_refusal(role, kind)


def check_refusal(role, kind):
    """Check that the header alone is refused, as if the message had no body."""
    header = EXAMPLES[kind].to_header()
    if len(header) > limits.UNAUTHENTICATED_HEADER_BYTES:
        header = header[: limits.UNAUTHENTICATED_HEADER_BYTES]
        expected = "msgpack map"
    else:
        expected = f"{kind.__name__} is not expected in the phase greeting"
    with pytest.raises(RemoteProtocolError, match=expected):
        Connection(role).receive_data(frames.encode_head(kind.tag, header, None))


def test_nothing_is_sent_after_goodbye():
    sender = connection("worker")
    sender.send(EXAMPLES[Goodbye])
    for kind in KINDS:
        with pytest.raises(LocalProtocolError):
            sender.send(encode(EXAMPLES[kind], body_for(EXAMPLES[kind])))


def test_wrong_bodies_are_local_errors():
    with pytest.raises(LocalProtocolError, match="with the wrong body"):
        encode(EXAMPLES[Heartbeat], b"x")
    with pytest.raises(LocalProtocolError, match="with the wrong body"):
        encode(EXAMPLES[messages.BlockGradientPayload])
    with pytest.raises(LocalProtocolError, match="over the limits"):
        encode(EXAMPLES[messages.StartRun], bytes(limits.BODY_BYTES + 1))
    with pytest.raises(LocalProtocolError, match="with the wrong body"):
        connection("worker").send(EXAMPLES[messages.BlockGradientPayload])


# Bodies refused after the header.


def head_of(message, body_bytes):
    """Return the frame without its body."""
    return frames.encode_head(message.tag, message.to_header(), bytes(body_bytes))


def missed_updates(**changes):
    """Return missed updates of a block with one tensor."""
    example = EXAMPLES[messages.StateChunk]
    return example.model_copy(update={"kind": "missed_updates", "block": 1, **changes})


def payload(**changes):
    return messages.BlockGradientPayload(**{**PAYLOAD, "block": 1, **changes})


@pytest.mark.parametrize(
    ("message", "body_bytes", "text"),
    [
        (payload(block=4), 32, "no chunk 0 of block 4"),
        (payload(block=2**62), 32, "no chunk 0 of block"),
        (payload(chunk=1), 32, "no chunk 1 of block 1"),
        (payload(block=2, chunk=5), 20, "no chunk 5 of block 2"),
        (payload(block=0), 12, "block 0 is of type 'non_block'"),
        (
            EXAMPLES[messages.NonBlockGradientPayload].model_copy(update={"block": 1}),
            32,
            "type 'block'",
        ),
        (payload(), 28, "a body of 32 bytes, got 28"),
        (payload(), 33, "a body of 32 bytes, got 33"),
        (payload(), 64, "a body of 32 bytes, got 64"),
        (payload(), 0, "a body of 32 bytes, got 0"),
        (payload(block=2, chunk=4), limits.BODY_BYTES, "a body of 20 bytes"),
        (EXAMPLES[messages.StateChunk], 12, "a body of 32 bytes, got 12"),
        (missed_updates(), 32, "a body of 4 bytes, got 32"),
        (missed_updates(chunk=1), 4, "no chunk 1 of block 1"),
        (missed_updates(block=4), 4, "no chunk 0 of block 4"),
        (EXAMPLES[Heartbeat], 1, "a body of 0 bytes, got 1"),
    ],
)
def test_body_of_the_wrong_size_is_refused_before_it_is_read(message, body_bytes, text):
    reader = connection("coordinator")
    with pytest.raises(OutOfOrder, match=text):
        reader.receive_data(head_of(message, body_bytes))
    assert reader._body is None


@pytest.mark.parametrize(
    ("role", "exchange", "kind", "body_bytes"),
    [
        ("coordinator", {"precision": "bfloat16"}, messages.BlockGradientPayload, 16),
        ("coordinator", {"averages": "bfloat16"}, messages.BlockGradientPayload, 32),
        ("worker", {"averages": "bfloat16"}, messages.AveragedBlockGradient, 16),
        ("worker", {"precision": "bfloat16"}, messages.AveragedBlockGradient, 32),
        ("worker", {"precision": "bfloat16", "averages": "bfloat16"}, messages.StateChunk, 32),
    ],
)
def test_gradients_are_as_long_as_the_run_s_exchange_says(role, exchange, kind, body_bytes):
    reader = connection(role)
    reader.exchange = ExchangeSpec(**exchange).codecs
    with pytest.raises(OutOfOrder, match=f"a body of {body_bytes} bytes, got {48 - body_bytes}"):
        reader.receive_data(head_of(EXAMPLES[kind], 48 - body_bytes))
    reader = connection(role)
    reader.exchange = ExchangeSpec(**exchange).codecs
    body = np.zeros(body_bytes, np.uint8)
    assert len(reader.receive_data(join_buffers(encode(EXAMPLES[kind], body)))) == 1


def test_gradients_before_the_manifest_are_refused():
    reader = connection("coordinator")
    reader.blocks = None
    with pytest.raises(OutOfOrder, match="before the manifest is known"):
        reader.receive_data(head_of(payload(), 32))


def test_data_after_ready_ignores_an_earlier_manifest():
    reader = connection("coordinator")
    ready, state = frame(EXAMPLES[messages.Ready]), frame(EXAMPLES[messages.StateChunk])
    with pytest.raises(OutOfOrder, match="before the manifest is known"):
        reader.receive_data(ready + state)


def test_a_block_without_elements_has_an_empty_body():
    message = messages.NonBlockGradientPayload(**PAYLOAD, block=3)
    (received,) = connection("coordinator").receive_data(
        join_buffers(encode(message, np.empty(0, np.float32)))
    )
    assert received.body is not None
    assert received.body.nbytes == 0


@pytest.mark.parametrize("phase", [phase for phase in LIVE_PHASES if phase is not Phase.OPEN])
@each_role
def test_unauthenticated_peers_may_not_send_bodies_or_large_headers(role, phase):
    reader = connection(role, phase)
    with pytest.raises(FrameError, match="a body of <= 0 bytes, got 1"):
        reader.receive_data(frames.encode_head(1, b"\x80", b"x")[: frames.PREFIX_BYTES])
    reader = connection(role, phase)
    size = limits.UNAUTHENTICATED_HEADER_BYTES + 1
    with pytest.raises(FrameError, match=f"a header of <= 256 bytes, got {size}"):
        reader.receive_data(frames.encode_head(1, bytes(size), None)[: frames.PREFIX_BYTES])


# Bodies are not copied.


def test_body_is_read_into_the_array_that_the_owner_receives():
    message = payload()
    head, raw = encode(message, np.arange(8, dtype="<f4")).buffers
    reader = connection("coordinator")
    assert reader.receive_data(head) == []
    buffer = np.frombuffer(reader.get_buffer(), np.uint8)
    assert buffer.nbytes == 32
    buffer[:] = np.frombuffer(raw, np.uint8)
    (received,) = reader.buffer_updated(32)
    assert received.body is not None
    assert np.shares_memory(received.body, buffer)
    assert received.body.view("<f4").tolist() == list(range(8))
    # The next message goes to another buffer: the receiver owns this one.
    assert not np.shares_memory(np.frombuffer(reader.get_buffer(), np.uint8), buffer)


def test_body_is_sent_from_the_array_of_the_caller():
    values = np.arange(8, dtype="<f4")
    encoded = encode(payload(), values)
    assert np.shares_memory(np.frombuffer(encoded.buffers[1], np.uint8), values)
    assert encoded.nbytes == len(join_buffers(encoded))
    assert connection("worker").send(encoded) is encoded
