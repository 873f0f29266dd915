"""The network between simulated processes: transports under the product's own `Channel`.

Each direction of a connection keeps its order. Written data waits in the sender until the
receiver's window has space, travels for a time from the seed, and is read in pieces of any size. A
connection is closed, or breaks: then each side gets some of the sent data, and learns of the break
later. Nothing passes a blocked connection, and neither side notices.

There is no TLS: it lies below the `Channel`, and has its own tests. The authentication handshake is
simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protocol.base import limits
from tests.simulation.virtual_time import Clock, Process

ProtocolFactory = Callable[[tuple[str, int]], Any]


class Network:
    """Delays of connections, and the listeners.

    Attributes:
        links: Open connections, and recent ones.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.latency_ms = clock.rng.choice((0.1, 1.0, 10.0))
        self.burst_probability = clock.rng.choice((0.3, 0.9))
        """Probability that all available data is read at once."""
        self.window_bytes = clock.rng.choice((1000, 100_000))
        self.links: list[Link] = []
        self._listening: dict[Process, ProtocolFactory] = {}

    def listen(self, process: Process, greet: ProtocolFactory) -> None:
        """Accept connections for a process."""
        self._listening[process] = greet

    def stop_listening(self, process: Process) -> None:
        self._listening.pop(process, None)

    async def connect(self, process: Process, factory: Callable[[], Any]) -> tuple[Any, Any]:
        """Connect to the listener on this process's side of the network.

        Raises:
            ConnectionRefusedError: There is no listener.
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
        greet: Callable[[], ProtocolFactory | None],
        slowness_ms: Callable[[Process], float] = lambda _: 0.0,
    ) -> Link:
        """Connect two processes.

        Args:
            client: The connecting process.
            server: The process that accepts, a moment later.
            protocol: The client's protocol.
            greet: Returns the server's acceptor; None if the server no longer listens.
            slowness_ms: Returns the additional delay of a sender's data.
        """
        clock = self.clock
        self.links = [link for link in self.links if not link.is_over]
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
    """A connection with two ends."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.client = Transport(network, client)
        self.server = Transport(network, server)
        self.client.peer, self.server.peer = self.server, self.client

    @property
    def is_over(self) -> bool:
        """Return whether nothing more can happen on the connection."""
        return all(end.lost or not end.process.alive for end in (self.client, self.server))

    def set_blocked(self, *, is_blocked: bool) -> None:
        """Block or unblock the connection: nothing passes a blocked one."""
        for end in (self.client, self.server):
            end.is_blocked = is_blocked
            end.pump()

    def cut(self) -> None:
        """Break the connection."""
        for end in (self.client, self.server):
            end.fail()

    def lose_one_way(self, sender: Process, lasts_ms: float) -> None:
        """Lose the sender's data for a while; only an operating system that waits for
        acknowledgments notices."""
        receiver = self.server if self.client.process is sender else self.client
        receiver.is_blocked = True
        clock, both_ends = receiver.peer.clock, (receiver.peer, receiver)
        noticing_ends = both_ends if clock.rng.random() < 0.5 else both_ends[:1]

        def release() -> None:
            receiver.is_blocked = False
            receiver.pump()

        def time_out_ends() -> None:
            for end in noticing_ends:
                end.time_out()

        clock.after(lasts_ms, release)
        if lasts_ms > limits.LIVENESS_TIMEOUT_MS:
            clock.after(limits.LIVENESS_TIMEOUT_MS, time_out_ends)

    def on_process_death(self, process: Process) -> None:
        """Close the end of a killed process as the operating system does: sent data may still
        arrive."""
        for end in (self.client, self.server):
            if end.process is process:
                end.peer.fail()


class Transport(asyncio.Transport):
    """One end: the protocol above it, and the data in transit to it.

    Attributes:
        process: The process of this end.
        peer: The other end.
        is_blocked: Whether data in transit to this end waits.
        lost: Whether the protocol knows that the connection has ended.
    """

    peer: Transport
    slowness_ms: Callable[[Process], float]

    def __init__(self, network: Network, process: Process) -> None:
        super().__init__()
        self.process = process
        self.is_blocked = False
        self._is_reading_paused = False
        self.lost = False
        self._network = network
        self._clock = network.clock
        self._protocol: Any = None
        self._unsent = bytearray()
        self._high_water_bytes = 65_536
        self._is_writing_paused = False
        self._is_closing = False
        self._incoming = bytearray()
        self._end_reason: str = ""
        self._is_arrival_scheduled = False

    def begin(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self.pump()

    @property
    def clock(self) -> Clock:
        return self._clock

    # asyncio.Transport

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sockname" and getattr(self.peer.process, "is_on_coordinator_host", False):
            return (self.peer.process.host, 9000)
        return (self.peer.process.host, 9000) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        assert low is None
        self._high_water_bytes = high

    def pause_reading(self) -> None:
        self._is_reading_paused = True

    def resume_reading(self) -> None:
        self._is_reading_paused = False
        self.pump()

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Any) -> None:
        if self._is_closing:
            return
        for data in list_of_data:
            self._unsent += data
        self._send()
        if not self._is_writing_paused and len(self._unsent) > self._high_water_bytes:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """Close the connection after all written data; read nothing more."""
        if not self._is_closing:
            self._is_closing = True
            self._incoming.clear()
            self._send()
            if not self.lost:
                self._clock.after(limits.LIVENESS_TIMEOUT_MS, self._abort_unfinished, self.process)

    def _abort_unfinished(self) -> None:
        """Abort as the operating system does when data is not acknowledged (TCP_USER_TIMEOUT)."""
        if not self.lost:
            self.abort()

    def abort(self) -> None:
        self._is_closing = True
        self._unsent.clear()
        self._incoming.clear()
        self.peer.fail()
        self._report_end(None)

    # The network.

    def time_out(self) -> None:
        """End the connection as the operating system does: the peer acknowledges no data."""
        if not self.lost:
            self._is_closing = True
            self._unsent.clear()
            self.peer.fail()
            self._report_end(TimeoutError(110, "Connection timed out"))

    def fail(self) -> None:
        """Break the connection: some sent data still arrives, then the end."""
        if not self._end_reason:
            del self._incoming[int(self._clock.rng.random() * (len(self._incoming) + 1)) :]
        self._end_reason = "reset"
        self.peer._unsent.clear()
        self.pump()

    def pump(self) -> None:
        """Schedule the arrival of data in transit, or of the end."""
        if (
            self._is_arrival_scheduled
            or self.is_blocked
            or self._is_reading_paused
            or self._protocol is None
        ):
            return
        # The protocol already knows of the end, or still sends data before its own close.
        is_ending = self._end_reason == "reset" or (self._end_reason and not self._is_closing)
        if self._incoming or (is_ending and not self.lost):
            self._is_arrival_scheduled = True
            network = self._network
            delay_ms = network.latency_ms * (0.1 + 2 * self._clock.rng.random())
            delay_ms += self.slowness_ms(self.peer.process)
            self._clock.after(delay_ms, self._arrive, self.process)

    def _send(self) -> None:
        """Fill the peer's window; once closed and without unsent data, send the end."""
        window_space = self._network.window_bytes - len(self.peer._incoming)
        if self._unsent and window_space > 0 and not self.peer._end_reason:
            self.peer._incoming += self._unsent[:window_space]
            del self._unsent[:window_space]
        if self._is_closing and not self._unsent and not self.lost:
            self.peer._end_reason = self.peer._end_reason or "closed"
            self._report_end(None)
        self.peer.pump()

    def _arrive(self) -> None:
        self._is_arrival_scheduled = False
        if self.is_blocked or self._is_reading_paused:
            return
        rng = self._clock.rng
        if self._incoming and not self._is_closing:
            count = len(self._incoming)
            if rng.random() >= self._network.burst_probability:
                count = rng.randint(1, count)
            data = bytes(self._incoming[:count])
            del self._incoming[:count]
            self._feed(data)
            self.peer._on_peer_read()
        if self._is_closing:
            self._incoming.clear()
            self.peer._on_peer_read()
        if self._end_reason and not self._incoming:
            self._end()
        self.pump()

    def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._is_closing:
            buffer = self._protocol.get_buffer(-1)
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            view = view[count:]
            self._protocol.buffer_updated(count)

    def _on_peer_read(self) -> None:
        """Continue to send soon: the peer has read data, so its window has space."""
        if self._unsent or self._is_closing:
            self._clock.after(self._network.latency_ms, self._send_more, self.process)

    def _send_more(self) -> None:
        self._send()
        if (
            self._is_writing_paused
            and len(self._unsent) <= self._high_water_bytes // 4
            and not self.lost
        ):
            self._is_writing_paused = False
            self._protocol.resume_writing()

    def _end(self) -> None:
        if self.lost:
            return
        if self._end_reason == "reset":
            self._is_closing = True
            self._report_end(ConnectionResetError(104, "Connection reset by peer"))
        elif not self._is_closing:
            self._protocol.eof_received()
            self.close()

    def _report_end(self, error: Exception | None) -> None:
        if self.lost:
            return
        self.lost = True
        if self._protocol is not None and self.process.alive:
            self.process.loop.call_soon(self._protocol.connection_lost, error)


class SimulatedAcceptor:
    """A coordinator's acceptor: see `coordinator.service.service.ConnectionSource`."""

    def __init__(self, network: Network, process: Process, greet: ProtocolFactory) -> None:
        self.address = ("", 0)
        self._network = network
        self._process = process
        self._greet = greet

    async def open(self, option: str, host: str, port: int) -> None:
        del option
        self.address = (host, port)
        self._network.listen(self._process, self._greet)

    def close(self) -> None:
        self._network.stop_listening(self._process)
