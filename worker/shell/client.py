"""The worker's shell: it connects, keeps the connection alive, and does what the session asks."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from backends.base.interface import Array
from protocol import __version__
from protocol.base import limits
from protocol.base.address import format_address
from protocol.base.duty import Duty
from protocol.base.errors import (
    ExitCode,
    Mismatch,
    NotAuthorised,
    OutOfPlace,
    ProtocolError,
    SamestepError,
    SharedMemoryFull,
    Unreachable,
    error_for,
)
from protocol.base.fields import cut_text
from protocol.host import local_socket
from protocol.host.machine import Machine
from protocol.host.secret_file import state_home
from protocol.host.trace import Tracer
from protocol.wire import dial, tls, tls_transport
from protocol.wire.authentication import NO_CERTIFICATE, answer, new_nonce, on_this_machine
from protocol.wire.connection import Body, Connection, Received, encode
from protocol.wire.messages import (
    AveragedGradient,
    Boundary,
    Challenge,
    CopyQuestion,
    Goodbye,
    GradientPayload,
    Heartbeat,
    Hello,
    Message,
    Welcome,
)
from protocol.wire.transport import Channel, reason_of
from worker.joining.credentials import WorkerCredentials
from worker.logic import actions as act
from worker.logic import events
from worker.logic.fetching import FileEvent
from worker.logic.fruitless_joins import TOO_OFTEN, FruitlessJoins
from worker.logic.session import WorkerSession
from worker.peers.exchange import MakeLinks, PeerExchange, socket_links
from worker.peers.share import AllAveraged, LastCame
from worker.shell.boundary_turns import BoundaryTurns
from worker.shell.engine import Engine, Taken, Toolbox
from worker.shell.host_engine import HostEngine, Several
from worker.shell.kept_copies import KeptCopies
from worker.shell.obtaining import Obtainer

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
    """

    _hello: Hello

    def __init__(
        self,
        target: Target,
        toolbox: Toolbox | Several,
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
            HostEngine(toolbox, self._emit, tell, machine)
            if isinstance(toolbox, Several)
            else Engine(toolbox, self._emit, tracer, machine)
        )
        self._files = Obtainer(self._obtained, cache, machine)
        self._copies = KeptCopies(state_home)
        self._copying: Executor | None = None
        self._links = links
        self._find_again = find_again
        self._peers: PeerExchange | None = None
        self._session: WorkerSession | None = None
        self._joins = FruitlessJoins()
        self._trouble = f"connecting to {target.at}"
        self._channel: Channel | None = None
        self._boundary_turns = BoundaryTurns()
        self._epochs: dict[str, int] = {}
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._leaving: act.Leave | None = None
        self._stop = asyncio.Event()
        self._draining = False
        self._given_bytes = 0

    async def serve(self) -> ExitCode:
        """Connect, again and again; gives the exit code.

        Raises:
            Unreachable: Nothing answered for as long as was to be tried.
            SamestepError: The coordinator refused, with its reason.
        """
        try:
            return await self._serve()
        finally:
            self._engine.close()
            self._files.close()
            if self._copying is not None:
                self._copying.shutdown(wait=False)

    def drain(self) -> None:
        """Finish what there is and leave; at once if there is no connection."""
        self._draining = True
        if self._session is not None and self._session.name:
            self._do(self._session.drain())
        else:
            self._stop.set()

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
            refused = leaving is not None and leaving.exit_code == ExitCode.NOT_AUTHORISED
            if leaving is not None and refused and self._credentials.try_token_next():
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
                if self._joins.lost(self._session, told=leaving is not None and not leaving.failed):
                    since_s, told_s = now_s, -_TELL_EVERY_S
                if told := self._joins.told(self._session, reason):
                    self._tell(told)
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
        if self._joins.fruitless >= TOO_OFTEN:
            times = self._joins.fruitless
            return f"joined the coordinator at {at} {times} times without a step: {reason}"
        return f"no coordinator at {at} for {for_s:g} s: {reason}"

    async def _look_again(self) -> None:
        """A coordinator that was found on the network may be at another address by now."""
        if self._find_again is None:
            return
        try:
            found = await self._unless_stopped(self._find_again(), _LOOK_AGAIN_FOR_S)
        except (OSError, SamestepError):
            return  # the next attempt at the address that is known says what is wrong
        if found is not None and found != (self._target.host, self._target.port):
            self._target = replace(self._target, host=found[0], port=found[1])
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
        self._lost = self._loop.create_future()
        self._leaving = None
        try:
            connecting = self._connect(min(patience_s, limits.HANDSHAKE_TIMEOUT_MS / 1000))
            channel = await self._unless_stopped(connecting, patience_s + _GRACE_S)
        except OSError as error:
            return reason_of(error)
        if channel is None:
            return "stopped"
        self._channel = channel
        self._session = WorkerSession(self._epochs, self._allocate)
        self._greet(channel)
        beating = self._loop.create_task(self._heartbeat(channel))
        stopping = self._loop.create_task(self._stop.wait())
        try:
            await asyncio.wait((self._lost, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            beating.cancel()
            stopping.cancel()
        if not self._lost.done():
            channel.goodbye("the worker ends", retry=False)
            return "stopped"
        self._engine.do(act.CancelWork())
        self._files.forget()
        self._leave_peers()
        self._channel = None
        return self._lost.result()

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
        if (shown := channel.certificate) is not None:
            self._certificate = tls.fingerprint(shown)
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
                if self._peers is not None:
                    self._peers.look()

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
                    raise OutOfPlace(f"{type(message).__name__} before the handshake")
                if isinstance(message, CopyQuestion):
                    self._copying = self._copying or self._machine.thread("copies")
                    self._copying.submit(self._answer, channel, message, body)
                    return
                self._trace("receive", message)
                self._do(session.receive(message, body))

    def _answer(self, channel: Channel, question: CopyQuestion, body: Body | None) -> None:
        """In the thread of copies: nothing of it is the session's."""
        answered = encode(*self._copies.answer(question, body))
        self._loop.call_soon_threadsafe(channel.send, answered)

    def _prove(self, channel: Channel, challenge: Challenge) -> None:
        certificate = self._certificate or NO_CERTIFICATE
        if channel.certificate is None and self._certificate is not None:
            certificate = on_this_machine(certificate)
        try:
            channel.send(answer(self._hello, challenge, certificate, self._secret))
        except NotAuthorised as error:
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
        if not self._lost.done():
            self._lost.set_result(reason)

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

    def _allocate(self, elements: int) -> Array:
        """Where the engine reads averages."""
        try:
            return self._engine.allocate(elements)
        except SharedMemoryFull as error:
            self._emit(events.DeviceFailed(error))
            return np.empty(elements, np.float32)  # for what is on its way before the end

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
                act.TellPeers() | act.BeginSlices() | act.DropSlices() | act.Contribute()
                | act.GiveAverages()
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
            make_links=self._make_links(), transmit=self._transmit_for_peers,
            averaged=self._slices_averaged, traced=self._trace_last,
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
        assert peers is not None, "what is about slices comes after Expect"
        match action:
            case act.TellPeers():
                peers.receive(action.message, action.body)
            case act.BeginSlices():
                peers.begin(action.place, action.microbatches)
            case act.DropSlices():
                peers.drop()
            case act.Contribute():
                self._trace_sum(action)
                peers.contribute(action.node, action.block, action.weight, action.values)
            case act.GiveAverages():
                peers.give(action.message, action.values)

    def _transmit_for_peers(self, message: Message, body: Any) -> None:
        if self._channel is not None:
            self._channel.send(encode(message, body))

    def _slices_averaged(self, found: AllAveraged) -> None:
        place = events.StepAttempt(found.step, found.attempt)
        if self._session is None or self._channel is None:
            return
        try:
            self._do(self._session.result(events.SlicesAveraged(place, found.averages)))
        except ProtocolError as error:
            self._channel.abort(str(error), error)

    def _taken(self, length_bytes: int) -> Taken:
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
        if isinstance(message, Boundary) and turns.leaves_out(message, channel.waiting):
            return
        self._trace("send", message)
        channel.send(encode(message, action.body))

    def _trace(self, direction: str, message: Message) -> None:
        gradient = isinstance(message, GradientPayload | AveragedGradient)
        if self._tracer is not None and gradient:
            fields = message.model_dump()
            self._tracer.instant(f"{direction} block {fields['block']}", "network", **fields)

    def _trace_sum(self, action: act.Contribute) -> None:
        session = self._session
        if self._tracer is not None and session is not None:
            lo, hi = action.node
            fields = {"step": session.step, "block": action.block, "lo": lo, "hi": hi}
            self._tracer.instant(f"send block {action.block}", "network", **fields)

    def _trace_last(self, came: LastCame) -> None:
        if self._tracer is not None:
            place = {"step": came.step, "attempt": came.attempt}
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
