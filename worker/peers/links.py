"""Links between the workers of a run: one connection for each pair.

A link is a `Channel`, with the same transport, TLS, acceptor, authentication and limit on pending
connections as at the coordinator. Links run in the worker's event loop; the transport encrypts and
decrypts large bodies in separate threads.

The worker whose name sorts first dials. The other one dials too if it has no connection after
`_FALLBACK_DIAL_S`, so one reachable port is enough; a worker that does not listen dials at once. A
broken link is dialed again for as long as the coordinator lists the peer.

If both dial at once, the worker whose name sorts first decides: it keeps the connection on which
the peer was authenticated first, and closes the other before it becomes a link. Both workers then
keep the same connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import ssl
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.base import limits
from protocol.base.errors import (
    ExitCode,
    NotAuthorized,
    OutOfOrder,
    ProtocolError,
    SamestepError,
    Unreachable,
)
from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import Codecs
from protocol.wire import dial, tls, tls_transport
from protocol.wire.acceptor import Acceptor, ProtocolFactory
from protocol.wire.authentication import NO_CERTIFICATE, Exchange, answer_challenge, new_nonce
from protocol.wire.connection import Connection, EncodedMessage, ReceivedMessage, Role, encode
from protocol.wire.dial import DialError
from protocol.wire.messages import (
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    Challenge,
    Goodbye,
    Message,
    PeerHello,
    PeerProbe,
    PeerWelcome,
    Proof,
)
from protocol.wire.peers import COORDINATOR_HOST, Peer, PeerList
from protocol.wire.pending import PendingConnections
from protocol.wire.transport import URGENT, Channel, reason_of

_RETRY_S: Final = (0.2, 1.0, 5.0)
_FALLBACK_DIAL_S: Final = 2.0
"""Delay before the worker whose name sorts second dials as well."""
_PROBES: Final = 2
"""Number of speed probes. The fastest counts: a slower one may have waited for a processor."""
_CROSSING_REASON: Final = "both workers dialed; the other connection is used"
_QUEUE_BYTES: Final = 2 * limits.PEER_EARLY_BYTES
_PRIORITY: Final[tuple[type[Message], ...]] = (
    *URGENT,
    AveragedBlockGradient,
    AveragedNonBlockGradient,
)
"""Averages overtake queued sums, because other workers need them to finish the step."""


class LinksOwner(Protocol):
    """Receives the events of links, in the event loop."""

    def on_gradient(self, peer: str, delivery: ReceivedMessage) -> None:
        """Handle a sum or an average from a peer, possibly in the thread that reads it.

        A ProtocolError raised here ends the link.
        """

    def on_linked(self, peer: str, mbit: float) -> None:
        """Handle a new link to this peer; `mbit` is its speed in Mbit/s."""

    def on_unlinked(self, peer: str, reason: str) -> None:
        """Handle the loss of the link to this peer, or a failure to connect."""


class Links(Protocol):
    """Links to all peers of a run."""

    def listen(self) -> tuple[int, bytes]:
        """Accept links; return the port and the SHA-256 of the certificate.

        Raises:
            OSError: No port can be opened.
        """

    def set_peers(self, listing: PeerList) -> None:
        """Link to the listed peers, and end all other links."""

    def send(self, peer: str, message: EncodedMessage) -> None:
        """Queue a message; it is dropped if there is no link."""

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Return the bytes sent and received so far, by peer."""

    def close(self) -> None:
        """End all links and stop listening."""


class PeerSockets(Protocol):
    """Opens the connections: real sockets, or a simulated network."""

    def listen(self, make_protocol: ProtocolFactory) -> tuple[int, bytes]:
        """Accept connections; return the port and the SHA-256 of the certificate.

        Raises:
            OSError: No port can be opened.
        """

    def pause(self) -> None:
        """Leave new connections in the kernel's queue."""

    def resume(self) -> None:
        """Accept connections again."""

    async def connect(self, peer: Peer, channel: Channel) -> None:
        """Connect a channel to a peer's port.

        Raises:
            OSError: The peer cannot be reached.
        """

    def close(self) -> None:
        """Stop listening."""


class _Link:
    """One peer, and the connection to it if there is one."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.connection: _PeerConnection | None = None
        self.down_event = asyncio.Event()
        self.down_event.set()
        self.dial_now = asyncio.Event()
        self.dial_task: asyncio.Task[None] | None = None


class PeerLinks:
    """The links of one worker; see `Links`.

    Args:
        worker_name: This worker's name.
        blocks: The manifest's blocks.
        codecs: Codecs of sums and averages.
        owner: Receives gradients, and changes of links.
        sockets: Opens connections.
    """

    def __init__(
        self,
        worker_name: str,
        blocks: tuple[Block, ...],
        codecs: Codecs,
        owner: LinksOwner,
        sockets: PeerSockets,
    ) -> None:
        self.worker_name = worker_name
        self.blocks = blocks
        self.codecs = codecs
        self.owner = owner
        self.fingerprint = NO_CERTIFICATE
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._pending_connections = PendingConnections[_PeerConnection](
            limits.PENDING_PEER_CONNECTIONS, limits.PENDING_PEER_CONNECTIONS, sockets.resume
        )
        self._listens = False
        self._links: dict[str, _Link] = {}
        self._rejected_names: set[str] = set()
        """Names of workers that dialed before the coordinator listed them."""
        self._traffic: dict[str, tuple[int, int]] = {}
        self._connections: set[_PeerConnection] = set()
        self._is_closed = False

    # Links.

    def listen(self) -> tuple[int, bytes]:
        port, self.fingerprint = self._sockets.listen(self._on_connection)
        return port, self.fingerprint

    def set_peers(self, listing: PeerList) -> None:
        self._listens = listing.listens
        peers = {peer.name: peer for peer in listing.peers}
        for name, link in list(self._links.items()):
            if peers.get(name) != link.peer:
                del self._links[name]
                self._end(link)
        for name, peer in peers.items():
            if name not in self._links:
                link = self._links[name] = _Link(peer)
                if name in self._rejected_names:
                    link.dial_now.set()
                if peer.port:
                    link.dial_task = self._loop.create_task(self._keep_dialed(link))
        self._rejected_names.clear()

    def send(self, peer: str, message: EncodedMessage) -> None:
        link = self._links.get(peer)
        if link is None or link.connection is None:
            return
        channel = link.connection.channel
        channel.send(message)
        if channel.waiting_bytes > _QUEUE_BYTES:
            channel.abort(f"too slow: {channel.waiting_bytes} bytes wait to be read")

    def traffic(self) -> dict[str, tuple[int, int]]:
        total = dict(self._traffic)
        for connection in self._connections:
            if connection.name:
                total[connection.name] = _add_traffic(
                    total.get(connection.name), connection.channel
                )
        return total

    def close(self) -> None:
        self._is_closed = True
        self._sockets.close()
        links, self._links = list(self._links.values()), {}
        for link in links:
            self._end(link)
        for connection in list(self._connections):
            connection.channel.abort("the worker has left the run")

    def _end(self, link: _Link) -> None:
        if link.dial_task is not None:
            link.dial_task.cancel()
        for connection in list(self._connections):
            if connection.name == link.peer.name:
                connection.channel.abort("the coordinator no longer lists this peer")

    # Dialing.

    async def _keep_dialed(self, link: _Link) -> None:
        """Dial a peer whenever there is no connection to it."""
        delays = _retry_delays_s()
        is_first = self.worker_name < link.peer.name or not self._listens
        delay_s = 0.0 if is_first else _FALLBACK_DIAL_S
        while True:
            await link.down_event.wait()
            if delay_s:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(link.dial_now.wait(), delay_s)
                link.dial_now.clear()
            if not link.down_event.is_set():
                continue
            try:
                await self._dial(link)
            except (OSError, SamestepError) as error:
                # The advice of a DialError is about coordinators, so only its observation is used.
                reason = error.observation if isinstance(error, DialError) else reason_of(error)
                if link.down_event.is_set() and not self._crossing_connections(link.peer):
                    self.owner.on_unlinked(link.peer.name, reason)
                delay_s = next(delays)
            else:
                delays = _retry_delays_s()
                delay_s = next(delays) if is_first else _FALLBACK_DIAL_S

    async def _dial(self, link: _Link) -> None:
        """Open a link to a peer.

        Raises:
            OSError: The peer cannot be reached.
            SamestepError: Another process answers, or the peer refuses the connection.
        """
        connection = _PeerConnection(self, "client", link.peer.host, link.peer)
        self._connections.add(connection)
        try:
            await self._sockets.connect(link.peer, connection.channel)
            connection.send_hello()
            await connection.link_future
        except BaseException:
            self._connections.discard(connection)
            connection.channel.abort("the link was not established")
            raise

    # Accepting.

    def _on_connection(self, address: tuple[str, int]) -> Channel | None:
        if not self._pending_connections.has_room(address[0]):
            return None
        connection = _PeerConnection(self, "listener", address[0], None)
        self._pending_connections.add(connection)
        self._connections.add(connection)
        if not self._pending_connections.has_room(address[0]):
            self._sockets.pause()
        return connection.channel

    def peer_of(self, hello: PeerHello) -> Peer:
        """Return the peer that sent this hello.

        Raises:
            NotAuthorized: The coordinator has not listed the sender, or the hello is addressed to
                another worker.
        """
        link = self._links.get(hello.name)
        if link is None or hello.to != self.worker_name:
            if len(self._rejected_names) < limits.WORKERS:
                self._rejected_names.add(hello.name)
            raise NotAuthorized(
                f"{hello.name!r} is not a peer of {self.worker_name!r}, or its hello is "
                f"addressed to {hello.to!r}"
            )
        return link.peer

    def has_link(self, peer: Peer) -> bool:
        """Return whether there is a link to the peer."""
        link = self._links.get(peer.name)
        return link is not None and link.connection is not None

    def refuse_crossing(self, connection: _PeerConnection) -> None:
        """Refuse this connection if both workers dialed and this worker keeps the other connection.

        Raises:
            Unreachable: This worker decides, and it keeps another connection to the peer.
        """
        peer = connection.peer
        assert peer is not None
        if self.worker_name < peer.name and any(
            crossing.is_dialed != connection.is_dialed
            for crossing in self._crossing_connections(peer)
        ):
            raise Unreachable(_CROSSING_REASON)

    def _crossing_connections(self, peer: Peer) -> list[_PeerConnection]:
        """Return connections on which the peer was authenticated within the handshake timeout.

        An older connection is not a crossing: a peer that has a connection does not dial.
        """
        since_s = self._loop.time() - limits.HANDSHAKE_TIMEOUT_MS / 1000
        return [c for c in self._connections if c.peer == peer and c.authenticated_s > since_s]

    def remove_pending(self, connection: _PeerConnection) -> None:
        """Stop counting a connection as pending: its peer is authenticated."""
        self._pending_connections.remove(connection)

    # Connections.

    def use_connection(self, connection: _PeerConnection, mbit: float) -> None:
        """Use a connection as the link to its peer, at this measured speed."""
        link = self._links.get(connection.name)
        if link is None or link.peer != connection.peer:
            connection.channel.abort("the coordinator no longer lists this peer")
            return
        old_connection, link.connection = link.connection, connection
        link.down_event.clear()
        if old_connection is not None:
            # Queued messages are lost; the owner must learn of it before it sends more.
            old_connection.channel.abort("replaced by a new connection")
            self.owner.on_unlinked(connection.name, "replaced by a new connection")
        self.owner.on_linked(connection.name, mbit)

    def drop_connection(self, connection: _PeerConnection, reason: str) -> None:
        """Forget a connection that has ended."""
        self._pending_connections.remove(connection)
        self._connections.discard(connection)
        if self._is_closed:
            return
        name = connection.name
        if name:
            self._traffic[name] = _add_traffic(self._traffic.get(name), connection.channel)
        link = self._links.get(name)
        if link is not None and link.connection is connection:
            link.connection = None
            link.down_event.set()
            self.owner.on_unlinked(name, reason)


class _PeerConnection:
    """One connection: handshake, speed probe, then gradients.

    Attributes:
        name: The peer's name; empty until the peer is authenticated, unless this worker dialed.
        host: The peer's host.
        is_dialed: Whether this worker dialed.
        authenticated_s: Time of the peer's authentication, by the event loop's clock; minus
            infinity before.
        link_future: Future that is done once the link is up, or fails with the reason.
    """

    def __init__(self, links: PeerLinks, role: Role, host: str, peer: Peer | None) -> None:
        loop = asyncio.get_running_loop()
        self.host = host
        self.name = peer.name if peer is not None else ""
        self.peer = peer
        self.is_dialed = peer is not None
        self.authenticated_s = -math.inf
        self.channel = Channel(Connection(role), self, loop.time, _PRIORITY, self._take_gradient)
        self.link_future: asyncio.Future[None] = loop.create_future()
        self._links = links
        self._loop = loop
        self._hello: PeerHello | None = None
        self._exchange: Exchange | None = None
        self._probe_sent_s = 0.0
        self._probe_times_s: list[float] = []
        self._probes_answered = 0
        self._timer = loop.call_later(limits.HANDSHAKE_TIMEOUT_MS / 1000, self._time_out)

    def _time_out(self) -> None:
        self.channel.abort(f"no link after {limits.HANDSHAKE_TIMEOUT_MS / 1000:g} s of handshake")

    # The handshake.

    def send_hello(self) -> None:
        """Check the certificate, then send PeerHello.

        Raises:
            NotAuthorized: The certificate is not the peer's.
            Unreachable: The peer's connection was faster and is already a link.
        """
        peer, certificate = self.peer, self.channel.certificate
        assert peer is not None
        if self._links.has_link(peer):
            raise Unreachable(_CROSSING_REASON)
        if certificate is not None and tls.fingerprint(certificate).hex() != peer.fingerprint:
            raise NotAuthorized(
                f"{peer.name!r}: expected this peer's certificate, got another certificate"
            )
        self._hello = PeerHello(name=self._links.worker_name, to=peer.name, nonce=new_nonce())
        self.channel.send(self._hello)

    def _send_challenge(self, hello: PeerHello) -> None:
        peer = self._links.peer_of(hello)
        self._hello, self.peer = hello, peer
        exchange = self._exchange = Exchange(hello, new_nonce(), self._links.fingerprint)
        self.channel.send(exchange.challenge(bytes.fromhex(peer.key)))

    def _answer_challenge(self, challenge: Challenge) -> None:
        assert self._hello is not None
        assert self.peer is not None
        certificate = self.channel.certificate
        fingerprint = NO_CERTIFICATE if certificate is None else tls.fingerprint(certificate)
        key = bytes.fromhex(self.peer.key)
        proof = answer_challenge(self._hello, challenge, fingerprint, key)
        self._note_authenticated()
        self.channel.send(proof)

    def _note_authenticated(self) -> None:
        """Record that the peer is authenticated.

        Raises:
            Unreachable: See `PeerLinks.refuse_crossing`.
        """
        self._links.refuse_crossing(self)
        self.authenticated_s = self._loop.time()

    def _check_proof(self, proof: Proof) -> None:
        assert self._exchange is not None
        assert self.peer is not None
        self._exchange.check_worker(bytes.fromhex(self.peer.key), proof)
        self._note_authenticated()
        self.name = self.peer.name
        self._links.remove_pending(self)
        self._accept_gradients()
        self.channel.send(PeerWelcome())
        self._send_probe()

    def _accept_gradients(self) -> None:
        connection = self.channel.connection
        connection.blocks, connection.exchange = self._links.blocks, self._links.codecs

    # The speed.

    def _send_probe(self) -> None:
        """Measure the link's speed by sending `PEER_PROBE_BYTES`."""
        self._probe_sent_s = self._loop.time()
        self.channel.send(encode(PeerProbe(), np.zeros(limits.PEER_PROBE_BYTES, np.uint8)))

    def _on_probe(self, body: NDArray[np.uint8]) -> None:
        if len(body):
            self._probes_answered += 1
            if self._probes_answered > _PROBES:
                raise OutOfOrder(f"expected {_PROBES} PeerProbes, got more")
            self.channel.send(encode(PeerProbe(), b""))
            return
        if len(self._probe_times_s) == _PROBES:
            raise OutOfOrder("expected no answer to a PeerProbe, got one")
        self._probe_times_s.append(self._loop.time() - self._probe_sent_s)
        if len(self._probe_times_s) < _PROBES:
            self._send_probe()
            return
        self._timer.cancel()
        mbit = limits.PEER_PROBE_BYTES * 8e-6 / max(min(self._probe_times_s), 1e-4)
        if not self.link_future.done():
            self.link_future.set_result(None)
        self._links.use_connection(self, mbit)

    def _take_gradient(self, delivery: ReceivedMessage) -> None:
        """Handle a gradient in the thread that reads it, without waking the event loop."""
        if not self.name:
            raise OutOfOrder(f"expected a link first, got {type(delivery.message).__name__}")
        self._links.owner.on_gradient(self.name, delivery)

    # protocol.wire.transport.ChannelOwner

    def on_message(self, channel: Channel, delivery: ReceivedMessage) -> None:
        message, body = delivery
        try:
            match message:
                case PeerHello():
                    self._send_challenge(message)
                case Challenge():
                    self._answer_challenge(message)
                case Proof():
                    self._check_proof(message)
                case PeerWelcome():
                    self._accept_gradients()
                    self._send_probe()
                case PeerProbe():
                    assert body is not None
                    self._on_probe(body)
                case Goodbye():
                    channel.abort(f"{self.name or self.host!r} refuses: {message.reason}")
        except NotAuthorized as error:
            channel.goodbye(str(error), retry=False, exit_code=ExitCode.NOT_AUTHORIZED)
        except Unreachable as error:
            channel.abort(str(error))

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        del channel, error
        self._timer.cancel()
        if not self.link_future.done():
            self.link_future.set_exception(Unreachable(reason))
            self.link_future.exception()  # nobody awaits the future of an accepted connection
        self._links.drop_connection(self, reason)


def _add_traffic(total: tuple[int, int] | None, channel: Channel) -> tuple[int, int]:
    sent_bytes, received_bytes = total or (0, 0)
    return sent_bytes + channel.bytes_sent, received_bytes + channel.bytes_received


def _retry_delays_s() -> Iterator[float]:
    return itertools.chain(_RETRY_S, itertools.repeat(_RETRY_S[-1]))


class LinkSockets:
    """Real sockets, with TLS if the connection to the coordinator has it; see `PeerSockets`.

    Args:
        worker_name: This worker's name, for its certificate.
        coordinator: The coordinator's address, at which its machine's workers listen too.
        encrypted: Whether links use TLS.
    """

    def __init__(self, worker_name: str, coordinator: str, *, encrypted: bool) -> None:
        self._worker_name = worker_name
        self._coordinator = coordinator
        self._encrypted = encrypted
        self._client_context = tls.client_context() if encrypted else None
        self._acceptor: Acceptor | None = None
        self._fingerprint = NO_CERTIFICATE

    def listen(self, make_protocol: ProtocolFactory) -> tuple[int, bytes]:
        if self._acceptor is None:
            context: ssl.SSLContext | None = None
            if self._encrypted:
                from protocol.wire.certificate import temporary_context  # noqa: PLC0415 -- the import takes 40 ms

                # A common name in a certificate has at most 64 characters.
                subject = f"samestep worker {self._worker_name}"[:64]
                context, self._fingerprint = temporary_context(subject)
            acceptor = Acceptor(make_protocol, context)
            acceptor.listen_on_free_port()
            self._acceptor = acceptor
        return self._acceptor.address[1], self._fingerprint

    def pause(self) -> None:
        if self._acceptor is not None:
            self._acceptor.pause()

    def resume(self) -> None:
        if self._acceptor is not None:
            self._acceptor.resume()

    async def connect(self, peer: Peer, channel: Channel) -> None:
        host = self._coordinator if peer.host == COORDINATOR_HOST else peer.host
        timeout_s = limits.HANDSHAKE_TIMEOUT_MS / 1000
        if self._client_context is not None:
            await tls_transport.connect(
                host, peer.port, self._client_context, channel, timeout_s=timeout_s
            )
            return
        endpoint = await dial.connect(host, peer.port, timeout_s)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: channel, sock=endpoint)

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()


MakeLinks = Callable[[str, tuple[Block, ...], Codecs, LinksOwner], Links]


def socket_links(coordinator: str, *, encrypted: bool) -> MakeLinks:
    """Return a function that opens a worker's links over real sockets.

    Args:
        coordinator: The coordinator's address as this worker knows it.
        encrypted: Whether links use TLS, like the connection to the coordinator.
    """

    def make(
        worker_name: str, blocks: tuple[Block, ...], codecs: Codecs, owner: LinksOwner
    ) -> Links:
        sockets = LinkSockets(worker_name, coordinator, encrypted=encrypted)
        return PeerLinks(worker_name, blocks, codecs, owner, sockets)

    return make
