"""Connections between members: blocking sockets in threads, one connection for each direction.

A sender and a receiver thread for each peer: OpenSSL works on a whole buffer with the interpreter's
lock released, and an SSL object must not be used by two threads at once. A body is read straight
into the array that is summed or kept. Averages overtake sums that wait: with them others can go on.

Who sends dials, unless the receiver cannot be reached: then the receiver dials, and says that it is
to be sent to. A connection that breaks is made anew for as long as the coordinator names the peer.
"""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np

from protocol.base import limits
from protocol.base.errors import NotAuthorised, OutOfPlace, SamestepError
from protocol.spec.manifest import Block
from protocol.spec.replicas_spec import Codecs
from protocol.wire import dial, tls
from protocol.wire.authentication import NO_CERTIFICATE, new_nonce
from protocol.wire.connection import Encoded, Received, encode
from protocol.wire.dial import DialError
from protocol.wire.messages import (
    Challenge,
    PeerHello,
    PeerProbe,
    PeerWelcome,
    SliceAverage,
    SliceSum,
)
from protocol.wire.peers import HERE, Peer, PeerList
from protocol.wire.transport import reason_of, set_socket_options
from worker.peers.door import Door
from worker.peers.proof import answer
from worker.peers.wire import Wire, wait_closed

_AGAIN_S: Final = (0.2, 1.0, 5.0)
_PROBES: Final = 2
"""The better one counts: the other may have waited for a processor."""
_QUEUED_BYTES: Final = 2 * limits.PEER_EARLY_BYTES


class LinksOwner(Protocol):
    """Who hears what happens on links; called in their threads."""

    def on_slice(self, peer: str, received: Received) -> None:
        """A slice came. A ProtocolError raised here ends the link."""

    def on_linked(self, peer: str, mbit: float) -> None:
        """The peer and this member reach each other, and so quickly it is sent to."""

    def on_unlinked(self, peer: str, reason: str) -> None:
        """They do not, or no more."""


class Links(Protocol):
    """Links to all peers of a run.

    Attributes:
        traffic: Bytes sent and received, by peer.
    """

    traffic: dict[str, tuple[int, int]]

    def listen(self) -> tuple[int, bytes]:
        """Port, and the fingerprint of the certificate."""

    def know(self, listing: PeerList) -> None:
        """All peers that there are: links to others end."""

    def send(self, peer: str, encoded: Encoded) -> None:
        """Queue a message; dropped where there is no link."""

    def close(self) -> None:
        """End all of them, and listen no more."""


class _Link:
    """What there is of the link to one peer."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.over = threading.Event()
        self.broken = threading.Event()
        self.knows_us = threading.Event()
        """It has come to this door; one that was told of members later turns others away first."""
        self.sending: Wire | None = None
        self.receiving: Wire | None = None
        self.mbit = 0.0
        self.linked = False
        self.queue: queue.PriorityQueue[tuple[int, int, Encoded | None]] = queue.PriorityQueue()
        self.queued_bytes = 0

    def wires(self) -> Iterator[Wire]:
        return (wire for wire in (self.sending, self.receiving) if wire is not None)


class SocketLinks:
    """The real ones; see `Links`.

    Attributes:
        traffic: Bytes sent and received, by peer.

    Args:
        me: This member's name.
        blocks: The manifest's.
        exchange: How gradients travel.
        owner: Who hears what happens.
        coordinator: Its address, where members on its machine are too.
        encrypted: Whether there is TLS, as to the coordinator.
    """

    def __init__(
        self,
        me: str,
        blocks: tuple[Block, ...],
        exchange: Codecs,
        owner: LinksOwner,
        *,
        coordinator: str,
        encrypted: bool,
    ) -> None:
        self.traffic: dict[str, tuple[int, int]] = {}
        self._me = me
        self._blocks = blocks
        self._exchange = exchange
        self._owner = owner
        self._coordinator = coordinator
        self._encrypted = encrypted
        self._client = tls.client_context() if encrypted else None
        self._listens = False
        self._links: dict[str, _Link] = {}
        self._lock = threading.Lock()
        self._counter = itertools.count()
        self._door = Door(me, encrypted=encrypted, key_of=self._key_of, came=self._came)

    def listen(self) -> tuple[int, bytes]:
        return self._door.open()

    def _key_of(self, name: str) -> bytes | None:
        link = self._links.get(name)
        return bytes.fromhex(link.peer.key) if link is not None else None

    def know(self, listing: PeerList) -> None:
        self._listens = listing.listens
        known = {peer.name: peer for peer in listing.peers}
        with self._lock:
            gone = [link for name, link in self._links.items() if known.get(name) != link.peer]
            for link in gone:
                del self._links[link.peer.name]
            new = [_Link(peer) for name, peer in known.items() if name not in self._links]
            self._links.update({link.peer.name: link for link in new})
        for link in gone:
            self._end(link)
        for link in new:
            self._start(self._dial, link, "dial")

    def _start(self, work: object, link: _Link, what: str) -> None:
        name = f"{what} {link.peer.name}"
        threading.Thread(target=work, args=(link,), name=name, daemon=True).start()  # type: ignore[arg-type]

    def send(self, peer: str, encoded: Encoded) -> None:
        link = self._links.get(peer)
        if link is None or not link.linked:
            return
        link.queued_bytes += encoded.nbytes
        if link.queued_bytes > _QUEUED_BYTES:
            self._break(link, f"too slow: {link.queued_bytes} bytes wait to be read")
            return
        urgent = not isinstance(encoded.message, SliceSum)
        link.queue.put((0 if urgent else 1, next(self._counter), encoded))

    def close(self) -> None:
        self._door.close()
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            self._end(link)

    def _end(self, link: _Link) -> None:
        link.over.set()
        link.broken.set()
        link.knows_us.set()
        link.queue.put((2, next(self._counter), None))
        for wire in link.wires():
            wire.close()

    # Making connections.

    def _dial(self, link: _Link) -> None:
        """Make the connections that are this member's to make, again and again."""
        pauses = _pauses_s()
        while not link.over.is_set():
            link.broken.clear()
            link.knows_us.clear()
            try:
                for sends in self._mine_to_dial(link.peer):
                    self._take(link, self._dialled(link.peer, sends=sends), sends=sends)
            except (OSError, SamestepError) as error:
                # What a DialError advises is for who connects to a coordinator.
                self._failed(
                    link, error.found if isinstance(error, DialError) else reason_of(error)
                )
                link.knows_us.wait(next(pauses))
                continue
            self._watch(link)
            pauses = _pauses_s()
            link.over.wait(next(pauses))

    def _watch(self, link: _Link) -> None:
        """Until the link is over. Nothing is read where it is sent, so the end of that is seen by
        nobody else until something is sent, and the peer would wait for that for ever."""
        with self._lock:
            wire = link.sending
            try:
                watched = wire.watched() if wire is not None else None
            except OSError:  # closed meanwhile
                watched = None
        if watched is not None:
            wait_closed(watched)
            if link.sending is wire:
                self._break(link, reason_of(None))
        link.broken.wait()

    def _mine_to_dial(self, peer: Peer) -> list[bool]:
        """Whether this member dials to send, and to receive."""
        if not peer.port:
            return []
        return [True] if self._listens else [True, False]

    def _dialled(self, peer: Peer, *, sends: bool) -> Wire:
        """A connection on which both have proved themselves.

        Raises:
            OSError: It cannot be made.
            SamestepError: Who answers is not the peer.
        """
        seconds = limits.HANDSHAKE_TIMEOUT_MS / 1000
        host = self._coordinator if peer.host == HERE else peer.host
        endpoint: socket.socket = dial.connect_blocking(host, peer.port, seconds)
        try:
            set_socket_options(endpoint)
            fingerprint = NO_CERTIFICATE
            if self._client is not None:
                secured = self._client.wrap_socket(endpoint)
                fingerprint = tls.fingerprint(secured.getpeercert(binary_form=True) or b"")
                endpoint = secured
            wire = Wire(endpoint, "dialler")
            self._greet(wire, peer, fingerprint, sends=sends)
        except BaseException:
            endpoint.close()
            raise
        return wire

    def _greet(self, wire: Wire, peer: Peer, fingerprint: bytes, *, sends: bool) -> None:
        """See who answers; only then say who this is, and prove it."""
        if self._client is not None and fingerprint.hex() != peer.fingerprint:
            raise NotAuthorised(f"who answers for {peer.name!r} has another certificate")
        hello = PeerHello(name=self._me, to=peer.name, sends=sends, nonce=new_nonce())
        wire.send(encode(hello))
        asked = wire.receive().message
        if not isinstance(asked, Challenge):
            raise OutOfPlace(f"{peer.name!r} refuses: {getattr(asked, 'reason', asked)}")
        wire.send(encode(answer(hello, asked, fingerprint, bytes.fromhex(peer.key))))
        welcome = wire.receive().message
        if not isinstance(welcome, PeerWelcome):
            raise OutOfPlace(f"{peer.name!r} refuses: {getattr(welcome, 'reason', welcome)}")

    def _came(self, wire: Wire, hello: PeerHello) -> None:
        """A peer has dialled, and proved itself; in the door's thread for it."""
        with self._lock:
            link = self._links.get(hello.name)
        if link is None:
            wire.close()
            return
        link.knows_us.set()
        try:
            self._take(link, wire, sends=not hello.sends)
        except (OSError, SamestepError) as error:
            self._failed(link, reason_of(error))

    def _take(self, link: _Link, wire: Wire, *, sends: bool) -> None:
        """A connection is made: see how quick it is, then use it.

        Raises:
            OSError: It breaks before that.
            SamestepError: What comes is no probe.
        """
        wire.connection.blocks, wire.connection.exchange = self._blocks, self._exchange
        try:
            if sends:
                link.mbit = _probed(wire)
            else:
                self._answer_probe(wire)
            wire.endpoint.settimeout(None)
        except BaseException:
            wire.close()
            raise
        with self._lock:
            before = link.sending if sends else link.receiving
            if sends:
                link.sending = wire
            else:
                link.receiving = wire
        if before is not None:
            before.close()
        if link.over.is_set():  # `_end` may have looked before this one was there to be closed
            wire.close()
            return
        if sends:
            link.queue = queue.PriorityQueue()
            link.queued_bytes = 0
        self._start(self._send_all if sends else self._receive_all, link, "to" if sends else "from")
        with self._lock:
            complete = link.sending is not None and link.receiving is not None
            now_linked = complete and not link.linked and not link.over.is_set()
            link.linked = link.linked or now_linked
        if now_linked:
            self._owner.on_linked(link.peer.name, link.mbit)

    def _answer_probe(self, wire: Wire) -> None:
        for _ in range(_PROBES):
            probe = wire.receive().message
            if not isinstance(probe, PeerProbe):
                raise OutOfPlace(f"expected a PeerProbe, got {type(probe).__name__}")
            wire.send(encode(PeerProbe(), b""))

    def _failed(self, link: _Link, reason: str) -> None:
        """A connection was not made; one of the other direction may well be there, and stays."""
        with self._lock:
            known = self._links.get(link.peer.name) is link and not link.linked
        if known:
            self._owner.on_unlinked(link.peer.name, reason)

    def _break(self, link: _Link, reason: str) -> None:
        """Nothing gets through any more: both connections are made anew."""
        with self._lock:
            wires = list(link.wires())
            link.sending = link.receiving = None
            was, link.linked = link.linked, False
            known = self._links.get(link.peer.name) is link
        link.queue.put((2, next(self._counter), None))
        for wire in wires:
            wire.close()
        link.broken.set()
        if known and (was or not wires):
            self._owner.on_unlinked(link.peer.name, reason)

    # The threads of a link.

    def _send_all(self, link: _Link) -> None:
        wire, waiting = link.sending, link.queue
        while wire is not None:
            _, _, encoded = waiting.get()
            if encoded is None:
                return
            try:
                wire.send(encoded)
            except (OSError, SamestepError) as error:
                if link.sending is wire:
                    self._break(link, reason_of(error))
                return
            link.queued_bytes -= encoded.nbytes
            self._count(link.peer.name, encoded.nbytes, 0)

    def _count(self, peer: str, sent: int, received: int) -> None:
        with self._lock:
            so_far = self.traffic.get(peer, (0, 0))
            self.traffic[peer] = (so_far[0] + sent, so_far[1] + received)

    def _receive_all(self, link: _Link) -> None:
        wire = link.receiving
        while wire is not None:
            try:
                received, before = wire.receive(), wire.bytes_counted
                wire.bytes_counted = wire.bytes_received
                self._count(link.peer.name, 0, wire.bytes_received - before)
                if not isinstance(received.message, SliceSum | SliceAverage):
                    raise OutOfPlace(f"{type(received.message).__name__} on a link")
                self._owner.on_slice(link.peer.name, received)
            except (OSError, SamestepError) as error:
                if link.receiving is wire:
                    self._break(link, reason_of(error))
                return


def _probed(wire: Wire) -> float:
    """How quickly a megabyte gets through, Mbit/s: slow links are told from quick ones."""
    taken_s = []
    for _ in range(_PROBES):
        start_s = time.monotonic()
        wire.send(encode(PeerProbe(), np.zeros(limits.PEER_PROBE_BYTES, np.uint8)))
        if not isinstance(wire.receive().message, PeerProbe):
            raise OutOfPlace("expected the answer to a PeerProbe")
        taken_s.append(time.monotonic() - start_s)
    return limits.PEER_PROBE_BYTES * 8e-6 / max(min(taken_s), 1e-4)


def _pauses_s() -> Iterator[float]:
    """Between attempts to reach a peer."""
    return itertools.chain(_AGAIN_S, itertools.repeat(_AGAIN_S[-1]))
