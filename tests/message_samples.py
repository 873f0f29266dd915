"""Messages for tests: a small example of every type, and strategies for all valid messages."""

from __future__ import annotations

import struct
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

from protocol.base import limits
from protocol.exact.replica import MISSED_UPDATES, part_slices
from protocol.exact.update import StepScalars
from protocol.spec.manifest import Block, TensorSpec
from protocol.wire import messages
from protocol.wire.connection import EncodedMessage, encode
from protocol.wire.messages import Message, StateKind

BLOCKS = (
    Block(name="embed", kind="non_block", tensors=(TensorSpec(name="e", shape=(3,)),)),
    Block(name="layer.0", kind="block", tensors=(TensorSpec(name="w", shape=(2, 4)),)),
    Block(
        name="layer.1",
        kind="block",
        tensors=(TensorSpec(name="large", shape=(4 * limits.CHUNK_ELEMENTS + 5,)),),
    ),
    Block(name="empty", kind="non_block", tensors=(TensorSpec(name="n", shape=(0, 7)),)),
)

DIGEST = "0123456789abcdef" * 4
STEP_ID = {"term": 1, "step": 2, "attempt": 0}
PAYLOAD = {**STEP_ID, "chunk": 0, "lo": 0, "hi": 4, "weight": 4.0}
SCALARS = StepScalars(
    learning_rate=0.5, clip=1.0, weight_decay=0.0, decay_factor=1.0, momentum=0.0, beta1=0.0,
    one_minus_beta1=1.0, beta2=0.0, one_minus_beta2=1.0, step_size=0.5, root_correction=1.0,
    epsilon=0.5,
)  # fmt: skip
_STATE = {"run_id": "r", "kind": "parameters", "step": 2, "optimizer_step": 2, "last": False}

EXAMPLES: dict[type[Message], Message] = {
    type(example): example
    for example in (
        messages.Hello(
            release="1", name="w", instance="0" * 32, backend="cpu", duty="train",
            nonce=bytes(32), enrolled=False,
        ),
        messages.Challenge(method="hmac-sha256", nonce=bytes(32), proof=bytes(32)),
        messages.Proof(proof=b""),
        messages.Welcome(
            worker="w", term=1, heartbeat_interval_ms=1000, liveness_timeout_ms=8000, key=b""
        ),
        messages.StartRun(run_id="r", term=1, step=0, blobs=None),
        messages.Ready(
            run_id="r", backend="cpu", device="d", initial_digest=DIGEST, step=2,
            state_digest=DIGEST, signature=DIGEST,
            signature_text="t",
        ),
        messages.NonFiniteSum(**STEP_ID, lo=0, hi=4, worker="w", block=1, device="gpu1"),
        messages.DeviceNote(device="gpu1", text="gone"),
        messages.Unready(run_id="r", reason="no data", own=False, exit_code=2),
        messages.StateRequest(run_id="r"),
        messages.StateChunk(**_STATE, block=1, chunk=0),
        messages.StepPlan(
            **STEP_ID, view=1, microbatches=8, subtrees=((0, 4), (4, 6)), uploads=7, owners=0,
            loss_scale=1.0
        ),
        messages.Credit(**STEP_ID, uploads=9),
        messages.BlockGradientPayload(**PAYLOAD, block=1),
        messages.NonBlockGradientPayload(**PAYLOAD, block=0),
        messages.AveragedBlockGradient(**STEP_ID, block=1, chunk=0),
        messages.AveragedNonBlockGradient(**STEP_ID, block=0, chunk=0),
        messages.CapturedRows(**STEP_ID, lo=0, hi=4, microbatch=2, chunk=0),
        messages.SubtreeLoss(
            **STEP_ID, lo=0, hi=4, loss_sum=2.5, weight=4.0, sums=b"", elapsed_ms=1.5
        ),
        messages.Commit(**STEP_ID, scalars=SCALARS, loss=0.25, averages_digest=DIGEST),
        messages.StepApplied(term=1, step=3, state_digest=DIGEST),
        messages.Assign(**STEP_ID, view=1, subtrees=((4, 6),)),
        messages.Cancel(**STEP_ID, subtrees=((4, 6),)),
        messages.EvalPlan(term=1, step=2, lo=0, hi=3),
        messages.EvalResult(term=1, step=2, part=0, sums={"correct": 3.0}),
        messages.ListenForPeers(run_id="r"),
        messages.PeerPort(run_id="r", port=7000, fingerprint=bytes(32)),
        messages.Peers(run_id="r"),
        messages.Linked(run_id="r", peer="w", mbit=940.0),
        messages.Unlinked(run_id="r", peer="w", reason="reset"),
        messages.Owners(run_id="r", term=1, number=1),
        messages.ChunkReduced(**STEP_ID, owners=1, block=1, chunk=0, digest=bytes(16)),
        messages.SumsArrived(**STEP_ID, owners=1, worker="w", lo=0, hi=4),
        messages.AverageDigests(**STEP_ID),
        messages.AveragesRequest(**STEP_ID),
        messages.AverageMismatch(**STEP_ID, owners=1, block=1, chunk=0, owner="w"),
        messages.PeerHello(name="w", to="v", nonce=bytes(32)),
        messages.PeerWelcome(),
        messages.PeerProbe(),
        messages.LinkTraffic(run_id="r"),
        messages.Heartbeat(),
        messages.Preparing(progress="read 1.00 GiB of 8.00 GiB, 9 s left"),
        messages.Halt(**STEP_ID, reason="non-finite"),
        messages.Continue(**STEP_ID),
        messages.Drain(),
        messages.EndRun(
            run_id="r", outcome="finished", reason="over", weights=DIGEST,
            metrics={"loss": 0.5, "ratio": None},
        ),
        messages.MemoryReturned(places=(0, 8192)),
        messages.StepEmbeddings(**STEP_ID, chunk=0, last=True),
        messages.Goodbye(reason="bye", retry=False, exit_code=0),
        messages.BlobRequest(run_id="r", digest=DIGEST, offset=4),
        messages.BlobChunk(run_id="r", digest=DIGEST, offset=4),
        messages.InnerPhaseProgress(**STEP_ID, replica=1, inner=3),
        messages.InnerCheckpointChunk(**STEP_ID, replica=1, inner=3, chunk=0, last=True),
        messages.InnerStateRequest(**STEP_ID, replica=1, own=True),
        messages.InnerStateChunk(**STEP_ID, replica=1, inner=3, own=True, last=True),
    )
}  # fmt: skip


def body_for(message: Message) -> Any:
    """Return a body that fits the message and `BLOCKS`; None if it carries none."""
    if message.body == "none":
        return None
    if message.body == "document":
        return b'{"a": 1}'
    if message.body == "bytes":
        return b"\x00\xffpart of a file"
    block, chunk = message.block, message.chunk  # type: ignore[attr-defined]
    chunk_slice = BLOCKS[block].chunk_slice(chunk)
    if isinstance(message, messages.StateChunk):
        chunk_slice = part_slices(message.kind, BLOCKS[block])[chunk]
    return np.arange(chunk_slice.stop - chunk_slice.start, dtype="<f4")


def frame(message: Message, body: Any = None) -> bytes:
    """Return the bytes of a message, with this body or one that fits the message."""
    return join_buffers(encode(message, body_for(message) if body is None else body))


def join_buffers(encoded: EncodedMessage) -> bytes:
    """Return the bytes of all buffers of an encoded message."""
    return b"".join(bytes(buffer) for buffer in encoded.buffers)


# Strategies.

_integer = st.integers(0, 2**63 - 1)
_printable = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))
_short_text = st.text(_printable, max_size=64)
_text = st.text(_printable, max_size=400)
_digest = st.text("0123456789abcdef", min_size=64, max_size=64)
# Drawn as bits, so that every NaN can occur.
_any_float = st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]
)
_weight = st.floats(0, allow_nan=False, allow_infinity=False)
_float32 = st.floats(0, 1, width=32)
_subtrees = st.lists(st.tuples(_integer, _integer), max_size=64).map(tuple)
_step_id = {"term": _integer, "step": _integer, "attempt": _integer}
_chunk_fields = {**_step_id, "block": _integer, "chunk": _integer, "owners": _integer}
_payload = {
    **_chunk_fields,
    "lo": _integer,
    "hi": _integer,
    "weight": _weight,
    "worker": _short_text,
}
_scalars = st.builds(
    StepScalars,
    **{
        name: _float32
        for name in StepScalars.model_fields
        if name not in {"epsilon", "group_clips", "group_scales"}
    },
    epsilon=st.floats(2.0**-20, 1, width=32),
    group_clips=st.lists(_float32, max_size=2).map(tuple),
    group_scales=st.lists(_float32, max_size=2).map(tuple),
)
_devices = st.integers(1, limits.DEVICES_PER_WORKER)
_bytes32 = st.binary(min_size=32, max_size=32)
_name = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True)

_FIELDS: dict[type[Message], dict[str, st.SearchStrategy[Any]]] = {
    messages.Hello: {
        "release": _short_text, "name": _short_text, "backend": _short_text,
        "instance": st.text("0123456789abcdef", min_size=32, max_size=32),
        "nonce": _bytes32, "enrolled": st.booleans(), "devices": _devices,
        "duty": st.sampled_from(["train", "evaluate"]),
    },
    messages.Challenge: {"method": _short_text, "nonce": _bytes32, "proof": _bytes32},
    messages.Proof: {"proof": st.binary(max_size=64)},
    messages.Welcome: {
        "worker": _short_text, "term": _integer,
        "heartbeat_interval_ms": st.integers(10, 60_000),
        "liveness_timeout_ms": st.integers(100, 600_000),
        "key": st.binary(max_size=32),
    },
    messages.StartRun: {
        "run_id": _short_text, "term": _integer, "step": _integer, "blobs": st.none() | _digest,
    },
    messages.Ready: {
        "run_id": _short_text, "backend": _short_text, "device": _short_text,
        "initial_digest": _digest, "step": _integer, "state_digest": _digest,
        "signature": _digest, "signature_text": _text, "devices": _devices,
    },
    messages.Unready: {"run_id": _short_text, "reason": _text, "exit_code": st.integers(1, 125)},
    messages.StateRequest: {"run_id": _short_text},
    messages.StateChunk: {
        "run_id": _short_text, "block": _integer, "chunk": _integer, "step": _integer,
        "kind": st.sampled_from(get_args(StateKind)),
        "optimizer_step": _integer, "last": st.booleans(),
    },
    messages.StepPlan: {
        **_step_id, "view": _integer, "subtrees": _subtrees,
        "microbatches": st.integers(1, limits.MICROBATCHES_PER_STEP), "uploads": _integer,
        "owners": _integer,
        "loss_scale": st.floats(1.0, limits.LOSS_SCALE_FACTOR),
        "phase": st.sampled_from(get_args(messages.StepPhase)),
    },
    messages.Credit: {**_step_id, "uploads": _integer},
    messages.BlockGradientPayload: _payload,
    messages.NonBlockGradientPayload: _payload,
    messages.AveragedBlockGradient: _chunk_fields,
    messages.AveragedNonBlockGradient: _chunk_fields,
    messages.CapturedRows: {
        **_step_id, "lo": _integer, "hi": _integer, "microbatch": _integer, "chunk": _integer,
    },
    messages.SubtreeLoss: {
        **_step_id, "lo": _integer, "hi": _integer, "loss_sum": _any_float, "weight": _weight,
        "elapsed_ms": _weight, "sums": st.binary(max_size=16),
        "unlike": st.lists(_integer, max_size=limits.UNLIKE_MICROBATCHES).map(tuple),
    },
    messages.StepEmbeddings: {**_step_id, "chunk": _integer, "last": st.booleans()},
    messages.Commit: {
        **_step_id, "scalars": st.none() | _scalars, "loss": _any_float,
        "averages_digest": _digest,
    },
    messages.StepApplied: {
        "term": _integer, "step": _integer, "state_digest": _digest,
    },
    messages.NonFiniteSum: {
        **_step_id, "lo": _integer, "hi": _integer, "worker": st.none() | _short_text,
        "block": st.none() | _integer, "device": _short_text,
    },
    messages.DeviceNote: {"device": _short_text, "text": _text},
    messages.Assign: {**_step_id, "view": _integer, "subtrees": _subtrees},
    messages.Cancel: {**_step_id, "subtrees": _subtrees},
    messages.EvalPlan: {"term": _integer, "step": _integer, "lo": _integer, "hi": _integer},
    messages.EvalResult: {
        "term": _integer, "step": _integer, "part": _integer,
        "sums": st.dictionaries(_short_text, _any_float, max_size=24),
    },
    messages.Heartbeat: {},
    messages.Preparing: {"progress": _text},
    messages.Halt: {**_step_id, "reason": _text},
    messages.Continue: _step_id,
    messages.Drain: {},
    messages.EndRun: {
        "run_id": _short_text, "outcome": st.sampled_from(get_args(messages.Outcome)),
        "reason": _text, "weights": st.none() | _digest,
        "metrics": st.dictionaries(_short_text, st.none() | _weight, max_size=4),
    },
    messages.MemoryReturned: {"places": st.lists(_integer, max_size=64).map(tuple)},
    messages.Goodbye: {
        "reason": _text, "retry": st.booleans(), "exit_code": st.integers(0, 125)
    },
    messages.BlobRequest: {"run_id": _short_text, "digest": _digest, "offset": _integer},
    messages.BlobChunk: {"run_id": _short_text, "digest": _digest, "offset": _integer},
    messages.InnerPhaseProgress: {**_step_id, "replica": _integer, "inner": _integer},
    messages.InnerCheckpointChunk: {
        **_step_id, "replica": _integer, "inner": _integer, "chunk": _integer,
        "last": st.booleans(),
    },
    messages.InnerStateRequest: {**_step_id, "replica": _integer, "own": st.booleans()},
    messages.InnerStateChunk: {
        **_step_id, "replica": _integer, "inner": _integer, "own": st.booleans(),
        "last": st.booleans(),
    },
    messages.ListenForPeers: {"run_id": _short_text},
    messages.PeerPort: {
        "run_id": _short_text, "port": st.integers(0, 65_535), "fingerprint": _bytes32,
    },
    messages.Peers: {"run_id": _short_text},
    messages.Linked: {
        "run_id": _short_text, "peer": _short_text, "mbit": st.floats(1e-3, 1e9, allow_nan=False),
    },
    messages.Unlinked: {"run_id": _short_text, "peer": _short_text, "reason": _text},
    messages.Owners: {"run_id": _short_text, "term": _integer, "number": st.integers(1, 2**63 - 1)},
    messages.ChunkReduced: {**_chunk_fields, "digest": st.binary(min_size=16, max_size=16)},
    messages.SumsArrived: {
        **_step_id, "owners": _integer, "worker": _short_text, "lo": _integer, "hi": _integer,
    },
    messages.AverageDigests: _step_id,
    messages.AveragesRequest: _step_id,
    messages.AverageMismatch: {**_chunk_fields, "owner": _short_text},
    messages.PeerHello: {
        "name": _short_text, "to": _short_text, "nonce": _bytes32,
    },
    messages.PeerWelcome: {},
    messages.PeerProbe: {},
    messages.LinkTraffic: {"run_id": _short_text},
}  # fmt: skip

STRATEGIES = {
    message_type: st.builds(message_type, **fields) for message_type, fields in _FIELDS.items()
}


def messages_of(message_types: frozenset[type[Message]]) -> st.SearchStrategy[Message]:
    """Draw messages of these types; chunk indices refer to small chunks of `BLOCKS`."""

    def messages_of_type(message_type: type[Message]) -> st.SearchStrategy[Message]:
        if message_type.body != "values":
            return STRATEGIES[message_type].filter(
                lambda m: len(m.to_header()) <= limits.HEADER_BYTES
            )
        non_block = (messages.NonBlockGradientPayload, messages.AveragedNonBlockGradient)
        chunk_ids = (
            [(0, 0), (3, 0)] if message_type in non_block else [(1, 0), (2, BLOCKS[2].chunks - 1)]
        )
        return st.builds(with_chunk, STRATEGIES[message_type], st.sampled_from(chunk_ids))

    def with_chunk(message: Message, chunk_id: tuple[int, int]) -> Message:
        block, chunk = chunk_id
        if isinstance(message, messages.StateChunk) and message.kind == MISSED_UPDATES:
            chunk = 0
        return message.model_copy(update={"block": block, "chunk": chunk})

    ordered_types = sorted(message_types, key=lambda message_type: message_type.tag)
    return st.sampled_from(ordered_types).flatmap(messages_of_type)
