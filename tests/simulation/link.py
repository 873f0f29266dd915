"""A connection between a simulated worker and a coordinator: two pipes, in order, that break."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any, Final

from protocol.wire.connection import FROM_COORDINATOR, FROM_WORKER, Phase
from protocol.wire.messages import Goodbye, Halt, Message, Welcome
from tests.simulation.clock import Clock, Process

if TYPE_CHECKING:
    from tests.simulation.coordinator import SimulatedCoordinator
    from tests.simulation.worker import SimulatedWorker

LOST: Final[Any] = "the connection is over"
"""Last item of a pipe."""

_SENT_BY_WORKER = FROM_WORKER[Phase.OPEN]
_SENT_BY_COORDINATOR = FROM_COORDINATOR[Phase.OPEN] | {Welcome}


class Network:
    """How slow connections are, and who cannot reach whom."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self.clock = clock
        self.rng = rng
        self.latency_ms = rng.choice((0.1, 1.0, 10.0))
        self.bursts = rng.choice((0.3, 0.9))
        """How often everything that is there is read at once."""


class Pipe:
    """One direction: what is sent arrives in order, later; while it is held, nothing arrives."""

    def __init__(self, network: Network, receiver: Process, take: Callable[[Any], None]) -> None:
        self.items: deque[Any] = deque()
        self.held = False
        self.broken = False
        self._network = network
        self._receiver = receiver
        self._take = take
        self._due = False

    def put(self, item: Any, *, first: bool = False) -> None:
        """Send; a broken pipe takes nothing."""
        if self.broken:
            return
        if first:
            self.items.appendleft(item)
        else:
            self.items.append(item)
        self.pump()

    def pump(self) -> None:
        """What is there will arrive."""
        if self._due or self.held or not self.items:
            return
        self._due = True
        network = self._network
        delay_ms = network.latency_ms * (0.1 + 2 * network.rng.random())
        network.clock.after(delay_ms, self._arrive, self._receiver)

    def end(self) -> None:
        """The connection fails: some of what was sent arrives all the same, then its end."""
        if self.broken:
            return
        rng = self._network.rng
        for _ in range(int(rng.random() * (len(self.items) + 1))):
            self.items.pop()
        self.items.append(LOST)
        self.broken = True
        self.pump()

    def close(self, last: Any = None) -> None:
        """Nothing more is sent; what was sent arrives, then a last word."""
        if self.broken:
            return
        if last is not None:
            self.items.append(last)
        self.items.append(LOST)
        self.broken = True
        self.pump()

    def drop(self) -> None:
        """The receiver reads no more."""
        self.items.clear()
        self.broken = True

    def _arrive(self) -> None:
        self._due = False
        if self.held:
            return
        items = self.items
        many = len(items) if self._network.rng.random() < self._network.bursts else 1
        for _ in range(many):
            if not items:
                return
            self._take(items.popleft())
        self.pump()


class Link:
    """See the module's text. `name` is the worker's, as the coordinator gave it."""

    def __init__(
        self, network: Network, worker: SimulatedWorker, coordinator: SimulatedCoordinator
    ) -> None:
        self.worker = worker
        self.coordinator = coordinator
        self.name = f"worker-{worker.instance}"
        self.closed = False
        """At the coordinator's side."""
        self.to_worker = Pipe(network, worker, lambda item: worker.receive(self, item))
        self.to_coordinator = Pipe(
            network, coordinator, lambda item: coordinator.receive(self, item)
        )

    @property
    def over(self) -> bool:
        """Whether nothing can come of it any more."""
        return self.closed and self.worker.link is not self

    def send_to_worker(self, message: Message, body: Any = None) -> None:
        """A halt is urgent: it overtakes what waits."""
        assert type(message) in _SENT_BY_COORDINATOR
        assert (body is not None) == (message.body != "none")
        if not self.closed:
            self.to_worker.put((message, body), first=isinstance(message, Halt))

    def send_to_coordinator(self, message: Message, body: Any = None) -> None:
        assert type(message) in _SENT_BY_WORKER
        assert (body is not None) == (message.body != "none")
        self.to_coordinator.put((message, body))

    def cut(self) -> None:
        """The network fails: each side gets some of what was sent, and learns of it later."""
        self.to_worker.end()
        self.to_coordinator.end()

    def hold(self, *, held: bool) -> None:
        """Whether nothing gets through, though neither side knows."""
        for pipe in (self.to_worker, self.to_coordinator):
            pipe.held = held
            pipe.pump()

    def close_at_coordinator(self, goodbye: Goodbye | None = None) -> None:
        """The coordinator closes, with a word or without; it reads no more."""
        if self.closed:
            return
        self.closed = True
        self.to_coordinator.drop()
        if goodbye is not None:
            self.to_worker.close((goodbye, None))
        else:
            self.to_worker.end()

    def close_at_worker(self, *, orderly: bool = True) -> None:
        """The worker closes; what it sent before arrives, if it closes in order."""
        if orderly:
            self.to_coordinator.close()
        else:
            self.to_coordinator.end()
        self.to_worker.drop()
