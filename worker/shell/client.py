"""The worker's shell: it connects, keeps the connection alive, and does what the session asks."""

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
from protocol.exact.reduction.float32 import Array
from protocol.exact.reduction.tree import Subtree
from protocol.machine import local_socket
from protocol.machine.machine import Machine
from protocol.machine.trace import Tracer
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import Codecs
from protocol.wire import dial, tls, tls_transport
from protocol.wire.authentication import NO_CERTIFICATE, answer, new_nonce, on_this_machine
from protocol.wire.connection import Connection, Encoded, Received, encode
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
from worker.logic.join_failures import TOO_OFTEN, JoinFailures
from worker.logic.session import WorkerSession
from worker.peers.links import MakeLinks, socket_links
from worker.peers.share import Action, GradientExchange, LastCame, ToPeer
from worker.shell.engine import BackendFactory, Engine, Release
from worker.shell.file_fetcher import FileFetcher
from worker.shell.group_engine import DeviceSet, GroupEngine

_SHORT_PAUSE_S: Final = 0.25
"""Between attempts at first: a coordinator that restarts is back within a second or two."""
_LONG_PAUSE_S: Final = 5.0
_SHORT_PAUSES_FOR_S: Final = 60.0
_TELL_EVERY_S: Final = 10.0
_LEAST_ATTEMPT_S: Final = 2.0
"""For one attempt, however little is left of the time to try."""
_GRACE_S: Final = 1.0
"""For an attempt to say itself what it waits for, before it is given up."""
_FIND_AGAIN_AFTER_S: Final = 2.0
"""A coordinator that restarts is at its old address within that time."""
_LOOK_AGAIN_FOR_S: Final = 5.0

T = TypeVar("T")
FindAgain = Callable[[], Coroutine[Any, Any, tuple[str, int]]]
"""Looks on the network for the coordinator; gives host and port, or raises Unreachable."""


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to serve, as whom, and for how long to try."""

    host: str
    port: int
    name: str
    backend: str
    retry_for_s: float
    duty: Duty = "train"

    @property
    def at(self) -> str:
        """The address, as users write it."""
        return format_address(self.host, self.port)


class Client:
    """Serves one coordinator until it says goodbye for good.

    Args:
        target: Whom to serve.
        toolbox: Opens the device, or those of several processes.
        credentials: What it proves itself with.
        tell: Prints a line.
        tracer: Records when messages came and went.
        cache: Where files of runs are kept; None for the user's cache.
        machine: Clock, threads and sockets.
        links: Makes the connections to peers.
        find_again: Looks for the coordinator on the network, for one that was found there.

    Attributes:
        is_device_busy: Whether the device still computes although `serve` has ended.
    """

    _hello: Hello

    def __init__(
        self,
        target: Target,
        toolbox: BackendFactory | DeviceSet,
        credentials: WorkerCredentials,
        tell: Callable[[str], None],
        tracer: Tracer | None = None,
        *,
        cache: Path | None = None,
        machine: Machine | None = None,
        links: MakeLinks | None = None,
        find_again: FindAgain | None = None,
    ) -> None:
        self._machine = machine = machine or Machine()
        self._target = target
        self._credentials = credentials
        self._secret = b""
        self._certificate: bytes | None = None
        self._tell = tell
        self._tracer = tracer
        self._instance = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._engine = (
            GroupEngine(toolbox, self._emit, tell, machine)
            if isinstance(toolbox, DeviceSet)
            else Engine(toolbox, self._emit, tracer, machine)
        )
        self._files = FileFetcher(self._obtained, cache, machine)
        self._links = links
        self._find_again = find_again
        self._peers: PeerExchange | None = None
        self._session: WorkerSession | None = None
        self._joins = JoinFailures()
        self._trouble = f"connecting to {target.at}"
        self._channel: Channel | None = None
        self._boundary_turns = InnerCheckpointThrottle()
        self._terms: dict[str, int] = {}
        self._loss: asyncio.Future[str] = self._loop.create_future()
        self._leaving: act.Leave | None = None
        self._stop = asyncio.Event()
        self._draining = False
        self._given_bytes = 0
        self._preparing, self._preparing_told_s = "", self._machine.now_s()
        self.is_device_busy = False

    async def serve(self) -> ExitCode:
        """Connect, again and again; gives the exit code.

        Raises:
            Unreachable: Nothing answered for as long as was to be tried.
            SamestepError: The coordinator refused, with its reason.
        """
        try:
            return await self._serve()
        finally:
            self.is_device_busy = not self._engine.close()
            self._files.close()

    def drain(self) -> None:
        """Finish what there is and leave; at once if there is no connection."""
        self._draining = True
        if self._session is not None and self._session.name:
            self._do(self._session.drain())
        else:
            self._stop.set()

    @property
    def is_device_hanging(self) -> bool:
        """Whether the device has not answered for much longer than ever before."""
        return self._engine.is_hanging

    def status(self) -> str:
        """What this worker is doing, in one line."""
        session = self._session
        return session.status() if session is not None and session.name else self._trouble

    def place(self) -> dict[str, object]:
        """Who this is and where it is, as fields of a log."""
        session = self._session
        if session is None or not session.name:
            return {"worker": self._target.name}
        run = {"run_id": session.run_id, "step": session.step} if session.run_id else {}
        return {"worker": session.name, **run}

    async def _serve(self) -> ExitCode:
        since_s, told_s = self._machine.now_s(), -_TELL_EVERY_S
        while not self._stop.is_set():
            left_s = self._target.retry_for_s - (self._machine.now_s() - since_s)
            reason = await self._attempt(max(left_s, _LEAST_ATTEMPT_S))
            leaving = self._leaving
            was_refused = leaving is not None and leaving.exit_code == ExitCode.NOT_AUTHORIZED
            if leaving is not None and was_refused and self._credentials.try_token_next():
                self._tell(f"{leaving.reason}; trying the join token")
                continue
            if leaving is not None and not leaving.retry:
                if leaving.exit_code in (ExitCode.OK, ExitCode.FAILED) and not leaving.failed:
                    self._tell(f"goodbye: {leaving.reason}")
                    return ExitCode(leaving.exit_code)
                raise error_for(leaving.exit_code, leaving.reason)
            if self._draining:
                return ExitCode.OK
            now_s = self._machine.now_s()
            if self._session is not None and self._session.name:
                if self._joins.connection_lost(
                    self._session, asked_to_return=leaving is not None and not leaving.failed
                ):
                    since_s, told_s = now_s, -_TELL_EVERY_S
                if warning := self._joins.warning(self._session, reason):
                    self._tell(warning)
            self._session = None
            left_s = self._target.retry_for_s - (now_s - since_s)
            if left_s <= 0:
                raise Unreachable(self._gives_up(reason))
            where = "" if self._target.at in reason else f"{self._target.at}: "
            self._trouble = f"{where}{reason}; trying again"
            if now_s - told_s >= _TELL_EVERY_S:
                told_s = now_s
                self._tell(f"{self._trouble}, giving up in {left_s:.0f} s")
            soon = now_s - since_s < _SHORT_PAUSES_FOR_S
            await self._pause(min(_SHORT_PAUSE_S if soon else _LONG_PAUSE_S, left_s))
            if now_s - since_s >= _FIND_AGAIN_AFTER_S:
                await self._look_again()
        return ExitCode.OK

    def _gives_up(self, reason: str) -> str:
        at, for_s = self._target.at, self._target.retry_for_s
        if self._joins.count >= TOO_OFTEN:
            times = self._joins.count
            return f"joined the coordinator at {at} {times} times without a step: {reason}"
        return f"no coordinator at {at} for {for_s:g} s: {reason}"

    async def _look_again(self) -> None:
        """A coordinator that was found on the network may be at another address by now."""
        if self._find_again is None:
            return
        try:
            address = await self._unless_stopped(self._find_again(), _LOOK_AGAIN_FOR_S)
        except (OSError, SamestepError):
            return  # the next attempt at the address that is known says what is wrong
        if address is not None and address != (self._target.host, self._target.port):
            self._target = replace(self._target, host=address[0], port=address[1])
            self._tell(f"the coordinator is at {self._target.at} now")

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], patience_s: float) -> T | None:
        """What the work returns; None if this worker is told to end first.

        Raises:
            TimeoutError: It takes longer than that.
        """
        working = self._loop.create_task(work)
        stopping = self._loop.create_task(self._stop.wait())
        try:
            await asyncio.wait(
                (working, stopping), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if working.done():
                return working.result()
            if self._stop.is_set():
                return None
            raise TimeoutError(f"no answer within {patience_s:.0f} s")
        finally:
            working.cancel()
            stopping.cancel()

    async def _attempt(self, patience_s: float) -> str:
        """One connection from beginning to end; why it ended.

        Args:
            patience_s: How long it may take to make it.
        """
        self._loss = self._loop.create_future()
        self._leaving = None
        try:
            connecting = self._connect(min(patience_s, limits.HANDSHAKE_TIMEOUT_MS / 1000))
            channel = await self._unless_stopped(connecting, patience_s + _GRACE_S)
        except OSError as error:
            return reason_of(error)
        if channel is None:
            return "stopped"
        self._channel = channel
        self._session = WorkerSession(self._terms)
        self._greet(channel)
        beating = self._loop.create_task(self._heartbeat(channel))
        stopping = self._loop.create_task(self._stop.wait())
        try:
            await asyncio.wait((self._loss, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            beating.cancel()
            stopping.cancel()
        if not self._loss.done():
            channel.goodbye("the worker ends", retry=False)
            return "stopped"
        self._engine.do(act.CancelWork())
        self._files.forget()
        self._leave_peers()
        self._channel = None
        return self._loss.result()

    async def _connect(self, timeout_s: float) -> Channel:
        """A connection, over TLS unless told otherwise or it leads to this user's on this machine.

        Args:
            timeout_s: For name and connection, and again for TLS.

        Raises:
            OSError: It cannot be had just now.
            Mismatch: What answers does not speak TLS.
        """
        here = None
        if not self._credentials.plaintext and self._machine.has_sockets:
            here = await local_socket.dial(self._target.host, self._target.port)
        if here is not None:
            endpoint, self._certificate, memory = here
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
                    f"expected TLS at {self._target.at}, got something else; if the coordinator "
                    "was started with --plaintext, give that to the worker too"
                ) from None
            raise
        return channel

    def _greet(self, channel: Channel) -> None:
        """See who answers; only then say who this is."""
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
            stalled = self._machine.now_s() - last_s > 3 * interval_s
            last_s = self._machine.now_s()
            silent_s = last_s - channel.last_received_s
            if self._session is None or stalled:
                continue
            if not self._session.name:
                if silent_s * 1000 > limits.HANDSHAKE_TIMEOUT_MS:
                    channel.abort(f"no answer to the handshake for {silent_s:.0f} s")
            elif silent_s * 1000 > limits.LIVENESS_TIMEOUT_MS and not channel.paused:
                channel.abort(f"the coordinator was silent for {silent_s:.0f} s")
            else:
                channel.send(Heartbeat())
                self._tell_preparing(channel)
                if self._peers is not None:
                    self._peers.look()

    def _tell_preparing(self, channel: Channel) -> None:
        """Tell the coordinator, and now and then the user, how far the preparation is."""
        text, now_s = cut_text(self._engine.preparing), self._machine.now_s()
        if text == self._preparing:
            return
        self._preparing = text
        channel.send(Preparing(progress=text))
        if text and now_s - self._preparing_told_s >= _TELL_EVERY_S:
            self._preparing_told_s = now_s
            self._tell(text)

    # protocol.transport.ChannelOwner

    def on_message(self, channel: Channel, received: Received) -> None:
        """Handshake first, then the session."""
        message, body = received
        session = self._session
        if session is None or channel is not self._channel:
            return
        match message:
            case Challenge():
                self._prove(channel, message)
            case Welcome():
                self._enrol(message)
                self._do(session.welcome(message))
            case Goodbye():
                self._do(session.receive(message, body))
            case _:
                if not session.name:
                    raise OutOfOrder(f"{type(message).__name__} before the handshake")
                self._trace_received(message)
                self._do(session.receive(message, body))

    def _prove(self, channel: Channel, challenge: Challenge) -> None:
        certificate = self._certificate or NO_CERTIFICATE
        if channel.certificate is None and self._certificate is not None:
            certificate = on_this_machine(certificate)
        try:
            channel.send(answer(self._hello, challenge, certificate, self._secret))
        except NotAuthorized as error:
            self._leave(act.Leave(str(error), retry=False, exit_code=error.exit_code))

    def _enrol(self, welcome: Welcome) -> None:
        trouble = self._credentials.remember(self._certificate, self._hello.name, welcome.key)
        if trouble:
            self._tell(trouble)

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        """The connection is over."""
        del channel
        if error is not None and error.exit_code == ExitCode.MISMATCH:
            self._leaving = act.Leave(str(error), retry=False, exit_code=ExitCode.MISMATCH)
        if not self._loss.done():
            self._loss.set_result(reason)

    # The engine.

    def _emit(self, event: events.Event) -> None:
        """Called in the engine's thread."""
        self._loop.call_soon_threadsafe(self._result, event)

    def _result(self, event: events.Event) -> None:
        if self._session is None or self._channel is None:
            return
        try:
            self._do(self._session.result(event))
        except Exception as error:  # noqa: BLE001 -- the coordinator must hear of it, or it waits
            self._do(self._session.result(events.DeviceFailed(error)))

    def _obtained(self, event: FileEvent) -> None:
        if self._session is not None and self._channel is not None:
            self._do(self._session.obtained(event))

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
                self._meet_peers(action)
            case (
                act.ForwardToExchange() | act.AbandonAttempt() | act.Contribute()
            ):  # fmt: skip
                self._do_with_peers(action)
            case act.Apply():
                length = sum(values.nbytes for values in action.averages)
                self._engine.do(action, self._taken(length))
            case act.LoadChunk():
                self._engine.do(action, self._taken(action.values.nbytes))
            case act.Locate() | act.OpenPart() | act.StoreChunk() | act.Assemble():
                self._files.do(action)
            case act.DropFiles():
                self._files.forget()
            case act.Tell():
                self._tell(action.text)
            case act.Leave():
                self._leave(action)
            case _:
                self._engine.do(action)

    # Other members of the run.

    def _meet_peers(self, action: act.Expect) -> None:
        """The task is built: others may average with this worker."""
        self._leave_peers()
        assert self._session is not None
        self._peers = PeerExchange(
            self._session.run_id, self._session.name, action.blocks, action.exchange,
            make_links=self._make_links(),
            transmit=self._transmit,
            averaged=self._averages_ready, traced=self._trace_last,
        )  # fmt: skip

    def _make_links(self) -> MakeLinks:
        encrypted = not self._credentials.plaintext
        return self._links or socket_links(self._target.host, encrypted=encrypted)

    def _leave_peers(self) -> None:
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _do_with_peers(self, action: act.Action) -> None:
        peers = self._peers
        assert peers is not None, "what is about the exchange comes after Expect"
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

    def _taken(self, length_bytes: int) -> Release:
        """The engine is given so much: as long as that is a lot no more is read, so that it waits
        where it is on disk, at the coordinator.

        Returns:
            To be called in the engine's thread, when it has that.
        """
        self._given_bytes += length_bytes
        if self._given_bytes > limits.RECEIVED_AHEAD_BYTES and self._channel is not None:
            self._channel.pause()

        def taken() -> None:
            self._loop.call_soon_threadsafe(self._took, length_bytes)

        return taken

    def _took(self, length_bytes: int) -> None:
        self._given_bytes -= length_bytes
        if self._given_bytes <= limits.RECEIVED_AHEAD_BYTES and self._channel is not None:
            self._channel.resume()

    def _transmit(self, action: act.Transmit) -> None:
        channel, message = self._channel, action.message
        if channel is None:
            return
        turns = self._boundary_turns
        if isinstance(message, InnerCheckpointChunk) and turns.skips(message, channel.waiting):
            return
        channel.send(encode(message, action.body))

    def _trace_received(self, message: Message) -> None:
        gradient = isinstance(message, GradientPayload | AveragedGradient)
        if self._tracer is not None and gradient:
            fields = message.model_dump()
            self._tracer.instant(f"receive block {fields['block']}", "network", **fields)

    def _trace_sum(self, action: act.Contribute) -> None:
        session = self._session
        if self._tracer is not None and session is not None:
            lo, hi = action.subtree
            fields = {"step": session.step, "block": action.block, "lo": lo, "hi": hi}
            self._tracer.instant(f"send block {action.block}", "network", **fields)

    def _trace_last(self, last: LastCame) -> None:
        if self._tracer is not None:
            place = {"step": last.step, "attempt": last.attempt}
            self._tracer.instant("receive blocks", "network", **place)

    def _leave(self, action: act.Leave) -> None:
        # The first failure says why; what else the engine had to do may have failed after it.
        if self._leaving is None or not self._leaving.failed:
            self._leaving = action
        channel = self._channel
        if channel is None:
            return
        if not action.failed:
            channel.abort(action.reason)
            return
        # Others must not be given what this one failed at: its Goodbye is written first.
        channel.finish()
        self._loop.call_later(limits.GOODBYE_TIMEOUT_MS / 1000, channel.abort, action.reason)


class PeerExchange:
    """A worker's exchange of gradients in one run, once its task is built.

    `share.py` decides what to do, one event at a time: events of the coordinator come in the event
    loop, those of links in their threads. What goes to the coordinator or to the session is done
    in the loop.

    Args:
        run_id: The run's.
        me: This worker's name.
        blocks: The manifest's.
        exchange: How gradients travel.
        make_links: Makes the connections.
        transmit: Sends a message to the coordinator; called in the event loop.
        averaged: Hears that all averages of a committed step are here; likewise.
        traced: Hears when those that workers average came, before the commit; likewise.
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
        averaged: Callable[[events.AveragesReady], None],
        traced: Callable[[LastCame], None],
    ) -> None:
        self._run_id = run_id
        self._transmit = transmit
        self._averaged = averaged
        self._traced = traced
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._lock = threading.RLock()
        self._share = GradientExchange(me, blocks, exchange)
        self._links = make_links(me, blocks, exchange, self)
        self._arrivals_seen = -1
        self._traffic_sent: dict[str, tuple[int, int]] = {}
        self._is_closed = False

    # The client's, in its event loop.

    def receive(self, message: Message, body: NDArray[Any] | None) -> None:
        """Take what the coordinator says about the exchange.

        Raises:
            RemoteProtocolError: It does not fit.
        """
        match message:
            case ListenForPeers():
                self._open()
            case Peers():
                assert body is not None
                self._links.know(parse(PeerList, body.tobytes()))
            case _:
                with self._lock:
                    self._do(self._share.hear(message, body))

    def _open(self) -> None:
        try:
            port, fingerprint = self._links.listen()
        except OSError:
            port, fingerprint = 0, NO_CERTIFICATE  # it may dial others all the same
        message = PeerPort(run_id=self._run_id, port=port, fingerprint=fingerprint)
        self._transmit(act.Transmit(message))

    def drop(self) -> None:
        """The attempt goes on without this worker."""
        with self._lock:
            self._share.drop()

    def contribute(self, subtree: Subtree, block: int, weight: float, values: Array) -> None:
        """A block's sum over a subtree; `values` are not changed any more."""
        with self._lock:
            self._do(self._share.contribute(subtree, block, weight, values))

    def look(self) -> None:
        """Now and then: where a committed step waits and nothing comes, ask for it; and tell what
        went over links."""
        if self._share.arrivals == self._arrivals_seen:
            with self._lock:
                self._do(self._share.waits())
        self._arrivals_seen = self._share.arrivals
        traffic = self._links.traffic()
        if traffic != self._traffic_sent:
            self._traffic_sent = traffic
            document = Traffic(peers=traffic).to_bytes()
            self._transmit(act.Transmit(LinkTraffic(run_id=self._run_id), document))

    def close(self) -> None:
        """The run, or the connection to the coordinator, is over."""
        self._is_closed = True
        self._links.close()

    # worker.peers.links.LinksOwner

    def on_gradient(self, peer: str, received: Received) -> None:
        message, body = received
        assert isinstance(message, GradientPayload | AveragedGradient)
        assert body is not None
        with self._lock:
            self._do(self._share.receive(peer, message, body))

    def on_linked(self, peer: str, mbit: float) -> None:
        self._transmit(act.Transmit(Linked(run_id=self._run_id, peer=peer, mbit=mbit)))

    def on_unlinked(self, peer: str, reason: str) -> None:
        message = Unlinked(run_id=self._run_id, peer=peer, reason=cut_text(reason))
        self._transmit(act.Transmit(message))
        with self._lock:
            self._do(self._share.lost(peer))

    def _do(self, actions: Sequence[Action]) -> None:
        """Perform actions in the event loop: now, or soon if this is another thread."""
        if threading.get_ident() == self._thread:
            self._do_in_loop(actions)
        elif actions and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._do_in_loop, actions)

    def _do_in_loop(self, actions: Sequence[Action]) -> None:
        encoded: Encoded | None = None
        for action in actions:
            if self._is_closed:
                return
            match action:
                case ToPeer(peer, message, body):
                    if encoded is None or encoded.message is not message:
                        encoded = encode(message, body)  # once for all that it goes to
                    self._links.send(peer, encoded)
                case act.Transmit():
                    self._transmit(action)
                case events.AveragesReady():
                    self._averaged(action)
                case LastCame():
                    self._traced(action)


class InnerCheckpointThrottle:
    """Skip an inner checkpoint while an earlier one of the same replica is still being sent.

    An inner checkpoint is as large as a state: on a slow link they would fill the memory. A
    skipped one only costs a successor some steps; it does not change the result.
    """

    def __init__(self) -> None:
        self._is_skipping = False

    def skips(self, piece: InnerCheckpointChunk, unsent: Iterable[Message]) -> bool:
        """Whether not to send this piece. Must be called for every piece, in order.

        Args:
            piece: One chunk of an inner checkpoint.
            unsent: Messages of this connection that are not sent yet.
        """
        if piece.chunk == 0:
            replica = piece.replica
            self._is_skipping = any(
                isinstance(each, InnerCheckpointChunk) and each.replica == replica
                for each in unsent
            )
        return self._is_skipping
