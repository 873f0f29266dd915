"""A whole cluster in memory, from one seed: the real `Run` and `Session`, and everything between.

Time is virtual: messages, gradients, disks and people take as long as the seed says, and between
events disturbances come. Links keep their order and nothing else does. A run with a live worker
must end, and whatever happens on the way must leave the bits of the undisturbed run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from coordinator.run.actions import Outcome
from coordinator.run.run import Run, RunPhase
from tests.simulation.clock import Clock
from tests.simulation.coordinator import SimulatedCoordinator
from tests.simulation.disk import MemoryDirectory
from tests.simulation.disturbances import Disturbances
from tests.simulation.execution import SimulatedExecution
from tests.simulation.job import STEPS, VARIANTS, Job, job_of
from tests.simulation.ledger import Ledger
from tests.simulation.link import Link, Network
from tests.simulation.worker import Flaws, SimulatedWorker, World

_MOST_EVENTS = 200_000
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
        self._disturbances = Disturbances(self, often)
        self.disturbed: Counter[str] = Counter()
        self._budget = 0 if calm else rng.choice((0, 2, 4, 8, 16))
        self._haste = rng.choice((0.002, 0.01, 0.03))
        self._unlike = not calm and rng.random() < 0.15
        count = runs or (1 if calm else rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 2)))
        jobs = {f"run-{n}": job_of(rng.randrange(VARIANTS)) for n in range(count)}
        self.ledgers = {
            run_id: Ledger(run_id, job, directory(run_id, job)) for run_id, job in jobs.items()
        }
        poison: set[Any] = set()
        if not calm and rng.random() < 0.1:
            poison = {(rng.randrange(STEPS), 0, rng.randint(-1, 3))}
        self._world = World(
            self.clock, rng, self.ledgers, poison, self._may_flip, self._flipped, self._came_loose
        )
        self._expect_workers = rng.randint(1, 4)
        self.workers: list[SimulatedWorker] = []
        self.coordinators: list[SimulatedCoordinator] = []
        self._restarting = False
        self._idle_since_ms: float | None = None
        self._continuing: set[SimulatedExecution] = set()
        self.start_coordinator()
        for _ in range(self._expect_workers):
            self.start_worker()

    def run(self) -> Told:
        """To the end of the last run.

        Raises:
            AssertionError: Something that must hold does not.
        """
        ledgers = self.ledgers.values()
        events = sum(self._to_the_end(ledger) for ledger in ledgers)
        return Told(
            [ledger.outcome.outcome for ledger in ledgers if ledger.outcome is not None],
            [ledger.expected(len(ledger.skips)).replica.weights_digest() for ledger in ledgers],
            self.disturbed,
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
                self._disturbances.happen()
        return events

    @property
    def coordinator(self) -> SimulatedCoordinator | None:
        """The one that has the directories."""
        newest = self.coordinators[-1]
        return newest if newest.alive else None

    @property
    def execution(self) -> SimulatedExecution | None:
        coordinator = self.coordinator
        return coordinator.current if coordinator is not None else None

    # Life.

    def start_coordinator(self) -> None:
        self._restarting = False
        coordinator = SimulatedCoordinator(
            self.clock, self.rng, list(self.ledgers.values()), self._expect_workers,
            halted=self._halted, stopped=self._stopped,
        )  # fmt: skip
        self.coordinators.append(coordinator)

    def restart_soon(self) -> None:
        self._restarting = True
        self.clock.after(self.rng.choice((100.0, 1000.0, 10_000.0)), self.start_coordinator)

    def _stopped(self, coordinator: SimulatedCoordinator) -> None:
        """One that has lost its directories ends."""
        coordinator.kill()

    def start_worker(self, **flaws: Any) -> None:
        instance = len(self.workers)
        pace_ms = self.rng.choice((2.0, 10.0, 10.0, 40.0, 100.0))
        given = Flaws(microbatch_ms=pace_ms, pace_ms=pace_ms, **flaws)
        if self._unlike:
            given.flavour = self.rng.randint(0, 1)
        worker = SimulatedWorker(instance, self._world, given)
        self.workers.append(worker)
        self.clock.after(20 * self.rng.random(), lambda: self._connect(worker), worker)

    def _connect(self, worker: SimulatedWorker) -> None:
        if worker.link is not None:
            return
        now_ms = self.clock.now_ms
        open_ = [
            c
            for c in self.coordinators
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
        execution.do(run.end_halt(skip_step=skip))

    def _idle(self) -> None:
        """Nothing is on its way but ticks: leases may run out, or a person must do something."""
        execution = self.execution
        now_ms = self.clock.now_ms
        if execution is None or any(
            self.clock.now_ms < p.stalled_until_ms for p in (*self.workers, *self.coordinators)
        ):
            self._idle_since_ms = None
            return
        run = execution.run
        loose = any(worker.alive and worker.link is None for worker in self.workers)
        if not loose and (not len(run.members) or _too_few(run)):
            self.start_worker()
        if self._idle_since_ms is None:
            self._idle_since_ms = now_ms
        if now_ms > self._idle_since_ms + _IDLE_MS:
            raise Stuck(_described(run))

    # What goes wrong.

    def _may_flip(self) -> bool:
        """What a worker has is taken on trust for a moment after a restart: see the docs."""
        execution = self.execution
        progress = execution.run.progress if execution is not None else None
        return progress is not None and not progress.agreement.catching_up

    def _flipped(self, worker: SimulatedWorker) -> None:
        for ledger in self.ledgers.values():
            ledger.excused.add(f"worker-{worker.instance}")
        if worker.flaws.dies_of_it:
            self.clock.after(20 * self.rng.random(), worker.kill, worker)


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
