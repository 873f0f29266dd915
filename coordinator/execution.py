"""The shell around one run's logic: it does what the logic asks, and feeds back what came of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from coordinator.actions import (
    Action,
    Adopt,
    ApplyStep,
    Broadcast,
    Dismiss,
    Finish,
    Follow,
    Report,
    Seed,
    Send,
)
from coordinator.artifacts import write_json, write_model
from coordinator.blob_index import BlobIndex
from coordinator.blob_server import BlobServer
from coordinator.reduction import Array
from coordinator.replica_keeper import Applied, ReplicaKeeper
from coordinator.run import Run
from coordinator.session import Session
from protocol.connection import Body, Encoded, Received, encode
from protocol.errors import ExitCode, OutOfPlace, RemoteProtocolError
from protocol.messages import (
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    BlobRequest,
    Commit,
    EndRun,
    Message,
    Ready,
    StateChunk,
    cut_text,
)
from protocol.trace import Tracer, now_us


class Watcher(Protocol):
    """Who hears what a run reports, and its end."""

    def reported(self, event: str, fields: Mapping[str, object]) -> None:
        """Something worth telling."""

    def ended(self, execution: Execution) -> None:
        """The run is over and its files are written."""


class Execution:
    """One run being executed.

    Attributes:
        run: The pure logic.
        applied: Where the coordinator's replica is.
        outcome: How the run ended, once it has.
        result: What `result.json` holds, once written.
    """

    def __init__(
        self,
        run: Run,
        sessions: Mapping[str, Session],
        directory: Path,
        watcher: Watcher,
        tracer: Tracer | None = None,
        *,
        blobs: BlobIndex | None = None,
    ) -> None:
        self.run = run
        self._blobs = BlobServer(run.run_id, blobs) if blobs is not None else None
        self.directory = directory
        self.applied: Applied | None = None
        self.outcome: Finish | None = None
        self.result: dict[str, object] = {}
        self.model_directory: Path | None = None
        self.started_s: float | None = None
        self._sessions = sessions
        self._watcher = watcher
        self._tracer = tracer
        self._keeper: ReplicaKeeper | None = None
        self._followers: set[str] = set()
        self._state_complete = False
        self._tail: deque[Encoded] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    # Events.

    def invite(self, session: Session) -> None:
        """A free worker: take it into the run."""
        self._handle(lambda: self.run.invite(session.name))

    def receive(self, session: Session, received: Received) -> None:
        """A member's message."""
        message, raw = received
        if isinstance(message, StateChunk):
            self._state_chunk(session.name, message, raw)
            return
        if isinstance(message, BlobRequest):
            self._blob_request(session, message)
            return
        body: Array | bytes | None = None
        if raw is not None:
            body = raw.tobytes() if message.body == "document" else raw.view("<f4")
        if self._tracer is not None and message.body == "float32":
            self._trace_payload(session.name, message)
        self._handle(lambda: self.run.receive(session.name, message, body))
        if isinstance(message, Ready) and self.run.manifest is not None:
            session.channel.connection.blocks = self.run.manifest.blocks

    def lost(self, session: Session, reason: str) -> None:
        """A member's connection is over."""
        self._followers.discard(session.name)
        self._handle(lambda: self.run.lost(session.name, reason))

    def command(self, actions: Sequence[Action]) -> None:
        """Do what an operator's word led to."""
        self._handle(lambda: actions)

    def _handle(self, event: Callable[[], Sequence[Action]]) -> None:
        """Do what an event leads to; an error of our own ends the run as failed, not as hung."""
        try:
            self._do(event())
        except RemoteProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever it is, the run has to end
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._watcher.reported("internal_error", {"error": repr(error)})
        self._do(self.run.give_up(f"internal error: {error!r}"))

    # Actions.

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Broadcast():
                    self._broadcast(action)
                case Report():
                    self._report(action)
                case ApplyStep():
                    self._spawn(self._apply(action))
                case Follow():
                    self._followers.add(action.worker)
                case Seed():
                    # Until it has the state no commit may reach it: taken with a wrong state, one
                    # would be answered with another odd digest.
                    self._followers.discard(action.worker)
                    self._spawn(self._seed(action.worker))
                case Adopt():
                    self._keeper = ReplicaKeeper(action.manifest, self.run.spec)
                case Dismiss():
                    self._dismiss(action)
                case Finish():
                    self._spawn(self._finish(action))

    def _send(self, action: Send) -> None:
        session = self._sessions.get(action.worker)
        if session is not None:
            session.channel.send(encode(action.message, action.body))

    def _broadcast(self, action: Broadcast) -> None:
        encoded = encode(action.message, action.body)
        for name in sorted(self._followers):
            session = self._sessions.get(name)
            if session is not None:
                session.channel.send(encoded)
        if isinstance(action.message, AveragedBlockGradient | AveragedNonBlockGradient | Commit):
            self._tail.append(encoded)
        if self._tracer is not None:
            self._tracer.instant(f"send {type(action.message).__name__}", "coordinator")

    def _report(self, action: Report) -> None:
        if action.event == "started":
            self.started_s = time.monotonic()
        fields = {"run_id": self.run.run_id, **action.fields}
        self._watcher.reported(action.event, fields)

    def _dismiss(self, action: Dismiss) -> None:
        self._followers.discard(action.worker)
        session = self._sessions.get(action.worker)
        if session is not None:
            session.channel.goodbye(action.reason, retry=False, exit_code=action.exit_code)

    async def _apply(self, action: ApplyStep) -> None:
        assert self._keeper is not None
        start = now_us()
        applied = await self._keeper.apply(action.averages, action.scalars)
        if self._tracer is not None:
            self._tracer.span("apply step", "replica", start, step=action.step)
        self.applied = applied
        while self._tail and _step_of(self._tail[0]) < applied.step:
            self._tail.popleft()
        self._do(self.run.replica_applied(applied.step, applied.state_digest))

    async def _seed(self, worker: str) -> None:
        """Send a joiner the state and what was broadcast since; no running worker is disturbed."""
        assert self._keeper is not None
        session = self._sessions.get(worker)
        snapshot = await self._keeper.snapshot()
        if session is None or session.channel.closed or self.outcome is not None:
            return
        assert self.run.manifest is not None
        pieces = [
            (part, chunk)
            for part in snapshot.parts()
            for chunk in range(self.run.manifest.blocks[part.block].chunks)
        ]
        for index, (part, chunk) in enumerate(pieces):
            piece = self.run.manifest.blocks[part.block].chunk_slice(chunk)
            message = StateChunk(
                run_id=self.run.run_id, kind=part.kind, block=part.block, chunk=chunk,
                step=snapshot.step, optimizer_step=snapshot.optimizer_step,
                last=index == len(pieces) - 1,
            )  # fmt: skip
            session.channel.send(encode(message, part.values[piece]))
        for encoded in self._tail:
            if _step_of(encoded) >= snapshot.step:
                session.channel.send(encoded)
        self._followers.add(worker)

    def _state_chunk(self, worker: str, message: StateChunk, raw: Body | None) -> None:
        if message.run_id != self.run.run_id:
            return
        admission = self.run.admission
        if self._keeper is None or admission is None or not admission.was_asked(worker):
            raise OutOfPlace("StateChunk was not asked for")
        if self._state_complete:
            return  # another sent it all just before it was lost
        assert raw is not None
        self._keeper.fill(message, raw.view("<f4"))
        if message.last:
            self._state_complete = True
            self._spawn(self._state_loaded(worker))

    def _blob_request(self, session: Session, message: BlobRequest) -> None:
        if message.run_id != self.run.run_id:
            return
        if self._blobs is None:
            raise OutOfPlace("BlobRequest in a run that names no blobs")
        if work := self._blobs.request(session.channel, message):
            self._spawn(work)

    async def _state_loaded(self, sender: str) -> None:
        assert self._keeper is not None
        applied = await self._keeper.digests()
        assert self.run.admission is not None
        if not self.run.admission.awaits(sender):
            self._state_complete = False  # it has left meanwhile; another sends it anew
            return
        self.applied = applied
        self._do(self.run.replica_loaded(self.applied.state_digest))
        self._state_complete = self.run.admission.state_known

    async def _finish(self, action: Finish) -> None:
        """Write what the run leaves behind, then let the workers go."""
        self.outcome = action
        ended_s = time.monotonic()
        try:
            await self._write(action, ended_s)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the run has to end
            told = error.strerror if isinstance(error, OSError) else repr(error)
            reason = f"cannot write the result to {str(self.directory)!r}: {told}"
            self.outcome = Finish("failed", reason, ExitCode.FAILED)
        message = EndRun(run_id=self.run.run_id, reason=cut_text(self.outcome.reason))
        try:
            for member in self.run.members:
                self._send(Send(member.name, message))
        finally:
            self._tail.clear()
            if self._keeper is not None:
                self._keeper.close()
            self._keeper = None
            self._watcher.ended(self)

    async def _write(self, action: Finish, ended_s: float) -> None:
        trained = self.run.manifest is not None and self._keeper is not None
        if not trained or self.applied is None or action.outcome == "failed":
            return
        assert self._keeper is not None
        assert self.run.manifest is not None
        replica = await self._keeper.snapshot()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.model_directory = await asyncio.to_thread(
            write_model, self.directory, self.run.manifest, replica
        )
        self.result = {
            "run_id": self.run.run_id,
            "outcome": action.outcome,
            "steps": self.run.step,
            "weights_digest": replica.weights_digest(),
            "losses": [loss if np.isfinite(loss) else None for loss in self.run.losses],
            "eval": {name: v if np.isfinite(v) else None for name, v in self.run.metrics.items()},
            "exact": self.run.progress is not None and not self.run.progress.mixed,
            "workers": {m.name: m.microbatches for m in self.run.members},
            "wall_s": round(ended_s - (self.started_s or ended_s), 3),
        }
        await asyncio.to_thread(write_json, self.directory / "result.json", self.result)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _trace_payload(self, worker: str, message: Message) -> None:
        assert self._tracer is not None
        fields = message.model_dump()
        self._tracer.instant(f"receive block {fields['block']}", worker, **fields)


def _step_of(encoded: Encoded) -> int:
    step = getattr(encoded.message, "step", None)
    assert isinstance(step, int)
    return step
