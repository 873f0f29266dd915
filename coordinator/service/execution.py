"""The shell of one run: it executes the actions of the state machine and returns their results."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from coordinator.files.blob_server import BlobServer
from coordinator.members.session import MemberSession
from coordinator.run import inputs
from coordinator.run.exchange.round import Summary, summarize_block
from coordinator.run.outputs.actions import (
    Action,
    AdoptManifest,
    AnswerInnerStateRequest,
    ApplyStep,
    Broadcast,
    DigestReplica,
    Dismiss,
    FillReplica,
    Finish,
    MakeCheckpoint,
    Persist,
    Replay,
    Report,
    SaveAdmissionRecord,
    Seed,
    Send,
    SendAverages,
    Subscribe,
    Summarize,
    Unsubscribe,
    WriteInnerCheckpoint,
)
from coordinator.run.outputs.events import Checkpointed, Evaluated, Event, Planned, RunContinued
from coordinator.run.outputs.side_outputs import Bytes
from coordinator.run.run import Run
from coordinator.run.workers.membership import MemberState
from coordinator.service.coordinator_replica import CoordinatorReplica, ReplicaState
from coordinator.service.events import (
    CheckpointCopied,
    CopyFailed,
    CopyRecovered,
    EventSink,
    InternalError,
    LogUnreadable,
    RunFailing,
    WorkerOutpaced,
)
from coordinator.service.flapping import Phase
from coordinator.service.journal_lines import record_of, records_of
from coordinator.service.memory_check import check_memory
from coordinator.service.result import metrics_to_send, write_result
from coordinator.service.subscribers import Subscribers
from coordinator.storage.copies import copy_checkpoint
from coordinator.storage.directory.journal_records import CommandName, CommandReceived
from coordinator.storage.log.log_records import chunk_id
from coordinator.storage.recovery import Recovery
from coordinator.storage.run_storage import LogHold, RunStorage
from coordinator.storage.states.checkpoint import Checkpoint
from protocol.base.errors import (
    ExitCode,
    RemoteProtocolError,
    SamestepError,
    StorageFailed,
    Superseded,
    text_of,
)
from protocol.base.fields import cut_text
from protocol.exact.parameter_groups import ClippedGroups
from protocol.exact.reduction.average import Array
from protocol.exact.reduction.codecs import unpack
from protocol.machine.machine import Machine
from protocol.machine.trace import Tracer, now_us
from protocol.spec.manifest import Block, Manifest
from protocol.wire.connection import ReceivedMessage, codec_of, encode
from protocol.wire.messages import (
    AveragedGradient,
    BlobRequest,
    Commit,
    EndRun,
    GradientPayload,
    InnerCheckpointChunk,
    InnerStateChunk,
    Message,
    Ready,
    StateChunk,
    StepApplied,
)
from protocol.wire.transport import Channel

Command = inputs.HaltRun | inputs.ContinueRun | inputs.SaveState | inputs.DrainRun | inputs.FailRun
"""An operator's commands to a run."""


class ExecutionSink(EventSink, Protocol):
    """Receives a run's events, and its end."""

    def end_run(self, execution: Execution, outcome: Finish) -> None:
        """Note that a run is over and its files are written."""


class Execution:
    """The execution of one run: its state machine, files, replica, and transfers to workers.

    Attributes:
        run: The state machine.
        replica_state: Step and digest of the state that the coordinator's replica has applied.
        weights_digest: Digest of the weights of the newest checkpoint, or of the result once it is
            written.
        outcome: How the run ended, once it has.
        result: The content of `result.json`, once written.
        is_superseded: Whether another coordinator owns the directory now.
    """

    def __init__(
        self,
        run: Run,
        sessions: Mapping[str, MemberSession],
        storage: RunStorage,
        blobs: BlobServer,
        sink: ExecutionSink,
        *,
        tracer: Tracer | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.run = run
        self.directory = storage.directory.path
        self.replica_state: ReplicaState | None = None
        self.weights_digest: str | None = None
        self.outcome: Finish | None = None
        self._failed_copies: set[str] = set()
        self.result: dict[str, object] = {}
        self.model_directory: Path | None = None
        self.is_superseded = False
        self.started_s: float | None = None
        self.started_step = 0
        self._sessions = sessions
        self._blobs = blobs
        self._sink = sink
        self._tracer = tracer
        self._machine = machine or Machine()
        self._coordinator_replica: CoordinatorReplica | None = None
        self._storage = storage
        self._exchange = run.spec.codecs
        self._subscribers = Subscribers(sessions, self._exchange.averages, run.steps_committed)
        self._copying: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._transfers: dict[str, asyncio.Task[None]] = {}
        self._progressed = asyncio.Event()
        self._checkpoint_failed = False
        self._closed = False

    # Inputs, from the service.

    def resume(self, recovery: Recovery) -> None:
        """Continue after a restart: workers train while the replica applies the logged steps."""
        self._coordinator_replica = self._new_replica(recovery.manifest)
        self._storage.begin_log(
            recovery.manifest, recovery.step, recovery.redo, recovery.index, recovery.checkpoint,
            own_digest=recovery.own_digest,
        )  # fmt: skip
        self._spawn(self._catch_up(self._coordinator_replica, recovery))
        self.weights_digest = recovery.checkpoint.info.weights_digest
        self._copy_newest(recovery.checkpoint.info.step)
        self._step(inputs.Resume())

    @property
    def _replica(self) -> CoordinatorReplica:
        """The replica; actions need it only after `AdoptManifest`."""
        assert self._coordinator_replica is not None, "AdoptManifest comes first"
        return self._coordinator_replica

    def _new_replica(self, manifest: Manifest) -> CoordinatorReplica:
        return CoordinatorReplica(manifest, self.run.spec, self._machine.thread("replica"))

    def _check_memory(self, manifest: Manifest, *, is_resumed: bool = False) -> None:
        workers = max(self.run.expect_workers, len(self._sessions))
        check_memory(self.run.spec, manifest, workers, is_resumed=is_resumed)

    async def _catch_up(self, replica: CoordinatorReplica, recovery: Recovery) -> None:
        try:
            self._check_memory(replica.manifest, is_resumed=True)
            self.replica_state = await replica.catch_up(recovery)
        except SamestepError as error:
            self.give_up(f"{error}; then resume the run")  # there is no state to continue from
            return
        self._step(inputs.ReplicaApplied(self.replica_state.step, self.replica_state.state_digest))

    def tick(self) -> None:
        """Advance the run's time."""
        self._step(inputs.Tick(self._machine.now_s() * 1000))

    def invite(self, session: MemberSession) -> None:
        """Offer a free worker to the run, which receives all its messages from now on."""
        if self._closed:
            return  # the next run will invite the worker
        session.run = self
        self._step(
            inputs.WorkerAvailable(
                session.name,
                session.check.admitted_by,
                host="" if session.channel.is_local else session.host,
                devices=session.hello.devices,
                evaluates=session.hello.duty == "evaluate",
            )
        )

    def receive(self, session: MemberSession, received: ReceivedMessage) -> None:
        """Take a member's message; see `members.session.MembersRun`."""
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
                        return  # the message belongs to an earlier run, whose manifest checked it
                    body = self._values(message, raw)
        session.has_stepped |= isinstance(message, StepApplied)
        self._trace_payload(session.name, message)
        self._step(inputs.WorkerMessage(session.name, message, body))
        if (
            isinstance(message, InnerCheckpointChunk)
            and not self._storage.inner_checkpoint_room.is_set()
        ):
            session.channel.pause()
            self._spawn(self._resume_reading(session.channel))
        if isinstance(message, Ready) and self._blocks is not None:
            session.channel.connection.blocks = self._blocks
            session.channel.connection.exchange = self._exchange

    @property
    def _blocks(self) -> tuple[Block, ...] | None:
        manifest = self.run.manifest
        return manifest.blocks if manifest is not None else None

    async def _resume_reading(self, channel: Channel) -> None:
        try:
            await self._storage.inner_checkpoint_room.wait()
        finally:
            channel.resume()

    def _values(self, message: Message, raw: Bytes) -> Array:
        codec = codec_of(message, self._exchange)
        if not isinstance(message, GradientPayload):
            return unpack(raw, codec, len(raw) // (2 if codec == "bfloat16" else 4))
        piece = self._replica.manifest.blocks[message.block].chunk_slice(message.chunk)
        return unpack(raw, codec, piece.stop - piece.start)

    def remove_member(self, session: MemberSession, reason: str) -> None:
        """Remove a member whose connection has ended."""
        self._subscribers.unsubscribe(session.name)
        self._stop_transfer(session.name)
        self._step(inputs.WorkerGone(session.name, reason, session.exit_code))

    def phase_of(self, session: MemberSession) -> Phase | None:
        """Return the phase in which a member's connection ended; None if the run did not need the
        member."""
        member = self.run.members.get(session.name)
        if member is None:
            return "loading" if session.name in self.run.unfit else None
        if member.is_released or self.outcome is not None:
            return None
        match member.state:
            case MemberState.PREPARING:
                is_sending = self._blobs.has_requests(session.channel)
                has_data = is_sending or session.channel.queued_bytes
                return "fetching files" if has_data else "loading"
            case MemberState.LOADING:
                return "loading"
            case MemberState.ACTIVE | MemberState.DRAINING:
                return "training"
        return None

    def report(self, event: Event) -> None:
        """Report an event of the service that belongs in the run's journal."""
        self._emit(event)

    def execute_command(self, command: Command) -> None:
        """Execute an operator's command."""
        name = _command_name(command)
        record = CommandReceived(term=self.run.term, step=self.run.steps_committed, command=name)
        self._storage.append_records([record])
        self._step(command)

    def give_up(self, reason: str) -> None:
        """End the run as failed."""
        self._step(inputs.FailRun(reason))

    def handle_storage_error(self, error: Exception) -> None:
        """Halt after a failed write; end the run as failed after any other error of its files."""
        if isinstance(error, StorageFailed):
            self._step(inputs.WriteFailed(str(error)))
        else:
            self.is_superseded = isinstance(error, Superseded)
            self.give_up(text_of(error))

    def _step(self, input_: inputs.Input) -> None:
        """Pass an input to the run; an internal error ends it as failed."""
        try:
            self._do(self.run.step(input_))
        except RemoteProtocolError:
            raise
        except Exception as error:  # noqa: BLE001 -- any error must end the run
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, SamestepError):
            self.handle_storage_error(error)
            return
        self._emit(InternalError(text_of(error)))
        self._do(self.run.step(inputs.FailRun(text_of(error))))

    # Actions.

    def _do(self, actions: Sequence[Action]) -> None:
        if self._closed:
            return
        self._storage.append_records(records_of(actions, self.run))
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Broadcast():
                    self._broadcast(action)
                case Report():
                    self._report(action.event)
                case FillReplica():
                    self._replica.fill(action.message, action.values)
                case DigestReplica():
                    self._spawn(self._digest_replica(action.upload))
                case ApplyStep():
                    self._spawn(self._apply(action))
                case Subscribe():
                    if (session := self._sessions.get(action.worker)) is not None:
                        self._subscribers.subscribe(session, action.step)
                case Unsubscribe():
                    self._subscribers.unsubscribe(action.worker)
                case Seed():
                    # No commit may reach the worker before the state: its digest would differ
                    # again.
                    self._subscribers.unsubscribe(action.worker)
                    self._send_missing(action.worker, None)
                case Replay():
                    self._send_missing(action.worker, action)
                case SendAverages():
                    self._send_averages(action)
                case Summarize():
                    self._spawn(self._summarize(action))
                case Persist():
                    self._spawn(self._persist(action))
                case WriteInnerCheckpoint():
                    self._storage.write_inner_checkpoint(action.message, action.content)
                case AnswerInnerStateRequest():
                    self._spawn(self._answer_inner_state_request(action))
                case SaveAdmissionRecord():
                    self._storage.save_admission_record(action.record)
                case MakeCheckpoint():
                    self._spawn(self._save(action.step))
                case AdoptManifest():
                    self._check_memory(action.manifest)
                    self._coordinator_replica = self._new_replica(action.manifest)
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
        self._subscribers.broadcast(message, values, action.served_by_peers)
        if isinstance(message, Commit):
            for worker in self._subscribers.find_slow_readers(message.step):
                self._leave_behind(worker, message.step)
        if isinstance(message, AveragedGradient):
            assert values is not None
            self._storage.append(chunk_id(message), values)
        if self._tracer is not None:
            self._tracer.instant(f"send {type(message).__name__}", "coordinator")

    def _send_averages(self, action: SendAverages) -> None:
        session = self._sessions.get(action.worker)
        if session is not None and not self._subscribers.resend_averages(session, action.step):
            reason = (
                "the coordinator no longer has the averages that other workers failed to send: "
                "join again"
            )
            session.channel.goodbye(reason, retry=True)

    async def _summarize(self, action: Summarize) -> None:
        clipped_groups = ClippedGroups(self.run.spec.step_optimizer)

        def work() -> dict[int, Summary]:
            return {
                number: summarize_block(*block, clipped_groups)
                for number, block in action.averages.items()
            }

        summaries = await asyncio.get_running_loop().run_in_executor(None, work)
        self._step(inputs.Summarized(action.step, action.attempt, summaries))

    async def _persist(self, action: Persist) -> None:
        start, step = now_us(), action.record.commit.step
        try:
            own_digest = await self._storage.commit(action.record, action.side_outputs)
        except StorageFailed as error:
            self._step(inputs.WriteFailed(str(error), is_commit_lost=True))
            return
        if self._tracer is not None:
            self._tracer.span("sync the log", "log", start, step=step)
        self._step(inputs.CommitDurable(step, own_digest))

    async def _answer_inner_state_request(self, action: AnswerInnerStateRequest) -> None:
        """Send a worker the state from which it continues a replica; a failed read halts the
        run."""
        request = action.message
        pieces: list[bytes] = []
        try:
            inner, pieces_on_disk = await self._storage.open_inner_state(request)
            fields = request.model_dump()
            async for piece in pieces_on_disk:
                for earlier_piece in pieces:
                    await self._send_inner_state(
                        action.worker, fields, inner, earlier_piece, last=False
                    )
                pieces = [piece]
        except SamestepError as error:
            self._step(inputs.WriteFailed(str(error)))
            return
        last_piece = pieces[0] if pieces else b""
        await self._send_inner_state(action.worker, fields, inner, last_piece, last=True)

    async def _send_inner_state(
        self, worker: str, fields: Mapping[str, Any], inner: int, piece: bytes, *, last: bool
    ) -> None:
        session = self._sessions.get(worker)
        if session is None or session.channel.closed:
            return
        await session.channel.wait_for_room()
        if not session.channel.closed:
            message = InnerStateChunk(**fields, inner=inner, last=last)
            session.channel.send(encode(message, piece))

    def _report(self, event: Event) -> None:
        if isinstance(event, Planned) and self.started_s is None:
            # The pace excludes the wait for workers, at the start or after a restart.
            self.started_s, self.started_step = self._machine.now_s(), self.run.steps_committed
        if isinstance(event, RunContinued):
            self._wake_joiners()
        if isinstance(event, Evaluated) and event.state_digest is not None:
            self._storage.save_metrics(event.step, event.state_digest, event.metric_values)
        if event.name:
            self._sink.emit(event, self.run.run_id)

    def _emit(self, event: Event) -> None:
        """Report an event that the run does not report itself, to the journal and the sinks."""
        record = record_of(event, self.run)
        if record is not None and not self._closed:
            self._storage.append_records([record])
        self._report(event)

    def _dismiss(self, action: Dismiss) -> None:
        self._subscribers.unsubscribe(action.worker)
        if (session := self._sessions.get(action.worker)) is not None:
            session.channel.goodbye(action.reason, retry=False, exit_code=action.exit_code)

    async def _apply(self, action: ApplyStep) -> None:
        start = now_us()
        state = await self._replica.apply(action.averages, action.scalars)
        if self._tracer is not None:
            self._tracer.span("apply step", "replica", start, step=action.step)
        self.replica_state = state
        self._subscribers.drop_before(state.step)
        self._wake_joiners()
        self._step(inputs.ReplicaApplied(state.step, state.state_digest, state.not_finite))

    async def _save(self, step: int) -> None:
        """Write a checkpoint; the log begins a new segment there."""
        losses = self.run.losses[:step]
        try:
            with await self._replica.lock() as locked:
                assert locked.replica.step == step
                if step:
                    await self._storage.roll_log()
                result = await self._storage.save_checkpoint(locked.replica, losses, locked.release)
            self._checkpoint_failed = False
        except SamestepError:
            self._checkpoint_failed = True
            raise
        finally:
            self._wake_joiners()
        info = result.info
        record = Checkpointed(
            term=self.run.term, step=step, optimizer_step=info.optimizer_step,
            weights_digest=info.weights_digest, state_digest=info.state_digest,
            directory=result.path.name,
        )  # fmt: skip
        self._emit(record)
        self.weights_digest = info.weights_digest
        self._copy_newest(step)
        self._step(inputs.CheckpointDurable(step))

    def _copy_newest(self, step: int) -> None:
        """Copy the newest checkpoint to every directory in the run spec.

        A restart copies too, since it may have rolled back steps.
        """
        for target in self.run.spec.checkpoint.copies:
            self._copying = self._spawn(self._copy(step, target, self._copying))

    async def _copy(self, step: int, target: str, previous_copy: asyncio.Task[None] | None) -> None:
        """Copy the newest checkpoint once the previous copy is complete.

        An error does not stop the run; the first failure and the recovery are reported.
        """
        if previous_copy is not None:
            await previous_copy
        keep = self.run.spec.checkpoint.keep_last
        directory = self._storage.directory
        try:
            async with self._storage.hold_newest_checkpoint() as newest:
                step = newest
                result = await asyncio.to_thread(copy_checkpoint, directory, step, target, keep)
        except (SamestepError, OSError) as error:
            if target not in self._failed_copies:
                self._failed_copies.add(target)
                self._emit(CopyFailed(step, target, text_of(error)))
        else:
            if target in self._failed_copies:
                self._failed_copies.remove(target)
                self._emit(CopyRecovered(step, target))
            if result:
                self._emit(CheckpointCopied(step, target))

    # Workers that lack the run's state.

    def _send_missing(self, worker: str, replay: Replay | None) -> None:
        """Send a worker missed steps or the whole state; this replaces a running transfer."""
        self._stop_transfer(worker)
        if (session := self._sessions.get(worker)) is not None:
            self._transfers[worker] = self._spawn(self._transfer(session, replay))

    def _stop_transfer(self, worker: str) -> None:
        if (task := self._transfers.pop(worker, None)) is not None:
            task.cancel()

    def _leave_behind(self, worker: str, step: int) -> None:
        """Send a slow reader its data from the log instead of from memory."""
        member = self.run.members.get(worker)
        if member is not None and member.state in (MemberState.LOADING, MemberState.FOLLOWING):
            next_step = self._subscribers.detach(worker, step)
            self._step(inputs.WorkerFellBehind(worker, next_step))

    async def _transfer(self, session: MemberSession, replay: Replay | None) -> None:
        """Send a worker the missing state; a failed read halts the run and is retried later."""
        while not self._is_gone(session):
            try:
                await self._transfer_once(session, replay)
            except StorageFailed as error:
                self._step(inputs.WriteFailed(str(error)))
                await self._progressed.wait()
            else:
                return

    async def _transfer_once(self, session: MemberSession, replay: Replay | None) -> None:
        """Send a worker the missing state, then subscribe it."""
        checkpoint: Checkpoint | None = None
        async with self._storage.hold_averages() as hold:
            reached_step = None
            if replay is not None and not self._is_far_behind(replay.step):
                hold.move_to(replay.step)
                reached_step = await self._replay_missed(session, replay, hold)
            while reached_step is None and not self._is_gone(session):
                checkpoint = await self._find_near_checkpoint(checkpoint)
                hold.move_to(checkpoint.info.step)
                reached_step = await self._send_checkpoint(session, checkpoint, hold)
            if reached_step is None or self._is_gone(session):
                return
            self._subscribers.subscribe(session, reached_step)
        self._step(inputs.WorkerCaughtUp(session.name))

    def _is_gone(self, session: MemberSession) -> bool:
        return session.channel.closed or self.outcome is not None

    def _is_far_behind(self, step: int) -> bool:
        return self._subscribers.is_far_behind(
            step, self.run.steps_committed, self._replica.manifest
        )

    async def _send_checkpoint(
        self, session: MemberSession, checkpoint: Checkpoint, hold: LogHold
    ) -> int | None:
        """Send a worker a checkpoint's state and later steps; None if they cannot be read."""
        try:
            with await self._storage.open_state(checkpoint) as checkpoint_state:
                await self._subscribers.send_state(
                    session.channel, self.run.run_id, self._storage, checkpoint_state
                )
        except SamestepError as error:
            self._emit(LogUnreadable(str(error)))
            return None
        replay = Replay(session.name, checkpoint.info.step, None)
        return await self._replay_missed(session, replay, hold)

    async def _replay_missed(
        self, session: MemberSession, replay: Replay, hold: LogHold
    ) -> int | None:
        """Send a worker the steps that it missed; None if the log does not have them."""
        reached_step, problem = None, ""
        try:
            reached_step = await self._subscribers.replay(
                session.channel,
                self._storage,
                self._replica.manifest,
                replay,
                self.run.term,
                hold=hold,
            )
        except SamestepError as error:
            problem = str(error)
        if reached_step is None and hold.is_dropped:
            self._emit(WorkerOutpaced(session.name, hold.step or 0, self.run.steps_committed))
        elif problem:
            self._emit(LogUnreadable(problem))
        return reached_step

    async def _find_near_checkpoint(self, unusable_checkpoint: Checkpoint | None) -> Checkpoint:
        """Return the newest checkpoint; make one first if the log since then is too large to send
        instead of a state (`max_replay_bytes`).

        Args:
            unusable_checkpoint: A checkpoint that could not be read.
        """
        averages_from = await self._storage.first_step_with_averages()
        requested_at = None
        while True:
            newest = self._storage.newest_checkpoint
            if (
                newest is not None
                and newest is not unusable_checkpoint
                and newest.info.step >= averages_from
            ):
                is_near = not self._is_far_behind(newest.info.step)
                if is_near or self._checkpoint_failed:
                    return newest
            if requested_at != self.run.steps_committed:
                requested_at = self.run.steps_committed
                self._step(inputs.SaveState())
            await self._progressed.wait()

    def _wake_joiners(self) -> None:
        self._progressed.set()
        self._progressed.clear()

    async def _digest_replica(self, upload: int) -> None:
        """Report a complete upload of state 0 to the run, once the run's log is open.

        Without a log the run cannot start. The sender may have left meanwhile.
        """
        initial_digest, state = await self._replica.digest_state_0()
        try:
            await self._storage.wait_for_log()
        except SamestepError:
            return  # `begin_log` reported it
        actions = self.run.step(inputs.ReplicaLoaded(upload, initial_digest, state.state_digest))
        if self.run.has_state and self.replica_state is None:
            self.replica_state = state
        self._do(actions)

    async def _finish(self, action: Finish) -> None:
        """Write the result of the run, then release the workers."""
        self.outcome = action
        ended_s = self._machine.now_s()
        try:
            await self._write(action, ended_s)
        except StorageFailed as error:
            self.outcome = None
            self._storage.reopen_journal()
            self._step(inputs.ResultNotWritten(str(error)))
            return
        except Exception as error:  # noqa: BLE001 -- any error must end the run
            self.is_superseded = isinstance(error, Superseded)
            reason = (
                f"all steps are committed, but the result could not be written: {text_of(error)}"
            )
            self.outcome = Finish("failed", reason, ExitCode.FAILED)
        if self.outcome.outcome == "failed":
            self._emit(RunFailing(self.outcome.reason))
        if self._copying is not None:
            await self._copying
        weights = self.result.get("weights_digest")
        if weights is not None:
            self.weights_digest = str(weights)
        message = EndRun(
            run_id=self.run.run_id, outcome=self.outcome.outcome,
            reason=cut_text(self.outcome.reason), weights=None if weights is None else str(weights),
            metrics=metrics_to_send(self.result),
        )  # fmt: skip
        try:
            await self.close()
        finally:
            # Last: a worker that leaves on this message leaves a finished run.
            for member in self.run.members:
                self._send(Send(member.name, message))
            self._sink.end_run(self, self.outcome)

    async def close(self) -> None:
        """Close files and threads; an interrupted run can be resumed."""
        if self._closed:
            return
        self._closed = True
        for session in self._sessions.values():
            if session.run is self:
                session.run = None
        others = self._tasks - {asyncio.current_task()}
        await asyncio.gather(*(t for t in others if t.cancel()), return_exceptions=True)
        self._subscribers.clear()
        if self._coordinator_replica is not None:
            self._coordinator_replica.close()
            # The next run needs the memory while this run is still shown.
            self._coordinator_replica = None
        await self._storage.close()

    async def _write(self, action: Finish, ended_s: float) -> None:
        if self.replica_state is None or action.outcome == "failed":
            return
        wall_s = ended_s - (self.started_s or ended_s)
        with await self._replica.lock() as locked:
            self.model_directory, self.result = await write_result(
                self.run, self._storage, locked.replica, action, wall_s
            )

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _trace_payload(self, worker: str, message: Message) -> None:
        if self._tracer is not None and isinstance(message, GradientPayload | StateChunk):
            fields = message.model_dump()
            self._tracer.instant(f"receive block {fields['block']}", worker, **fields)


def _command_name(command: Command) -> CommandName:
    """Return a command's name in the journal."""
    match command:
        case inputs.HaltRun():
            return "halt"
        case inputs.ContinueRun(skip_step):
            return "skip_step" if skip_step else "continue"
        case inputs.SaveState():
            return "checkpoint"
        case inputs.DrainRun():
            return "drain"
        case inputs.FailRun():
            return "give_up"
