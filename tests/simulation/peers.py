"""The sockets of the links between simulated workers, on the simulated network.

The links are the product's: dialing, handshake, queues and recovery.
"""

from __future__ import annotations

import asyncio
from typing import Any

from protocol.spec.manifest import Block
from protocol.spec.sections.exchange import Codecs
from protocol.wire.acceptor import ProtocolFactory
from protocol.wire.authentication import NO_CERTIFICATE
from protocol.wire.connection import ReceivedMessage
from protocol.wire.peers import Peer
from protocol.wire.transport import Channel
from tests.simulation.network import Link, Network
from tests.simulation.virtual_time import Process
from worker.peers.links import Links, LinksOwner, MakeLinks, PeerLinks


class WorkerPorts:
    """The ports at which workers accept links, and pairs of workers that cannot reach each other.

    Attributes:
        listening: Process and acceptor of each open port.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.listening: dict[int, tuple[Process, ProtocolFactory]] = {}
        self._links: list[Link] = []
        self._cut_pairs: set[frozenset[str]] = set()
        self._next_port = 7000

    @property
    def links(self) -> list[Link]:
        self._links = [link for link in self._links if not link.is_over]
        return self._links

    def open(self, process: Process, make_protocol: ProtocolFactory) -> int:
        """Open a new port for a process and return its number."""
        self._next_port += 1
        self.listening[self._next_port] = (process, make_protocol)
        return self._next_port

    def connect(self, client: Process, port: int, channel: Channel) -> None:
        """Connect to a port.

        Raises:
            ConnectionRefusedError: No process listens at the port, or the process is unreachable.
        """
        server, _ = self.listening.get(port, (client, None))
        pair = _pair(client, server)
        if (
            server is client
            or not server.alive
            or client.side != server.side
            or pair in self._cut_pairs
        ):
            raise ConnectionRefusedError(111, "Connection refused")
        self._links.append(
            self.network.join(
                client, server, channel, lambda: self.listening.get(port, (None, None))[1],
                lambda process: float(getattr(process, "send_delay_ms", 0.0)),
            )
        )  # fmt: skip

    def linked_pairs(self) -> list[frozenset[str]]:
        """Return the pairs of workers that have a link."""
        return [_pair(link.client.process, link.server.process) for link in self.links]

    def cut_off(self, pair: frozenset[str], lasts_ms: float) -> None:
        """Cut the links between two workers; for a while they cannot make a new one."""
        self._cut_pairs.add(pair)
        for link in self._links_of_pair(pair):
            link.cut()
        self.network.clock.after(lasts_ms, lambda: self._cut_pairs.discard(pair))

    def cut_one_way(self, pair: frozenset[str], lasts_ms: float) -> None:
        """Lose the data of one worker to the other for a while; neither can dial meanwhile."""
        clock = self.network.clock
        self._cut_pairs.add(pair)
        sender = clock.rng.choice(sorted(pair))
        for link in self._links_of_pair(pair):
            end_processes = (link.client.process, link.server.process)
            link.lose_one_way(end_processes[end_processes[1].host == sender], lasts_ms)
        clock.after(lasts_ms, lambda: self._cut_pairs.discard(pair))

    def _links_of_pair(self, pair: frozenset[str]) -> list[Link]:
        return [
            link for link in self.links if _pair(link.client.process, link.server.process) == pair
        ]


def _pair(first: Process, second: Process) -> frozenset[str]:
    return frozenset((first.host, second.host))


class SimulatedSockets:
    """See `worker.peers.links.PeerSockets`."""

    def __init__(self, ports: WorkerPorts, process: Process) -> None:
        self._ports = ports
        self._process = process
        self._port = 0

    def listen(self, make_protocol: ProtocolFactory) -> tuple[int, bytes]:
        if getattr(self._process, "only_dials", False):
            raise OSError("no port can be opened here")
        if not self._port:
            self._port = self._ports.open(self._process, make_protocol)
        return self._port, NO_CERTIFICATE

    def pause(self) -> None:
        """Do nothing: no simulated port is ever full."""

    def resume(self) -> None:
        """Do nothing: no simulated port is ever full."""

    async def connect(self, peer: Peer, channel: Channel) -> None:
        network = self._ports.network
        await asyncio.sleep(network.latency_ms * (0.1 + network.clock.rng.random()) / 1000)
        self._ports.connect(self._process, peer.port, channel)

    def close(self) -> None:
        self._ports.listening.pop(self._port, None)


class _RandomSpeeds:
    """An owner of links that reports link speeds from the seed."""

    def __init__(self, owner: LinksOwner, ports: WorkerPorts) -> None:
        self._owner = owner
        self._rng = ports.network.clock.rng

    def on_gradient(self, peer: str, received: ReceivedMessage) -> None:
        self._owner.on_gradient(peer, received)

    def on_linked(self, peer: str, mbit: float) -> None:
        del mbit
        self._owner.on_linked(peer, self._rng.choice((60.0, 1000.0, 1000.0)))

    def on_unlinked(self, peer: str, reason: str) -> None:
        self._owner.on_unlinked(peer, reason)


def links_of(ports: WorkerPorts, process: Process) -> MakeLinks:
    """Return the factory of a worker's links; see `worker.peers.links.MakeLinks`."""

    def make(name: str, blocks: tuple[Block, ...], exchange: Codecs, owner: LinksOwner) -> Links:
        sockets: Any = SimulatedSockets(ports, process)
        return PeerLinks(name, blocks, exchange, _RandomSpeeds(owner, ports), sockets)

    return make
