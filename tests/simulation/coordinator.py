"""A simulated coordinator process: what `service` does, runs one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from protocol.base import limits
from protocol.wire.messages import Goodbye, Welcome
from tests.simulation.clock import Clock, Process
from tests.simulation.execution import SimulatedExecution
from tests.simulation.ledger import Ledger
from tests.simulation.link import LOST, Link
from tests.simulation.worker import SimulatedWorker

_TICK_MS = 2.5 * limits.TICK_MS
"""As late as a busy coordinator may be, and fewer to simulate."""


class SimulatedCoordinator(Process):
    """One process: `coordinator.service.service.Service` without a loop.

    Attributes:
        side: Of a split network.
    """

    def __init__(
        self,
        clock: Clock,
        rng: Random,
        ledgers: Sequence[Ledger],
        expect_workers: int,
        *,
        halted: Callable[[SimulatedExecution], None],
        stopped: Callable[[SimulatedCoordinator], None],
    ) -> None:
        super().__init__()
        self.clock = clock
        self.rng = rng
        self.expect_workers = expect_workers
        self.halted = halted
        self.side = 0
        self.at_commit: Callable[[], None] | None = None
        self.pace = rng.choice((1.0, 10.0, 60.0))
        """Milliseconds that a job on disk or on the replica may take."""
        self.sessions: dict[str, Link] = {}
        self.links: list[Link] = []
        self.current: SimulatedExecution | None = None
        self.finished: list[SimulatedExecution] = []
        self._stopped = stopped
        self._waiting = [ledger for ledger in ledgers if ledger.outcome is None]
        self._found = []
        for ledger in self._waiting:
            epoch = ledger.directory.claim()
            found = ledger.directory.recover()
            ledger.found(found)
            self._found.append((ledger, epoch, found))
        self.epoch = max((epoch for _, epoch, _ in self._found), default=1)
        self._start_next()
        self._tick()

    def join(self, worker: SimulatedWorker, link: Link) -> None:
        """A handshake: the worker gets a name, its old connection is forgotten."""
        for other in list(self.sessions.values()):
            if other.worker is worker:
                self.close(other)
                self._forget(other)
        self.links = [old for old in self.links if not old.over]
        self.links.append(link)
        welcome = Welcome(
            worker=link.name, epoch=self.epoch, heartbeat_interval_ms=1000,
            liveness_timeout_ms=8000, key=b"",
        )  # fmt: skip
        link.send_to_worker(welcome)
        self.sessions[link.name] = link
        if self.current is not None:
            self.current.invite(link.name)

    def receive(self, link: Link, item: Any) -> None:
        """The oldest message of a connection."""
        if link.closed:
            return
        if item is LOST:
            link.closed = True
            self._forget(link)
            return
        message, body = item
        if isinstance(message, Goodbye):
            link.close_at_coordinator()
            self._forget(link)
        elif self.current is not None and self.sessions.get(link.name) is link:
            received = body if body is None or isinstance(body, bytes) else np.array(body, "<f4")
            self.current.receive(link.name, message, received)

    def silent(self, link: Link) -> None:
        """Nothing was heard of the worker for too long."""
        self.close(link)

    def close(self, link: Link, goodbye: Goodbye | None = None) -> None:
        """Close a connection; that it is over is noticed soon after."""
        if not link.closed:
            link.close_at_coordinator(goodbye)
            self.clock.after(0.1, lambda: self._forget(link), self)

    def kill(self) -> None:
        """SIGKILL: connections break."""
        self._die()
        for link in self.links:
            link.closed = True
            link.to_coordinator.drop()
            link.to_worker.end()

    def commits(self) -> None:
        """A commit is on its way: the moment for what is to happen then."""
        act, self.at_commit = self.at_commit, None
        if act is not None:
            self.clock.after(self.pace * self.rng.random() / 2, act, self)

    def vanish(self) -> None:
        """The machine loses power: nobody hears of it."""
        self._die()
        for link in self.links:
            link.closed = True
            link.hold(held=True)

    def _die(self) -> None:
        self.alive = False
        if self.current is not None:
            self.current.die()

    def ended(self, *, held: bool) -> None:
        """The run in progress is over."""
        assert self.current is not None
        self.finished.append(self.current)
        self.current = None
        if held:
            self._start_next()
        else:
            self._stopped(self)

    def _forget(self, link: Link) -> None:
        if self.sessions.get(link.name) is link:
            del self.sessions[link.name]
            if self.current is not None:
                self.current.lost(link.name)

    def _start_next(self) -> None:
        if self._found:
            ledger, epoch, found = self._found.pop(0)
            self.current = SimulatedExecution(self, ledger, epoch, found)
            for name in list(self.sessions):
                self.current.invite(name)

    def _tick(self) -> None:
        if self.current is not None:
            self.current.tick()
        self.clock.after(_TICK_MS, self._tick, self, background=True)
