"""A coordinator's logic in memory, whose actions complete immediately.

Connection, run, journal lines and replica are production code. There are no disk, threads or
sockets.
"""

from __future__ import annotations

from coordinator.run import inputs
from coordinator.run.outputs import actions as act
from coordinator.run.run import Run, RunPhase
from coordinator.service.coordinator_replica import CoordinatorReplica
from coordinator.service.journal_lines import records_of
from protocol.base.errors import ProtocolError, RemoteProtocolError
from protocol.spec.run_spec import RunSpec
from protocol.wire.connection import Connection, EncodedMessage, Phase, ReceivedMessage, encode
from protocol.wire.messages import (
    AveragedGradient,
    Commit,
    Drain,
    Goodbye,
    Message,
    Ready,
    StateChunk,
)
from tests.fuzz.handshakes import connect_until
from tests.message_samples import join_buffers


class PureCoordinator:
    """A coordinator that repeats one run spec, with one member at a time.

    Attributes:
        run: The current run.
        runs: Number of runs so far.
        outcomes: Outcomes and reasons of ended runs.
        is_open: Whether the member's connection is open.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.runs = 0
        self.outcomes: list[tuple[str, str]] = []
        self.is_open = False
        self._spec = spec
        self._begin()

    def _begin(self) -> None:
        self.run = Run("r", self._spec, 1, 1)
        self.runs += 1
        self._coordinator_replica: CoordinatorReplica | None = None
        self._digests: dict[int, str] = {}
        self._tail: list[EncodedMessage] = []
        self._is_subscribed = False

    def digest_after(self, step: int) -> str | None:
        """Return the digest of the replica after this many steps."""
        return self._digests.get(step)

    def connect(self) -> bytes:
        """Connect a member, to a new run or a continued one; return the bytes that it receives."""
        if self.run.phase is RunPhase.OVER:
            self._begin()
        self._connection: Connection = connect_until("coordinator", Phase.OPEN)
        self._connection.blocks = None
        self._outbox = bytearray()
        self.is_open, self._is_subscribed = True, False
        if self.run.phase is RunPhase.HALTED:
            self._step(inputs.ContinueRun())
        self._step(inputs.WorkerAvailable("m"))
        return self._take_output()

    def feed(self, data: bytes) -> bytes:
        """Deliver the member's bytes; return the bytes that it receives."""
        try:
            for received in self._connection.receive_data(data):
                if self.is_open:
                    self._receive(received)
        except RemoteProtocolError as error:
            self._disconnect(str(error))
        return self._take_output()

    def hang_up(self) -> None:
        """Close the member's end."""
        if self.is_open:
            try:
                self._connection.receive_eof()
            except ProtocolError as error:
                self._disconnect(str(error))
            else:
                self._disconnect("closed")

    def _disconnect(self, reason: str) -> None:
        self.is_open = False
        self._step(inputs.WorkerGone("m", reason))

    def _take_output(self) -> bytes:
        output = bytes(self._outbox)
        self._outbox.clear()
        return output

    def _receive(self, received: ReceivedMessage) -> None:
        """Handle a message as `Service` and `Execution` do."""
        message, raw = received
        if isinstance(message, Goodbye):
            self._disconnect(message.reason)
        elif "m" not in self.run.members:
            if isinstance(message, Drain):
                self._disconnect("drained")
        else:
            body = None
            if raw is not None:
                body = raw.tobytes() if message.body == "document" else raw.view("<f4")
            self._step(inputs.WorkerMessage("m", message, body))
            if isinstance(message, Ready) and self.run.manifest is not None:
                self._connection.blocks = self.run.manifest.blocks

    def _step(self, input_: inputs.Input) -> None:
        actions = self.run.step(input_)
        records_of(actions, self.run)
        for action in actions:
            self._perform(action)

    def _perform(self, action: act.Action) -> None:
        run = self.run
        match action:
            case act.Send():
                self._send(encode(action.message, action.body))
            case act.Broadcast():
                self._broadcast(action.message, encode(action.message, action.body))
            case act.Subscribe():
                self._subscribe(action.step)
            case act.Seed() | act.Replay():
                self._send_state()
                self._step(inputs.WorkerCaughtUp("m"))
            case act.AdoptManifest():
                self._coordinator_replica = CoordinatorReplica(action.manifest, run.spec)
            case act.FillReplica():
                assert self._coordinator_replica is not None
                self._coordinator_replica.fill(action.message, action.values)
            case act.DigestReplica():
                assert self._coordinator_replica is not None
                self._digests[0] = self._coordinator_replica._replica.state_digest()
                initial_digest = self._coordinator_replica._replica.initial_digest()
                self._step(inputs.ReplicaLoaded(action.upload, initial_digest, self._digests[0]))
            case act.Persist():
                self._step(inputs.CommitDurable(action.record.commit.step))
            case act.MakeCheckpoint():
                self._step(inputs.CheckpointDurable(action.step))
            case act.ApplyStep():
                self._apply(action)
            case act.Dismiss():
                self._disconnect(action.reason)
            case act.Finish():
                self.outcomes.append((action.outcome, action.reason))

    def _apply(self, action: act.ApplyStep) -> None:
        assert self._coordinator_replica is not None
        replica = self._coordinator_replica._replica
        if action.scalars is None:
            replica.skip()
        else:
            replica.apply(action.averages, action.scalars)
        self._digests[replica.step] = replica.state_digest()
        self._tail.clear()
        self._step(inputs.ReplicaApplied(replica.step, self._digests[replica.step]))

    def _send(self, encoded: EncodedMessage) -> None:
        if self.is_open:
            self._outbox += join_buffers(self._connection.send(encoded))

    def _broadcast(self, message: Message, encoded: EncodedMessage) -> None:
        if self._is_subscribed:
            self._send(encoded)
        if isinstance(message, AveragedGradient | Commit):
            self._tail.append(encoded)

    def _subscribe(self, step: int) -> None:
        self._is_subscribed = True
        for encoded in self._tail:
            if encoded.message.step >= step:  # type: ignore[attr-defined]
                self._send(encoded)

    def _send_state(self) -> None:
        assert self._coordinator_replica is not None
        assert self.run.manifest is not None
        replica = self._coordinator_replica._replica
        parts = replica.parts()
        for index, part in enumerate(parts):
            chunk = StateChunk(
                run_id="r", kind=part.kind, block=part.block, chunk=0, step=replica.step,
                optimizer_step=replica.optimizer_step, last=index == len(parts) - 1,
            )  # fmt: skip
            self._send(encode(chunk, part.values))
        self._subscribe(replica.step)
