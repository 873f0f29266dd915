"""All messages, as one tagged union of frozen models.

A message is the header of a frame. Some have a body after it: raw float32 for gradients and state,
a JSON document for the run spec and the manifest, a file's bytes for a blob. `term` is the
coordinator's term: a worker refuses a term below the highest that it has seen. `step` and `attempt`
count from 0; a step that restarts has the next attempt.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.base import limits
from protocol.base.errors import MessageError
from protocol.base.fields import Bytes32, Digest, Duty, Number, ShortText, Text
from protocol.exact.reduction.reducer import NonFinite
from protocol.exact.reduction.tree import Subtree
from protocol.exact.update import StepScalars

SubtreeList = Annotated[tuple[tuple[Number, Number], ...], Field(max_length=64)]
BodyRule = Literal["none", "values", "document", "bytes"]
StateKind = Literal[
    "parameters", "first_moment", "second_moment", "third_moment", "factors", "average",
    "missed_updates",
]  # fmt: skip
StepPhase = Literal["embeddings", "gradients"]
"""The result of an attempt: a step whose loss couples all samples collects embeddings first."""
Outcome = Literal["finished", "drained", "failed"]
"""How a run ended."""


class Message(BaseModel):
    """Base of all messages.

    Attributes:
        tag: The number of the class on the wire.
        body: The content of the body; none if the message has no body.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tag: ClassVar[int]
    body: ClassVar[BodyRule] = "none"

    def to_header(self) -> bytes:
        """Return the header of the message's frame, a msgpack map."""
        packed: bytes = msgpack.packb(self.model_dump(), use_bin_type=True)
        return packed


class _StepMessage(Message):
    """Base of messages that belong to one attempt at one step."""

    term: Number
    step: Number
    attempt: Number


# Joining and state.


class Hello(Message):
    """Worker: my identity. `instance` is new at each start: a restarted worker is another worker.

    Hello is sent before torch is imported, so `backend` is the one that the user requested.
    `enrolled`: the proofs use the key that was issued to this name, not the join token's secret.
    `devices`: the number of devices.
    """

    tag = 1
    release: ShortText
    name: ShortText
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    backend: ShortText
    duty: Duty
    enrolled: bool
    nonce: Bytes32
    devices: Annotated[int, Field(ge=1, le=limits.DEVICES_PER_WORKER)] = 1


class Challenge(Message):
    """Coordinator: here is my proof; send yours (see `protocol.wire.authentication`)."""

    tag = 2
    method: ShortText
    nonce: Bytes32
    proof: Bytes32


class Proof(Message):
    """Worker: the answer to a challenge."""

    tag = 3
    proof: Annotated[bytes, Field(max_length=64)]


class Welcome(Message):
    """Coordinator: you are a member. `worker` is your name in this cluster, made unique.

    `key` replaces the join token from the next connection on; empty if no key is issued.
    """

    tag = 4
    worker: ShortText
    term: Number
    key: Annotated[bytes, Field(max_length=32, repr=False)]
    heartbeat_interval_ms: Annotated[int, Field(ge=10, le=60_000)]
    liveness_timeout_ms: Annotated[int, Field(ge=100, le=600_000)]


class StartRun(Message):
    """Coordinator: build this run's task; `step` of its steps are committed. Body: the spec.

    `blobs` is the digest of the list of files that the task reads; the list is requested like any
    blob (`protocol.spec.files.blob_list`). None: the task reads no files.
    """

    tag = 5
    body = "document"
    run_id: ShortText
    term: Number
    step: Number
    blobs: Digest | None


class Ready(Message):
    """Worker: the task is built on this device. Body: the manifest.

    `initial_digest` is the digest of this worker's initial state, and `state_digest` that of its
    replica after `step` steps; they differ if the worker has been in this run before. `devices`:
    how many devices compute, each with its own replica; `left_out`: why the others cannot.
    """

    tag = 6
    body = "document"
    run_id: ShortText
    backend: ShortText
    device: ShortText
    initial_digest: Digest
    step: Number
    state_digest: Digest
    signature: Digest
    signature_text: Text
    devices: Annotated[int, Field(ge=1, le=limits.DEVICES_PER_WORKER)] = 1
    left_out: Text = ""


class Unready(Message):
    """Worker: I cannot take part in this run, for this reason: its task cannot be built here, or
    its results have changed. `own`: the cause is this worker, so other workers may be able to."""

    tag = 7
    run_id: ShortText
    reason: Text
    own: bool
    exit_code: Annotated[int, Field(ge=1, le=125)]


class StateRequest(Message):
    """Coordinator: send your trainable state."""

    tag = 8
    run_id: ShortText


class StateChunk(Message):
    """Either side: a chunk of the state after `step` steps; `last` on the last chunk.

    Parameters come first. `missed_updates` has a value for each tensor of a block, and is sent only
    if a tensor has missed an update (`protocol.exact.replica`).
    """

    tag = 9
    body = "values"
    run_id: ShortText
    kind: StateKind
    block: Number
    chunk: Number
    step: Number
    optimizer_step: Number
    last: bool


class BlobRequest(Message):
    """Worker: send the chunk of this blob that starts at `offset`."""

    tag = 28
    run_id: ShortText
    digest: Digest
    offset: Number


class BlobChunk(Message):
    """Coordinator: the requested chunk, of the largest body size or up to the blob's end.

    Chunks are sent in the order of the requests. A shorter chunk means that the file has changed
    since the run was submitted.
    """

    tag = 29
    body = "bytes"
    run_id: ShortText
    digest: Digest
    offset: Number


# Work.


class StepPlan(_StepMessage):
    """Coordinator: your subtrees of this step, whose tree has `microbatches` leaves.

    Of each subtree, `uploads` chunks may be sent to the coordinator, in the order of
    `protocol.exact.reduction.chunk_grid`, until a `Credit` permits more. `owners` is the number of
    the table of chunk owners (`Owners`); 0: the coordinator averages all chunks. `phase`: a subtree
    of the embeddings phase is answered with `CapturedRows` and a `SubtreeLoss` of loss 0, without
    gradients; all `StepEmbeddings` precede the plan for the gradients.
    """

    tag = 10
    view: Number
    owners: Number
    microbatches: Annotated[int, Field(ge=1, le=limits.MICROBATCHES_PER_STEP)]
    subtrees: SubtreeList
    uploads: Number
    loss_scale: Annotated[float, Field(ge=1.0, le=limits.LOSS_SCALE_FACTOR)]
    phase: StepPhase = "gradients"


class StepEmbeddings(_StepMessage):
    """Coordinator: a chunk of the embeddings of all samples of the step, in the order of
    microbatches; `attempt` is that of the plan that follows."""

    tag = 63
    body = "bytes"
    chunk: Number
    last: bool


class _ChunkMessage(_StepMessage):
    """Base of messages about one chunk; `owners` is the number of the table of its owner, 0 for the
    table in which the coordinator owns all chunks."""

    block: Number
    chunk: Number
    owners: Number = 0


class _PayloadMessage(_ChunkMessage):
    body = "values"
    lo: Number
    hi: Number
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    worker: ShortText = ""

    @property
    def subtree(self) -> Subtree:
        return Subtree(self.lo, self.hi)


class BlockGradientPayload(_PayloadMessage):
    """Worker, to the chunk's owner: a chunk of a block's gradient sum over a subtree of total
    weight `weight`.

    A worker that cannot reach the owner sends its payload to the coordinator, which forwards it
    with the worker's name in `worker`. Empty: the payload is the sender's own.
    """

    tag = 11


class NonBlockGradientPayload(_PayloadMessage):
    """Worker, to the chunk's owner: the same as `BlockGradientPayload` for non-block tensors."""

    tag = 12


class _AverageMessage(_ChunkMessage):
    body = "values"


class AveragedBlockGradient(_AverageMessage):
    """Owner: a chunk of a block's gradient, averaged over all samples of the step."""

    tag = 13


class AveragedNonBlockGradient(_AverageMessage):
    """Owner: the same as `AveragedBlockGradient` for non-block tensors."""

    tag = 14


class CapturedRows(_StepMessage):
    """Worker: a chunk of the side outputs of microbatch `microbatch` of subtree [lo, hi).

    Side outputs are captured logits, per-replica state or embeddings. All chunks of a subtree
    precede its `SubtreeLoss`.
    """

    tag = 30
    body = "bytes"
    lo: Number
    hi: Number
    microbatch: Number
    chunk: Number

    @property
    def subtree(self) -> Subtree:
        return Subtree(self.lo, self.hi)


class SubtreeLoss(_StepMessage):
    """Worker: a subtree is computed; a non-finite `loss_sum` halts the run.

    `sums` is the xxh3-128 of the subtree's gradients if other workers average them. `unlike`: the
    microbatches, 64 at most, whose recomputed embeddings differ from those in `StepEmbeddings`.
    """

    tag = 15
    lo: Number
    hi: Number
    loss_sum: float
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    elapsed_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    sums: Annotated[bytes, Field(max_length=16)]
    unlike: Annotated[tuple[Number, ...], Field(max_length=limits.UNLIKE_MICROBATCHES)] = ()

    @property
    def subtree(self) -> Subtree:
        return Subtree(self.lo, self.hi)


class NonFiniteSum(_StepMessage):
    """Worker: a sum over microbatches [lo, hi) contains NaN or infinity; see `NonFinite`.

    Sent instead of the sum of the worker's own subtree, or instead of the average of a chunk that
    the worker owns.
    """

    tag = 60
    lo: Number
    hi: Number
    worker: ShortText | None
    block: Number | None
    device: ShortText

    @property
    def non_finite(self) -> NonFinite:
        return NonFinite(Subtree(self.lo, self.hi), self.worker, self.block, self.device)


class DeviceNote(Message):
    """Worker: a problem with one of its devices, as text for users; the worker continues."""

    tag = 61
    device: ShortText
    text: Text


class Commit(_StepMessage):
    """Coordinator: apply the step; without `scalars`, skip it and apply nothing."""

    tag = 16
    scalars: StepScalars | None
    loss: float
    averages_digest: Digest


class StepApplied(Message):
    """Worker: my replica has taken `step` steps and has this digest."""

    tag = 17
    term: Number
    step: Number
    state_digest: Digest


class Assign(_StepMessage):
    """Coordinator: compute these further subtrees of the step in progress."""

    tag = 18
    view: Number
    subtrees: SubtreeList


class Cancel(_StepMessage):
    """Coordinator: drop these subtrees of the step in progress; other workers have finished
    them."""

    tag = 19
    subtrees: SubtreeList


class Credit(_StepMessage):
    """Coordinator: of each of your subtrees, `uploads` chunks may now be sent.

    There is memory for their sums, and other workers have sent about as many.
    """

    tag = 31
    uploads: Number


# Inner phases, in a run with replicas: subtree [k, k + 1) of a step is replica k's inner phase.


class _ReplicaMessage(_StepMessage):
    replica: Number


class InnerPhaseProgress(_ReplicaMessage):
    """Worker: `inner` inner steps of the replica's inner phase are done."""

    tag = 38
    inner: Number


class InnerCheckpointChunk(_ReplicaMessage):
    """Worker: a chunk of the inner checkpoint after `inner` inner steps; `last` on the last
    chunk."""

    tag = 39
    body = "bytes"
    inner: Number
    chunk: Number
    last: bool


class InnerStateRequest(_ReplicaMessage):
    """Worker: send the newest inner checkpoint of this phase, and with `own` the per-replica
    state."""

    tag = 40
    own: bool


class InnerStateChunk(_ReplicaMessage):
    """Coordinator: a chunk of the answer to `InnerStateRequest`; `last` on the last chunk.

    The chunks together are the per-replica state, if it was requested, then the newest inner
    checkpoint, after `inner` inner steps; `inner` is 0 if there is none.
    """

    tag = 41
    body = "bytes"
    inner: Number
    own: bool
    last: bool


class EvalPlan(Message):
    """Coordinator: evaluate these held-out parts, [lo, hi), with the weights after `step`."""

    tag = 20
    term: Number
    step: Number
    lo: Number
    hi: Number


class EvalResult(Message):
    """Worker: the sums over one held-out part."""

    tag = 21
    term: Number
    step: Number
    part: Number
    sums: Annotated[dict[ShortText, float], Field(max_length=limits.EVALUATION_SUMS)]


# Workers that average chunks among themselves.


class ListenForPeers(Message):
    """Coordinator: listen for the other members of this run."""

    tag = 42
    run_id: ShortText


class PeerPort(Message):
    """Worker: I listen for peers at this port. `fingerprint`: SHA-256 of my certificate, zeros
    without TLS. Port 0: I cannot listen."""

    tag = 43
    run_id: ShortText
    port: Annotated[int, Field(ge=0, le=65_535)]
    fingerprint: Bytes32


class Peers(Message):
    """Coordinator: all workers that listen for peers, and you. Body: `protocol.wire.peers`."""

    tag = 44
    body = "document"
    run_id: ShortText


class Linked(Message):
    """Worker: this peer and I reach each other; `mbit` is the measured speed in Mbit/s."""

    tag = 45
    run_id: ShortText
    peer: ShortText
    mbit: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Unlinked(Message):
    """Worker: this peer and I cannot reach each other, or no longer can, for this reason."""

    tag = 46
    run_id: ShortText
    peer: ShortText
    reason: Text


class LinkTraffic(Message):
    """Worker: bytes sent to each peer and received from it since the link began. Body: JSON."""

    tag = 59
    body = "document"
    run_id: ShortText


class Owners(Message):
    """Coordinator: the table of chunk owners from now on. Body: `protocol.wire.peers`.

    The table also applies to the step in progress: sums of chunks whose owner changes are sent
    again.
    """

    tag = 47
    body = "document"
    run_id: ShortText
    term: Number
    number: Annotated[int, Field(ge=1, lt=2**63)]


class ChunkReduced(_ChunkMessage):
    """Owner: I have averaged this chunk. Body: its origin (JSON), the workers and subtrees whose
    sums were added."""

    tag = 50
    body = "document"
    digest: Annotated[bytes, Field(min_length=16, max_length=16)]


class SumsArrived(_StepMessage):
    """Owner: I have received this worker's sums of the subtree for all chunks that I own."""

    tag = 51
    owners: Number
    worker: ShortText
    lo: Number
    hi: Number

    @property
    def subtree(self) -> Subtree:
        return Subtree(self.lo, self.hi)


class AverageDigests(_StepMessage):
    """Coordinator: the digests of all averages of this step; the commit follows. Body: 16 bytes per
    chunk."""

    tag = 53
    body = "bytes"


class AveragesRequest(_StepMessage):
    """Worker: I lack averages of a committed step; send all averages of the step."""

    tag = 54


class AverageMismatch(_ChunkMessage):
    """Worker: the average of this chunk that `owner` sent does not have the digest of the
    commit."""

    tag = 55
    owner: ShortText


class PeerHello(Message):
    """Dialing worker: I am `name`, and expect `to`."""

    tag = 56
    name: ShortText
    to: ShortText
    nonce: Bytes32


class PeerWelcome(Message):
    """Dialed worker: you have proved your identity."""

    tag = 57


class PeerProbe(Message):
    """Either peer: bytes that measure the speed of the link. The answer has an empty body."""

    tag = 58
    body = "bytes"


# Liveness, halts and the end.


class Heartbeat(Message):
    """Either side: a sign of life (any other byte is one too)."""

    tag = 22


class Preparing(Message):
    """Worker: progress of the preparation of the run's task; empty once it is complete."""

    tag = 64
    progress: Text


class Halt(_StepMessage):
    """Coordinator: stop computing and apply nothing, for this reason."""

    tag = 23
    reason: Text


class Continue(_StepMessage):
    """Coordinator: the halt is over; the next attempt follows."""

    tag = 24


class Drain(Message):
    """Worker: I want to leave; assign no more subtrees to me."""

    tag = 25


class EndRun(Message):
    """Coordinator: the run is over; wait for the next one.

    `weights` is the digest of the trained weights, if the run has any. `metrics` are the last
    evaluation metrics, with None for a value that is not finite; empty if a message cannot hold
    all of them.
    """

    tag = 26
    run_id: ShortText
    outcome: Outcome
    reason: Text
    weights: Digest | None
    metrics: Annotated[dict[ShortText, float | None], Field(max_length=limits.EVALUATION_SUMS)]


class MemoryReturned(Message):
    """Either side: I no longer need the bodies at these offsets of your shared memory."""

    tag = 62
    places: Annotated[tuple[Number, ...], Field(max_length=64)]


class Goodbye(Message):
    """Either side: I close this connection, for this reason. `retry`: whether to reconnect."""

    tag = 27
    reason: Text
    retry: bool
    exit_code: Annotated[int, Field(ge=0, le=125)]


MESSAGES: dict[int, type[Message]] = {
    message.tag: message
    for message in (
        Hello, Challenge, Proof, Welcome, StartRun, Ready, Unready, StateRequest, StateChunk,
        StepPlan, BlockGradientPayload, NonBlockGradientPayload, AveragedBlockGradient,
        AveragedNonBlockGradient, SubtreeLoss, Commit, StepApplied, Assign, Cancel, Credit,
        EvalPlan, EvalResult, Heartbeat, Preparing, Halt, Continue, Drain, EndRun, Goodbye,
        BlobRequest, BlobChunk, CapturedRows, InnerPhaseProgress, InnerCheckpointChunk,
        InnerStateRequest, InnerStateChunk, ListenForPeers, PeerPort, Peers, Linked, Unlinked,
        Owners, ChunkReduced, SumsArrived, AverageDigests, AveragesRequest,
        AverageMismatch, PeerHello, PeerWelcome, PeerProbe,
        LinkTraffic, NonFiniteSum, DeviceNote, MemoryReturned, StepEmbeddings,
    )
}  # fmt: skip

GradientPayload = BlockGradientPayload | NonBlockGradientPayload
AveragedGradient = AveragedBlockGradient | AveragedNonBlockGradient


def decode_message(tag: int, header: bytes | bytearray | memoryview) -> Message:
    """Decode the header of the message with this tag.

    Raises:
        MessageError: The tag is unknown, the bytes are not a msgpack map, or a field is invalid.
    """
    message_type = MESSAGES.get(tag)
    if message_type is None:
        raise MessageError(f"expected a known message, got tag {tag}")
    try:
        fields = msgpack.unpackb(header, raw=False, strict_map_key=True, use_list=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(
            f"expected a msgpack map as {message_type.__name__}, got {error}"
        ) from None
    try:
        message = message_type.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "the message"
        raise MessageError(f"{message_type.__name__}: {location}: {first['msg']}") from None
    # Defaults are for code that creates a message: on the wire every field is present.
    for missing in message_type.model_fields.keys() - message.model_fields_set:
        raise MessageError(f"{message_type.__name__}: {missing}: Field required")
    return message
