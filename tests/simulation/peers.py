"""Links between simulated workers: what their threads and sockets do, in virtual time.

Each direction keeps its order. Every message goes through the product's protocol as bytes, made as
late as a sender thread may make them, so that a buffer that was changed after it was sent shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from protocol.base.errors import RemoteProtocolError
from protocol.spec.manifest import Block
from protocol.spec.replicas_spec import Codecs
from protocol.wire.connection import Connection, Encoded, Phase
from protocol.wire.peers import Peer, PeerList
from tests.simulation.virtual_time import Clock, Process
from worker.peers.links import Links, LinksOwner

_AGAIN_MS: Final = 300.0


class PeerNetwork:
    """All that listen for others, and between whom nothing gets through.

    Attributes:
        ends: Of all workers, in whatever run.
        cut: Pairs of workers, by address, that do not reach each other.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ends: list[SimulatedLinks] = []
        self.cut: set[frozenset[str]] = set()

    def linked(self) -> list[frozenset[str]]:
        """Pairs of workers that have a link."""
        return [
            frozenset((end.process.host, pipe.to.process.host))
            for end in self.ends
            if end.process.alive
            for pipe in end.pipes.values()
        ]

    def cut_off(self, pair: frozenset[str], lasts_ms: float) -> None:
        """The link of two breaks, and cannot be made again for a while."""
        self.cut.add(pair)
        for end in self.ends:
            for name, pipe in list(end.pipes.items()):
                if frozenset((end.process.host, pipe.to.process.host)) == pair:
                    end.broken(name)
        self.clock.after(lasts_ms, lambda: self.cut.discard(pair))

    def died(self, process: Process) -> None:
        """Its system closes its links: what it had sent may arrive."""
        for end in self.ends:
            for name, pipe in list(end.pipes.items()):
                if pipe.to.process is process:
                    self.clock.after(self.delay_ms(), partial(end.broken, name), end.process)

    def delay_ms(self) -> float:
        return self.clock.rng.choice((0.1, 1.0, 5.0)) * self.clock.rng.random()

    def reach(self, one: Process, other: Process) -> bool:
        """Whether what one sends gets to the other."""
        return one.side == other.side and frozenset((one.host, other.host)) not in self.cut


class _Pipe:
    """One direction of a link: what is on its way, in order."""

    def __init__(self, end: SimulatedLinks, to: SimulatedLinks, blocks: Any) -> None:
        self.to = to
        self.over = False
        self._from = end
        self._last_ms = 0.0
        self._connection = Connection("listener")
        self._connection.phase = Phase.OPEN
        self._connection.blocks, self._connection.exchange = blocks

    def send(self, encoded: Encoded) -> None:
        network = self._from.network
        self._last_ms = max(self._last_ms, network.clock.now_ms + network.delay_ms())
        self._last_ms += self._from.slowness_ms()
        network.clock.at(self._last_ms, lambda: self._arrive(encoded), self.to.process)

    def _arrive(self, encoded: Encoded) -> None:
        network = self._from.network
        if self.over or self.to.closed:
            return
        if not network.reach(self._from.process, self.to.process):  # held until that ends
            network.clock.after(_AGAIN_MS, lambda: self._arrive(encoded), self.to.process)
            return
        data = b"".join(bytes(buffer) for buffer in encoded.buffers)
        try:
            for received in self._connection.receive_data(data):
                self.to.owner.on_slice(self._from.me, received)
        except RemoteProtocolError as error:
            self.to.refused = str(error)
            self.to.broken(self._from.me)


class SimulatedLinks:
    """See `worker.peers.links.Links`.

    Attributes:
        refused: Why a link was ended by what came over it; no worker sends such things.
    """

    def __init__(
        self,
        network: PeerNetwork,
        process: Process,
        me: str,
        shape: tuple[tuple[Block, ...], Codecs],
        owner: LinksOwner,
    ) -> None:
        self.network = network
        self.process = process
        self.me = me
        self.owner = owner
        self.pipes: dict[str, _Pipe] = {}
        self.closed = False
        self.refused = ""
        self.traffic: dict[str, tuple[int, int]] = {}
        self._shape = shape
        self._peers: dict[str, Peer] = {}
        self._listens = False
        network.ends = [end for end in network.ends if end.process.alive and not end.closed]
        network.ends.append(self)

    def slowness_ms(self) -> float:
        """How much longer than usual its messages take."""
        return float(getattr(self.process, "sends_slowly_ms", 0.0))

    def listen(self) -> tuple[int, bytes]:
        if getattr(self.process, "only_dials", False):
            raise OSError("nobody gets in here")
        self._listens = True
        return 7000, bytes(32)

    def know(self, listing: PeerList) -> None:
        known = {peer.name: peer for peer in listing.peers}
        for name in [name for name in self._peers if known.get(name) != self._peers[name]]:
            del self._peers[name]
            self.broken(name)
        new = [peer for name, peer in known.items() if name not in self._peers]
        self._peers.update(known)
        for peer in new:
            self._try_soon(peer)

    def _try_soon(self, peer: Peer, delay_ms: float = 0.0) -> None:
        delay_ms += self.network.delay_ms()
        self.network.clock.after(delay_ms, lambda: self._try(peer), self.process)

    def _try(self, peer: Peer) -> None:
        if self.closed or self._peers.get(peer.name) != peer or peer.name in self.pipes:
            return
        other = next((end for end in self.network.ends if self._is(end, peer)), None)
        listening = other is not None and (other._listens or self._listens)
        if other is None or not listening or not self.network.reach(self.process, other.process):
            self._try_soon(peer, _AGAIN_MS)
            return
        for end, to in ((self, other), (other, self)):
            end.pipes[to.me] = _Pipe(end, to, self._shape)
        mbit = self.network.clock.rng.choice((60.0, 1000.0, 1000.0))
        self._later(lambda: self.owner.on_linked(other.me, mbit))
        other._later(lambda: other.owner.on_linked(self.me, mbit))

    def _is(self, end: SimulatedLinks, peer: Peer) -> bool:
        """Whether this is the peer, and both have one key."""
        theirs = end._peers.get(self.me)
        there = end.me == peer.name and end.process.alive and not end.closed
        return there and theirs is not None and theirs.key == peer.key and self.me not in end.pipes

    def _later(self, act: Callable[[], None]) -> None:
        self.network.clock.after(
            self.network.delay_ms(), lambda: None if self.closed else act(), self.process
        )

    def send(self, peer: str, encoded: Encoded) -> None:
        pipe = self.pipes.get(peer)
        if pipe is not None:
            pipe.send(encoded)

    def broken(self, name: str) -> None:
        """The link to this one is over, at both ends."""
        pipe = self.pipes.pop(name, None)
        if pipe is None:
            return
        pipe.over = True
        back = pipe.to.pipes.pop(self.me, None)
        if back is not None:
            back.over = True
        for end, other in ((self, name), (pipe.to, self.me)):
            end._later(partial(end.owner.on_unlinked, other, "cut"))
            if (peer := end._peers.get(other)) is not None:
                end._try_soon(peer, _AGAIN_MS)

    def close(self) -> None:
        for name in list(self.pipes):
            self.broken(name)
        self.closed = True


def links_of(network: PeerNetwork, process: Process) -> Any:
    """Makes a worker's links; see `worker.peers.exchange.MakeLinks`."""

    def make(me: str, blocks: tuple[Block, ...], exchange: Codecs, owner: LinksOwner) -> Links:
        return SimulatedLinks(network, process, me, (blocks, exchange), owner)

    return make
