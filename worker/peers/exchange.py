"""A worker's exchange of slices with other members: decisions, links, and the client between them.

What to do is decided in `share.py`, one event at a time: the client's come in its event loop, those
of links in their threads. What is for the coordinator goes to the event loop, in order.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from protocol.base.fields import cut_text
from protocol.exact.tree import Node
from protocol.exact.update import Array
from protocol.spec.manifest import Block
from protocol.spec.replicas_spec import Codecs
from protocol.wire.authentication import NO_CERTIFICATE
from protocol.wire.connection import Encoded, Received, encode
from protocol.wire.messages import (
    AveragedGradient,
    DoorOpen,
    Linked,
    LinkTraffic,
    Message,
    OpenDoor,
    Owners,
    Peers,
    SliceAverage,
    SliceDigests,
    SliceSum,
    Unlinked,
)
from protocol.wire.peers import OwnerTable, PeerList, Traffic, parse
from worker.peers.links import Links, LinksOwner, SocketLinks
from worker.peers.share import (
    COORDINATOR,
    Action,
    AllAveraged,
    LastCame,
    SlicePart,
    ToCoordinator,
    ToPeer,
)

MakeLinks = Callable[[str, tuple[Block, ...], Codecs, LinksOwner], Links]
FOR_PEERS: Final = (OpenDoor, Peers, Owners, SliceSum, SliceDigests)
"""What the coordinator says about slices."""


class PeerExchange:
    """Of one worker in one run, from the time when it has built its task.

    Args:
        run_id: The run's.
        me: This worker's name.
        blocks: The manifest's.
        exchange: How gradients travel.
        make_links: Makes the connections.
        transmit: Sends a message to the coordinator; called in the event loop.
        averaged: Hears that all averages of a committed step are here; likewise.
        traced: Hears when they came, committed or not; likewise.
    """

    def __init__(
        self,
        run_id: str,
        me: str,
        blocks: tuple[Block, ...],
        exchange: Codecs,
        *,
        make_links: MakeLinks,
        transmit: Callable[[Message, NDArray[Any] | bytes | None], None],
        averaged: Callable[[AllAveraged], None],
        traced: Callable[[LastCame], None],
    ) -> None:
        self._run_id = run_id
        self._transmit = transmit
        self._averaged = averaged
        self._traced = traced
        self._loop = asyncio.get_running_loop()
        self._lock = threading.RLock()
        self._share = SlicePart(me, blocks, exchange)
        self._links = make_links(me, blocks, exchange, self)
        self._came = -1
        self._told: dict[str, tuple[int, int]] = {}
        self._closed = False

    # The client's, in its event loop.

    def receive(self, message: Message, body: NDArray[Any] | None) -> None:
        """What the coordinator says: one of `FOR_PEERS`.

        Raises:
            RemoteProtocolError: It does not fit.
        """
        match message:
            case OpenDoor():
                self._open()
            case Peers():
                assert body is not None
                self._links.know(parse(PeerList, body.tobytes()))
            case Owners():
                assert body is not None
                table = parse(OwnerTable, body.tobytes())
                with self._lock:
                    self._do(self._share.own(message.number, table))
            case SliceSum():
                assert body is not None
                with self._lock:
                    self._do(self._share.receive(COORDINATOR, message, body))
            case SliceDigests():
                assert body is not None
                with self._lock:
                    self._do(self._share.commit(message.model_dump(), body))

    def _open(self) -> None:
        try:
            port, fingerprint = self._links.listen()
        except OSError:
            port, fingerprint = 0, NO_CERTIFICATE  # it may dial others all the same
        self._transmit(DoorOpen(run_id=self._run_id, port=port, fingerprint=fingerprint), None)

    def begin(self, place: dict[str, int], microbatches: int) -> None:
        """An attempt at a step whose slices have owners."""
        with self._lock:
            self._do(self._share.begin(place, microbatches))

    def drop(self) -> None:
        """An attempt came to nothing, or is another's now."""
        with self._lock:
            self._share.drop()

    def contribute(self, node: Node, block: int, weight: float, values: Array) -> None:
        """A block's sum over a node; `values` are not changed any more."""
        with self._lock:
            self._do(self._share.contribute(node, block, weight, values))

    def give(self, message: AveragedGradient, values: Array) -> None:
        """A chunk of averages from the coordinator."""
        with self._lock:
            self._do(self._share.averaged(message, values))

    def look(self) -> None:
        """Now and then: where a committed step waits and nothing comes, ask for it; and tell what
        went over links."""
        with self._lock:
            if self._share.came == self._came:
                self._do(self._share.waits())
            self._came = self._share.came
        if self._links.traffic != self._told:
            self._told = dict(self._links.traffic)
            document = Traffic(peers=self._told).to_bytes()
            self._transmit(LinkTraffic(run_id=self._run_id), document)

    def close(self) -> None:
        """The run, or the connection to the coordinator, is over."""
        self._closed = True
        self._links.close()

    # worker.peers.links.LinksOwner

    def on_slice(self, peer: str, received: Received) -> None:
        message, body = received
        assert isinstance(message, SliceSum | SliceAverage)
        assert body is not None
        with self._lock:
            self._do(self._share.receive(peer, message, body))

    def on_linked(self, peer: str, mbit: float) -> None:
        self._tell(Linked(run_id=self._run_id, peer=peer, mbit=mbit))

    def on_unlinked(self, peer: str, reason: str) -> None:
        self._tell(Unlinked(run_id=self._run_id, peer=peer, reason=cut_text(reason)))
        with self._lock:
            self._do(self._share.lost(peer))

    def _do(self, actions: Sequence[Action]) -> None:
        encoded: Encoded | None = None
        for action in actions:
            match action:
                case ToPeer(peer, message, body):
                    if encoded is None or encoded.message is not message:
                        encoded = encode(message, body)  # once for all that it goes to
                    self._links.send(peer, encoded)
                case ToCoordinator(message, body):
                    self._tell(message, body)
                case AllAveraged():
                    self._later(self._averaged, action)
                case LastCame():
                    self._later(self._traced, action)

    def _tell(self, message: Message, body: NDArray[Any] | bytes | None = None) -> None:
        self._later(self._transmit, message, body)

    def _later(self, work: Callable[..., None], *given: object) -> None:
        def unless_closed() -> None:
            if not self._closed:
                work(*given)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(unless_closed)


def socket_links(coordinator: str, *, encrypted: bool) -> MakeLinks:
    """Makes real ones.

    Args:
        coordinator: Its address as this worker knows it.
        encrypted: Whether the connection to it has TLS.
    """

    def make(me: str, blocks: tuple[Block, ...], exchange: Codecs, owner: LinksOwner) -> Links:
        return SocketLinks(
            me, blocks, exchange, owner, coordinator=coordinator, encrypted=encrypted
        )

    return make
