"""The coordinator's service: members come and go, runs are taken one after the other."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from coordinator.disk.claim import Claim
from coordinator.files.blob_index import BlobIndex
from coordinator.files.blob_server import BlobServer
from coordinator.files.permitted import PermittedFiles
from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.doorway import HERE, Doorway, Greet
from coordinator.members.session import JoinCheck, MemberSession
from coordinator.members.strangers import Strangers
from coordinator.run.exchange.round import new_array
from coordinator.run.outputs.actions import Finish
from coordinator.run.outputs.facts import Fact
from coordinator.run.run import Run
from coordinator.run.workers.membership import MemberState
from coordinator.service.accepted_run import AcceptedRun, begin_run, find_run
from coordinator.service.execution import Execution
from coordinator.service.listener import (
    Draining,
    Listener,
    LoopHeld,
    RunAccepted,
    RunEnded,
    RunResumed,
    RunWaitsForDisk,
    SecretsSound,
    SecretsTrouble,
    WorkerConnected,
    WorkerDisconnected,
    document,
)
from coordinator.service.repeated_ends import Others, Phase, RepeatedEnds
from coordinator.storage.kept_files import hold
from coordinator.storage.run_storage import RunStorage
from protocol.base import limits
from protocol.base.address import format_address
from protocol.base.errors import (
    ExitCode,
    OutOfPlace,
    QueueFull,
    SamestepError,
    SharedMemoryFull,
    StorageFailed,
    UsageError,
)
from protocol.exact.update import Array
from protocol.host.lent_memory import Lender, new_lender
from protocol.host.loop_watch import LoopWatch
from protocol.host.machine import Machine
from protocol.host.secret_file import secret_places
from protocol.host.trace import Tracer
from protocol.spec.run_spec import RunSpec
from protocol.wire.authentication import new_key
from protocol.wire.connection import Connection
from protocol.wire.messages import Heartbeat, Welcome
from protocol.wire.transport import Channel

log = structlog.get_logger("coordinator")


@dataclass(frozen=True, slots=True)
class Settings:
    """How the service runs.

    Attributes:
        bind: Host and port for workers; port 0 takes a free one.
        expect_workers: How many must be ready before a run starts.
        directory: Where runs are kept: each in a directory below, or the one run right there.
        once: End after the first run.
        plaintext: Without TLS: members still prove themselves, but all can be read and changed.
        data_roots: Below which submitted runs may read files; none: anywhere but in secrets.
    """

    bind: tuple[str, int]
    expect_workers: int
    directory: Path
    once: bool
    trace: Path | None = None
    plaintext: bool = False
    data_roots: tuple[Path, ...] = ()


class Entrance(Protocol):
    """Where connections come in: a `Doorway`, unless they are played."""

    address: tuple[str, int]

    async def open(self, option: str, host: str, port: int) -> None:
        """Listen."""

    def close(self) -> None:
        """No more connections."""


class Service:
    """Members, the run in progress and those that wait.

    Attributes:
        sessions: Members by name.
        current: The run in progress.
        finished: The last run that ended.
        over: Set when the service is to end.
        credentials: What it proves itself with, once it has started.
        permitted: Which files submitted runs may read.
        disk_trouble: Why the next run cannot begin yet; empty if nothing hinders it.
        secrets_troubles: What is wrong with the files of those, in words; empty if nothing is.
        loop_watch: How long its event loop was held, once that is watched.
    """

    credentials: CoordinatorCredentials

    def __init__(
        self,
        settings: Settings,
        machine: Machine | None = None,
        doorway: Callable[[Greet, ssl.SSLContext | None], Entrance] = Doorway,
    ) -> None:
        self.settings = settings
        self.loop_watch = LoopWatch(lambda held_ms: self.reported(LoopHeld(round(held_ms))))
        self._machine = machine or Machine()
        self._open_doorway = doorway
        self.permitted = PermittedFiles(settings.data_roots, secret_places())
        self.secrets_troubles: list[str] = []
        self.disk_trouble = ""
        self.sessions: dict[str, MemberSession] = {}
        self.known: set[str] = set()
        self.repeated_ends = RepeatedEnds()
        self._others = Others()
        self.current: Execution | None = None
        self.finished: Execution | None = None
        self.waiting: deque[AcceptedRun] = deque()
        self.over = asyncio.Event()
        self.address = settings.bind
        self.started_s = self._machine.now_s()
        self.listeners: list[Listener] = []
        self._joining = Strangers()
        self._doorway: Entrance | None = None
        self._lender: Lender | None = None
        self._ticking: list[asyncio.Task[None]] = []
        self._claim: Claim | None = None
        self._running: AcceptedRun | None = None
        self._draining = False
        self._tracer = Tracer.to_file(settings.trace, "coordinator") if settings.trace else None

    @property
    def trainers(self) -> list[str]:
        """Names of the members that are there to train: those that a run waits for, each as often
        as it has devices."""
        sessions = sorted(self.sessions.items())
        training = [(n, s.hello.devices) for n, s in sessions if s.hello.duty == "train"]
        return [name for name, devices in training for _ in range(devices)]

    async def start(self) -> None:
        """Listen for workers.

        Raises:
            UsageError: The directory is another coordinator's, or cannot be used; the address is
                taken or not this machine's; there are no credentials and none can be made.
        """
        self.credentials = CoordinatorCredentials.open()
        self.credentials.keys.refresh()
        self.claim()
        loop = asyncio.get_running_loop()
        plaintext = self.settings.plaintext
        context = None if plaintext else self.credentials.server_context()
        self._doorway = self._open_doorway(self._connection, context)
        await self._doorway.open("--bind", *self.settings.bind)
        self.address = self._doorway.address
        if context is not None and isinstance(self._doorway, Doorway):
            self._lender = new_lender()
            self._doorway.open_here(self.credentials.fingerprint, self._lender)
        self._ticking = [loop.create_task(self._beat()), loop.create_task(self._tick())]

    async def stop(self) -> None:
        """Say goodbye to everyone and close."""
        self.listeners.clear()
        # Whoever has taken over, or goes on with what is left, will want these workers.
        last = self.finished
        drained = (
            last is not None and last.outcome is not None and last.outcome.outcome == "drained"
        )
        superseded = last is not None and last.superseded
        wanted = superseded or drained or self.current is not None or bool(self.waiting)
        for session in self._joining:
            session.channel.abort("the coordinator ends")
        for session in list(self.sessions.values()):
            session.channel.goodbye("the coordinator ends", retry=wanted, exit_code=0)
        if self._doorway is not None:
            self._doorway.close()
        for task in self._ticking:
            task.cancel()
        if self.current is not None:
            await self.current.close()
        for accepted in (self._running, *self.waiting):
            self._release(accepted.claim if accepted is not None else None)
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        if self._lender is not None:
            self._lender.close()
            self._lender = None
        if self._tracer is not None:
            self._tracer.close()

    def claim(self, directory: Path | None = None) -> Claim:
        """Hold a directory; the service's own is held only once.

        Raises:
            UsageError: It is another coordinator's, or cannot be used.
        """
        if self._claim is None:
            self._claim = hold(self.settings.directory)
        if directory is None or directory.resolve() == self.settings.directory.resolve():
            return self._claim
        claim = hold(directory, above=self._claim.epoch - 1)
        self._claim.raise_to(claim.epoch)
        return claim

    def submit(
        self, spec: RunSpec, directory: Path | None = None, blobs: BlobIndex | None = None
    ) -> str:
        """Queue a run; it starts when those before it are over.

        Args:
            spec: The run.
            directory: Where it is kept.
            blobs: The files that it names, here; without them each worker uses its own.

        Returns:
            The run's id.

        Raises:
            UsageError: The directory cannot be used, or holds a run already.
            StorageFailed: The disk refuses.
        """
        self._refuse_more_runs()
        run_id = f"{spec.name}-{uuid.uuid4().hex[:8]}"
        claim = self.claim(directory or self.settings.directory / run_id)
        try:
            accepted = begin_run(run_id, spec, claim, blobs)
        except SamestepError:
            self._release(claim)
            raise
        self._queue(accepted)
        return run_id

    def resume(
        self, directory: Path, spec: RunSpec | None = None, from_step: int | None = None
    ) -> str | None:
        """Queue the run that a directory holds, to go on with it.

        Args:
            directory: Its directory.
            spec: What the run has to be; None for whatever it is.
            from_step: Go back to the checkpoint after so many steps first.

        Returns:
            The run's id; None if there is none, or it has finished.

        Raises:
            SamestepError: It cannot go on; the reason says why.
        """
        claim = self.claim(directory)
        try:
            accepted = find_run(claim, spec, from_step)
        except SamestepError:
            self._release(claim)
            raise
        return self._queue_found(claim, accepted)

    async def resume_by_name(self, run_id: str, from_step: int | None = None) -> str | None:
        """As `resume`, while others are served: large files are read in a thread.

        Raises:
            UsageError: It is here already, or there is no such run.
            SamestepError: It cannot go on; the reason says why.
        """
        directory = self.settings.directory / run_id
        self._refuse_more_runs()
        here = [self._running, *self.waiting]
        if run_id in (accepted.stored.run_id for accepted in here if accepted is not None):
            raise UsageError(f"run {run_id!r} is in progress or waits already")
        if Path(run_id).name != run_id or not (directory / "run.json").is_file():
            raise UsageError(f"expected the name of a run, found none at {str(directory)!r}")
        claim = self.claim(directory)
        try:
            accepted = await asyncio.to_thread(find_run, claim, None, from_step, self.permitted)
        except SamestepError:
            self._release(claim)
            raise
        return self._queue_found(claim, accepted)

    def _queue_found(self, claim: Claim, accepted: AcceptedRun | None) -> str | None:
        if accepted is None:
            self._release(claim)
            return None
        self._queue(accepted)
        return accepted.stored.run_id

    def _refuse_more_runs(self) -> None:
        if self._draining:
            raise UsageError("the coordinator is draining and takes no more runs")
        if len(self.waiting) >= limits.QUEUED_RUNS:
            raise QueueFull(
                f"expected at most {limits.QUEUED_RUNS} runs that wait, got one more; submit it "
                "when one of them has begun"
            )

    def _queue(self, accepted: AcceptedRun) -> None:
        self.waiting.append(accepted)
        if self.current is not None:
            # Hundreds may wait, and a lock is an open file; it is taken again when the run begins.
            self._release(accepted.claim)
        self._start_next()

    def _release(self, claim: Claim | None) -> None:
        if claim is not None and claim is not self._claim:
            claim.release()

    def drain(self) -> None:
        """Finish the present step, then end."""
        if not self._draining:
            self._draining = True
            self.reported(Draining())
        while self.waiting:
            self._release(self.waiting.pop().claim)
        if self.current is None:
            self.over.set()
        else:
            self.current.command("drain", self.current.run.drain)

    def give_up(self, reason: str) -> None:
        """End the run in progress as failed, unless it is over."""
        if self.current is not None:
            self.current.give_up(reason)

    # Sessions.

    def admit(self, session: MemberSession) -> Welcome:
        """Name the worker; see `SessionOwner`."""
        if len(self.sessions) >= limits.WORKERS:
            raise OutOfPlace(f"expected at most {limits.WORKERS} workers, this is one more")
        wanted = session.hello.name or "worker"
        for other in list(self.sessions.values()):
            if other.hello.instance == session.hello.instance:
                # The same process came back before its old connection was seen to be dead.
                other.channel.abort("the worker has connected again")
                self._forget(other, "the worker has connected again")
        name, number = wanted, 1
        while name in self.sessions:
            number += 1
            name = f"{wanted[:60]}-{number}"
        return Welcome(
            worker=name,
            epoch=self.claim().epoch,
            heartbeat_interval_ms=limits.HEARTBEAT_INTERVAL_MS,
            liveness_timeout_ms=limits.LIVENESS_TIMEOUT_MS,
            key=session.check.new_key(),
        )

    def joined(self, session: MemberSession) -> None:
        """A worker is a member; see `SessionOwner`."""
        self._joining.leave(session)
        self.repeated_ends.well(session.host)
        self.sessions[session.name] = session
        self.known.add(session.name)
        backend, admitted_by = session.hello.backend, session.check.admitted_by
        self.reported(WorkerConnected(session.name, backend, admitted_by, len(self.sessions)))
        if self.current is not None:
            self.current.invite(session)

    def left(self, session: MemberSession, reason: str) -> None:
        """A connection is over; see `SessionOwner`."""
        self._joining.leave(session)
        if not session.name:
            log.info("connection_closed", peer=session.channel.peer, reason=reason)
            if session.is_worker:
                self._note_end(session, session.host, "joining", reason)
            elif fact := self._others.came(session.host, reason, self._machine.now_s()):
                self.reported(fact)
        self._forget(session, reason)

    def _forget(self, session: MemberSession, reason: str) -> None:
        if self.sessions.get(session.name) is not session:
            return
        del self.sessions[session.name]
        self.reported(WorkerDisconnected(session.name, reason, len(self.sessions)))
        if self.current is not None:
            phase = self.current.phase_of(session)
            self.current.lost(session, reason)
            self._note_end(session, session.name, phase, reason)

    def _note_end(
        self, session: MemberSession, worker: str, phase: Phase | None, reason: str
    ) -> None:
        """See whether a worker comes and goes for ever."""
        if session.stepped or session.leaves:
            self.repeated_ends.well(worker)
        elif phase is not None:
            said = session.explained
            fact = self.repeated_ends.ended(worker, phase, reason, said=said)
            if fact is not None and self.current is not None:
                self.current.tell(fact)
            elif fact is not None:
                self.reported(fact)

    def _connection(self, address: tuple[str, int]) -> Channel | None:
        host = address[0]
        if not self._joining.admits(host):
            log.debug("connection_refused", peer=host, reason="too many are in the handshake")
            return None
        encrypted = not self.settings.plaintext
        check = JoinCheck(self.credentials, encrypted=encrypted, here=address == HERE)
        session = MemberSession(self, check, host)
        channel = Channel(Connection("coordinator"), session, self._machine.now_s)
        channel.peer = format_address(host, address[1])
        session.start(channel)
        self._joining.enter(session)
        return channel

    # Runs.

    def _allocate(self, elements: int) -> Array:
        """Memory for averages: workers of this machine read them where they are made. Where there
        is no more of it, whoever is to be sent them is told so."""
        if self._lender is not None and any(
            session.channel.connection.memory for session in self.sessions.values()
        ):
            with suppress(SharedMemoryFull):
                if (shared := self._lender.allocate(elements)) is not None:
                    return shared
        return new_array(elements)

    def _next_run(self) -> AcceptedRun | None:
        """Take the first run that waits and whose directory is still this coordinator's.

        A directory that cannot be used now may be usable later: its run waits on, and is tried
        again with every heartbeat.
        """
        while self.waiting:
            accepted = self.waiting[0]
            try:
                accepted.claim.take_again()
                accepted.directory.reopen()
            except StorageFailed as error:
                if self.settings.once:
                    raise
                self._waits_for_disk(accepted.stored.run_id, str(error))
                return None
            except SamestepError as error:
                ended = RunEnded("failed", f"it did not begin: {error}")
                self.reported(ended, accepted.stored.run_id)
                self.waiting.popleft()
            else:
                self.disk_trouble = ""
                return self.waiting.popleft()
        return None

    def _waits_for_disk(self, run_id: str, reason: str) -> None:
        if self.disk_trouble != reason:
            self.disk_trouble = reason
            self.reported(RunWaitsForDisk(reason), run_id)

    def _start_next(self) -> None:
        accepted = self._next_run() if self.current is None else None
        if accepted is None:
            return
        stored, epoch, restart = accepted.stored, accepted.claim.epoch, accepted.restart
        self._running = accepted
        if self._lender is not None:
            self._lender.trim()
        run = Run(
            stored.run_id,
            stored.spec,
            epoch,
            self.settings.expect_workers,
            restart.resumption if restart is not None else None,
            secret=new_key(),
            allocate=self._allocate,
        )
        run.blobs = accepted.blobs.digest if accepted.blobs is not None else None
        storage = RunStorage(
            accepted.directory, stored.run_id, stored.spec, epoch=epoch,
            guard=accepted.claim.check, failed=self._storage_failed,
            thread=self._machine.thread,
        )  # fmt: skip
        storage.begin_journal(accepted.first_lines)
        self.current = Execution(
            run, self.sessions, storage, BlobServer(stored.run_id, accepted.blobs), self,
            tracer=self._tracer, machine=self._machine,
        )  # fmt: skip
        task, steps = stored.spec.task, run.known_steps
        if restart is None:
            self.reported(RunAccepted(task, steps), stored.run_id)
        else:
            notes = list(restart.recovery.notes)
            self.reported(RunResumed(task, steps, run.step, notes), stored.run_id)
            self.current.resume(restart.recovery)
        for session in list(self.sessions.values()):
            self.current.invite(session)

    def _storage_failed(self, error: Exception) -> None:
        if self.current is not None:
            self.current.storage_failed(error)

    def reported(self, fact: Fact, run_id: str = "") -> None:
        """Log once and tell the listeners; see `execution.Watcher`."""
        log.info(fact.event, **document(fact, run_id))
        for listener in list(self.listeners):
            try:
                listener.reported(fact, run_id)
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- a run outlives its audience
                self.listeners.remove(listener)
                log.warning("listener_lost", error=repr(error))

    def ended(self, execution: Execution, outcome: Finish) -> None:
        """A run is over; see `execution.Watcher`."""
        self.finished, self.current = execution, None
        if self._running is not None:
            self._release(self._running.claim)
            self._running = None
        self.reported(RunEnded(outcome.outcome, outcome.reason), execution.run.run_id)
        if self.settings.once or self._draining or execution.superseded:
            self.over.set()  # who has lost one directory to a successor leaves it the workers too
        else:
            self._start_next()

    async def _tick(self) -> None:
        """Let the run look at its leases."""
        while True:
            await asyncio.sleep(limits.TICK_MS / 1000)
            if self.current is not None:
                self.current.tick()

    async def _beat(self) -> None:
        """Send heartbeats, and count silent workers as lost."""
        interval_s = limits.HEARTBEAT_INTERVAL_MS / 1000
        last_s = self._machine.now_s()
        while True:
            await asyncio.sleep(interval_s)
            # After a stall of our own, what others sent meanwhile is still to be read.
            stalled = self._machine.now_s() - last_s > 3 * interval_s
            last_s = self._machine.now_s()
            if stalled:
                continue
            self._look_at_secrets()
            self._start_next()
            for session in list(self.sessions.values()):
                silent_s = self._machine.now_s() - session.channel.last_received_s
                unread = session.channel.paused
                if silent_s * 1000 > self._patience_ms(session) and not unread:
                    session.channel.abort(f"silent for {silent_s:.0f} s")
                elif session.check.revoked:
                    reason = f"the key of {session.check.name!r} was revoked"
                    session.channel.goodbye(reason, retry=False, exit_code=ExitCode.NOT_AUTHORISED)
                else:
                    session.channel.send(Heartbeat())

    def _look_at_secrets(self) -> None:
        """Say what is wrong with the files of keys and token, and when that is over."""
        before, self.secrets_troubles = self.secrets_troubles, self.credentials.look()
        for trouble in self.secrets_troubles:
            if trouble not in before:
                self.reported(SecretsTrouble(trouble))
        if before and not self.secrets_troubles:
            self.reported(SecretsSound())

    def _patience_ms(self, session: MemberSession) -> int:
        """How long this member may give no sign of life.

        One that imports a library, opens its device or builds its task may not be able to: all of
        its threads may stand still meanwhile. The answers of its kernel count then, for a while.
        """
        member = self.current.run.members.get(session.name) if self.current is not None else None
        answered_s = session.channel.unanswered_s
        if (member is not None and member.state is not MemberState.PREPARING) or (
            answered_s is None or answered_s * 1000 > limits.LIVENESS_TIMEOUT_MS
        ):
            return limits.LIVENESS_TIMEOUT_MS
        return limits.STANDSTILL_TIMEOUT_MS
