"""A whole cluster in memory, from one seed: the real `Run` and `Session`, and everything between.

Time is virtual: messages, gradients, disks and people take as long as the seed says, and between
events disturbances come. Links keep their order and nothing else does. A run with a live worker
must end, and whatever happens on the way must leave the bits of the undisturbed run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from coordinator.actions import Outcome
from coordinator.phase import RunPhase
from coordinator.run import Run
from protocol import limits
from tests.simulation.clock import Clock
from tests.simulation.coordinator import SimulatedCoordinator, SimulatedExecution
from tests.simulation.disk import MemoryDirectory
from tests.simulation.job import STEPS, VARIANTS, Job, job_of
from tests.simulation.ledger import Ledger
from tests.simulation.link import Link, Network
from tests.simulation.worker import Flaws, SimulatedWorker, World

_MOST_EVENTS = 200_000
_MOST_WORKERS = 8
_IDLE_MS = 60_000.0
"""After so long with nothing but ticks nothing will come any more."""


class Stuck(AssertionError):
    """Nothing can happen any more, and the run is not over."""


@dataclass
class Told:
    """What came of a simulation."""

    outcomes: list[Outcome]
    digests: list[str]
    disturbances: Counter[str]
    reports: Counter[str]
    events: int
    virtual_s: float


class Cluster:
    """One simulation; `run` it to its end.

    Args:
        seed: Decides everything.
        calm: Without disturbances.
        often: Disturbances that are to come more often than others, with + between them.
        runs: How many one after the other.
        directory: Makes a run's directory.
    """

    def __init__(
        self,
        seed: int,
        *,
        calm: bool = False,
        often: str = "",
        runs: int | None = None,
        directory: Callable[[str, Job], Any] = MemoryDirectory,
    ) -> None:
        self.rng = rng = Random(seed)
        self.clock = Clock()
        self.network = Network(self.clock, rng)
        self._often = often.split("+")
        self._disturbed: Counter[str] = Counter()
        self._budget = 0 if calm else rng.choice((0, 2, 4, 8, 16))
        self._haste = rng.choice((0.002, 0.01, 0.03))
        self._unlike = not calm and rng.random() < 0.15
        count = runs or (1 if calm else rng.choice((1, 1, 1, 1, 2)))
        jobs = {f"run-{n}": job_of(rng.randrange(VARIANTS)) for n in range(count)}
        self._ledgers = {
            run_id: Ledger(run_id, job, directory(run_id, job)) for run_id, job in jobs.items()
        }
        poison: set[Any] = set()
        if not calm and rng.random() < 0.1:
            poison = {(rng.randrange(STEPS), 0, rng.randint(-1, 3))}
        self._world = World(
            self.clock, rng, self._ledgers, poison, self._may_flip, self._flipped, self._came_loose
        )
        self._expect_workers = rng.randint(1, 4)
        self._workers: list[SimulatedWorker] = []
        self._coordinators: list[SimulatedCoordinator] = []
        self._restarting = False
        self._idle_since_ms: float | None = None
        self._continuing: set[SimulatedExecution] = set()
        self._start_coordinator()
        for _ in range(self._expect_workers):
            self._start_worker()

    def run(self) -> Told:
        """To the end of the last run.

        Raises:
            AssertionError: Something that must hold does not.
        """
        ledgers = self._ledgers.values()
        events = sum(self._to_the_end(ledger) for ledger in ledgers)
        return Told(
            [ledger.outcome.outcome for ledger in ledgers if ledger.outcome is not None],
            [ledger.expected(len(ledger.skips)).replica.weights_digest() for ledger in ledgers],
            self._disturbed,
            sum((ledger.counts for ledger in ledgers), Counter()),
            events,
            self.clock.now_ms / 1000,
        )

    def _to_the_end(self, ledger: Ledger) -> int:
        """Until one run is over; gives how many events that took."""
        rng, clock, haste = self.rng, self.clock, self._haste
        events = 0
        while ledger.outcome is None:
            events += 1
            if events > _MOST_EVENTS:
                raise Stuck(f"no end after {_MOST_EVENTS} events")
            clock.step()
            if not clock.foreground:
                self._idle()
                continue
            self._idle_since_ms = None
            if self._budget and rng.random() < haste:
                self._budget -= 1
                self._disturb()
        return events

    @property
    def _coordinator(self) -> SimulatedCoordinator | None:
        """The one that has the directories."""
        newest = self._coordinators[-1]
        return newest if newest.alive else None

    @property
    def _execution(self) -> SimulatedExecution | None:
        coordinator = self._coordinator
        return coordinator.current if coordinator is not None else None

    # Life.

    def _start_coordinator(self) -> None:
        self._restarting = False
        coordinator = SimulatedCoordinator(
            self.clock, self.rng, list(self._ledgers.values()), self._expect_workers,
            self._halted, self._stopped,
        )  # fmt: skip
        self._coordinators.append(coordinator)

    def _restart_soon(self) -> None:
        self._restarting = True
        self.clock.after(self.rng.choice((100.0, 1000.0, 10_000.0)), self._start_coordinator)

    def _stopped(self, coordinator: SimulatedCoordinator) -> None:
        """One that has lost its directories ends."""
        coordinator.kill()

    def _start_worker(self, **flaws: Any) -> None:
        instance = len(self._workers)
        pace_ms = self.rng.choice((2.0, 10.0, 10.0, 40.0, 100.0))
        given = Flaws(microbatch_ms=pace_ms, pace_ms=pace_ms, **flaws)
        if self._unlike:
            given.flavour = self.rng.randint(0, 1)
        worker = SimulatedWorker(instance, self._world, given)
        self._workers.append(worker)
        self.clock.after(20 * self.rng.random(), lambda: self._connect(worker), worker)

    def _connect(self, worker: SimulatedWorker) -> None:
        if worker.link is not None:
            return
        now_ms = self.clock.now_ms
        open_ = [
            c
            for c in self._coordinators
            if c.alive and c.side == worker.side and now_ms >= c.stalled_until_ms
        ]
        if not open_:
            self.clock.after(250.0, lambda: self._connect(worker), worker, background=True)
            return
        coordinator = self.rng.choice(open_)
        link = Link(self.network, worker, coordinator)
        worker.connect(link)
        coordinator.join(worker, link)

    def _came_loose(self, worker: SimulatedWorker) -> None:
        pause_ms = self.rng.choice((20.0, 250.0, 2000.0)) * self.rng.random()
        self.clock.after(pause_ms, lambda: self._connect(worker), worker)

    def _halted(self, execution: SimulatedExecution) -> None:
        """An operator sees it, sooner or later."""
        if execution not in self._continuing:
            self._continuing.add(execution)
            delay_ms = self.rng.choice((5.0, 50.0, 1000.0)) * (0.1 + self.rng.random())
            self.clock.after(delay_ms, lambda: self._continue(execution), execution._coordinator)

    def _continue(self, execution: SimulatedExecution) -> None:
        self._continuing.discard(execution)
        run = execution.run
        if run.phase is not RunPhase.HALTED:
            return
        poisoned = any(step == run.step for step, _, _ in self._world.poison)
        skip = self.rng.random() < (0.7 if poisoned else 0.25)
        # What was committed as taken and is done again is not to be left out now.
        skip = skip and run.step >= len(execution.ledger.skips)
        execution.do(run.resume(skip_step=skip))

    def _idle(self) -> None:
        """Nothing is on its way but ticks: leases may run out, or a person must do something."""
        execution = self._execution
        now_ms = self.clock.now_ms
        if execution is None or any(
            self.clock.now_ms < p.stalled_until_ms for p in (*self._workers, *self._coordinators)
        ):
            self._idle_since_ms = None
            return
        run = execution.run
        if not len(run.members) or _too_few(run):
            if not any(w.alive and w.link is None for w in self._workers):
                self._start_worker()
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        if now_ms > self._idle_since_ms + _IDLE_MS:
            raise Stuck(_described(run))

    # What goes wrong.

    def _may_flip(self) -> bool:
        """What a worker has is taken on trust for a moment after a restart: see the docs."""
        execution = self._execution
        progress = execution.run.progress if execution is not None else None
        return progress is not None and not progress.agreement.catching_up

    def _flipped(self, worker: SimulatedWorker) -> None:
        for ledger in self._ledgers.values():
            ledger.excused.add(f"worker-{worker.instance}")
        if worker.flaws.dies_of_it:
            self.clock.after(20 * self.rng.random(), worker.kill, worker)

    def _disturb(self) -> None:
        rng = self.rng
        choices: list[tuple[int, str, Callable[[], None]]] = []
        alive = [worker for worker in self._workers if worker.alive]
        if len(alive) < _MOST_WORKERS:
            choices.append((6, "join", self._start_worker))
            choices.append((1, "cannot_build", partial(self._start_worker, cannot_build=True)))
        choices += [(5, "disk", self._disk_fails)]
        if alive:
            choices += self._on_worker(rng.choice(alive))
        linked = [worker.link for worker in alive if worker.link is not None]
        if linked:
            choices += [
                (5, "cut", rng.choice(linked).cut),
                (3, "partition", lambda: self._partition(alive)),
            ]
        coordinator, execution = self._coordinator, self._execution
        if coordinator is not None and execution is not None:
            choices += self._on_coordinator(coordinator, execution, alive)
        weights = [10 * w if name in self._often else w for w, name, _ in choices]
        _, name, act = rng.choices(choices, weights)[0]
        self._disturbed[name] += 1
        act()

    def _on_worker(self, one: SimulatedWorker) -> list[tuple[int, str, Callable[[], None]]]:
        rng, execution, flaws = self.rng, self._execution, one.flaws
        step = min((execution.run.step if execution else 0) + rng.randint(0, 1), STEPS - 1)
        found: list[tuple[int, str, Callable[[], None]]] = [
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
    ) -> list[tuple[int, str, Callable[[], None]]]:
        run = execution.run
        found: list[tuple[int, str, Callable[[], None]]] = [
            (2, "operator_halts", lambda: execution.do(run.halt("an operator"))),
            (2, "save", lambda: execution.do(run.save())),
            (2, "stall_coordinator", lambda: self._stall_coordinator(coordinator)),
        ]
        if self.rng.random() < 0.1:
            found.append((2, "drain", lambda: execution.do(run.drain())))
        if not any(worker.engine.spoilt for worker in alive):
            found += [
                (4, "kill_coordinator", lambda: self._kill_coordinator(coordinator)),
                (3, "power_loss", self._power_loss),
            ]
            if len(self._coordinators) < 2 or not self._coordinators[-2].alive:
                found.append((3, "split", lambda: self._split(coordinator, alive)))
        return found

    def _disk_fails(self) -> None:
        for ledger in self._ledgers.values():
            directory = ledger.directory
            if self.rng.random() < 0.3:
                directory.sync_fails = True
            else:
                directory.full = True
                self.clock.after(
                    self.rng.choice((20.0, 300.0, 3000.0)),
                    lambda directory=directory: setattr(directory, "full", False),
                )

    def _stall_worker(self, worker: SimulatedWorker) -> None:
        until_ms = self.clock.now_ms + self.rng.choice((200.0, 2000.0, 7000.0, 15_000.0))
        worker.stalled_until_ms = until_ms
        link = worker.link
        if link is not None:

            def look() -> None:
                if worker.stalled_until_ms >= until_ms > self.clock.now_ms and not link.closed:
                    if link.coordinator.woke_ms + 1000 > self.clock.now_ms:
                        self.clock.after(1000.0, look, link.coordinator)
                    else:
                        link.coordinator.silent(link)

            self.clock.after(self._silence_ms(), look, link.coordinator)

    def _silence_ms(self) -> float:
        return limits.LIVENESS_TIMEOUT_MS + limits.HEARTBEAT_INTERVAL_MS * self.rng.random()

    def _stall_coordinator(self, coordinator: SimulatedCoordinator) -> None:
        until_ms = self.clock.now_ms + self.rng.choice((200.0, 2000.0, 7000.0, 15_000.0))
        coordinator.stalled_until_ms = until_ms
        for link in list(coordinator.sessions.values()):
            self.clock.after(
                self._silence_ms(),
                partial(self._worker_looks, link.worker, link, until_ms),
                link.worker,
            )

    def _worker_looks(self, worker: SimulatedWorker, link: Link, until_ms: float) -> None:
        """A worker has heard nothing for long: unless it was stalled itself, it gives up."""
        if worker.woke_ms + 1000 > self.clock.now_ms:
            self.clock.after(1000.0, partial(self._worker_looks, worker, link, until_ms), worker)
        elif self.clock.now_ms < until_ms:
            worker.silent(link)

    def _kill_coordinator(self, coordinator: SimulatedCoordinator) -> None:
        coordinator.kill()
        self._restart_soon()

    def _power_loss(self) -> None:
        for one in self._coordinators:
            if one.alive:
                one.vanish()
                for link in one.links:
                    self._notice(link, float("inf"))
        for ledger in self._ledgers.values():
            ledger.directory.crash(self.rng)
        self._restart_soon()

    def _notice(self, link: Link, until_ms: float) -> None:
        """Both sides of a silent connection find out, if it lasts."""
        delay_ms = self._silence_ms()
        self.clock.after(
            delay_ms, partial(self._worker_looks, link.worker, link, until_ms), link.worker
        )

        def look() -> None:
            if self.clock.now_ms < until_ms:
                if link.coordinator.woke_ms + 1000 > self.clock.now_ms:
                    self.clock.after(1000.0, look, link.coordinator)
                else:
                    link.coordinator.silent(link)

        self.clock.after(self._silence_ms(), look, link.coordinator)

    def _partition(self, alive: list[SimulatedWorker]) -> None:
        """Some workers are cut off for a while."""
        off = [worker for worker in alive if worker.side == 0 and self.rng.random() < 0.5]
        self._cut_off(off, None)

    def _split(self, coordinator: SimulatedCoordinator, alive: list[SimulatedWorker]) -> None:
        """The coordinator is cut off with some workers, and another takes over."""
        off = [worker for worker in alive if worker.side == 0 and self.rng.random() < 0.5]
        self._cut_off(off, coordinator)
        self.clock.after(self.rng.choice((100.0, 1000.0)), self._start_coordinator)

    def _cut_off(
        self, off: list[SimulatedWorker], coordinator: SimulatedCoordinator | None
    ) -> None:
        lasts_ms = self.rng.choice((300.0, 3000.0, 6000.0, 20_000.0))
        until_ms = self.clock.now_ms + lasts_ms
        side = len(self._workers) + len(self._coordinators) + self.clock._number
        for worker in off:
            worker.side = side
        if coordinator is not None:
            coordinator.side = side
        held = [
            link
            for c in self._coordinators
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
                delay_ms = self.rng.choice((100.0, 5000.0))
                self.clock.after(delay_ms, coordinator.kill, coordinator)

        self.clock.after(lasts_ms, heal)


def _spoil(flaws: Flaws, step: int) -> None:
    flaws.flips.add(step)
    flaws.dies_of_it = True


def _too_few(run: Run) -> bool:
    return run.phase is RunPhase.WAITING and len(run.members) < run.expect_workers


def _described(run: Run) -> str:
    members = {member.name: member.state.value for member in run.members}
    progress = run.progress
    waits = progress.agreement.waiting_for if progress is not None else []
    round_ = progress.round if progress is not None else None
    owing = {n: [str(x) for x in round_.unfinished(n)] for n in round_.shares} if round_ else {}
    return (
        f"nothing can happen: {run.phase.value}, step {run.step}, members {members}, "
        f"owed by {waits}, unfinished {owing}, nobody's {round_ and round_.unassigned()}"
    )
