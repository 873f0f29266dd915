"""What goes wrong in a simulated cluster: one thing at a time, whichever the seed picks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from protocol.base import limits
from tests.simulation.coordinator import SimulatedCoordinator
from tests.simulation.execution import SimulatedExecution
from tests.simulation.job import STEPS
from tests.simulation.link import Link
from tests.simulation.worker import Flaws, SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_MOST_WORKERS = 8
_STALLS_MS = (200.0, 2000.0, 7000.0, 15_000.0)

Choice = tuple[int, str, Callable[[], None]]
"""Weight, name and what it does."""


class Disturbances:
    """Those of one cluster.

    Args:
        cluster: The cluster.
        often: What is to come more often than others, with + between names.
    """

    def __init__(self, cluster: Cluster, often: str) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._rng = cluster.rng
        self._often = often.split("+")
        self._sides = 0

    def happen(self) -> None:
        rng = self._rng
        choices: list[Choice] = []
        alive = [worker for worker in self._cluster.workers if worker.alive]
        if len(alive) < _MOST_WORKERS:
            choices.append((6, "join", self._cluster.start_worker))
            choices.append(
                (1, "cannot_build", partial(self._cluster.start_worker, cannot_build=True))
            )
        choices += [(5, "disk", self._disk_fails)]
        if alive:
            choices += self._on_worker(rng.choice(alive))
        linked = [worker.link for worker in alive if worker.link is not None]
        if linked:
            choices += [
                (5, "cut", rng.choice(linked).cut),
                (3, "partition", lambda: self._partition(alive)),
            ]
        coordinator, execution = self._cluster.coordinator, self._cluster.execution
        if coordinator is not None and execution is not None:
            choices += self._on_coordinator(coordinator, execution, alive)
        weights = [10 * w if name in self._often else w for w, name, _ in choices]
        _, name, act = rng.choices(choices, weights)[0]
        self._cluster.disturbed[name] += 1
        act()

    def _on_worker(self, one: SimulatedWorker) -> list[Choice]:
        rng, execution, flaws = self._rng, self._cluster.execution, one.flaws
        step = min((execution.run.step if execution else 0) + rng.randint(0, 1), STEPS - 1)
        found: list[Choice] = [
            (5, "kill", one.kill),
            (2, "worker_drains", one.drain),
            (3, "slower", lambda: setattr(flaws, "microbatch_ms", 20.0 * flaws.pace_ms)),
            (4, "stall", lambda: self._stall_worker(one)),
            (1, "nonfinite", lambda: flaws.nonfinite_once.add((step, rng.randint(-1, 3)))),
            (2, "flip", lambda: flaws.flips.add(step + 1)),
            (2, "flip_and_die", lambda: _spoil(flaws, step + 1)),
        ]
        return found

    def _on_coordinator(
        self,
        coordinator: SimulatedCoordinator,
        execution: SimulatedExecution,
        alive: list[SimulatedWorker],
    ) -> list[Choice]:
        run = execution.run
        found: list[Choice] = [
            (2, "operator_halts", lambda: execution.do(run.halt("an operator"))),
            (2, "save", lambda: execution.do(run.save())),
            (2, "stall_coordinator", lambda: self._stall_coordinator(coordinator)),
        ]
        if self._rng.random() < 0.1:
            found.append((2, "drain", lambda: execution.do(run.drain())))
        if not self._any_spoilt():
            kill = partial(self._kill_coordinator, coordinator)
            found += [
                (4, "kill_coordinator", lambda: self._now_or_at_commit(coordinator, kill)),
                (3, "power_loss", lambda: self._now_or_at_commit(coordinator, self._power_loss)),
            ]
            if len(self._cluster.coordinators) < 2 or not self._cluster.coordinators[-2].alive:
                found.append((3, "split", lambda: self._split(coordinator, alive)))
        return found

    def _any_spoilt(self) -> bool:
        return any(worker.alive and worker.engine.spoilt for worker in self._cluster.workers)

    def _now_or_at_commit(self, coordinator: SimulatedCoordinator, act: Callable[[], None]) -> None:
        """At once, or while a commit is on its way to the disk."""

        def then() -> None:
            if not self._any_spoilt():
                act()

        if self._rng.random() < 0.5:
            act()
        else:
            coordinator.at_commit = then

    def _disk_fails(self) -> None:
        for ledger in self._cluster.ledgers.values():
            directory = ledger.directory
            if self._rng.random() < 0.5:
                directory.sync_fails = True
            else:
                directory.full = True
                self._clock.after(
                    self._rng.choice((20.0, 300.0, 3000.0)),
                    partial(setattr, directory, "full", False),
                )

    def _stall_worker(self, worker: SimulatedWorker) -> None:
        until_ms = self._clock.now_ms + self._rng.choice((200.0, 2000.0, 7000.0, 15_000.0))
        worker.stalled_until_ms = until_ms
        link = worker.link
        if link is not None:

            def look() -> None:
                if worker.stalled_until_ms >= until_ms > self._clock.now_ms and not link.closed:
                    if link.coordinator.woke_ms + 1000 > self._clock.now_ms:
                        self._clock.after(1000.0, look, link.coordinator)
                    else:
                        link.coordinator.silent(link)

            self._clock.after(self._silence_ms(), look, link.coordinator)

    def _silence_ms(self) -> float:
        return limits.LIVENESS_TIMEOUT_MS + limits.HEARTBEAT_INTERVAL_MS * self._rng.random()

    def _stall_coordinator(self, coordinator: SimulatedCoordinator) -> None:
        until_ms = self._clock.now_ms + self._rng.choice((200.0, 2000.0, 7000.0, 15_000.0))
        coordinator.stalled_until_ms = until_ms
        for link in list(coordinator.sessions.values()):
            self._clock.after(
                self._silence_ms(),
                partial(self._worker_looks, link.worker, link, until_ms),
                link.worker,
            )

    def _worker_looks(self, worker: SimulatedWorker, link: Link, until_ms: float) -> None:
        """A worker has heard nothing for long: unless it was stalled itself, it gives up."""
        if worker.woke_ms + 1000 > self._clock.now_ms:
            self._clock.after(1000.0, partial(self._worker_looks, worker, link, until_ms), worker)
        elif self._clock.now_ms < until_ms:
            worker.silent(link)

    def _kill_coordinator(self, coordinator: SimulatedCoordinator) -> None:
        coordinator.kill()
        self._cluster.restart_soon()

    def _power_loss(self) -> None:
        for one in self._cluster.coordinators:
            if one.alive:
                one.vanish()
                for link in one.links:
                    self._notice(link, float("inf"))
        for ledger in self._cluster.ledgers.values():
            ledger.directory.crash(self._rng)
        self._cluster.restart_soon()

    def _notice(self, link: Link, until_ms: float) -> None:
        """Both sides of a silent connection find out, if it lasts."""
        delay_ms = self._silence_ms()
        self._clock.after(
            delay_ms, partial(self._worker_looks, link.worker, link, until_ms), link.worker
        )

        def look() -> None:
            if self._clock.now_ms < until_ms:
                if link.coordinator.woke_ms + 1000 > self._clock.now_ms:
                    self._clock.after(1000.0, look, link.coordinator)
                else:
                    link.coordinator.silent(link)

        self._clock.after(self._silence_ms(), look, link.coordinator)

    def _partition(self, alive: list[SimulatedWorker]) -> None:
        """Some workers are cut off for a while."""
        off = [worker for worker in alive if worker.side == 0 and self._rng.random() < 0.5]
        self._cut_off(off, None)

    def _split(self, coordinator: SimulatedCoordinator, alive: list[SimulatedWorker]) -> None:
        """The coordinator is cut off with some workers, and another takes over."""
        off = [worker for worker in alive if worker.side == 0 and self._rng.random() < 0.5]
        self._cut_off(off, coordinator)
        self._clock.after(self._rng.choice((100.0, 1000.0)), self._cluster.start_coordinator)

    def _cut_off(
        self, off: list[SimulatedWorker], coordinator: SimulatedCoordinator | None
    ) -> None:
        lasts_ms = self._rng.choice((300.0, 3000.0, 6000.0, 20_000.0))
        until_ms = self._clock.now_ms + lasts_ms
        side = len(self._cluster.workers) + len(self._cluster.coordinators) + self._clock._number
        for worker in off:
            worker.side = side
        if coordinator is not None:
            coordinator.side = side
        held = [
            link
            for c in self._cluster.coordinators
            for link in c.links
            if not link.over and link.worker.side != c.side
        ]
        for link in held:
            link.hold(held=True)
            self._notice(link, until_ms)

        def heal() -> None:
            for one in (*off, coordinator):
                if one is not None:
                    one.side = 0
            for link in held:
                if link.coordinator.alive:
                    link.hold(held=False)
            if coordinator is not None and coordinator.alive:
                delay_ms = self._rng.choice((100.0, 5000.0))
                self._clock.after(delay_ms, coordinator.kill, coordinator)

        self._clock.after(lasts_ms, heal)


def _spoil(flaws: Flaws, step: int) -> None:
    flaws.flips.add(step)
    flaws.dies_of_it = True
