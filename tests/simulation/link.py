"""A connection between a simulated worker and the coordinator: two queues, in order, that break."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING, Any, Final

from protocol.connection import FROM_COORDINATOR, FROM_WORKER, Phase
from protocol.messages import Goodbye, Halt, Message, Welcome

if TYPE_CHECKING:
    from tests.simulation.worker import SimulatedWorker

LOST: Final[Any] = "the connection is over"
"""Last item of a queue."""

_SENT_BY_WORKER = FROM_WORKER[Phase.OPEN]
_SENT_BY_COORDINATOR = FROM_COORDINATOR[Phase.OPEN] | {Welcome}


class Link:
    """See the module's text. `name` is the worker's, as the coordinator gave it."""

    def __init__(self, worker: SimulatedWorker, name: str) -> None:
        self.worker = worker
        self.name = name
        self.to_worker: deque[Any] = deque()
        self.to_coordinator: deque[Any] = deque()
        self.closed = False
        """At the coordinator's side."""
        self._broken = False

    def send_to_worker(self, message: Message, body: Any = None) -> None:
        """A halt is urgent: it overtakes what waits."""
        assert type(message) in _SENT_BY_COORDINATOR
        assert (body is not None) == (message.body != "none")
        if self._broken or self.closed:
            return
        if isinstance(message, Halt):
            self.to_worker.appendleft((message, body))
        else:
            self.to_worker.append((message, body))

    def send_to_coordinator(self, message: Message, body: Any = None) -> None:
        assert type(message) in _SENT_BY_WORKER
        assert (body is not None) == (message.body != "none")
        if not (self._broken or self.closed):
            self.to_coordinator.append((message, body))

    def cut(self, rng: Random) -> None:
        """The network fails: each side gets some of what was sent, and learns of it later."""
        if self._broken:
            return
        self._broken = True
        for queue in (self.to_worker, self.to_coordinator):
            _shorten(queue, rng)
            queue.append(LOST)

    def close_at_coordinator(self, rng: Random, goodbye: Goodbye | None) -> None:
        """The coordinator closes, with a word or without; it reads no more."""
        if self.closed:
            return
        self.closed = True
        self.to_coordinator.clear()
        self.to_coordinator.append(LOST)
        if not self._broken:
            _shorten(self.to_worker, rng)
            if goodbye is not None:
                self.to_worker.append((goodbye, None))
            self.to_worker.append(LOST)
        self._broken = True

    def close_at_worker(self) -> None:
        """The worker closes; what it sent before arrives."""
        if not self._broken:
            self.to_coordinator.append(LOST)
        self._broken = True
        self.to_worker.clear()


def _shorten(queue: deque[Any], rng: Random) -> None:
    for _ in range(rng.randint(0, len(queue))):
        queue.pop()
