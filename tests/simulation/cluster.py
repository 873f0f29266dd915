"""A whole cluster in memory, from one seed: the real `Run` and `Session`, and everything between.

At each tick one of the things that could happen next happens: a message arrives, an engine or
the replica's thread does a piece of work, or a disturbance comes. Links keep their order and
nothing else does. A run with a live worker must end, and whatever happens on the way must leave
the bits of the undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from coordinator.actions import Outcome
from coordinator.membership import MemberState
from coordinator.phase import RunPhase
from coordinator.run import Run
from tests.simulation.coordinator import SimulatedExecution, SimulatedService
from tests.simulation.job import STEPS, VARIANTS, Job, job_of
from tests.simulation.link import Link
from tests.simulation.worker import Flaws, SimulatedWorker

_MOST_TICKS = 60_000
_MOST_WORKERS = 8

Choice = tuple[float, Callable[[], None]]


class Stuck(AssertionError):
    """Nothing can happen any more, and the run is not over."""


@dataclass
class Told:
    """What came of a simulation, for tests of the simulation itself."""

    outcomes: list[Outcome]
    digests: list[str]
    disturbances: dict[str, int]


class Cluster:
    """One simulation; `run` it to its end.

    Args:
        seed: Decides everything.
        calm: Without disturbances.
        often: A disturbance that is to come more often than others.
    """

    def __init__(self, seed: int, *, calm: bool = False, often: str = "") -> None:
        self._rng = Random(seed)
        rng = self._rng
        self._often = often
        self._workers: list[SimulatedWorker] = []
        self._dying: list[SimulatedWorker] = []
        self._links: list[Link] = []
        self._poison: set[Any] = set()
        self._excused: set[str] = set()
        self._disturbed: dict[str, int] = {}
        self._budget = 0 if calm else rng.choice((0, 2, 5, 10, 20))
        self._hashing = rng.choice((0.5, 0.05))
        self._haste = rng.choice((0.002, 0.01, 0.05))
        self._unlike = not calm and rng.random() < 0.15
        count = 1 if calm else rng.choice((1, 1, 1, 2))
        self._jobs: dict[str, Job] = {
            f"run-{number}": job_of(rng.randrange(VARIANTS)) for number in range(count)
        }
        expect_workers = rng.randint(1, 4)
        if not calm and rng.random() < 0.1:
            self._poison = {(rng.randrange(STEPS), 0, rng.randint(-1, 3))}
        self.service = SimulatedService(self._jobs, expect_workers, self._excused, rng)
        for _ in range(expect_workers):
            self._start_worker()

    def run(self) -> Told:
        """To the end of the last run.

        Raises:
            AssertionError: Something that must hold does not.
        """
        for _ in range(_MOST_TICKS):
            if self.service.current is None:
                break
            self._tick(self.service.current)
            self._check()
        else:
            raise Stuck(f"no end after {_MOST_TICKS} ticks")
        outcomes = [e.outcome.outcome for e in self.service.finished if e.outcome is not None]
        digests = [
            e.job.undisturbed(e.skips, e.flavour).replica.weights_digest()
            for e in self.service.finished
        ]
        return Told(outcomes, digests, self._disturbed)

    def _tick(self, execution: SimulatedExecution) -> None:
        if self._dying and self._rng.random() < 0.05:
            self._dying.pop().kill(self._rng)
        choices = self._possible(execution)
        disturb = self._budget > 0 and (not choices or self._rng.random() < self._haste)
        if disturb:
            self._budget -= 1
            self._disturb(execution)
        elif choices:
            weights = [weight for weight, _ in choices]
            self._rng.choices(choices, weights)[0][1]()
        else:
            self._unstick(execution)

    def _possible(self, execution: SimulatedExecution) -> list[Choice]:
        choices: list[Choice] = []
        for worker in self._workers:
            if not worker.alive:
                continue
            engine, pace = worker.engine, 1 / worker.flaws.slowness
            if worker.link is None:
                choices.append((0.5, lambda w=worker: self._connect(w)))  # type: ignore[misc]
            elif worker.link.to_worker:
                choices.append((1.0, worker.receive))
            if engine.has_work:
                choices.append((pace, lambda w=worker: self._work(w)))  # type: ignore[misc]
            if engine.hashes:
                choices.append((self._hashing, engine.finish_hash))
            if engine.emitted:
                choices.append((1.0, worker.take_result))
        choices += [
            (1.0, lambda link=link: self.service.receive(link))  # type: ignore[misc]
            for link in self._links
            if link.to_coordinator
        ]
        if execution.keeper:
            choices.append((0.5, execution.work))
        if execution.completions:
            choices.append((1.0, self.service.complete))
        if execution.run.phase is RunPhase.HALTED:
            choices.append((0.02, lambda: self._continue(execution)))
        return choices

    def _connect(self, worker: SimulatedWorker) -> None:
        link = self.service.join(worker)
        worker.connect(link)
        self._links = [old for old in self._links if old.to_coordinator or not old.closed]
        self._links.append(link)

    def _work(self, worker: SimulatedWorker) -> None:
        worker.engine.work()
        if worker.engine.flipped:
            worker.engine.flipped = False
            self._excused.add(f"worker-{worker.instance}")
            if worker.flaws.dies_of_it:
                self._dying.append(worker)

    def _start_worker(self, **flaws: Any) -> None:
        instance = len(self._workers)
        given = Flaws(slowness=self._rng.choice((1.0, 1.0, 3.0, 10.0)), **flaws)
        if self._unlike:
            given.flavour = self._rng.randint(0, 1)
        worker = SimulatedWorker(instance, self._jobs.__getitem__, given, self._poison)
        self._workers.append(worker)

    # What goes wrong.

    def _disturb(self, execution: SimulatedExecution) -> None:
        rng, alive = self._rng, [worker for worker in self._workers if worker.alive]
        linked = [worker for worker in alive if worker.link is not None]
        disturbances: list[tuple[int, str, Callable[[], None]]] = [
            (2, "operator_halts", lambda: execution.do(execution.run.halt("an operator"))),
        ]
        if rng.random() < 0.1:
            disturbances.append((2, "drain", lambda: execution.do(execution.run.drain())))
        if len(alive) < _MOST_WORKERS:
            disturbances.append((6, "join", self._start_worker))
            failing = lambda: self._start_worker(cannot_build=True)  # noqa: E731
            disturbances.append((1, "cannot_build", failing))
        if alive:
            one = rng.choice(alive)
            step = min(execution.run.step + rng.randint(0, 1), STEPS - 1)
            disturbances += [
                (5, "kill", lambda: one.kill(rng)),
                (2, "worker_drains", one.drain),
                (2, "slower", lambda: setattr(one.flaws, "slowness", one.flaws.slowness * 10)),
                (2, "flip", lambda: one.flaws.flips.add(step + 1)),
                (2, "flip_and_die", lambda: _spoil(one.flaws, step + 1)),
                (1, "nonfinite", lambda: one.flaws.nonfinite_once.add((step, rng.randint(-1, 3)))),
            ]
        if linked:
            other = rng.choice(linked)
            link = other.link
            assert link is not None
            disturbances += [
                (5, "cut", lambda: link.cut(rng)),
                (2, "silent", lambda: self.service.silent(link)),
            ]
        weights = [
            10 * weight if name == self._often else weight for weight, name, _ in disturbances
        ]
        _, name, act = rng.choices(disturbances, weights)[0]
        self._disturbed[name] = self._disturbed.get(name, 0) + 1
        act()
        self.service.settle()

    def _continue(self, execution: SimulatedExecution) -> None:
        run = execution.run
        for name in run._odd:  # whom the halt named
            member = run.members.get(name)
            if member is not None and member.state is not MemberState.LOADING:
                self._excused.discard(name)
        poisoned = any(step == run.step for step, _, _ in self._poison)
        skip = self._rng.random() < (0.7 if poisoned else 0.15)
        execution.do(run.resume(skip_step=skip))
        self.service.settle()

    def _unstick(self, execution: SimulatedExecution) -> None:
        """Nothing is on its way: only a person can go on, or the simulation has found a fault."""
        run = execution.run
        if run.phase is RunPhase.HALTED:
            self._continue(execution)
        elif not len(run.members) or _too_few(run):
            self._start_worker()
        else:
            raise Stuck(_described(run))

    def _check(self) -> None:
        """What must hold after every tick."""
        execution = self.service.current
        if execution is None:
            return
        run = execution.run
        assert len(run.losses) == run.step == len(execution.skips)
        if run.phase in (RunPhase.TRAINING, RunPhase.EVALUATING, RunPhase.OVER):
            assert run.phase is RunPhase.OVER or not run.reason
        else:
            assert run.reason, "a run that waits says why"


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
