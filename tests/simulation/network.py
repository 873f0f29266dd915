"""The network between simulated processes: transports under the product's own `Channel`.

Each direction of a connection keeps its order. What is written waits in the sender until the
receiver's window has room, travels for as long as the seed says, and is read in pieces that end
anywhere. A connection ends in order, or is cut: then each side gets some of what was sent, and
learns of it later. While it is held nothing gets through, though neither side knows.

TLS is left out: asyncio does that below the `Channel`, and has tests of its own here. The handshake
by which both sides prove themselves is played.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protocol.base import limits
from tests.simulation.virtual_time import Clock, Process

Greet = Callable[[tuple[str, int]], Any]


class Network:
    """How slow connections are, and who listens.

    Attributes:
        links: Those that are not over.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.latency_ms = clock.rng.choice((0.1, 1.0, 10.0))
        self.bursts = clock.rng.choice((0.3, 0.9))
        """How often everything that is there is read at once."""
        self.window_bytes = clock.rng.choice((1000, 100_000))
        self.links: list[Link] = []
        self._listening: dict[Process, Greet] = {}

    def listen(self, process: Process, greet: Greet) -> None:
        """It takes connections."""
        self._listening[process] = greet

    def listens_no_more(self, process: Process) -> None:
        self._listening.pop(process, None)

    async def connect(self, process: Process, factory: Callable[[], Any]) -> tuple[Any, Any]:
        """A connection to whoever listens on this process's side of the network.

        Raises:
            ConnectionRefusedError: Nobody does.
        """
        clock = self.clock
        await asyncio.sleep(self.latency_ms * (0.1 + clock.rng.random()) / 1000)
        reachable = [c for c in self._listening if c.alive and c.side == process.side]
        if not reachable:
            raise ConnectionRefusedError(111, "Connection refused")
        server = clock.rng.choice(reachable)
        protocol = factory()
        link = self.join(process, server, protocol, lambda: self._listening.get(server))
        return link.client, protocol

    def join(
        self,
        client: Process,
        server: Process,
        protocol: Any,
        greet: Callable[[], Greet | None],
        slowness_ms: Callable[[Process], float] = lambda _: 0.0,
    ) -> Link:
        """Connect two processes.

        Args:
            client: The one that dials.
            server: The one that accepts, a moment later.
            protocol: The client's.
            greet: Returns what greets the client at the server; None if it no longer listens.
            slowness_ms: How much later than usual what a process sends arrives.
        """
        clock = self.clock
        self.links = [link for link in self.links if not link.over]
        link = Link(self, client, server)
        link.client.slowness_ms = link.server.slowness_ms = slowness_ms
        self.links.append(link)
        link.client.begin(protocol)

        def accept() -> None:
            open_channel = greet()
            channel = open_channel((client.host, 50_000)) if open_channel is not None else None
            if channel is None:
                link.server.abort()
            else:
                link.server.begin(channel)

        clock.after(self.latency_ms * clock.rng.random(), accept, server)
        return link


class Link:
    """A connection: two ends."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.client = Transport(network, client)
        self.server = Transport(network, server)
        self.client.peer, self.server.peer = self.server, self.client

    @property
    def over(self) -> bool:
        """Whether nothing can come of it any more."""
        return all(end.lost or not end.process.alive for end in (self.client, self.server))

    def hold(self, *, held: bool) -> None:
        """Whether nothing gets through."""
        for end in (self.client, self.server):
            end.held = held
            end.pump()

    def cut(self) -> None:
        """The network fails."""
        for end in (self.client, self.server):
            end.fail()

    def lose_one_way(self, sender: Process, lasts_ms: float) -> None:
        """What the sender sends is lost for a while; only systems that wait for answers notice."""
        receiving = self.server if self.client.process is sender else self.client
        receiving.held = True
        clock, ends = receiving.peer.clock, (receiving.peer, receiving)
        notices = ends if clock.rng.random() < 0.5 else ends[:1]

        def release() -> None:
            receiving.held = False
            receiving.pump()

        def notice() -> None:
            for end in notices:
                end.time_out()

        clock.after(lasts_ms, release)
        if lasts_ms > limits.LIVENESS_TIMEOUT_MS:
            clock.after(limits.LIVENESS_TIMEOUT_MS, notice)

    def died(self, process: Process) -> None:
        """The system of a killed process closes for it: what it had sent may arrive."""
        for end in (self.client, self.server):
            if end.process is process:
                end.peer.fail()


class Transport(asyncio.Transport):
    """One end: the protocol above it, and what is on its way to it.

    Attributes:
        process: Whose end it is.
        peer: The other one.
        held: Whether nothing arrives here.
        lost: Whether the protocol knows that it is over.
    """

    peer: Transport
    slowness_ms: Callable[[Process], float]

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        self.process = process
        self.held = False
        self._unread = False
        self.lost = False
        self._network = network
        self._clock = network.clock
        self._protocol: Any = None
        self._unsent = bytearray()
        self._high_water_bytes = 65_536
        self._paused = False
        self._closing = False
        self._coming = bytearray()
        self._ends: str = ""
        self._due = False

    def begin(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self.pump()

    @property
    def clock(self) -> Clock:
        return self._clock

    # asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sockname" and getattr(self.peer.process, "beside", False):
            return (self.peer.process.host, 9000)
        return (self.peer.process.host, 9000) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        assert low is None
        self._high_water_bytes = high

    def pause_reading(self) -> None:
        self._unread = True

    def resume_reading(self) -> None:
        self._unread = False
        self.pump()

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Any) -> None:
        if self._closing:
            return
        for data in list_of_data:
            self._unsent += data
        self._send()
        if not self._paused and len(self._unsent) > self._high_water_bytes:
            self._paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """What was written is sent first; nothing more is read."""
        if not self._closing:
            self._closing = True
            self._coming.clear()
            self._send()
            if not self.lost:
                self._clock.after(limits.LIVENESS_TIMEOUT_MS, self._gave_up, self.process)

    def _gave_up(self) -> None:
        """The system has tried for long enough (TCP_USER_TIMEOUT)."""
        if not self.lost:
            self.abort()

    def abort(self) -> None:
        self._closing = True
        self._unsent.clear()
        self._coming.clear()
        self.peer.fail()
        self._lose(None)

    # The network.

    def time_out(self) -> None:
        """The system gives up, since nobody acknowledges what this end has sent."""
        if not self.lost:
            self._closing = True
            self._unsent.clear()
            self.peer.fail()
            self._lose(TimeoutError(110, "Connection timed out"))

    def fail(self) -> None:
        """The connection breaks: some of what was sent arrives all the same, then its end."""
        if not self._ends:
            del self._coming[int(self._clock.rng.random() * (len(self._coming) + 1)) :]
        self._ends = "reset"
        self.peer._unsent.clear()
        self.pump()

    def pump(self) -> None:
        """What is on its way will arrive."""
        if self._due or self.held or self._unread or self._protocol is None:
            return
        # An end that is known already, or that waits for what is still to be sent, is no news.
        ends = self._ends == "reset" or (self._ends and not self._closing)
        if self._coming or (ends and not self.lost):
            self._due = True
            network = self._network
            delay_ms = network.latency_ms * (0.1 + 2 * self._clock.rng.random())
            delay_ms += self.slowness_ms(self.peer.process)
            self._clock.after(delay_ms, self._arrive, self.process)

    def _send(self) -> None:
        """Fill the peer's window; once closed and empty, that is said."""
        room = self._network.window_bytes - len(self.peer._coming)
        if self._unsent and room > 0 and not self.peer._ends:
            self.peer._coming += self._unsent[:room]
            del self._unsent[:room]
        if self._closing and not self._unsent and not self.lost:
            self.peer._ends = self.peer._ends or "closed"
            self._lose(None)
        self.peer.pump()

    def _arrive(self) -> None:
        self._due = False
        if self.held or self._unread:
            return
        rng = self._clock.rng
        if self._coming and not self._closing:
            count = len(self._coming)
            if rng.random() >= self._network.bursts:
                count = rng.randint(1, count)
            data = bytes(self._coming[:count])
            del self._coming[:count]
            self._feed(data)
            self.peer._room()
        if self._closing:
            self._coming.clear()
            self.peer._room()
        if self._ends and not self._coming:
            self._end()
        self.pump()

    def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._closing:
            buffer = self._protocol.get_buffer(-1)
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            view = view[count:]
            self._protocol.buffer_updated(count)

    def _room(self) -> None:
        """The receiver has read: there is room in its window, which the sender soon knows."""
        if self._unsent or self._closing:
            self._clock.after(self._network.latency_ms, self._go_on, self.process)

    def _go_on(self) -> None:
        self._send()
        if self._paused and len(self._unsent) <= self._high_water_bytes // 4 and not self.lost:
            self._paused = False
            self._protocol.resume_writing()

    def _end(self) -> None:
        if self.lost:
            return
        if self._ends == "reset":
            self._closing = True
            self._lose(ConnectionResetError(104, "Connection reset by peer"))
        elif not self._closing:
            self._protocol.eof_received()
            self.close()

    def _lose(self, error: Exception | None) -> None:
        if self.lost:
            return
        self.lost = True
        if self._protocol is not None and self.process.alive:
            self.process.loop.call_soon(self._protocol.connection_lost, error)


class SimulatedAcceptor:
    """A coordinator's acceptor: see `coordinator.service.service.ConnectionSource`."""

    def __init__(self, network: Network, process: Process, greet: Greet) -> None:
        self.address = ("", 0)
        self._network = network
        self._process = process
        self._greet = greet

    async def open(self, option: str, host: str, port: int) -> None:
        del option
        self.address = (host, port)
        self._network.listen(self._process, self._greet)

    def close(self) -> None:
        self._network.listens_no_more(self._process)
