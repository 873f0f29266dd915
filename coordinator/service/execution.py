"""The shell around one run's logic: it does what the logic asks, and feeds back what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from coordinator.files.blob_server import BlobServer
from coordinator.members.questions import Questions
from coordinator.members.session import MemberSession
from coordinator.run.exchange.summary import Summary, summary_of
from coordinator.run.outputs.actions import (
    Action,
    Adopt,
    AnswerStretch,
    ApplyStep,
    Broadcast,
    DigestReplica,
    Dismiss,
    FillReplica,
    Finish,
    Follow,
    KeepBoundary,
    MakeCheckpoint,
    Persist,
    Remember,
    Replay,
    Report,
    Seed,
    Send,
    SendAverages,
    Summarise,
    Withhold,
)
from coordinator.run.outputs.facts import Fact, HeldOutMeasured, NodesPlanned, RunContinued
from coordinator.run.outputs.kept import Bytes
from coordinator.run.run import Run
from coordinator.run.workers.membership import MemberState
from coordinator.service.chronicle import record_of, records_of
from coordinator.service.followers import Followers
from coordinator.service.listener import (
    CheckpointCopied,
    CheckpointSaved,
    CopiedAgain,
    CopyFailed,
    InternalError,
    Listener,
    LogUnreadable,
    RunFails,
)
from coordinator.service.memory_room import check_memory
from coordinator.service.repeated_ends import Phase
from coordinator.service.replica_keeper import ReplicaKeeper, ReplicaState
from coordinator.service.result import metrics_to_send, write_result
from coordinator.service.worker_copies import give_copy
from coordinator.storage.copies import copy_checkpoint
from coordinator.storage.directory.journal_records import Checkpointed, Commanded
from coordinator.storage.log.log_records import place_of
from coordinator.storage.recovery import Recovery
from coordinator.storage.run_storage import RunStorage
from coordinator.storage.states.checkpoint import Checkpoint
from protocol.base.errors import (
    ExitCode,
    RemoteProtocolError,
    SamestepError,
    StorageFailed,
    Superseded,
    Unreachable,
    text_of,
)
from protocol.base.fields import cut_text
from protocol.base.place import is_directory
from protocol.exact.codecs import unpacked
from protocol.exact.update import Array
from protocol.host.machine import Machine
from protocol.host.trace import Tracer, now_us
from protocol.spec.manifest import Block, Manifest
from protocol.wire.connection import Received, codec_of, encode
from protocol.wire.messages import (
    AveragedGradient,
    BlobRequest,
    Boundary,
    Commit,
    EndRun,
    GradientPayload,
    Message,
    Ready,
    StateChunk,
    StepApplied,
    StretchState,
)
from protocol.wire.transport import Channel

Command = Literal["submit", "halt", "continue", "skip_step", "checkpoint", "drain", "give_up"]


class Watcher(Listener, Protocol):
    """Who hears what a run reports, and its end."""

    def ended(self, execution: Execution, outcome: Finish) -> None:
        """The run is over and its files are written."""


class Execution:
    """One run being executed.

    Attributes:
        run: The pure logic.
        applied: Where the coordinator's replica is.
        outcome: How the run ended, once it has.
        result: What `result.json` holds, once written.
        superseded: Whether another coordinator has the directory now.
    """

    def __init__(
        self,
        run: Run,
        sessions: Mapping[str, MemberSession],
        storage: RunStorage,
        blobs: BlobServer,
        watcher: Watcher,
        *,
        tracer: Tracer | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.run = run
        self.directory = storage.directory.path
        self.applied: ReplicaState | None = None
        self.outcome: Finish | None = None
        self._not_copied_to: set[str] = set()
        self.result: dict[str, object] = {}
        self.model_directory: Path | None = None
        self.superseded = False
        self.started_s: float | None = None
        self.started_step = 0
        self._sessions = sessions
        self._blobs = blobs
        self._watcher = watcher
        self._tracer = tracer
        self._machine = machine or Machine()
        self._keeper: ReplicaKeeper | None = None
        self._storage = storage
        self._exchange = run.spec.codecs
        self._followers = Followers(sessions, self._exchange.averages, run.step)
        self._copying: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._led: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._refused = False
        self._closed = False

    # Events.

    def resume(self, recovery: Recovery) -> None:
        """After a restart: workers go on, while the replica takes the logged steps again."""
        self._keeper = self._new_keeper(recovery.manifest)
        self._storage.begin_log(
            recovery.manifest, recovery.step, recovery.redo, recovery.index, recovery.checkpoint,
            own_digest=recovery.own_digest,
        )  # fmt: skip
        self._spawn(self._catch_up(self._keeper, recovery))
        self._copy_newest(recovery.checkpoint.info.step, workers=False)
        self._handle(self.run.resume)

    @property
    def _replica(self) -> ReplicaKeeper:
        """The replica: what a run decides needs it only once its manifest is settled."""
        assert self._keeper is not None, "Adopt comes before all that needs a replica"
        return self._keeper

    def _new_keeper(self, manifest: Manifest) -> ReplicaKeeper:
        return ReplicaKeeper(manifest, self.run.spec, self._machine.thread("replica"))

    def _check_memory(self, manifest: Manifest, *, goes_on: bool = False) -> None:
        workers = max(self.run.expect_workers, len(self._sessions))
        check_memory(self.run.spec, manifest, workers, goes_on=goes_on)

    async def _catch_up(self, keeper: ReplicaKeeper, recovery: Recovery) -> None:
        try:
            self._check_memory(keeper.manifest, goes_on=True)
            self.applied = await keeper.catch_up(recovery)
        except SamestepError as error:
            self.give_up(f"{error}; then resume the run")  # there is no state to go on with
            return
        self._do(self.run.replica_applied(self.applied.step, self.applied.state_digest))

    def tick(self) -> None:
        """Time goes on."""
        self._handle(lambda: self.run.tick(self._machine.now_s() * 1000))

    def invite(self, session: MemberSession) -> None:
        """A free worker: take it into the run, which hears all that it says from now on."""
        if self._closed:
            return  # the next run will have it
        session.run = self
        newest = self._storage.newest
        if session.name in self.run.spec.checkpoint.copies and newest is not None:
            self._copying = self._spawn(self._copy(newest.info.step, session.name, self._copying))
        evaluates = session.hello.duty == "evaluate"
        name, admitted_by = session.name, session.check.admitted_by
        host = "" if session.channel.is_local else session.host
        devices = session.hello.devices
        self._handle(
            lambda: self.run.invite(name, admitted_by, host, devices=devices, evaluates=evaluates)
        )

    def receive(self, session: MemberSession, received: Received) -> None:
        """A member's message; see `members.session.MembersRun`."""
        message, raw = received
        if isinstance(message, BlobRequest):
            self._blobs.request(session.channel, message)
            return
        body: Array | Bytes | bytes | None = None
        if raw is not None:
            match message.body:
                case "document":
                    body = raw.tobytes()
                case "bytes":
                    body = raw
                case _:
                    if session.channel.connection.blocks is not self._blocks:
                        return  # it was checked by an earlier run's manifest, and is of that run
                    body = self._values(message, raw)
        session.stepped |= isinstance(message, StepApplied)
        self._trace_payload(session.name, message)
        self._handle(lambda: self.run.receive(session.name, message, body))
        if isinstance(message, Boundary) and not self._storage.boundary_room.is_set():
            session.channel.pause()
            self._spawn(self._read_on(session.channel))
        if isinstance(message, Ready) and self._blocks is not None:
            session.channel.connection.blocks = self._blocks
            session.channel.connection.exchange = self._exchange

    @property
    def _blocks(self) -> tuple[Block, ...] | None:
        manifest = self.run.manifest
        return manifest.blocks if manifest is not None else None

    async def _read_on(self, channel: Channel) -> None:
        try:
            await self._storage.boundary_room.wait()
        finally:
            channel.resume()

    def _values(self, message: Message, raw: Bytes) -> Array:
        codec = codec_of(message, self._exchange)
        if not isinstance(message, GradientPayload):
            return unpacked(raw, codec, len(raw) // (2 if codec == "bfloat16" else 4))
        piece = self._replica.manifest.blocks[message.block].chunk_slice(message.chunk)
        return unpacked(raw, codec, piece.stop - piece.start)

    def lost(self, session: MemberSession, reason: str) -> None:
        """A member's connection is over."""
        self._followers.discard(session.name)
        self._stop_leading(session.name)
        self._handle(lambda: self.run.lost(session.name, reason, exit_code=session.exit_code))

    def phase_of(self, session: MemberSession) -> Phase | None:
        """What a member's connection was at that is about to be lost; None if nothing was to come
        of it just now."""
        member = self.run.members.get(session.name)
        if member is None:
            return "loading" if session.name in self.run.unfit else None
        if member.released or self.outcome is not None:
            return None
        match member.state:
            case MemberState.PREPARING:
                sending = self._blobs.serves(session.channel) or session.channel.queued_bytes
                return "fetching files" if sending else "loading"
            case MemberState.LOADING:
                return "loading"
            case MemberState.ACTIVE | MemberState.DRAINING:
                return "training"
        return None

    def tell(self, fact: Fact) -> None:
        """A fact of the service's that belongs into the run's journal."""
        self._tell(fact)

    def command(self, command: Command, event: Callable[[], Sequence[Action]]) -> None:
        """Do what an operator's word leads to."""
        record = Commanded(epoch=self.run.epoch, step=self.run.step, command=command)
        self._storage.record([record])
        self._handle(event)

    def give_up(self, reason: str) -> None:
        """Nothing more can come: end as failed."""
        self._handle(lambda: self.run.give_up(reason))

    def storage_failed(self, error: Exception) -> None:
        """The disk refused something that nobody waited for, or is another's now."""
        if isinstance(error, StorageFailed):
            self._handle(lambda: self.run.storage_failed(str(error)))
        else:
            self.superseded = isinstance(error, Superseded)
            self.give_up(text_of(error))

    def _handle(self, event: Callable[[], Sequence[Action]]) -> None:
        """Do what an event leads to; an error of our own ends the run as failed, not as hung."""
        try:
            self._do(event())
        except RemoteProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever it is, the run has to end
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, SamestepError):
            self.storage_failed(error)
            return
        self._tell(InternalError(text_of(error)))
        self._do(self.run.give_up(text_of(error)))

    # Actions.

    def _do(self, actions: Sequence[Action]) -> None:
        if self._closed:
            return
        self._storage.record(records_of(actions, self.run))
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Broadcast():
                    self._broadcast(action)
                case Report():
                    self._report(action.fact)
                case FillReplica():
                    self._replica.fill(action.message, action.values)
                case DigestReplica():
                    self._spawn(self._digest_replica(action.upload))
                case ApplyStep():
                    self._spawn(self._apply(action))
                case Follow():
                    if (session := self._sessions.get(action.worker)) is not None:
                        self._followers.join(session, action.step)
                case Withhold():
                    self._followers.discard(action.worker)
                case Seed():
                    # Until it has the state no commit may reach it: its answer would be odd again.
                    self._followers.discard(action.worker)
                    self._lead(action.worker, None)
                case Replay():
                    self._lead(action.worker, action)
                case SendAverages():
                    self._send_averages(action)
                case Summarise():
                    self._spawn(self._summarise(action))
                case Persist():
                    self._spawn(self._persist(action))
                case KeepBoundary():
                    self._storage.keep_boundary(action.message, action.content)
                case AnswerStretch():
                    self._spawn(self._answer_stretch(action))
                case Remember():
                    self._storage.remember(action.terms)
                case MakeCheckpoint():
                    self._spawn(self._save(action.step))
                case Adopt():
                    self._check_memory(action.manifest)
                    self._keeper = self._new_keeper(action.manifest)
                    self._storage.begin_log(action.manifest, 0)
                case Dismiss():
                    self._dismiss(action)
                case Finish():
                    self._spawn(self._finish(action))

    def _send(self, action: Send) -> None:
        if (session := self._sessions.get(action.worker)) is not None:
            session.channel.send(encode(action.message, action.body))

    def _broadcast(self, action: Broadcast) -> None:
        message, values = action.message, action.body
        self._followers.broadcast(message, values, action.had_by)
        if isinstance(message, Commit):
            for worker in self._followers.behind(message.step):
                self._leave_behind(worker, message.step)
        if isinstance(message, AveragedGradient):
            assert values is not None
            self._storage.append(place_of(message), values)
        if self._tracer is not None:
            self._tracer.instant(f"send {type(message).__name__}", "coordinator")

    def _send_averages(self, action: SendAverages) -> None:
        session = self._sessions.get(action.worker)
        if session is not None and not self._followers.send_again(session, action.step):
            reason = "the averages that others were to send are here no more: join again"
            session.channel.goodbye(reason, retry=True)

    async def _summarise(self, action: Summarise) -> None:
        def work() -> dict[int, Summary]:
            return {number: summary_of(*given) for number, given in action.averages.items()}

        summaries = await asyncio.get_running_loop().run_in_executor(None, work)
        self._do(self.run.summarised(action.step, action.attempt, summaries))

    async def _persist(self, action: Persist) -> None:
        start, step = now_us(), action.record.commit.step
        try:
            own_digest = await self._storage.commit(action.record, action.kept)
        except StorageFailed as error:
            self._do(self.run.storage_failed(str(error), lost_commit=True))
            return
        if self._tracer is not None:
            self._tracer.span("sync the log", "log", start, step=step)
        self._do(self.run.durable(step, own_digest))

    async def _answer_stretch(self, action: AnswerStretch) -> None:
        """Send a worker where it is to go on; what the disk refuses halts the run."""
        request = action.message
        pieces: list[bytes] = []
        try:
            inner, reading = await self._storage.answer_stretch(request)
            place = request.model_dump()
            async for piece in reading:
                for waiting in pieces:
                    await self._tell_stretch(action.worker, place, inner, waiting, last=False)
                pieces = [piece]
        except SamestepError as error:
            self._do(self.run.storage_failed(str(error)))
            return
        rest = pieces[0] if pieces else b""
        await self._tell_stretch(action.worker, place, inner, rest, last=True)

    async def _tell_stretch(
        self, worker: str, place: Mapping[str, Any], inner: int, piece: bytes, *, last: bool
    ) -> None:
        session = self._sessions.get(worker)
        if session is None or session.channel.closed:
            return
        await session.channel.room()
        if not session.channel.closed:
            message = StretchState(**place, inner=inner, last=last)
            session.channel.send(encode(message, piece))

    def _report(self, fact: Fact) -> None:
        if isinstance(fact, NodesPlanned) and self.started_s is None:
            # The wait for workers, at the start or after a restart, is no part of the pace.
            self.started_s, self.started_step = self._machine.now_s(), self.run.step
        if isinstance(fact, RunContinued):
            self._tell_joiners()
        if isinstance(fact, HeldOutMeasured) and fact.state_digest is not None:
            self._storage.keep_metrics(fact.step, fact.state_digest, fact.metrics)
        if fact.event:
            self._watcher.reported(fact, self.run.run_id)

    def _tell(self, fact: Fact) -> None:
        """A fact of the shell's own, to the journal and to all who listen."""
        record = record_of(fact, self.run)
        if record is not None and not self._closed:
            self._storage.record([record])
        self._report(fact)

    def _dismiss(self, action: Dismiss) -> None:
        self._followers.discard(action.worker)
        if (session := self._sessions.get(action.worker)) is not None:
            session.channel.goodbye(action.reason, retry=False, exit_code=action.exit_code)

    async def _apply(self, action: ApplyStep) -> None:
        start = now_us()
        applied = await self._replica.apply(action.averages, action.scalars)
        if self._tracer is not None:
            self._tracer.span("apply step", "replica", start, step=action.step)
        self.applied = applied
        self._followers.forget_before(applied.step)
        self._tell_joiners()
        self._do(self.run.replica_applied(applied.step, applied.state_digest, applied.not_finite))

    async def _save(self, step: int) -> None:
        """Write a checkpoint; the log begins a new segment where it belongs."""
        losses = self.run.losses[:step]
        try:
            with await self._replica.hold() as held:
                assert held.replica.step == step
                if step:
                    await self._storage.roll()
                made = await self._storage.save(held.replica, losses, held.release)
            self._refused = False
        except SamestepError:
            self._refused = True
            raise
        finally:
            self._tell_joiners()
        info = made.info
        record = Checkpointed(
            epoch=self.run.epoch, step=step, optimizer_step=info.optimizer_step,
            weights_digest=info.weights_digest, state_digest=info.state_digest,
            directory=made.path.name,
        )  # fmt: skip
        self._storage.record([record])
        self._tell(CheckpointSaved(step))
        self._copy_newest(step)
        self._do(self.run.checkpointed(step))

    def _copy_newest(self, step: int, *, workers: bool = True) -> None:
        """Wherever the run's spec says; also at a restart, which may have taken steps back: then
        workers get theirs as they come."""
        for place in self.run.spec.checkpoint.copies:
            if not workers and not is_directory(place):
                continue
            self._copying = self._spawn(self._copy(step, place, self._copying))

    async def _copy(self, step: int, place: str, before: asyncio.Task[None] | None) -> None:
        """Copy a checkpoint, one after the other; what goes wrong holds up nobody, and is told
        when it begins and when it ends.

        Where a newer one is there when it is its turn, that is copied.
        """
        if before is not None:
            await before
        keep = self.run.spec.checkpoint.keep_last
        directory = self._storage.directory
        try:
            async with self._storage.holding_newest() as newest:
                step = newest
                if is_directory(place):
                    to = Path(place)
                    made = await asyncio.to_thread(copy_checkpoint, directory, step, to, keep)
                else:
                    made = await give_copy(self._keeper_of_copies(place), directory, step, keep)
        except (SamestepError, OSError) as error:
            if place not in self._not_copied_to:
                self._not_copied_to.add(place)
                self._tell(CopyFailed(step, place, text_of(error)))
        else:
            if place in self._not_copied_to:
                self._not_copied_to.remove(place)
                self._tell(CopiedAgain(step, place))
            if made:
                self._tell(CheckpointCopied(step, place))

    def _keeper_of_copies(self, worker: str) -> Questions:
        """A worker that is to keep copies.

        Raises:
            Unreachable: It is not here.
        """
        if (session := self._sessions.get(worker)) is None:
            raise Unreachable(f"no worker {worker!r} is here; it gets the newest when it comes")
        return session.questions

    # Workers on their way to the run's state.

    def _lead(self, worker: str, missed: Replay | None) -> None:
        """Send it what it has missed, or everything; what was on its way to it is void."""
        self._stop_leading(worker)
        if (session := self._sessions.get(worker)) is not None:
            self._led[worker] = self._spawn(self._bring(session, missed))

    def _stop_leading(self, worker: str) -> None:
        if (task := self._led.pop(worker, None)) is not None:
            task.cancel()

    def _leave_behind(self, worker: str, step: int) -> None:
        """It reads too slowly to be sent what is in memory: from the log, at its own pace."""
        member = self.run.members.get(worker)
        if member is not None and member.state in (MemberState.LOADING, MemberState.FOLLOWING):
            self._do(self.run.fell_behind(worker, self._followers.detach(worker, step)))

    async def _bring(self, session: MemberSession, missed: Replay | None) -> None:
        """What the disk refuses on the way halts the run; it is tried again when that goes on."""
        while not self._is_gone(session):
            try:
                await self._bring_once(session, missed)
            except StorageFailed as error:
                self._do(self.run.storage_failed(str(error)))
                await self._news.wait()
            else:
                return

    async def _bring_once(self, session: MemberSession, missed: Replay | None) -> None:
        """Then it hears all that is broadcast."""
        tried: Checkpoint | None = None
        async with self._storage.joining() as needs:
            reached = None
            if missed is not None and not self._is_far(missed.step):
                needs(missed.step)
                reached = await self._replayed(session, missed)
            while reached is None and not self._is_gone(session):
                tried = await self._checkpoint_near(tried)
                needs(tried.info.step)
                reached = await self._seeded(session, tried)
            if reached is None or self._is_gone(session):
                return
            self._followers.join(session, reached)
        self._do(self.run.replayed(session.name))

    def _is_gone(self, session: MemberSession) -> bool:
        return session.channel.closed or self.outcome is not None

    def _is_far(self, step: int) -> bool:
        return self._followers.is_far(step, self.run.step, self._replica.manifest)

    async def _seeded(self, session: MemberSession, checkpoint: Checkpoint) -> int | None:
        """Send it a checkpoint's state, then what came since; None if that cannot be had."""
        try:
            with await self._storage.open_state(checkpoint) as saved:
                await self._followers.send_state(
                    session.channel, self.run.run_id, self._storage, saved
                )
        except SamestepError as error:
            self._tell(LogUnreadable(str(error)))
            return None
        return await self._replayed(session, Replay(session.name, checkpoint.info.step, None))

    async def _replayed(self, session: MemberSession, missed: Replay) -> int | None:
        try:
            return await self._followers.replay(
                session.channel, self._storage, self._replica.manifest, missed, self.run.epoch
            )
        except SamestepError as error:
            self._tell(LogUnreadable(str(error)))
            return None

    async def _checkpoint_near(self, tried: Checkpoint | None) -> Checkpoint:
        """The newest checkpoint; where the log since is longer than the state, one that is made
        now, for all who come meanwhile.

        Args:
            tried: One that has led nowhere.
        """
        averages_from = await self._storage.averages_from()
        asked = None
        while True:
            newest = self._storage.newest
            if newest is not None and newest is not tried and newest.info.step >= averages_from:
                near = not self._is_far(newest.info.step)
                if near or self._refused:
                    return newest
            if asked != self.run.step:
                asked = self.run.step
                self._do(self.run.save())
            await self._news.wait()

    def _tell_joiners(self) -> None:
        self._news.set()
        self._news.clear()

    async def _digest_replica(self, upload: int) -> None:
        """All chunks of an upload of state 0 are in the replica; maybe its sender has left.

        The run hears of it when its log has begun: without a place for it nothing starts.
        """
        applied = await self._replica.digests()
        try:
            await self._storage.log_begun()
        except SamestepError:
            return  # whoever began it has heard of it
        actions = self.run.replica_loaded(upload, applied.state_digest)
        if self.run.has_state and self.applied is None:
            self.applied = applied
        self._do(actions)

    async def _finish(self, action: Finish) -> None:
        """Write what the run leaves behind, then let the workers go."""
        self.outcome = action
        ended_s = self._machine.now_s()
        try:
            await self._write(action, ended_s)
        except StorageFailed as error:
            self.outcome = None
            self._storage.reopen_journal()
            self._do(self.run.result_refused(str(error)))
            return
        except Exception as error:  # noqa: BLE001 -- whatever it is, the run has to end
            self.superseded = isinstance(error, Superseded)
            reason = f"the run is done, but its result is not written: {text_of(error)}"
            self.outcome = Finish("failed", reason, ExitCode.FAILED)
        if self.outcome.outcome == "failed":
            self._tell(RunFails(self.outcome.reason))
        if self._copying is not None:
            await self._copying
        weights = self.result.get("weights_digest")
        message = EndRun(
            run_id=self.run.run_id, outcome=self.outcome.outcome,
            reason=cut_text(self.outcome.reason), weights=None if weights is None else str(weights),
            metrics=metrics_to_send(self.result),
        )  # fmt: skip
        try:
            await self.close()
        finally:
            # In one go: a worker that leaves when it is told leaves no run that goes on.
            for member in self.run.members:
                self._send(Send(member.name, message))
            self._watcher.ended(self, self.outcome)

    async def close(self) -> None:
        """Let go of files and threads; a run that goes on can be resumed."""
        if self._closed:
            return
        self._closed = True
        for session in self._sessions.values():
            if session.run is self:
                session.run = None
        others = self._tasks - {asyncio.current_task()}
        await asyncio.gather(*(t for t in others if t.cancel()), return_exceptions=True)
        self._followers.clear()
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None  # the next run needs as much memory, while this one is looked at
        await self._storage.close()

    async def _write(self, action: Finish, ended_s: float) -> None:
        if self.applied is None or action.outcome == "failed":
            return
        wall_s = ended_s - (self.started_s or ended_s)
        with await self._replica.hold() as held:
            self.model_directory, self.result = await write_result(
                self.run, self._storage, held.replica, action, wall_s
            )

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _trace_payload(self, worker: str, message: Message) -> None:
        if self._tracer is not None and isinstance(message, GradientPayload | StateChunk):
            fields = message.model_dump()
            self._tracer.instant(f"receive block {fields['block']}", worker, **fields)
