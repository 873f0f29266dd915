"""Messages for tests: a small example of every kind, and strategies for all valid ones."""

from __future__ import annotations

import struct
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

from protocol.base import limits
from protocol.exact.replica import MISSED, part_slices
from protocol.exact.update import StepScalars
from protocol.spec.manifest import Block, TensorSpec
from protocol.wire import messages
from protocol.wire.connection import Encoded, encode
from protocol.wire.messages import Message, StateKind

BLOCKS = (
    Block(name="embed", kind="non_block", tensors=(TensorSpec(name="e", shape=(3,)),)),
    Block(name="layer.0", kind="block", tensors=(TensorSpec(name="w", shape=(2, 4)),)),
    Block(
        name="layer.1",
        kind="block",
        tensors=(TensorSpec(name="large", shape=(4 * limits.CHUNK_ELEMENTS + 5,)),),
    ),
    Block(name="nothing", kind="non_block", tensors=(TensorSpec(name="n", shape=(0, 7)),)),
)

DIGEST = "0123456789abcdef" * 4
PLACE = {"term": 1, "step": 2, "attempt": 0}
PAYLOAD = {**PLACE, "chunk": 0, "lo": 0, "hi": 4, "weight": 4.0}
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
        messages.NonFiniteSum(**PLACE, lo=0, hi=4, worker="w", block=1, device="gpu1"),
        messages.DeviceNote(device="gpu1", text="gone"),
        messages.Unready(run_id="r", reason="no data", own=False, exit_code=2),
        messages.StateRequest(run_id="r"),
        messages.StateChunk(**_STATE, block=1, chunk=0),
        messages.StepPlan(
            **PLACE, view=1, microbatches=8, subtrees=((0, 4), (4, 6)), uploads=7, owners=0,
            loss_scale=1.0
        ),
        messages.Credit(**PLACE, uploads=9),
        messages.BlockGradientPayload(**PAYLOAD, block=1),
        messages.NonBlockGradientPayload(**PAYLOAD, block=0),
        messages.AveragedBlockGradient(**PLACE, block=1, chunk=0),
        messages.AveragedNonBlockGradient(**PLACE, block=0, chunk=0),
        messages.CapturedRows(**PLACE, lo=0, hi=4, microbatch=2, chunk=0),
        messages.SubtreeLoss(
            **PLACE, lo=0, hi=4, loss_sum=2.5, weight=4.0, sums=b"", elapsed_ms=1.5
        ),
        messages.Commit(**PLACE, scalars=SCALARS, loss=0.25, averages_digest=DIGEST),
        messages.StepApplied(term=1, step=3, state_digest=DIGEST),
        messages.Assign(**PLACE, view=1, subtrees=((4, 6),)),
        messages.Cancel(**PLACE, subtrees=((4, 6),)),
        messages.EvalPlan(term=1, step=2, lo=0, hi=3),
        messages.EvalResult(term=1, step=2, part=0, sums={"correct": 3.0}),
        messages.ListenForPeers(run_id="r"),
        messages.PeerPort(run_id="r", port=7000, fingerprint=bytes(32)),
        messages.Peers(run_id="r"),
        messages.Linked(run_id="r", peer="w", mbit=940.0),
        messages.Unlinked(run_id="r", peer="w", reason="reset"),
        messages.Owners(run_id="r", term=1, number=1),
        messages.ChunkReduced(**PLACE, owners=1, block=1, chunk=0, digest=bytes(16)),
        messages.SumsArrived(**PLACE, owners=1, worker="w", lo=0, hi=4),
        messages.AverageDigests(**PLACE),
        messages.AveragesRequest(**PLACE),
        messages.AverageMismatch(**PLACE, owners=1, block=1, chunk=0, owner="w"),
        messages.PeerHello(name="w", to="v", nonce=bytes(32)),
        messages.PeerWelcome(),
        messages.PeerProbe(),
        messages.LinkTraffic(run_id="r"),
        messages.Heartbeat(),
        messages.Preparing(progress="read 1.00 GiB of 8.00 GiB, 9 s left"),
        messages.Halt(**PLACE, reason="non-finite"),
        messages.Continue(**PLACE),
        messages.Drain(),
        messages.EndRun(
            run_id="r", outcome="finished", reason="over", weights=DIGEST,
            metrics={"loss": 0.5, "ratio": None},
        ),
        messages.MemoryReturned(places=(0, 8192)),
        messages.StepEmbeddings(**PLACE, chunk=0, last=True),
        messages.Goodbye(reason="bye", retry=False, exit_code=0),
        messages.BlobRequest(run_id="r", digest=DIGEST, offset=4),
        messages.BlobChunk(run_id="r", digest=DIGEST, offset=4),
        messages.InnerPhaseProgress(**PLACE, replica=1, inner=3),
        messages.InnerCheckpointChunk(**PLACE, replica=1, inner=3, chunk=0, last=True),
        messages.InnerStateRequest(**PLACE, replica=1, own=True),
        messages.InnerStateChunk(**PLACE, replica=1, inner=3, own=True, last=True),
    )
}  # fmt: skip


def body_for(message: Message) -> Any:
    """Return a body that fits the message and `BLOCKS`; None if it carries none."""
    if message.body == "none":
        return None
    if message.body == "document":
        return b'{"a": 1}'
    if message.body == "bytes":
        return b"\x00\xffof a file"
    block, chunk = message.block, message.chunk  # type: ignore[attr-defined]
    chunk_part = BLOCKS[block].chunk_slice(chunk)
    if isinstance(message, messages.StateChunk):
        chunk_part = part_slices(message.kind, BLOCKS[block])[chunk]
    return np.arange(chunk_part.stop - chunk_part.start, dtype="<f4")


def frame(message: Message, body: Any = None) -> bytes:
    """Return the bytes of a message with a body that fits."""
    return flat(encode(message, body_for(message) if body is None else body))


def flat(encoded: Encoded) -> bytes:
    """Join all buffers."""
    return b"".join(bytes(buffer) for buffer in encoded.buffers)


# Strategies. Floats are drawn as bits, so every NaN can occur.

_number = st.integers(0, 2**63 - 1)
_printable = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))
_small = st.text(_printable, max_size=64)
_text = st.text(_printable, max_size=400)
_digest = st.text("0123456789abcdef", min_size=64, max_size=64)
_any_float = st.integers(0, 2**64 - 1).map(
    lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]
)
_weight = st.floats(0, allow_nan=False, allow_infinity=False)
_float32 = st.floats(0, 1, width=32)
_subtrees = st.lists(st.tuples(_number, _number), max_size=64).map(tuple)
_in_step = {"term": _number, "step": _number, "attempt": _number}
_of_chunk = {**_in_step, "block": _number, "chunk": _number, "owners": _number}
_payload = {**_of_chunk, "lo": _number, "hi": _number, "weight": _weight, "worker": _small}
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
        "release": _small, "name": _small, "backend": _small,
        "instance": st.text("0123456789abcdef", min_size=32, max_size=32),
        "nonce": _bytes32, "enrolled": st.booleans(), "devices": _devices,
        "duty": st.sampled_from(["train", "evaluate"]),
    },
    messages.Challenge: {"method": _small, "nonce": _bytes32, "proof": _bytes32},
    messages.Proof: {"proof": st.binary(max_size=64)},
    messages.Welcome: {
        "worker": _small, "term": _number,
        "heartbeat_interval_ms": st.integers(10, 60_000),
        "liveness_timeout_ms": st.integers(100, 600_000),
        "key": st.binary(max_size=32),
    },
    messages.StartRun: {
        "run_id": _small, "term": _number, "step": _number, "blobs": st.none() | _digest,
    },
    messages.Ready: {
        "run_id": _small, "backend": _small, "device": _small, "initial_digest": _digest,
        "step": _number, "state_digest": _digest, "signature": _digest, "signature_text": _text,
        "devices": _devices,
    },
    messages.Unready: {"run_id": _small, "reason": _text, "exit_code": st.integers(1, 125)},
    messages.StateRequest: {"run_id": _small},
    messages.StateChunk: {
        "run_id": _small, "block": _number, "chunk": _number, "step": _number,
        "kind": st.sampled_from(get_args(StateKind)),
        "optimizer_step": _number, "last": st.booleans(),
    },
    messages.StepPlan: {
        **_in_step, "view": _number, "subtrees": _subtrees,
        "microbatches": st.integers(1, limits.MICROBATCHES_PER_STEP), "uploads": _number,
        "owners": _number,
        "loss_scale": st.floats(1.0, limits.LOSS_SCALE_FACTOR),
        "phase": st.sampled_from(get_args(messages.StepPhase)),
    },
    messages.Credit: {**_in_step, "uploads": _number},
    messages.BlockGradientPayload: _payload,
    messages.NonBlockGradientPayload: _payload,
    messages.AveragedBlockGradient: _of_chunk,
    messages.AveragedNonBlockGradient: _of_chunk,
    messages.CapturedRows: {
        **_in_step, "lo": _number, "hi": _number, "microbatch": _number, "chunk": _number,
    },
    messages.SubtreeLoss: {
        **_in_step, "lo": _number, "hi": _number, "loss_sum": _any_float, "weight": _weight,
        "elapsed_ms": _weight, "sums": st.binary(max_size=16),
        "unlike": st.lists(_number, max_size=limits.UNLIKE_MICROBATCHES).map(tuple),
    },
    messages.StepEmbeddings: {**_in_step, "chunk": _number, "last": st.booleans()},
    messages.Commit: {
        **_in_step, "scalars": st.none() | _scalars, "loss": _any_float,
        "averages_digest": _digest,
    },
    messages.StepApplied: {
        "term": _number, "step": _number, "state_digest": _digest,
    },
    messages.NonFiniteSum: {
        **_in_step, "lo": _number, "hi": _number, "worker": st.none() | _small,
        "block": st.none() | _number, "device": _small,
    },
    messages.DeviceNote: {"device": _small, "text": _text},
    messages.Assign: {**_in_step, "view": _number, "subtrees": _subtrees},
    messages.Cancel: {**_in_step, "subtrees": _subtrees},
    messages.EvalPlan: {"term": _number, "step": _number, "lo": _number, "hi": _number},
    messages.EvalResult: {
        "term": _number, "step": _number, "part": _number,
        "sums": st.dictionaries(_small, _any_float, max_size=24),
    },
    messages.Heartbeat: {},
    messages.Preparing: {"progress": _text},
    messages.Halt: {**_in_step, "reason": _text},
    messages.Continue: _in_step,
    messages.Drain: {},
    messages.EndRun: {
        "run_id": _small, "outcome": st.sampled_from(get_args(messages.Outcome)), "reason": _text,
        "weights": st.none() | _digest,
        "metrics": st.dictionaries(_small, st.none() | _weight, max_size=4),
    },
    messages.MemoryReturned: {"places": st.lists(_number, max_size=64).map(tuple)},
    messages.Goodbye: {
        "reason": _text, "retry": st.booleans(), "exit_code": st.integers(0, 125)
    },
    messages.BlobRequest: {"run_id": _small, "digest": _digest, "offset": _number},
    messages.BlobChunk: {"run_id": _small, "digest": _digest, "offset": _number},
    messages.InnerPhaseProgress: {**_in_step, "replica": _number, "inner": _number},
    messages.InnerCheckpointChunk: {
        **_in_step, "replica": _number, "inner": _number, "chunk": _number, "last": st.booleans(),
    },
    messages.InnerStateRequest: {**_in_step, "replica": _number, "own": st.booleans()},
    messages.InnerStateChunk: {
        **_in_step, "replica": _number, "inner": _number, "own": st.booleans(),
        "last": st.booleans(),
    },
    messages.ListenForPeers: {"run_id": _small},
    messages.PeerPort: {
        "run_id": _small, "port": st.integers(0, 65_535), "fingerprint": _bytes32,
    },
    messages.Peers: {"run_id": _small},
    messages.Linked: {
        "run_id": _small, "peer": _small, "mbit": st.floats(1e-3, 1e9, allow_nan=False),
    },
    messages.Unlinked: {"run_id": _small, "peer": _small, "reason": _text},
    messages.Owners: {"run_id": _small, "term": _number, "number": st.integers(1, 2**63 - 1)},
    messages.ChunkReduced: {**_of_chunk, "digest": st.binary(min_size=16, max_size=16)},
    messages.SumsArrived: {
        **_in_step, "owners": _number, "worker": _small, "lo": _number, "hi": _number,
    },
    messages.AverageDigests: _in_step,
    messages.AveragesRequest: _in_step,
    messages.AverageMismatch: {**_of_chunk, "owner": _small},
    messages.PeerHello: {
        "name": _small, "to": _small, "nonce": _bytes32,
    },
    messages.PeerWelcome: {},
    messages.PeerProbe: {},
    messages.LinkTraffic: {"run_id": _small},
}  # fmt: skip

STRATEGIES = {kind: st.builds(kind, **fields) for kind, fields in _FIELDS.items()}


def messages_of(kinds: frozenset[type[Message]]) -> st.SearchStrategy[Message]:
    """Draw messages of these kinds; chunk indices refer to small chunks of `BLOCKS`."""

    def placed(kind: type[Message]) -> st.SearchStrategy[Message]:
        if kind.body != "values":
            return STRATEGIES[kind].filter(lambda m: len(m.to_header()) <= limits.HEADER_BYTES)
        non_block = (messages.NonBlockGradientPayload, messages.AveragedNonBlockGradient)
        blocks = [(0, 0), (3, 0)] if kind in non_block else [(1, 0), (2, BLOCKS[2].chunks - 1)]
        return st.builds(at_place, STRATEGIES[kind], st.sampled_from(blocks))

    def at_place(message: Message, chunk_id: tuple[int, int]) -> Message:
        block, chunk = chunk_id
        if isinstance(message, messages.StateChunk) and message.kind == MISSED:
            chunk = 0
        return message.model_copy(update={"block": block, "chunk": chunk})

    return st.sampled_from(sorted(kinds, key=lambda kind: kind.tag)).flatmap(placed)
