"""The coordinator's service: members, the queue of runs, and the run in progress."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from coordinator.disk.directory_lock import DirectoryLock
from coordinator.files.blob_index import BlobIndex
from coordinator.files.blob_server import BlobServer
from coordinator.files.permitted_files import PermittedFiles
from coordinator.members.acceptor import LOCAL, CoordinatorAcceptor
from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.session import JoinCheck, MemberSession
from coordinator.run.exchange.round import new_array
from coordinator.run.inputs import DrainRun
from coordinator.run.outputs.actions import Finish
from coordinator.run.outputs.events import Event
from coordinator.run.run import Run
from coordinator.run.workers.membership import MemberState
from coordinator.service.events import (
    Draining,
    EventLoopBlocked,
    EventSink,
    RunAccepted,
    RunEnded,
    RunResumed,
    RunWaitsForDisk,
    SecretsDamaged,
    SecretsRestored,
    WorkerConnected,
    WorkerDisconnected,
    event_fields,
)
from coordinator.service.execution import Execution
from coordinator.service.flapping import FlapDetector, Phase, StrayConnections
from coordinator.service.run_instance import RunInstance, begin_run, load_run
from coordinator.storage.file_digests import lock_directory
from coordinator.storage.run_storage import RunStorage
from protocol.base import limits
from protocol.base.address import format_address
from protocol.base.errors import (
    ExitCode,
    OutOfOrder,
    QueueFull,
    SamestepError,
    SharedMemoryFull,
    StorageFailed,
    UsageError,
)
from protocol.base.option_names import option
from protocol.exact.reduction.average import Array
from protocol.machine.event_loop import LoopWatch
from protocol.machine.machine import Machine
from protocol.machine.secret_file import secret_paths
from protocol.machine.shared_segment import SegmentOwner, new_segment_owner
from protocol.machine.trace import Tracer
from protocol.spec.run_spec import RunSpec
from protocol.wire.acceptor import ProtocolFactory
from protocol.wire.authentication import new_key
from protocol.wire.connection import Connection
from protocol.wire.messages import Heartbeat, Welcome
from protocol.wire.pending import PendingConnections
from protocol.wire.transport import Channel

log = structlog.get_logger("coordinator")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the service.

    Attributes:
        bind: Host and port for workers; port 0: any free port.
        expect_workers: Number of workers that must be ready before a run starts; a multi-device
            worker counts once for each device.
        directory: The parent of the runs' directories; with `once`, the directory of the only run.
        once: Whether to end after the first run.
        trace: The file for a trace; None: no trace.
        plaintext: Whether to use no TLS: members still authenticate, but anyone can read and change
            data.
        data_roots: Directories whose files submitted runs may read; empty: all files but secrets.
    """

    bind: tuple[str, int]
    expect_workers: int
    directory: Path
    once: bool
    trace: Path | None = None
    plaintext: bool = False
    data_roots: tuple[Path, ...] = ()


class ConnectionSource(Protocol):
    """Accepts connections: a `CoordinatorAcceptor`, or a simulated one."""

    address: tuple[str, int]

    async def open(self, option: str, host: str, port: int) -> None:
        """Listen."""

    def close(self) -> None:
        """Accept no more connections."""


class Service:
    """The members, the run in progress, and the queued runs.

    Attributes:
        sessions: Members by name.
        known_workers: Names of all members since the start, also of those that have left.
        current: The run in progress.
        finished: The last run that ended.
        queue: The queued runs, the next one first.
        should_end: Set when the service must end.
        address: The address for workers; once the service has started, with the port in use.
        event_sinks: Receive every event.
        credentials: The coordinator's credentials; available once the service has started.
        permitted_files: Checks the files that submitted runs may read.
        disk_trouble: Why the next run cannot begin yet; empty if nothing prevents it.
        secrets_troubles: Problems with the files of keys and token; empty without problems.
        loop_watch: Measures how long the event loop was blocked.
    """

    credentials: CoordinatorCredentials

    def __init__(
        self,
        settings: Settings,
        machine: Machine | None = None,
        make_acceptor: Callable[[ProtocolFactory, ssl.SSLContext | None], ConnectionSource] = (
            CoordinatorAcceptor
        ),
    ) -> None:
        self.settings = settings
        self.loop_watch = LoopWatch(lambda ms: self.emit(EventLoopBlocked(round(ms))))
        self._machine = machine or Machine()
        self._make_acceptor = make_acceptor
        self.permitted_files = PermittedFiles(settings.data_roots, secret_paths())
        self.secrets_troubles: list[str] = []
        self.disk_trouble = ""
        self.sessions: dict[str, MemberSession] = {}
        self.known_workers: set[str] = set()
        self.flap_detector = FlapDetector()
        self._stray_connections = StrayConnections()
        self.current: Execution | None = None
        self.finished: Execution | None = None
        self.queue: deque[RunInstance] = deque()
        self.should_end = asyncio.Event()
        self.address = settings.bind
        self.started_s = self._machine.now_s()
        self.event_sinks: list[EventSink] = []
        self._pending = PendingConnections[MemberSession]()
        self._acceptor: ConnectionSource | None = None
        self._segment_owner: SegmentOwner | None = None
        self._timer_tasks: list[asyncio.Task[None]] = []
        self._lock: DirectoryLock | None = None
        self._running: RunInstance | None = None
        self._is_draining = False
        self._tracer = Tracer.to_file(settings.trace, "coordinator") if settings.trace else None

    @property
    def trainers(self) -> list[str]:
        """Names of the members that train, each repeated for every device, since
        `expect_workers` counts devices."""
        sessions = sorted(self.sessions.items())
        training = [(n, s.hello.devices) for n, s in sessions if s.hello.duty == "train"]
        return [name for name, devices in training for _ in range(devices)]

    async def start(self) -> None:
        """Accept workers.

        Raises:
            UsageError: Another coordinator uses the directory, or the directory cannot be used; the
                address is in use or not this machine's; credentials are missing and cannot be
                created.
        """
        self.credentials = CoordinatorCredentials.open()
        self.credentials.keys.refresh()
        self.lock()
        loop = asyncio.get_running_loop()
        plaintext = self.settings.plaintext
        context = None if plaintext else self.credentials.server_context()
        self._acceptor = self._make_acceptor(self._connection, context)
        await self._acceptor.open(option("--bind"), *self.settings.bind)
        self.address = self._acceptor.address
        if context is not None and isinstance(self._acceptor, CoordinatorAcceptor):
            self._segment_owner = new_segment_owner()
            self._acceptor.open_local(self.credentials.fingerprint, self._segment_owner)
        self._timer_tasks = [loop.create_task(self._beat()), loop.create_task(self._tick())]

    async def stop(self) -> None:
        """Close all connections and files."""
        self.event_sinks.clear()
        # A successor, or a restart that continues the run, needs these workers: they reconnect.
        last = self.finished
        is_drained = (
            last is not None and last.outcome is not None and last.outcome.outcome == "drained"
        )
        is_superseded = last is not None and last.is_superseded
        has_runs = self.current is not None or bool(self.queue)
        should_return = is_superseded or is_drained or has_runs
        for session in self._pending:
            session.channel.abort("the coordinator ends")
        for session in list(self.sessions.values()):
            session.channel.goodbye("the coordinator ends", retry=should_return, exit_code=0)
        if self._acceptor is not None:
            self._acceptor.close()
        for task in self._timer_tasks:
            task.cancel()
        if self.current is not None:
            await self.current.close()
        for instance in (self._running, *self.queue):
            self._release(instance.lock if instance is not None else None)
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        if self._segment_owner is not None:
            self._segment_owner.close()
            self._segment_owner = None
        if self._tracer is not None:
            self._tracer.close()

    def lock(self, directory: Path | None = None) -> DirectoryLock:
        """Lock a directory; the service's own directory is locked only once.

        Raises:
            UsageError: Another coordinator uses the directory, or the directory cannot be used.
        """
        if self._lock is None:
            self._lock = lock_directory(self.settings.directory)
        if directory is None or directory.resolve() == self.settings.directory.resolve():
            return self._lock
        lock = lock_directory(directory, above_term=self._lock.term - 1)
        self._lock.raise_term_to(lock.term)
        return lock

    def submit(
        self, spec: RunSpec, directory: Path | None = None, blobs: BlobIndex | None = None
    ) -> str:
        """Queue a run; it starts when the preceding runs are over.

        Args:
            spec: The run spec.
            directory: Directory of the run; None: a new one below the service's directory.
            blobs: The files that the spec names, on this machine; None if each worker has its own
                copies.

        Returns:
            The run's ID.

        Raises:
            UsageError: The directory cannot be used, or already contains a run.
            StorageFailed: A write failed.
        """
        self._refuse_more_runs()
        run_id = f"{spec.name}-{uuid.uuid4().hex[:8]}"
        lock = self.lock(directory or self.settings.directory / run_id)
        try:
            instance = begin_run(run_id, spec, lock, blobs)
        except SamestepError:
            self._release(lock)
            raise
        self._queue(instance)
        return run_id

    def resume(
        self,
        directory: Path,
        spec: RunSpec | None = None,
        from_step: int | None = None,
        changes: Sequence[str] | RunSpec = (),
    ) -> str | None:
        """Queue the run in a directory to continue it.

        Args:
            directory: Directory of the run.
            spec: The expected run spec; None for any.
            from_step: First roll back to the checkpoint after this many steps.
            changes: `key=value` pairs to change in the run spec first, or the whole new run spec.

        Returns:
            The run's ID; None if there is no run, or it has finished.

        Raises:
            SamestepError: The run cannot continue.
        """
        lock = self.lock(directory)
        try:
            instance = load_run(lock, spec, from_step, changes=changes)
        except SamestepError:
            self._release(lock)
            raise
        return self._queue_or_release(lock, instance)

    async def resume_by_name(
        self, run_id: str, from_step: int | None = None, changes: Sequence[str] = ()
    ) -> str | None:
        """Queue a run as `resume` does, but read its files in a thread.

        Raises:
            UsageError: The run is queued or in progress, or there is no such run.
            SamestepError: The run cannot continue.
        """
        directory = self.settings.directory / run_id
        self._refuse_more_runs()
        current_runs = [self._running, *self.queue]
        if run_id in (instance.stored.run_id for instance in current_runs if instance is not None):
            raise UsageError(
                f"expected a run that has ended, got {run_id!r}, which is already queued or in "
                "progress; follow it with: coordinator status"
            )
        if Path(run_id).name != run_id or not (directory / "run.json").is_file():
            raise UsageError(
                f"expected the name of a run, found no run at {str(directory)!r}; "
                "use a name that submit or status prints"
            )
        lock = self.lock(directory)
        try:
            instance = await asyncio.to_thread(
                load_run, lock, None, from_step, self.permitted_files, changes
            )
        except SamestepError:
            self._release(lock)
            raise
        return self._queue_or_release(lock, instance)

    def _queue_or_release(self, lock: DirectoryLock, instance: RunInstance | None) -> str | None:
        if instance is None:
            self._release(lock)
            return None
        self._queue(instance)
        return instance.stored.run_id

    def _refuse_more_runs(self) -> None:
        if self._is_draining:
            raise UsageError(
                "the coordinator is draining and takes no more runs; submit the run again after "
                "the coordinator has restarted"
            )
        if len(self.queue) >= limits.QUEUED_RUNS:
            raise QueueFull(
                f"expected at most {limits.QUEUED_RUNS} queued runs, got one more; submit the run "
                "when one of them has begun"
            )

    def _queue(self, instance: RunInstance) -> None:
        self.queue.append(instance)
        if self.current is not None:
            # Hundreds of runs may be queued, and a lock is an open file: reacquire it when the run
            # begins.
            self._release(instance.lock)
        self._start_next()

    def _release(self, lock: DirectoryLock | None) -> None:
        if lock is not None and lock is not self._lock:
            lock.release()

    def drain(self) -> None:
        """End once the step in progress, if any, is finished; queued runs stay on disk."""
        if not self._is_draining:
            self._is_draining = True
            self.emit(Draining())
        while self.queue:
            self._release(self.queue.pop().lock)
        if self.current is None:
            self.should_end.set()
        else:
            self.current.execute_command(DrainRun())

    def give_up(self, reason: str) -> None:
        """End the run in progress as failed, unless it is over."""
        if self.current is not None:
            self.current.give_up(reason)

    # Sessions.

    def name_worker(self, session: MemberSession) -> Welcome:
        """Give a joining worker a unique name; see `SessionOwner`.

        An old connection of the same process is closed first.
        """
        if len(self.sessions) >= limits.WORKERS:
            raise OutOfOrder(f"expected at most {limits.WORKERS} workers, got one more")
        base = session.hello.name or "worker"
        for other in list(self.sessions.values()):
            if other.hello.instance == session.hello.instance:
                # The same process reconnected before its old connection was found dead.
                other.channel.abort("the worker has connected again")
                self._forget(other, "the worker has connected again")
        name, number = base, 1
        while name in self.sessions:
            number += 1
            name = f"{base[:60]}-{number}"
        return Welcome(
            worker=name,
            term=self.lock().term,
            heartbeat_interval_ms=limits.HEARTBEAT_INTERVAL_MS,
            liveness_timeout_ms=limits.LIVENESS_TIMEOUT_MS,
            key=session.check.new_key(),
        )

    def add_member(self, session: MemberSession) -> None:
        """Add a member; see `SessionOwner`."""
        self._pending.remove(session)
        self.flap_detector.reset(session.host)
        self.sessions[session.name] = session
        self.known_workers.add(session.name)
        backend, admitted_by = session.hello.backend, session.check.admitted_by
        self.emit(WorkerConnected(session.name, backend, admitted_by, len(self.sessions)))
        if self.current is not None:
            self.current.invite(session)

    def remove_session(self, session: MemberSession, reason: str) -> None:
        """Remove a session whose connection has ended; see `SessionOwner`."""
        self._pending.remove(session)
        if not session.name:
            log.info("connection_closed", peer=session.channel.peer, reason=reason)
            if session.is_worker:
                self._note_end(session, session.host, "joining", reason)
            elif event := self._stray_connections.count(
                session.host, reason, self._machine.now_s()
            ):
                self.emit(event)
        self._forget(session, reason)

    def _forget(self, session: MemberSession, reason: str) -> None:
        if self.sessions.get(session.name) is not session:
            return
        del self.sessions[session.name]
        self.emit(WorkerDisconnected(session.name, reason, len(self.sessions)))
        if self.current is not None:
            phase = self.current.phase_of(session)
            self.current.remove_member(session, reason)
            self._note_end(session, session.name, phase, reason)

    def _note_end(
        self, session: MemberSession, worker: str, phase: Phase | None, reason: str
    ) -> None:
        """Count the end of a connection, to detect a worker that keeps reconnecting."""
        if session.has_stepped or session.has_left:
            self.flap_detector.reset(worker)
        elif phase is not None:
            event = self.flap_detector.count_end(
                worker, phase, reason, is_explained=session.is_explained
            )
            if event is not None and self.current is not None:
                self.current.report(event)
            elif event is not None:
                self.emit(event)

    def _connection(self, address: tuple[str, int]) -> Channel | None:
        host = address[0]
        if not self._pending.has_room(host):
            log.debug("connection_refused", peer=host, reason="too many handshakes")
            return None
        encrypted = not self.settings.plaintext
        check = JoinCheck(self.credentials, encrypted=encrypted, is_local=address == LOCAL)
        session = MemberSession(self, check, host)
        channel = Channel(Connection("coordinator"), session, self._machine.now_s)
        channel.peer = format_address(host, address[1])
        session.start(channel)
        self._pending.add(session)
        return channel

    # Runs.

    def _allocate(self, elements: int) -> Array:
        """Return an array for averages: in shared memory, if local workers can read it and there is
        enough of it."""
        if self._segment_owner is not None and any(
            session.channel.connection.memory for session in self.sessions.values()
        ):
            with suppress(SharedMemoryFull):
                if (shared := self._segment_owner.allocate(elements)) is not None:
                    return shared
        return new_array(elements)

    def _next_run(self) -> RunInstance | None:
        """Take the first queued run whose directory is still this coordinator's.

        A run whose directory cannot be used now stays queued, and is retried with every heartbeat.
        """
        while self.queue:
            instance = self.queue[0]
            try:
                instance.lock.reacquire()
                instance.directory.reopen()
            except StorageFailed as error:
                if self.settings.once:
                    raise
                self._note_disk_trouble(instance.stored.run_id, str(error))
                return None
            except SamestepError as error:
                event = RunEnded("failed", f"cannot begin: {error}")
                self.emit(event, instance.stored.run_id)
                self.queue.popleft()
            else:
                self.disk_trouble = ""
                return self.queue.popleft()
        return None

    def _note_disk_trouble(self, run_id: str, reason: str) -> None:
        if self.disk_trouble != reason:
            self.disk_trouble = reason
            self.emit(RunWaitsForDisk(reason), run_id)

    def _start_next(self) -> None:
        instance = self._next_run() if self.current is None else None
        if instance is None:
            return
        stored_run, term, restart = instance.stored, instance.lock.term, instance.restart
        self._running = instance
        if self._segment_owner is not None:
            self._segment_owner.trim()
        run = Run(
            stored_run.run_id,
            stored_run.spec,
            term,
            self.settings.expect_workers,
            restart.resumption if restart is not None else None,
            secret=new_key(),
            allocate=self._allocate,
        )
        run.blobs = instance.blobs.digest if instance.blobs is not None else None
        storage = RunStorage(
            instance.directory, stored_run.run_id, stored_run.spec, term=term,
            guard=instance.lock.check, failed=self._storage_failed,
            thread=self._machine.thread,
        )  # fmt: skip
        storage.begin_journal(instance.first_lines)
        self.current = Execution(
            run, self.sessions, storage, BlobServer(stored_run.run_id, instance.blobs), self,
            tracer=self._tracer, machine=self._machine,
        )  # fmt: skip
        task, steps = stored_run.spec.task, run.known_steps
        if restart is None:
            self.emit(RunAccepted(task, steps), stored_run.run_id)
        else:
            notes = list(restart.recovery.notes)
            self.emit(RunResumed(task, steps, run.steps_committed, notes), stored_run.run_id)
            self.current.resume(restart.recovery)
        for session in list(self.sessions.values()):
            self.current.invite(session)

    def _storage_failed(self, error: Exception) -> None:
        if self.current is not None:
            self.current.handle_storage_error(error)

    def emit(self, event: Event, run_id: str = "") -> None:
        """Log an event and pass it to all sinks; see `ExecutionSink`."""
        log.info(event.name, **event_fields(event, run_id))
        for sink in list(self.event_sinks):
            try:
                sink.emit(event, run_id)
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- a run outlives its sinks
                self.event_sinks.remove(sink)
                log.warning("event_sink_lost", error=repr(error))

    def end_run(self, execution: Execution, outcome: Finish) -> None:
        """Note that a run is over, and start the next one; see `ExecutionSink`."""
        self.finished, self.current = execution, None
        if self._running is not None:
            self._release(self._running.lock)
            self._running = None
        self.emit(RunEnded(outcome.outcome, outcome.reason), execution.run.run_id)
        if self.settings.once or self._is_draining or execution.is_superseded:
            self.should_end.set()  # a successor gets the workers too
        else:
            self._start_next()

    async def _tick(self) -> None:
        """Let the run check its leases."""
        while True:
            await asyncio.sleep(limits.TICK_MS / 1000)
            if self.current is not None:
                self.current.tick()

    async def _beat(self) -> None:
        """Send heartbeats, and close the connections of silent workers."""
        interval_s = limits.HEARTBEAT_INTERVAL_MS / 1000
        last_s = self._machine.now_s()
        while True:
            await asyncio.sleep(interval_s)
            # After a stall of this process, received data is still unread.
            has_stalled = self._machine.now_s() - last_s > 3 * interval_s
            last_s = self._machine.now_s()
            if has_stalled:
                continue
            self._check_secrets()
            self._start_next()
            for session in list(self.sessions.values()):
                silent_s = self._machine.now_s() - session.channel.last_received_s
                is_paused = session.channel.is_paused
                if silent_s * 1000 > self._patience_ms(session) and not is_paused:
                    session.channel.abort(f"silent for {silent_s:.0f} s")
                elif session.check.is_revoked:
                    reason = f"the key of {session.check.name!r} was revoked"
                    session.channel.goodbye(reason, retry=False, exit_code=ExitCode.NOT_AUTHORIZED)
                else:
                    session.channel.send(Heartbeat())

    def _check_secrets(self) -> None:
        """Report problems with the files of keys and token, and the end of the problems."""
        earlier_troubles, self.secrets_troubles = self.secrets_troubles, self.credentials.check()
        for trouble in self.secrets_troubles:
            if trouble not in earlier_troubles:
                self.emit(SecretsDamaged(trouble))
        if earlier_troubles and not self.secrets_troubles:
            self.emit(SecretsRestored())

    def _patience_ms(self, session: MemberSession) -> int:
        """Return how long a member may be silent.

        While a worker imports a library, opens its device or builds its task, all of its threads
        may be blocked. Its kernel's acknowledgements then count as signs of life, for a while.
        """
        member = self.current.run.members.get(session.name) if self.current is not None else None
        answered_s = session.channel.unacknowledged_s
        if (member is not None and member.state is not MemberState.PREPARING) or (
            answered_s is None or answered_s * 1000 > limits.LIVENESS_TIMEOUT_MS
        ):
            return limits.LIVENESS_TIMEOUT_MS
        return limits.STALL_TIMEOUT_MS
