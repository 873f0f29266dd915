"""The worker's client: connects, keeps the connection alive, and executes the session's actions."""

from __future__ import annotations

import asyncio
import ssl
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from numpy.typing import NDArray

from protocol import __version__
from protocol.base import limits
from protocol.base.address import format_address
from protocol.base.errors import (
    ExitCode,
    Mismatch,
    NotAuthorized,
    OutOfOrder,
    ProtocolError,
    SamestepError,
    Unreachable,
    error_for,
)
from protocol.base.fields import Duty, cut_text
from protocol.exact.reduction.average import Array
from protocol.exact.reduction.tree import Subtree
from protocol.machine import local_socket
from protocol.machine.machine import Machine
from protocol.machine.trace import Tracer
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import Codecs
from protocol.wire import dial, tls, tls_transport
from protocol.wire.authentication import (
    NO_CERTIFICATE,
    answer_challenge,
    local_fingerprint,
    new_nonce,
)
from protocol.wire.connection import Connection, EncodedMessage, ReceivedMessage, encode
from protocol.wire.messages import (
    AveragedGradient,
    Challenge,
    Goodbye,
    GradientPayload,
    Heartbeat,
    Hello,
    InnerCheckpointChunk,
    Linked,
    LinkTraffic,
    ListenForPeers,
    Message,
    PeerPort,
    Peers,
    Preparing,
    Unlinked,
    Welcome,
)
from protocol.wire.peers import PeerList, Traffic, parse
from protocol.wire.transport import Channel, reason_of
from worker.join.credentials import WorkerCredentials
from worker.logic import actions as act
from worker.logic import events
from worker.logic.file_fetch import FileEvent
from worker.logic.join_failures import FRUITLESS_JOINS, JoinFailures
from worker.logic.session import WorkerSession
from worker.peers.gradient_exchange import Action, GradientExchange, LastAverage, ToPeer
from worker.peers.links import MakeLinks, socket_links
from worker.shell.engine import BackendFactory, Engine, Release
from worker.shell.file_fetcher import FileFetcher
from worker.shell.group_engine import DeviceSet, GroupEngine

_SHORT_PAUSE_S: Final = 0.25
"""The first pauses between attempts: a restarting coordinator is back within two seconds."""
_LONG_PAUSE_S: Final = 5.0
_SHORT_PAUSES_S: Final = 60.0
"""After this long without a connection, pauses are long."""
_REPORT_INTERVAL_S: Final = 10.0
_LEAST_ATTEMPT_S: Final = 2.0
"""Shortest limit for an attempt, even if less time is left."""
_GRACE_S: Final = 1.0
"""Extra time in which an attempt can report its failure itself, before it is cancelled."""
_FIND_AGAIN_AFTER_S: Final = 2.0
"""A restarting coordinator answers at its old address within that time."""
_SEARCH_TIMEOUT_S: Final = 5.0

T = TypeVar("T")
CoordinatorSearch = Callable[[], Coroutine[Any, Any, tuple[str, int]]]
"""Searches for the coordinator; returns host and port, or raises Unreachable."""


@dataclass(frozen=True, slots=True)
class Target:
    """The coordinator to serve, this worker's name and duty, and how long to try."""

    host: str
    port: int
    name: str
    backend: str
    retry_for_s: float
    duty: Duty = "train"

    @property
    def address(self) -> str:
        """The coordinator's address as text, HOST:PORT."""
        return format_address(self.host, self.port)


class Client:
    """Serves one coordinator until it says goodbye.

    Args:
        target: The coordinator.
        devices: Opens the one device, or the devices of several processes.
        credentials: The worker's credentials.
        print_line: Prints a line.
        tracer: Records when messages are sent and received.
        cache: Cache directory for files of runs; None for the user's cache.
        machine: Clock, threads and sockets.
        links: Opens the connections to peers.
        search_again: Searches for the coordinator again, if it was found by a search.

    Attributes:
        is_device_busy: Whether the device is still computing after the end of `serve`.
    """

    _hello: Hello

    def __init__(
        self,
        target: Target,
        devices: BackendFactory | DeviceSet,
        credentials: WorkerCredentials,
        print_line: Callable[[str], None],
        tracer: Tracer | None = None,
        *,
        cache: Path | None = None,
        machine: Machine | None = None,
        links: MakeLinks | None = None,
        search_again: CoordinatorSearch | None = None,
    ) -> None:
        self._machine = machine = machine or Machine()
        self._target = target
        self._credentials = credentials
        self._secret = b""
        self._certificate: bytes | None = None
        self._print = print_line
        self._tracer = tracer
        self._instance = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._engine = (
            GroupEngine(devices, self._emit, print_line, tracer, machine)
            if isinstance(devices, DeviceSet)
            else Engine(devices, self._emit, tracer, machine)
        )
        self._files = FileFetcher(self._file_result, cache, machine)
        self._links = links
        self._coordinator_search = search_again
        self._peers: PeerExchange | None = None
        self._session: WorkerSession | None = None
        self._joins = JoinFailures()
        self._problem = f"connecting to {target.address}"
        self._channel: Channel | None = None
        self._checkpoint_throttle = InnerCheckpointThrottle()
        self._terms: dict[str, int] = {}
        self._lost_reason: asyncio.Future[str] = self._loop.create_future()
        self._leave_action: act.Leave | None = None
        self._stop = asyncio.Event()
        self._is_draining = False
        self._pending_bytes = 0
        self._preparing, self._preparing_printed_s = "", self._machine.now_s()
        self.is_device_busy = False

    async def serve(self) -> ExitCode:
        """Serve over as many connections as needed; return the exit code.

        Raises:
            Unreachable: No coordinator answered in time.
            SamestepError: The coordinator refused this worker, for the given reason.
        """
        try:
            return await self._serve()
        finally:
            self.is_device_busy = not self._engine.close()
            self._files.close()

    def drain(self) -> None:
        """Finish assigned work and leave; without a connection, leave at once."""
        self._is_draining = True
        if self._session is not None and self._session.name:
            self._do(self._session.drain())
        else:
            self._stop.set()

    @property
    def is_device_hanging(self) -> bool:
        """Whether the device has not answered for much longer than its answers took before."""
        return self._engine.is_hanging

    def status(self) -> str:
        """Describe this worker's activity in one line."""
        session = self._session
        return session.status() if session is not None and session.name else self._problem

    def log_fields(self) -> dict[str, object]:
        """Return this worker's name, run and step as fields of a log line."""
        session = self._session
        if session is None or not session.name:
            return {"worker": self._target.name}
        run = {"run_id": session.run_id, "step": session.step} if session.run_id else {}
        return {"worker": session.name, **run}

    async def _serve(self) -> ExitCode:
        start_s, printed_s = self._machine.now_s(), -_REPORT_INTERVAL_S
        while not self._stop.is_set():
            left_s = self._target.retry_for_s - (self._machine.now_s() - start_s)
            reason = await self._attempt(max(left_s, _LEAST_ATTEMPT_S))
            leave = self._leave_action
            was_refused = leave is not None and leave.exit_code == ExitCode.NOT_AUTHORIZED
            if leave is not None and was_refused and self._credentials.try_token_next():
                self._print(f"{leave.reason}; trying the join token")
                continue
            if leave is not None and not leave.retry:
                if leave.exit_code in (ExitCode.OK, ExitCode.FAILED) and not leave.is_failure:
                    self._print(f"goodbye: {leave.reason}")
                    return ExitCode(leave.exit_code)
                raise error_for(leave.exit_code, leave.reason)
            if self._is_draining:
                return ExitCode.OK
            now_s = self._machine.now_s()
            if self._session is not None and self._session.name:
                if self._joins.connection_lost(
                    self._session, is_return_requested=leave is not None and not leave.is_failure
                ):
                    start_s, printed_s = now_s, -_REPORT_INTERVAL_S
                if warning := self._joins.warning(self._session, reason):
                    self._print(warning)
            self._session = None
            left_s = self._target.retry_for_s - (now_s - start_s)
            if left_s <= 0:
                raise Unreachable(self._describe_failure(reason))
            prefix = "" if self._target.address in reason else f"{self._target.address}: "
            self._problem = f"{prefix}{reason}; trying again"
            if now_s - printed_s >= _REPORT_INTERVAL_S:
                printed_s = now_s
                self._print(f"{self._problem}, giving up in {left_s:.0f} s")
            is_early = now_s - start_s < _SHORT_PAUSES_S
            await self._pause(min(_SHORT_PAUSE_S if is_early else _LONG_PAUSE_S, left_s))
            if now_s - start_s >= _FIND_AGAIN_AFTER_S:
                await self._update_address()
        return ExitCode.OK

    def _describe_failure(self, reason: str) -> str:
        address, retry_for_s = self._target.address, self._target.retry_for_s
        if self._joins.count >= FRUITLESS_JOINS:
            times = self._joins.count
            return f"joined the coordinator at {address} {times} times without a step: {reason}"
        return f"no coordinator at {address} for {retry_for_s:g} s: {reason}"

    async def _update_address(self) -> None:
        """Search for the coordinator again: it may have another address now."""
        if self._coordinator_search is None:
            return
        try:
            address = await self._unless_stopped(self._coordinator_search(), _SEARCH_TIMEOUT_S)
        except (OSError, SamestepError):
            return  # the next attempt at the known address reports the problem
        if address is not None and address != (self._target.host, self._target.port):
            self._target = replace(self._target, host=address[0], port=address[1])
            self._print(f"the coordinator is at {self._target.address} now")

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T | None:
        """Await the work and return its result; None if this worker must stop first.

        Raises:
            TimeoutError: The work takes longer than `timeout_s`.
        """
        work_task = self._loop.create_task(work)
        stop_task = self._loop.create_task(self._stop.wait())
        try:
            await asyncio.wait(
                (work_task, stop_task), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if work_task.done():
                return work_task.result()
            if self._stop.is_set():
                return None
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        finally:
            work_task.cancel()
            stop_task.cancel()

    async def _attempt(self, timeout_s: float) -> str:
        """Serve one connection until it ends; return the reason for its end.

        Args:
            timeout_s: Limit for connecting.
        """
        self._lost_reason = self._loop.create_future()
        self._leave_action = None
        try:
            connection = self._connect(min(timeout_s, limits.HANDSHAKE_TIMEOUT_MS / 1000))
            channel = await self._unless_stopped(connection, timeout_s + _GRACE_S)
        except OSError as error:
            return reason_of(error)
        if channel is None:
            return "stopped"
        self._channel = channel
        self._session = WorkerSession(self._terms)
        self._send_hello(channel)
        heartbeat_task = self._loop.create_task(self._heartbeat(channel))
        stop_task = self._loop.create_task(self._stop.wait())
        try:
            await asyncio.wait((self._lost_reason, stop_task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            heartbeat_task.cancel()
            stop_task.cancel()
        if not self._lost_reason.done():
            channel.goodbye("the worker ends", retry=False)
            return "stopped"
        self._engine.do(act.CancelWork())
        self._files.forget()
        self._close_exchange()
        self._channel = None
        return self._lost_reason.result()

    async def _connect(self, timeout_s: float) -> Channel:
        """Connect over TLS, or over a local socket to a coordinator of this user on this machine.

        Args:
            timeout_s: Limit for resolving and connecting, and again for TLS.

        Raises:
            OSError: The connection cannot be made now.
            Mismatch: The server does not speak TLS.
        """
        local = None
        if not self._credentials.plaintext and self._machine.has_sockets:
            local = await local_socket.dial(self._target.host, self._target.port)
        if local is not None:
            endpoint, self._certificate, memory = local
            channel = Channel(Connection("worker"), self, self._machine.now_s)
            channel.connection.memory = memory
            await self._loop.create_unix_connection(lambda: channel, sock=endpoint)
            return channel
        self._certificate = None
        channel = Channel(Connection("worker"), self, self._machine.now_s)
        host, port = self._target.host, self._target.port
        if not self._machine.has_sockets:
            await self._loop.create_connection(lambda: channel, host, port)
            return channel
        if self._credentials.plaintext:
            endpoint = await dial.connect(host, port, timeout_s)
            await self._loop.create_connection(lambda: channel, sock=endpoint)
            return channel
        try:
            context = tls.client_context()
            await tls_transport.connect(host, port, context, channel, timeout_s=timeout_s)
        except ssl.SSLError as error:
            if error.reason in tls.ERROR_MEANS_NO_TLS:
                raise Mismatch(
                    f"expected TLS at {self._target.address}, got none: if this is the control "
                    "port, use the workers' port, 9000 by default; if the coordinator was started "
                    "with --plaintext, start the worker with it too"
                ) from None
            raise
        return channel

    def _send_hello(self, channel: Channel) -> None:
        """Send Hello, if this worker has credentials for the server's certificate."""
        name = cut_text(self._target.name, 48)
        if (certificate := channel.certificate) is not None:
            self._certificate = tls.fingerprint(certificate)
        try:
            self._secret, enrolled = self._credentials.secret(self._certificate, name)
        except SamestepError as error:
            self._leave(act.Leave(str(error), retry=False, exit_code=error.exit_code))
            return
        self._hello = Hello(
            release=__version__,
            name=name,
            instance=self._instance,
            backend=cut_text(self._target.backend, 32),
            duty=self._target.duty,
            nonce=new_nonce(),
            enrolled=enrolled,
            devices=self._engine.devices,
        )
        channel.send(self._hello)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return

    async def _heartbeat(self, channel: Channel) -> None:
        interval_s = limits.HEARTBEAT_INTERVAL_MS / 1000
        last_s = self._machine.now_s()
        while not channel.closed:
            await asyncio.sleep(interval_s)
            was_stalled = self._machine.now_s() - last_s > 3 * interval_s
            last_s = self._machine.now_s()
            silent_s = last_s - channel.last_received_s
            if self._session is None or was_stalled:
                continue
            if not self._session.name:
                if silent_s * 1000 > limits.HANDSHAKE_TIMEOUT_MS:
                    channel.abort(f"no answer to the handshake for {silent_s:.0f} s")
            elif silent_s * 1000 > limits.LIVENESS_TIMEOUT_MS and not channel.is_paused:
                channel.abort(f"the coordinator was silent for {silent_s:.0f} s")
            else:
                channel.send(Heartbeat())
                self._report_preparing(channel)
                if self._peers is not None:
                    self._peers.check_progress()

    def _report_preparing(self, channel: Channel) -> None:
        """Report the progress of the preparation to the coordinator, and less often to the user."""
        text, now_s = cut_text(self._engine.preparing), self._machine.now_s()
        if text == self._preparing:
            return
        self._preparing = text
        channel.send(Preparing(progress=text))
        if text and now_s - self._preparing_printed_s >= _REPORT_INTERVAL_S:
            self._preparing_printed_s = now_s
            self._print(text)

    # protocol.wire.transport.ChannelOwner

    def on_message(self, channel: Channel, delivery: ReceivedMessage) -> None:
        """Handle a message: the handshake first, then the session's messages."""
        message, body = delivery
        session = self._session
        if session is None or channel is not self._channel:
            return
        match message:
            case Challenge():
                self._prove(channel, message)
            case Welcome():
                self._store_key(message)
                self._do(session.welcome(message))
            case Goodbye():
                self._do(session.receive(message, body))
            case _:
                if not session.name:
                    raise OutOfOrder(f"expected a handshake, got {type(message).__name__}")
                self._trace_received(message)
                self._do(session.receive(message, body))

    def _prove(self, channel: Channel, challenge: Challenge) -> None:
        certificate = self._certificate or NO_CERTIFICATE
        if channel.certificate is None and self._certificate is not None:
            certificate = local_fingerprint(certificate)
        try:
            channel.send(answer_challenge(self._hello, challenge, certificate, self._secret))
        except NotAuthorized as error:
            self._leave(act.Leave(str(error), retry=False, exit_code=error.exit_code))

    def _store_key(self, welcome: Welcome) -> None:
        problem = self._credentials.store_key(self._certificate, self._hello.name, welcome.key)
        if problem:
            self._print(problem)

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        """Record why the connection ended."""
        del channel
        if error is not None and error.exit_code == ExitCode.MISMATCH:
            self._leave_action = act.Leave(str(error), retry=False, exit_code=ExitCode.MISMATCH)
        if not self._lost_reason.done():
            self._lost_reason.set_result(reason)

    # The engine.

    def _emit(self, event: events.Event) -> None:
        """Pass an event to the event loop; called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._result, event)

    def _result(self, event: events.Event) -> None:
        if self._session is None or self._channel is None:
            return
        try:
            self._do(self._session.result(event))
        except Exception as error:  # noqa: BLE001 -- otherwise the coordinator waits
            self._do(self._session.result(events.DeviceFailed(error)))

    def _file_result(self, event: FileEvent) -> None:
        if self._session is not None and self._channel is not None:
            self._do(self._session.file_result(event))

    def _do(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            self._do_one(action)

    def _do_one(self, action: act.Action) -> None:
        match action:
            case act.Transmit():
                self._transmit(action)
            case act.Expect():
                assert self._channel is not None
                self._channel.connection.blocks = action.blocks
                self._channel.connection.exchange = action.exchange
                self._open_exchange(action)
            case (
                act.ForwardToExchange() | act.AbandonAttempt() | act.Contribute()
            ):  # fmt: skip
                self._do_in_exchange(action)
            case act.Apply():
                length = sum(values.nbytes for values in action.averages)
                self._engine.do(action, self._start_handover(length))
            case act.LoadChunk():
                self._engine.do(action, self._start_handover(action.values.nbytes))
            case act.Locate() | act.OpenPart() | act.StoreChunk() | act.Assemble():
                self._files.do(action)
            case act.DropFiles():
                self._files.forget()
            case act.PrintLine():
                self._print(action.text)
            case act.Leave():
                self._leave(action)
            case _:
                self._engine.do(action)

    # Other members of the run.

    def _open_exchange(self, action: act.Expect) -> None:
        """Open the exchange with peers; the task is built."""
        self._close_exchange()
        assert self._session is not None
        self._peers = PeerExchange(
            self._session.run_id, self._session.name, action.blocks, action.exchange,
            make_links=self._make_links(),
            transmit=self._transmit,
            on_averages=self._averages_ready, on_last_average=self._trace_last,
        )  # fmt: skip

    def _make_links(self) -> MakeLinks:
        encrypted = not self._credentials.plaintext
        return self._links or socket_links(self._target.host, encrypted=encrypted)

    def _close_exchange(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _do_in_exchange(self, action: act.Action) -> None:
        peers = self._peers
        assert peers is not None, "actions of the exchange follow Expect"
        match action:
            case act.ForwardToExchange():
                peers.receive(action.message, action.body)
            case act.AbandonAttempt():
                peers.drop()
            case act.Contribute():
                self._trace_sum(action)
                peers.contribute(action.subtree, action.block, action.weight, action.values)

    def _averages_ready(self, event: events.AveragesReady) -> None:
        if self._session is None or self._channel is None:
            return
        try:
            self._do(self._session.result(event))
        except ProtocolError as error:
            self._channel.abort(str(error), error)

    def _start_handover(self, length_bytes: int) -> Release:
        """Count bytes that are queued for the engine, and stop reading while they are too many.

        Unread messages then wait at the coordinator, which has them on disk.

        Returns:
            A function that the engine's thread calls when it no longer needs the bytes.
        """
        self._pending_bytes += length_bytes
        if self._pending_bytes > limits.RECEIVED_AHEAD_BYTES and self._channel is not None:
            self._channel.pause()

        def release() -> None:
            self._loop.call_soon_threadsafe(self._end_handover, length_bytes)

        return release

    def _end_handover(self, length_bytes: int) -> None:
        self._pending_bytes -= length_bytes
        if self._pending_bytes <= limits.RECEIVED_AHEAD_BYTES and self._channel is not None:
            self._channel.resume()

    def _transmit(self, action: act.Transmit) -> None:
        channel, message = self._channel, action.message
        if channel is None:
            return
        throttle = self._checkpoint_throttle
        if isinstance(message, InnerCheckpointChunk) and throttle.skips(
            message, channel.waiting_messages
        ):
            return
        channel.send(encode(message, action.body))

    def _trace_received(self, message: Message) -> None:
        is_gradient = isinstance(message, GradientPayload | AveragedGradient)
        if self._tracer is not None and is_gradient:
            fields = message.model_dump()
            self._tracer.instant(f"receive block {fields['block']}", "network", **fields)

    def _trace_sum(self, action: act.Contribute) -> None:
        session = self._session
        if self._tracer is not None and session is not None:
            lo, hi = action.subtree
            fields = {"step": session.step, "block": action.block, "lo": lo, "hi": hi}
            self._tracer.instant(f"send block {action.block}", "network", **fields)

    def _trace_last(self, average: LastAverage) -> None:
        if self._tracer is not None:
            fields = {"step": average.step, "attempt": average.attempt}
            self._tracer.instant("receive blocks", "network", **fields)

    def _leave(self, action: act.Leave) -> None:
        # The first failure is the cause; later ones may follow from it.
        if self._leave_action is None or not self._leave_action.is_failure:
            self._leave_action = action
        channel = self._channel
        if channel is None:
            return
        if not action.is_failure:
            channel.abort(action.reason)
            return
        # The coordinator must read the Goodbye first, so that no other worker gets this work.
        channel.finish()
        self._loop.call_later(limits.GOODBYE_TIMEOUT_MS / 1000, channel.abort, action.reason)


class PeerExchange:
    """A worker's exchange of gradients in one run, after the task is built.

    `gradient_exchange.py` decides, one event at a time: the coordinator's messages are handled in
    the event loop, those of links in the threads that read them. Actions are always executed in the
    loop.

    Args:
        run_id: The run's ID.
        me: This worker's name.
        blocks: The manifest's blocks.
        exchange: Codecs of sums and averages.
        make_links: Opens the links to peers.
        transmit: Sends a message to the coordinator; called in the event loop.
        on_averages: Called in the event loop when a committed step has all averages.
        on_last_average: Called in the event loop when a step that workers average has all
            averages, before its commit.
    """

    def __init__(
        self,
        run_id: str,
        me: str,
        blocks: tuple[Block, ...],
        exchange: Codecs,
        *,
        make_links: MakeLinks,
        transmit: Callable[[act.Transmit], None],
        on_averages: Callable[[events.AveragesReady], None],
        on_last_average: Callable[[LastAverage], None],
    ) -> None:
        self._run_id = run_id
        self._transmit = transmit
        self._on_averages = on_averages
        self._on_last_average = on_last_average
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.RLock()
        self._exchange = GradientExchange(me, blocks, exchange)
        self._links = make_links(me, blocks, exchange, self)
        self._last_arrivals = -1
        self._traffic_sent: dict[str, tuple[int, int]] = {}
        self._is_closed = False

    # Called by the client, in its event loop.

    def receive(self, message: Message, body: NDArray[Any] | None) -> None:
        """Handle a message of the coordinator about the exchange.

        Raises:
            RemoteProtocolError: The message does not fit.
        """
        match message:
            case ListenForPeers():
                self._open()
            case Peers():
                assert body is not None
                self._links.set_peers(parse(PeerList, body.tobytes()))
            case _:
                with self._lock:
                    self._do(self._exchange.receive_from_coordinator(message, body))

    def _open(self) -> None:
        try:
            port, fingerprint = self._links.listen()
        except OSError:
            port, fingerprint = 0, NO_CERTIFICATE  # this worker can still dial its peers
        message = PeerPort(run_id=self._run_id, port=port, fingerprint=fingerprint)
        self._transmit(act.Transmit(message))

    def drop(self) -> None:
        """Abandon the current attempt, which continues without this worker."""
        with self._lock:
            self._exchange.drop()

    def contribute(self, subtree: Subtree, block: int, weight: float, values: Array) -> None:
        """Send a block's sum over a subtree; the caller no longer changes `values`."""
        with self._lock:
            self._do(self._exchange.contribute(subtree, block, weight, values))

    def check_progress(self) -> None:
        """Request missing averages if nothing has arrived since the last call; report traffic."""
        if self._exchange.arrivals == self._last_arrivals:
            with self._lock:
                self._do(self._exchange.request_overdue())
        self._last_arrivals = self._exchange.arrivals
        traffic = self._links.traffic()
        if traffic != self._traffic_sent:
            self._traffic_sent = traffic
            document = Traffic(peers=traffic).to_bytes()
            self._transmit(act.Transmit(LinkTraffic(run_id=self._run_id), document))

    def close(self) -> None:
        """Close all links: the run or the connection to the coordinator has ended."""
        self._is_closed = True
        self._links.close()

    # worker.peers.links.LinksOwner

    def on_gradient(self, peer: str, delivery: ReceivedMessage) -> None:
        message, body = delivery
        assert isinstance(message, GradientPayload | AveragedGradient)
        assert body is not None
        with self._lock:
            self._do(self._exchange.receive(peer, message, body))

    def on_linked(self, peer: str, mbit: float) -> None:
        self._transmit(act.Transmit(Linked(run_id=self._run_id, peer=peer, mbit=mbit)))

    def on_unlinked(self, peer: str, reason: str) -> None:
        message = Unlinked(run_id=self._run_id, peer=peer, reason=cut_text(reason))
        self._transmit(act.Transmit(message))
        with self._lock:
            self._do(self._exchange.link_lost(peer))

    def _do(self, actions: Sequence[Action]) -> None:
        """Perform actions in the event loop: now, or soon if this is another thread."""
        if threading.get_ident() == self._thread:
            self._do_in_loop(actions)
        elif actions and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._do_in_loop, actions)

    def _do_in_loop(self, actions: Sequence[Action]) -> None:
        encoding: EncodedMessage | None = None
        for action in actions:
            if self._is_closed:
                return
            match action:
                case ToPeer(peer, message, body):
                    if encoding is None or encoding.message is not message:
                        encoding = encode(message, body)  # once for all peers
                    self._links.send(peer, encoding)
                case act.Transmit():
                    self._transmit(action)
                case events.AveragesReady():
                    self._on_averages(action)
                case LastAverage():
                    self._on_last_average(action)


class InnerCheckpointThrottle:
    """Skip an inner checkpoint while an earlier one of the same replica is still being sent.

    An inner checkpoint is as large as the state, so on a slow link unsent checkpoints fill the
    memory. After a skipped checkpoint, another worker that takes over repeats more steps, with the
    same result.
    """

    def __init__(self) -> None:
        self._is_skipping = False

    def skips(self, chunk: InnerCheckpointChunk, unsent_messages: Iterable[Message]) -> bool:
        """Return whether to skip this chunk. Must be called for every chunk, in order.

        Args:
            chunk: One chunk of an inner checkpoint.
            unsent_messages: Messages of this connection that are not sent yet.
        """
        if chunk.chunk == 0:
            replica = chunk.replica
            self._is_skipping = any(
                isinstance(message, InnerCheckpointChunk) and message.replica == replica
                for message in unsent_messages
            )
        return self._is_skipping
