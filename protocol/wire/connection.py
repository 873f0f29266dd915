"""The protocol without I/O: bytes in, messages or a typed error out; messages in, buffers out.

A transport gets a buffer with `get_buffer`, fills it, and calls `buffer_updated`; `receive_data`
does both for bytes that have already been read. A body is read directly into the array that is
summed later. Tables list the messages that are legal in each phase.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import Final, Literal, NamedTuple, Protocol
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from protocol.base import limits
from protocol.base.errors import FrameError, LocalProtocolError, OutOfOrder, VersionMismatch
from protocol.exact.reduction.codecs import body_bytes
from protocol.exact.replica import part_slices
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import Codec, Codecs
from protocol.wire import frames
from protocol.wire.messages import (
    Assign,
    AveragedBlockGradient,
    AveragedGradient,
    AverageDigests,
    AveragedNonBlockGradient,
    AverageMismatch,
    AveragesRequest,
    BlobChunk,
    BlobRequest,
    BlockGradientPayload,
    Cancel,
    CapturedRows,
    Challenge,
    ChunkReduced,
    Commit,
    Continue,
    Credit,
    DeviceNote,
    Drain,
    EndRun,
    EvalPlan,
    EvalResult,
    Goodbye,
    GradientPayload,
    Halt,
    Heartbeat,
    Hello,
    InnerCheckpointChunk,
    InnerPhaseProgress,
    InnerStateChunk,
    InnerStateRequest,
    Linked,
    LinkTraffic,
    ListenForPeers,
    MemoryReturned,
    Message,
    NonBlockGradientPayload,
    NonFiniteSum,
    Owners,
    PeerHello,
    PeerPort,
    PeerProbe,
    Peers,
    PeerWelcome,
    Preparing,
    Proof,
    Ready,
    StartRun,
    StateChunk,
    StateRequest,
    StepApplied,
    StepEmbeddings,
    StepPlan,
    SubtreeLoss,
    SumsArrived,
    Unlinked,
    Unready,
    Welcome,
    decode_message,
)

Role = Literal["coordinator", "worker", "listener", "client"]
"""Of two workers that exchange chunks, one is the listener and the other the client."""
Body = NDArray[np.uint8]


class Phase(Enum):
    """The phases of the handshake; before OPEN, only small headers and no bodies are accepted.

    Each of the four messages Hello, Challenge, Proof and Welcome is legal in one phase and leads to
    the next, so no message can precede the one that it answers.
    """

    GREETING = "greeting"
    CHALLENGING = "challenging"
    PROVING = "proving"
    ADMITTING = "admitting"
    OPEN = "open"
    CLOSED = "closed"


FROM_WORKER: Final[dict[Phase, frozenset[type[Message]]]] = {
    Phase.GREETING: frozenset({Hello, Goodbye}),
    Phase.CHALLENGING: frozenset({Goodbye}),
    Phase.PROVING: frozenset({Proof, Goodbye}),
    Phase.ADMITTING: frozenset({Goodbye}),
    Phase.OPEN: frozenset({
        Ready, Unready, StateChunk, BlockGradientPayload, NonBlockGradientPayload, SubtreeLoss,
        CapturedRows, NonFiniteSum, StepApplied, EvalResult, Heartbeat, Preparing, Drain, Goodbye,
        BlobRequest, InnerPhaseProgress, InnerCheckpointChunk, InnerStateRequest,
        PeerPort, Linked, LinkTraffic, Unlinked, AveragedBlockGradient, AveragedNonBlockGradient,
        ChunkReduced, SumsArrived, AveragesRequest, AverageMismatch, DeviceNote, MemoryReturned,
    }),
    Phase.CLOSED: frozenset(),
}  # fmt: skip

FROM_COORDINATOR: Final[dict[Phase, frozenset[type[Message]]]] = {
    Phase.GREETING: frozenset({Goodbye}),
    Phase.CHALLENGING: frozenset((Challenge, Goodbye)),
    Phase.PROVING: frozenset({Goodbye}),
    Phase.ADMITTING: frozenset({Welcome, Goodbye}),
    Phase.OPEN: frozenset({
        StartRun, StateRequest, StateChunk, StepPlan, AveragedBlockGradient,
        AveragedNonBlockGradient, Commit, Assign, Cancel, Credit, EvalPlan, Heartbeat, Halt,
        Continue, EndRun, Goodbye, BlobChunk,
        InnerStateChunk, ListenForPeers, Peers, Owners, BlockGradientPayload,
        NonBlockGradientPayload, AverageDigests, MemoryReturned, StepEmbeddings,
    }),
    Phase.CLOSED: frozenset(),
}  # fmt: skip

_BETWEEN_PEERS: Final[frozenset[type[Message]]] = frozenset(
    {
        BlockGradientPayload,
        NonBlockGradientPayload,
        AveragedBlockGradient,
        AveragedNonBlockGradient,
        PeerProbe,
        Heartbeat,
        Goodbye,
    }
)
FROM_CLIENT: Final[dict[Phase, frozenset[type[Message]]]] = {
    Phase.GREETING: frozenset({PeerHello}),
    Phase.CHALLENGING: frozenset(),
    Phase.PROVING: frozenset({Proof}),
    Phase.ADMITTING: frozenset(),
    Phase.OPEN: _BETWEEN_PEERS,
    Phase.CLOSED: frozenset(),
}
FROM_LISTENER: Final[dict[Phase, frozenset[type[Message]]]] = {
    Phase.GREETING: frozenset({Goodbye}),
    Phase.CHALLENGING: frozenset((Challenge, Goodbye)),
    Phase.PROVING: frozenset({Goodbye}),
    Phase.ADMITTING: frozenset({PeerWelcome, Goodbye}),
    Phase.OPEN: _BETWEEN_PEERS,
    Phase.CLOSED: frozenset(),
}
_LEGAL_MESSAGES: Final = {
    "coordinator": (FROM_WORKER, FROM_COORDINATOR),
    "worker": (FROM_COORDINATOR, FROM_WORKER),
    "listener": (FROM_CLIENT, FROM_LISTENER),
    "client": (FROM_LISTENER, FROM_CLIENT),
}
"""The messages that each role may receive, and those that it may send."""

_NEXT_PHASE: Final[dict[type[Message], Phase]] = {
    Hello: Phase.CHALLENGING,
    Challenge: Phase.PROVING,
    Proof: Phase.ADMITTING,
    Welcome: Phase.OPEN,
    PeerHello: Phase.CHALLENGING,
    PeerWelcome: Phase.OPEN,
    Goodbye: Phase.CLOSED,
}

_SHAREABLE: Final = (
    BlockGradientPayload, NonBlockGradientPayload, AveragedBlockGradient, AveragedNonBlockGradient,
)  # fmt: skip
"""Messages whose bodies may be in shared memory, since they are released within the step."""
_SCRATCH_BYTES: Final = 64 * limits.KIB
_HANDSHAKE_BUFFER_BYTES: Final = 2 * limits.UNAUTHENTICATED_HEADER_BYTES
"""Size of the receive buffer during the handshake, when there may be many connections at once."""


class SharedBodies(Protocol):
    """Memory that both ends of a connection map; see `protocol.machine.shared_segment`.

    Attributes:
        min_shared_bytes: Minimum length of a body in shared memory; shorter bodies go through the
            connection.
    """

    min_shared_bytes: int

    def copy(self, raw: memoryview) -> Body | None:
        """Return a copy in memory that the peer reads; None if too many copies wait there."""

    def lend(self, values: Body) -> int | None:
        """Return the offset of values in this end's memory, and keep them until `release`; None for
        values elsewhere."""

    def release(self, offsets: tuple[int, ...]) -> None:
        """Note that the peer no longer needs the values at these offsets."""

    def borrow(self, offset: int, length: int) -> Body:
        """Return the values that the peer has written at an offset."""

    def collect_unneeded(self, at_least: int = 1) -> tuple[int, ...]:
        """Return, once each, the offsets of borrowed values that are no longer used; empty if there
        are fewer than `at_least`."""


class ReceivedMessage(NamedTuple):
    """A message and its body, if it carries one."""

    message: Message
    body: Body | None


class EncodedMessage:
    """A message ready to be written, to one peer or to many.

    Attributes:
        message: The message.
        nbytes: Length of the frame, with the body also if that travels in shared memory.
    """

    def __init__(self, message: Message, raw: memoryview | None) -> None:
        self.message = message
        self._header = message.to_header()
        self._raw = raw
        self._copy: ref[Body] | None = None
        self.nbytes = frames.frame_bytes(self._header, raw)

    @cached_property
    def buffers(self) -> tuple[frames.Buffer, ...]:
        """Return the buffers to write. The checksum is computed when the first peer can take them,
        so queuing a gigabyte does not read all of it at once."""
        head = frames.encode_head(self.message.tag, self._header, self._raw)
        return (head,) if self._raw is None or not len(self._raw) else (head, self._raw)

    def encode_shared(self, memory: SharedBodies) -> bytes | None:
        """Return the frame of a message whose body is in shared memory.

        All peers on this machine use the same copy of the body. None if the body goes through the
        connection.

        Raises:
            SharedMemoryFull: There is not enough memory.
        """
        raw = self._raw
        if (
            not isinstance(self.message, _SHAREABLE)
            or raw is None
            or len(raw) < memory.min_shared_bytes
        ):
            return None
        values = self._copy() if self._copy is not None else None
        offset = memory.lend(np.frombuffer(raw, np.uint8) if values is None else values)
        if offset is None:
            values = memory.copy(raw)
            if values is None:
                return None
            self._copy = ref(values)
            offset = memory.lend(values)
            assert offset is not None, "the copy is in this memory"
        return frames.encode_shared(self.message.tag, self._header, len(raw), offset)


def _bytes_of(body: NDArray[np.generic] | bytes) -> memoryview:
    flat = body if isinstance(body, bytes) else np.ascontiguousarray(body).data
    return memoryview(flat).cast("B")


def encode(message: Message, body: NDArray[np.generic] | bytes | None = None) -> EncodedMessage:
    """Encode a message. The body is not copied: do not change it afterwards."""
    if (body is not None) != (message.body != "none"):
        raise LocalProtocolError(f"{type(message).__name__} with the wrong body")
    raw = None if body is None else _bytes_of(body)
    return EncodedMessage(message, raw)


class Connection:
    """One end of a connection. Not thread-safe.

    Attributes:
        phase: The phase of the handshake; each of its messages advances both ends.
        blocks: Blocks of the manifest, once it is known; from then on, a gradient's size is checked
            before its bytes are read. Reset when a worker becomes ready for another run.
        exchange: The codecs of gradients; set with the blocks.
        memory: Memory shared with the peer; None: all bodies go through the connection.
        shared_bytes_received: Total size of the bodies received through shared memory.
    """

    def __init__(self, role: Role) -> None:
        self.role: Role = role
        self.phase = Phase.GREETING
        self.blocks: tuple[Block, ...] | None = None
        self.exchange = Codecs()
        self.memory: SharedBodies | None = None
        self.shared_bytes_received = 0
        self._receivable, self._sendable = _LEGAL_MESSAGES[role]
        self._scratch = bytearray(_HANDSHAKE_BUFFER_BYTES)
        self._filled = 0
        self._body: Body | None = None
        self._body_filled = 0
        self._pending: tuple[frames.Prefix, bytes, Message] | None = None

    def send(self, message: Message | EncodedMessage) -> EncodedMessage:
        """Return the encoded message if it is legal to send it now."""
        frame = encode(message) if isinstance(message, Message) else message
        message_type = type(frame.message)
        if message_type not in self._sendable[self.phase]:
            raise LocalProtocolError(
                f"{self.role} sends {message_type.__name__} in {self.phase.value}"
            )
        self._advance(message_type)
        return frame

    @property
    def missing_body_bytes(self) -> int:
        """Number of bytes of the body in progress that have not been received; 0 between bodies."""
        return len(self._body) - self._body_filled if self._body is not None else 0

    def get_buffer(self) -> memoryview:
        """Return the buffer for the next received bytes; never empty."""
        if self._body is not None:
            return self._body.data[self._body_filled :]
        if self.phase is Phase.OPEN and len(self._scratch) < _SCRATCH_BYTES:
            scratch = bytearray(_SCRATCH_BYTES)
            scratch[: self._filled] = memoryview(self._scratch)[: self._filled]
            self._scratch = scratch
        return memoryview(self._scratch)[self._filled :]

    def buffer_updated(self, count: int) -> list[ReceivedMessage]:
        """Process `count` bytes that were written into the buffer from `get_buffer`.

        Raises:
            RemoteProtocolError: The peer broke the protocol; close the connection.
        """
        received: list[ReceivedMessage] = []
        try:
            if self._body is not None:
                self._body_filled += count
                self._finish_body(received)
            else:
                self._filled += count
                self._parse(received)
        except VersionMismatch as error:
            self._close()
            error.reader = self.role
            raise
        except Exception:
            self._close()
            raise
        return received

    def receive_data(self, data: frames.Buffer) -> list[ReceivedMessage]:
        """Return the messages that these bytes complete; see `buffer_updated`."""
        received: list[ReceivedMessage] = []
        view = memoryview(data)
        while view:
            buffer = self.get_buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            view = view[count:]
            received += self.buffer_updated(count)
        return received

    @property
    def buffered_bytes(self) -> int:
        """Size of the receive buffer and of the body in progress."""
        return len(self._scratch) + (len(self._body) if self._body is not None else 0)

    def receive_eof(self) -> None:
        """Process the end of the peer's data.

        Raises:
            FrameError: The data ended in the middle of a frame.
        """
        is_incomplete = self._filled or self._body is not None
        was_open = self.phase is not Phase.CLOSED
        self._close()
        if is_incomplete and was_open:
            raise FrameError("expected the rest of a frame, got the end of the connection")

    def _close(self) -> None:
        """Discard all further input: the buffer must never fill up."""
        self.phase = Phase.CLOSED
        self._body = self._pending = None
        self._filled = 0

    def _parse(self, received: list[ReceivedMessage]) -> None:
        position = 0
        view = memoryview(self._scratch)[: self._filled]
        while self._body is None and self.phase is not Phase.CLOSED:
            if len(view) - position < frames.PREFIX_BYTES:
                break
            prefix = frames.decode_prefix(view[position:], *self._frame_limits())
            if len(view) - position < prefix.head_bytes:
                break
            header = bytes(view[position + frames.PREFIX_BYTES :][: prefix.header_bytes])
            if prefix.body_bytes and not prefix.is_shared:
                marker = position + prefix.head_bytes - frames.MARKER_BYTES
                frames.check_marker(view[marker:], prefix.body_bytes)
            message = self._decode(prefix, header)
            position += prefix.head_bytes
            if prefix.is_shared:
                offset_bytes = bytes(view[position - frames.OFFSET_BYTES : position])
                self._accept_shared(prefix, header, message, offset_bytes, received)
                continue
            if message.body == "none" or not prefix.body_bytes:
                self._accept(prefix, header, message, None, received)
                continue
            position += self._start_body(prefix, header, message, view[position:], received)
        # Once closed, discard input: the buffer must never fill up.
        rest = b"" if self.phase is Phase.CLOSED else bytes(view[position:])
        view.release()
        self._scratch[: len(rest)] = rest
        self._filled = len(rest)

    def _start_body(
        self,
        prefix: frames.Prefix,
        header: bytes,
        message: Message,
        available: memoryview,
        received: list[ReceivedMessage],
    ) -> int:
        """Allocate the body and copy its available bytes; return their number."""
        self._body = np.empty(prefix.body_bytes, np.uint8)
        self._pending = (prefix, header, message)
        self._body_filled = min(len(available), prefix.body_bytes)
        self._body.data[: self._body_filled] = available[: self._body_filled]
        filled = self._body_filled
        self._finish_body(received)
        return filled

    def _finish_body(self, received: list[ReceivedMessage]) -> None:
        assert self._body is not None
        assert self._pending is not None
        if self._body_filled < len(self._body):
            return
        (prefix, header, message), body = self._pending, self._body
        self._body = self._pending = None
        self._accept(prefix, header, message, body, received)

    def _accept_shared(
        self,
        prefix: frames.Prefix,
        header: bytes,
        message: Message,
        offset_bytes: bytes,
        received: list[ReceivedMessage],
    ) -> None:
        """Accept a message whose body is in shared memory."""
        type_name = type(message).__name__
        if self.memory is None or not isinstance(message, _SHAREABLE) or not prefix.body_bytes:
            raise FrameError(
                f"{type_name}: expected the body in the frame, got one in shared memory"
            )
        if frames.checksum_of(header, offset_bytes) != prefix.checksum:
            raise FrameError(f"{type_name}: the checksum does not match the bytes")
        body = self.memory.borrow(frames.decode_offset(offset_bytes), prefix.body_bytes)
        self.shared_bytes_received += prefix.body_bytes
        received.append(ReceivedMessage(message, body))

    def _accept(
        self,
        prefix: frames.Prefix,
        header: bytes,
        message: Message,
        body: Body | None,
        received: list[ReceivedMessage],
    ) -> None:
        if frames.checksum_of(header, None if body is None else body.data) != prefix.checksum:
            raise FrameError(f"{type(message).__name__}: the checksum does not match the bytes")
        if body is None and message.body != "none":
            body = np.empty(0, np.uint8)
        self._advance(type(message))
        if isinstance(message, Ready):
            # Later frames in the same bytes must not be checked against an earlier run's manifest.
            self.blocks = None
        received.append(ReceivedMessage(message, body))

    def _frame_limits(self) -> tuple[int, int]:
        if self.phase is Phase.OPEN:
            return limits.HEADER_BYTES, limits.BODY_BYTES
        return limits.UNAUTHENTICATED_HEADER_BYTES, 0

    def _decode(self, prefix: frames.Prefix, header: bytes) -> Message:
        """Decode a message, and check that it is legal in this phase and has the right size."""
        message = decode_message(prefix.tag, header)
        message_type = type(message)
        if message_type not in self._receivable[self.phase]:
            raise OutOfOrder(
                f"{message_type.__name__} is not expected in the phase {self.phase.value}"
            )
        expected = self._expected_body_bytes(message)
        if expected is not None and prefix.body_bytes != expected:
            raise OutOfOrder(
                f"{message_type.__name__}: expected a body of {expected} bytes, got "
                f"{prefix.body_bytes}"
            )
        return message

    def _expected_body_bytes(self, message: Message) -> int | None:
        """Return the body size that the message must have; None if only the limit applies."""
        if message.body == "none":
            return 0
        if message.body in ("document", "bytes"):
            return None
        if self.blocks is None:
            raise OutOfOrder(f"{type(message).__name__} before the manifest is known")
        block, chunk = _block_and_chunk(message)
        state = message.kind if isinstance(message, StateChunk) else "parameters"
        pieces = part_slices(state, self.blocks[block]) if block < len(self.blocks) else []
        if chunk >= len(pieces):
            raise OutOfOrder(f"{type(message).__name__}: no chunk {chunk} of block {block}")
        kind = self.blocks[block].kind
        is_block = kind == "block"
        if _IS_BLOCK.get(type(message), is_block) != is_block:
            raise OutOfOrder(f"{type(message).__name__}: block {block} is of type {kind!r}")
        elements = pieces[chunk].stop - pieces[chunk].start
        return body_bytes(codec_of(message, self.exchange), elements)

    def _advance(self, message_type: type[Message]) -> None:
        """Advance the handshake; the same messages advance both sides."""
        self.phase = _NEXT_PHASE.get(message_type, self.phase)


def codec_of(message: Message, exchange: Codecs) -> Codec:
    """Return the codec of a message's values; those of a state are always float32."""
    if isinstance(message, GradientPayload):
        return exchange.precision
    return exchange.averages if isinstance(message, AveragedGradient) else "float32"


def _block_and_chunk(message: Message) -> tuple[int, int]:
    assert isinstance(
        message,
        BlockGradientPayload
        | NonBlockGradientPayload
        | AveragedBlockGradient
        | AveragedNonBlockGradient
        | StateChunk,
    )
    return message.block, message.chunk


_IS_BLOCK: Final[dict[type[Message], bool]] = {
    BlockGradientPayload: True,
    NonBlockGradientPayload: False,
    AveragedBlockGradient: True,
    AveragedNonBlockGradient: False,
}
