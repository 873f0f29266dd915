"""A whole cluster in one process, from one seed: coordinators, workers, network, disk and
operators.

It runs the product's service and client, and everything below them, on event loops in virtual time.
The seed decides how long messages, gradients, disks and operators take, and which disturbances
occur between events. A run with a live worker must end, and no disturbance may change its bits.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest import mock

from coordinator.run.inputs import ContinueRun
from coordinator.run.run import RunPhase
from coordinator.service.execution import Execution
from protocol.base import limits
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.exchange import Topology
from protocol.wire.messages import Outcome
from tests.simulation.device import Flaws
from tests.simulation.disk import Disk
from tests.simulation.disturbances import Disturbances
from tests.simulation.job import LAYOUT, MANY_STEPS, STEPS, VARIANTS, Job, job_of
from tests.simulation.ledger import Ledger
from tests.simulation.network import Network
from tests.simulation.peers import WorkerPorts
from tests.simulation.probes import Probes
from tests.simulation.processes import CoordinatorProcess, WorkerProcess
from tests.simulation.replica_job import REPLICA_VARIANTS, replica_job_of
from tests.simulation.virtual_time import Clock
from worker.shell import file_fetcher

_MAX_EVENTS: Final = 400_000
_OPERATOR_INTERVAL_MS: Final = 500.0
_QUIET_MS: Final = 120_000.0
"""Time without progress after which the simulation is stuck."""
_LEAVE_TIMEOUT_MS: Final = 60_000.0
"""A drained worker must leave within this time, plus the time for its owed work, if nothing is
stalled or cut off."""
_MAX_OWED_MICROBATCHES: Final = 100
"""All inner phases of a round: one worker owes them if no other worker is active."""
_FILE_PROBABILITY: Final = 0.2
"""Probability that a run reads a file, which workers fetch."""
_FILE_BYTES: Final = (300, 10_000, 20_000)
"""Sizes of one chunk and of several."""
_PATH_CHARACTERS: Final = 200
"""Length of the directory's path: paths are sent and written, and their length must not depend on
its location."""
_LIMITS: Final = {
    "BODY_BYTES": 4096,
    "CHUNK_ELEMENTS": 4,
    "WRITE_HIGH_WATER_BYTES": 2_000,
    "SEND_AHEAD_BYTES": 300,
    "RECEIVED_AHEAD_BYTES": 100,
    "REPLAY_BYTES": 1_000,
    "HEARTBEAT_INTERVAL_MS": 2_000,
    "TICK_MS": 250,
    "LOGITS_FILE_BYTES": 20 * LAYOUT.sample_bytes,
    "ROW_GROUP_BYTES": 4 * LAYOUT.sample_bytes,
    "PEER_PROBE_BYTES": 500,
}
"""Limits so small that tiny blocks travel in several chunks and fill the queues; the timers are as
slow as in a busy process."""


class Stuck(AssertionError):
    """The run has not ended, but no event can happen."""


@dataclass
class SimulationResult:
    """The outcome of a simulation."""

    outcomes: list[Outcome]
    digests: list[str]
    disturbances: Counter[str]
    reports: Counter[str]
    events: int
    virtual_s: float


class Cluster:
    """One simulation; `run` it to its end.

    Args:
        seed: Seed of all random decisions.
        root: An empty directory; events do not depend on its location.
        calm: Whether to simulate without disturbances.
        often: Names of disturbances that occur more often than others, joined with +.
        runs: Number of consecutive runs.
        steps: Steps of each run.
        files: Whether workers fetch a file for each run.
        evaluators: Number of workers that evaluate while others train.
        captures: Whether runs capture rows instead of training.
        embeds: Whether the loss couples all samples of a step.
        buffers: Whether forward changes buffers.
        replicas: Whether runs have replicas with inner phases.
        topology: Topology of the exchange.
    """

    def __init__(
        self,
        seed: int,
        root: Path,
        *,
        calm: bool = False,
        often: str = "",
        runs: int | None = None,
        steps: int | None = None,
        files: bool = False,
        evaluators: int = 0,
        captures: bool = False,
        embeds: bool = False,
        buffers: bool = False,
        replicas: bool = False,
        topology: Topology = "star",
    ) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.clock = Clock(rng)
        self.network = Network(self.clock)
        assert len(str(root)) < _PATH_CHARACTERS - 1, f"expected a shorter path than {root}"
        self.root = root = root / ("-" * (_PATH_CHARACTERS - 1 - len(str(root))))
        (root / "coordinator").mkdir(parents=True)
        self.disk = Disk(root / "coordinator", self.clock)
        self.events = 0
        self.transmitted = 0
        self.disturbance_counts: Counter[str] = Counter()
        self.workers: list[WorkerProcess] = []
        self.coordinators: list[CoordinatorProcess] = []
        self.disturbances = Disturbances(self, often)
        self._budget = 0 if calm else rng.choice((8, 16) if often else (0, 2, 4, 8, 16))
        self._disturbance_probability = rng.choice((0.01, 0.03) if often else (0.001, 0.004, 0.01))
        self._has_two_profiles = not calm and rng.random() < 0.15
        steps = steps or (MANY_STEPS if not calm and rng.random() < 0.005 else STEPS)
        count = runs or (1 if calm else rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 2)))
        build_job, variants = (replica_job_of, REPLICA_VARIANTS) if replicas else (job_of, VARIANTS)
        variant_options: dict[str, Any] = {"captures": True} if captures else {}
        if embeds:
            variant_options["embeds"] = True
        if buffers:
            variant_options["buffers"] = True
        if topology != "star":
            variant_options["topology"] = topology
        self.peers = WorkerPorts(self.network)
        self.wiring = Random(f"wiring {seed}")
        jobs: list[Job] = [
            build_job(rng.randrange(variants), steps, **variant_options) for _ in range(count)
        ]
        self.jobs = jobs
        self.ledgers = [Ledger(job, self.disk.root / f"run-{n}") for n, job in enumerate(jobs)]
        for number, ledger in enumerate(self.ledgers):
            if files or (not calm and rng.random() < _FILE_PROBABILITY):
                ledger.data = root / f"data-{number}"
                ledger.data.write_bytes(rng.randbytes(rng.choice(_FILE_BYTES)))
        self.poison: set[Any] = set()
        if not calm and rng.random() < 0.1:
            self.poison = {(rng.randrange(STEPS), 0, rng.randint(-1, 2))}
        queue_bytes = rng.choice((32_000, 200_000))
        sums_bytes = 1 if queue_bytes == 32_000 else 200_000
        self._limits = {
            **_LIMITS, "SEND_QUEUE_BYTES": queue_bytes, "PARTIAL_SUMS_BYTES": sums_bytes,
            "EVENT_LOOP_REDUCE_BYTES": sums_bytes, "UPLOAD_AHEAD_BYTES": sums_bytes,
            "UPLOAD_AHEAD_CHUNKS": 1,
        }  # fmt: skip
        self.expect_workers = rng.randint(1, 4)
        self._evaluators = evaluators
        self._restarting = False
        self._continuing: set[Execution] = set()
        self._quiet_since_ms = 0.0
        self._free_since_ms = 0.0
        self._last_progress: Any = None

    def run(self) -> SimulationResult:
        """Simulate to the end of the last run.

        Raises:
            AssertionError: A property is violated.
        """
        with self._installed():
            self.start_coordinator()
            for _ in range(self.expect_workers):
                self.start_worker()
            for _ in range(self._evaluators):
                self.start_worker(evaluates=True)
            self.clock.after(_OPERATOR_INTERVAL_MS, self._operate)
            try:
                events = self._run_events()
            finally:
                for process in (*self.workers, *self.coordinators):
                    if process.alive:
                        process.end()
                    self.disk.close(process.fds)
        return SimulationResult(
            [ledger.outcome.outcome for ledger in self.ledgers if ledger.outcome is not None],
            [
                ledger.expected(len(ledger.skips)).replica.weights_digest()
                for ledger in self.ledgers
            ],
            self.disturbance_counts,
            sum((ledger.counts for ledger in self.ledgers), Counter()),
            events,
            self.clock.now_ms / 1000,
        )

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.dict(vars(limits), self._limits))
            stack.enter_context(self.disk.intercept_calls())
            # No worker finds the coordinator's files under the names of the run spec.
            stack.enter_context(mock.patch.object(file_fetcher, "_local_files", return_value={}))
            stack.enter_context(mock.patch.object(tempfile, "tempdir", str(self.root)))
            stack.enter_context(Probes(self).installed())
            yield

    def _run_events(self) -> int:
        """Simulate until all runs are over; return the number of events."""
        rng, clock, probability = self.rng, self.clock, self._disturbance_probability
        events = 0
        unfinished = list(self.ledgers)
        while unfinished:
            if unfinished[-1].outcome is not None:
                unfinished.pop()
                continue
            events += 1
            if events > _MAX_EVENTS:
                raise Stuck(f"no end after {_MAX_EVENTS} events: {self._describe()}")
            clock.step()
            if self._budget and rng.random() < probability:
                self._budget -= 1
                self.disturbances.disturb()
        return events

    def check_product(self, check: Callable[[], None]) -> None:
        """Check internal state of the product; a violation ends the simulation."""
        try:
            check()
        except Exception as error:  # noqa: BLE001 -- the product would handle it
            self.clock.errors.append(error)

    # State.

    @property
    def coordinator(self) -> CoordinatorProcess | None:
        """Return the coordinator that owns the directories."""
        newest = self.coordinators[-1]
        return newest if newest.alive else None

    @property
    def execution(self) -> Execution | None:
        coordinator = self.coordinator
        return coordinator.execution if coordinator is not None else None

    def job(self, spec: RunSpec) -> Job:
        """Return the job of a run spec in which a worker has replaced the path of the data."""
        spec_without_data = spec.model_copy(update={"data": None})
        candidates = [ledger for ledger in self.ledgers if ledger.job.spec == spec_without_data]
        if spec.data is not None:
            content = Path(spec.data.train).read_bytes()
            is_alike = any(
                x.data is not None and x.data.read_bytes() == content for x in candidates
            )
            assert is_alike, "a worker reads other data than the coordinator sent"
        return candidates[0].job

    def ledger(self, run_id: str) -> Ledger | None:
        return next((ledger for ledger in self.ledgers if ledger.run_id == run_id), None)

    # Life cycle.

    def start_coordinator(self, *, take_over: bool = False) -> None:
        """Start a coordinator if none is alive; a successor also takes over from a disconnected
        one."""
        self._restarting = False
        newest = self.coordinators[-1] if self.coordinators else None
        if newest is not None and newest.alive and not (take_over and newest.side):
            return
        self.coordinators.append(CoordinatorProcess(self))

    def restart_soon(self) -> None:
        if self._restarting:
            return
        self._restarting = True
        self.clock.after(self.rng.choice((100.0, 1000.0, 10_000.0)), self.start_coordinator)

    def start_worker(self, **flaws: Any) -> None:
        pace_ms = self.rng.choice((2.0, 10.0, 10.0, 40.0, 100.0))
        chosen_flaws = Flaws(microbatch_ms=pace_ms, pace_ms=pace_ms, **flaws)
        if self._has_two_profiles:
            chosen_flaws.flavor = self.rng.randint(0, 1)
        self.workers.append(WorkerProcess(self, chosen_flaws))

    def cache(self, worker: WorkerProcess) -> Path:
        """Return a worker's cache directory, which may hold files of an earlier worker."""
        used_caches = {other.cache for other in self.workers if other.alive}
        free_caches = [self.root / f"cache-{n}" for n in range(len(self.workers) + 1)]
        worker.cache = self.rng.choice(
            [path for path in free_caches if path not in used_caches][:2]
        )
        return worker.cache

    def on_commit(self, coordinator: CoordinatorProcess) -> None:
        """Run the action that waits for the moment when a commit is being written."""
        action, coordinator.at_commit = coordinator.at_commit, None
        if action is not None:
            delay_ms = self.rng.choice((0.0, coordinator.pace_ms / 2)) * self.rng.random()
            self.clock.after(delay_ms, action)

    def is_disk_failure(self, reason: str) -> bool:
        """Return whether the reason is that of a failing disk, so that a coordinator may not
        start."""
        failing = self.disturbance_counts["disk"] + self.disturbance_counts["cut_and_refuse"]
        return bool(failing) and ("space" in reason or "nput/output" in reason)

    def on_halt(self, coordinator: CoordinatorProcess, execution: Execution) -> None:
        """Continue a halted run after a random delay, as an operator does."""
        if execution not in self._continuing:
            self._continuing.add(execution)
            delay_ms = self.rng.choice((5.0, 50.0, 1000.0)) * (0.1 + self.rng.random())
            self.clock.after(delay_ms, lambda: self._continue(execution), coordinator)

    def _continue(self, execution: Execution) -> None:
        self._continuing.discard(execution)
        run = execution.run
        if run.phase is not RunPhase.HALTED:
            return
        ledger = self.ledger(run.run_id)
        assert ledger is not None
        poisoned = any(step == run.steps_committed for step, _, _ in self.poison)
        skip = self.rng.random() < (0.7 if poisoned else 0.25)
        # A repeated step that was committed before must not be skipped now.
        skip = skip and run.steps_committed >= len(ledger.skips)
        execution.execute_command(ContinueRun(skip))

    def _operate(self) -> None:
        """Act as the operators: restart a coordinator that ended, and workers if needed.

        Raises:
            Stuck: Nothing happens any more.
        """
        self.clock.after(_OPERATOR_INTERVAL_MS, self._operate)
        has_coordinator = any(coordinator.alive for coordinator in self.coordinators)
        if not has_coordinator and not self._restarting:
            self.restart_soon()
        able_workers = [
            w for w in self.workers if w.alive and not w.flaws.cannot_build and not w.draining
        ]
        evaluators = [worker for worker in able_workers if worker.flaws.evaluates]
        if len(able_workers) - len(evaluators) < self._needed():
            self.start_worker()
        if len(evaluators) < self._evaluators:
            self.start_worker(evaluates=True)
        progress = (
            self.events, self.transmitted, len(self.workers), len(self.coordinators),
            self.disturbance_counts.total(),
        )  # fmt: skip
        now_ms = self.clock.now_ms
        is_stalled = any(
            now_ms < p.stalled_until_ms or p.side for p in (*self.workers, *self.coordinators)
        )
        if is_stalled:
            self._free_since_ms = now_ms
        for worker in self.workers:
            since_ms = max(self._free_since_ms, worker.draining_since_ms)
            owed_ms = _MAX_OWED_MICROBATCHES * worker.flaws.microbatch_ms
            is_leaving = not worker.alive or now_ms < since_ms + _LEAVE_TIMEOUT_MS + owed_ms
            assert is_leaving, "a worker that was asked to leave does not leave"
        if progress != self._last_progress or is_stalled:
            self._last_progress, self._quiet_since_ms = progress, now_ms
        elif now_ms > self._quiet_since_ms + _QUIET_MS:
            raise Stuck(self._describe())

    def _needed(self) -> int:
        execution = self.execution
        if execution is not None and execution.run.phase is not RunPhase.WAITING:
            return 1
        return self.expect_workers

    # Disturbances.

    def on_flip(self, worker: WorkerProcess) -> None:
        for ledger in self.ledgers:
            ledger.flipped_workers.add(f"worker-{worker.instance}")

    def on_result_sent(self, worker: WorkerProcess) -> None:
        """Let a worker whose bit flipped crash soon after it sends a result, if its flaws say
        so."""
        if worker.has_flipped_bit and worker.flaws.dies_after_flip:
            self.clock.after(3 * self.network.latency_ms * self.rng.random(), worker.kill)

    def _describe(self) -> str:
        execution = self.execution
        if execution is None:
            return "nothing can happen, and no run is in progress"
        run = execution.run
        members = {member.name: member.state.value for member in run.members}
        progress = run.progress
        waiting_for = progress.agreement.awaited_workers if progress is not None else []
        round_ = progress.round if progress is not None else None
        owing = {n: [str(x) for x in round_.unfinished(n)] for n in round_.shares} if round_ else {}
        return (
            f"nothing can happen: {run.phase.value}, step {run.steps_committed}, "
            f"members {members}, "
            f"owed by {waiting_for}, unfinished {owing}, "
            f"unassigned {round_ and round_.unassigned_subtrees()}"
        )
