"""Disturbances of a simulated cluster: one at a time, chosen by the seed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from coordinator.run.inputs import DrainRun, HaltRun, SaveState
from coordinator.service.execution import Command, Execution
from tests.simulation.processes import CoordinatorProcess, WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

_MAX_WORKERS = 8
_FETCH_PROBABILITY = 0.25
_STALL_DURATIONS_MS = (200.0, 2000.0, 7000.0, 15_000.0)

Choice = tuple[int, str, Callable[[], None]]
"""Weight, name and action."""


class Disturbances:
    """The disturbances of one cluster.

    Args:
        cluster: The cluster.
        often: Names of disturbances that occur more often than others, joined with +.
    """

    def __init__(self, cluster: Cluster, often: str) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._rng = cluster.rng
        self._often = often.split("+")
        self._sides = 0

    def disturb(self) -> None:
        """Cause one disturbance, chosen at random."""
        rng, cluster = self._rng, self._cluster
        alive = [worker for worker in cluster.workers if worker.alive]
        choices: list[Choice] = [(5, "disk", self._disk_fails), (2, "slow_disk", self._slow_disk)]
        if len(alive) < _MAX_WORKERS:
            choices.append((6, "join", cluster.start_worker))
            choices.append((1, "cannot_build", partial(cluster.start_worker, cannot_build=True)))
        if alive:
            choices += self._on_worker(rng.choice(alive))
        links = [link for link in cluster.network.links if not link.is_over]
        if links:
            choices += [
                (5, "cut", rng.choice(links).cut),
                (3, "partition", lambda: self._partition(alive)),
            ]
        coordinator, execution = cluster.coordinator, cluster.execution
        if coordinator is not None and execution is not None:
            choices += self._on_coordinator(coordinator, execution, alive)
        if any(job.spec.replicas and job.spec.replicas.has_carried_state for job in cluster.jobs):
            # The undisturbed run cannot reproduce the per-replica state of a spoilt replica.
            choices = [choice for choice in choices if not choice[1].startswith("flip")]
        weights = [10 * w if name in self._often else w for w, name, _ in choices]
        _, name, act = rng.choices(choices, weights)[0]
        cluster.disturbance_counts[name] += 1
        act()

    def _on_worker(self, worker: WorkerProcess) -> list[Choice]:
        rng, execution, flaws = self._rng, self._cluster.execution, worker.flaws
        step = (execution.run.steps_committed if execution else 0) + rng.randint(0, 1)
        return [
            (5, "kill", worker.kill),
            (2, "worker_drains", worker.drain),
            (3, "slower", lambda: setattr(flaws, "microbatch_ms", 20.0 * flaws.pace_ms)),
            (4, "stall", lambda: self._stall(worker)),
            (1, "nonfinite", lambda: flaws.nonfinite_once.add((step, rng.randint(-1, 2)))),
            (2, "flip", lambda: flaws.flips.add(step + 1)),
            (2, "flip_and_die", lambda: self._flip_then_crash(worker, step + 1)),
            *self._on_links(worker),
        ]

    def _on_links(self, worker: WorkerProcess) -> list[Choice]:
        """Disturb the links of workers that average among themselves."""
        rng, peers = self._rng, self._cluster.peers
        linked = peers.linked_pairs()
        if not linked:
            return []

        def set_delay(ms: float) -> None:
            worker.send_delay_ms = ms

        def delay_messages() -> None:
            set_delay(rng.choice((50.0, 1000.0)))
            self._clock.after(rng.choice((300.0, 5000.0)), partial(set_delay, 0.0))

        duration_ms = rng.choice((100.0, 3000.0, 20_000.0))
        owners = [worker for worker in self._cluster.workers if worker.alive]
        pair_of_workers = rng.sample(owners, min(2, len(owners)))

        def kill_both() -> None:
            for owner in pair_of_workers:
                owner.kill()

        return [
            (4, "cut_peers", lambda: peers.cut_off(rng.choice(linked), duration_ms)),
            (2, "cut_one_way", lambda: peers.cut_one_way(rng.choice(linked), duration_ms)),
            (2, "slow_owner", delay_messages),
            (2, "kill_two", kill_both),
        ]

    def _flip_then_crash(self, worker: WorkerProcess, step: int) -> None:
        worker.flaws.flips.add(step)
        worker.flaws.dies_after_flip = True

    def _on_coordinator(
        self, coordinator: CoordinatorProcess, execution: Execution, alive: list[WorkerProcess]
    ) -> list[Choice]:
        def command(order: Command) -> None:
            coordinator.do(lambda: execution.execute_command(order))

        choices: list[Choice] = [
            (2, "operator_halts", lambda: command(HaltRun("an operator"))),
            (2, "save", lambda: command(SaveState())),
            (2, "stall_coordinator", lambda: self._stall(coordinator)),
        ]
        if self._rng.random() < 0.1:
            choices.append((2, "drain", lambda: command(DrainRun())))
        kill = partial(self._kill_coordinator, coordinator)
        choices += [
            (4, "kill_coordinator", lambda: self._now_or_at_commit(coordinator, kill)),
            (3, "power_loss", lambda: self._now_or_at_commit(coordinator, self._power_loss)),
        ]
        choices.append((1, "cut_and_refuse", lambda: self._cut_and_refuse(coordinator)))
        if not any(c.alive for c in self._cluster.coordinators if c is not coordinator):
            choices.append((3, "split", lambda: self._split(coordinator, alive)))
        return choices

    def _now_or_at_commit(self, coordinator: CoordinatorProcess, act: Callable[[], None]) -> None:
        """Act at once, while the next commit is being written, or before its sync."""
        moment = self._rng.random()
        if moment < 0.5:
            act()
        elif moment < 0.75:
            coordinator.at_commit = act
        else:
            coordinator.at_sync = act

    def on_chunk_fetched(self, worker: WorkerProcess) -> None:
        """Sometimes disturb a worker that has just written a chunk of a fetched file."""
        if self._rng.random() < _FETCH_PROBABILITY:
            self._cluster.disturbance_counts["while_fetching"] += 1
            links = [x for x in self._cluster.network.links if x.client.process is worker]
            act = self._rng.choice([worker.crash, worker.kill, *(link.cut for link in links)])
            self._clock.after(0.0, act)

    def _disk_fails(self) -> None:
        disk = self._cluster.disk
        if self._rng.random() < 0.5:
            disk.sync_fails = self._rng.choice(("*", "*/log/*"))
        else:
            disk.full = True
            duration_ms = self._rng.choice((20.0, 300.0, 3000.0))
            self._clock.after(duration_ms, partial(setattr, disk, "full", False))

    def _cut_and_refuse(self, coordinator: CoordinatorProcess) -> None:
        """Make a worker miss the next commit, and the disk fail at the commit after it."""

        def fail_sync() -> None:
            self._cluster.disk.sync_fails = "*/log/*"

        def cut() -> None:
            if links := [link for link in self._cluster.network.links if not link.is_over]:
                self._rng.choice(links).cut()
            coordinator.at_commit = fail_sync

        coordinator.at_commit = cut

    def _slow_disk(self) -> None:
        disk = self._cluster.disk
        disk.slowness = self._rng.choice((5.0, 50.0))
        self._clock.after(
            self._rng.choice((300.0, 5000.0)), partial(setattr, disk, "slowness", 1.0)
        )

    def _stall(self, process: WorkerProcess | CoordinatorProcess) -> None:
        until_ms = self._clock.now_ms + self._rng.choice(_STALL_DURATIONS_MS)
        # Never end a stall earlier than planned: events that wait for its end would be overtaken.
        process.stalled_until_ms = max(process.stalled_until_ms, until_ms)

    def _kill_coordinator(self, coordinator: CoordinatorProcess) -> None:
        if coordinator.alive:
            coordinator.kill()
            self._cluster.restart_soon()

    def _power_loss(self) -> None:
        for coordinator in self._cluster.coordinators:
            if coordinator.alive:
                coordinator.vanish()
        self._cluster.disk.lose_power(self._rng)
        self._cluster.restart_soon()

    def _partition(self, alive: list[WorkerProcess]) -> None:
        """Cut off some workers for a while."""
        cut_off = [worker for worker in alive if worker.side == 0 and self._rng.random() < 0.5]
        self._cut_off(cut_off, None)

    def _split(self, coordinator: CoordinatorProcess, alive: list[WorkerProcess]) -> None:
        """Cut off the coordinator with some workers, and start another coordinator that takes over
        its directories."""
        cut_off = [worker for worker in alive if worker.side == 0 and self._rng.random() < 0.5]
        self._cut_off(cut_off, coordinator)

        def take_over() -> None:
            if not coordinator.side:
                return
            root = self._cluster.disk.root
            for directory in (root, *(path for path in root.iterdir() if path.is_dir())):
                (directory / "lock").unlink(missing_ok=True)
            self._cluster.start_coordinator(take_over=True)

        self._clock.after(self._rng.choice((100.0, 1000.0)), take_over)

    def _cut_off(
        self, cut_off: list[WorkerProcess], coordinator: CoordinatorProcess | None
    ) -> None:
        duration_ms = self._rng.choice((300.0, 3000.0, 6000.0, 20_000.0))
        self._sides += 1
        for process in (*cut_off, coordinator):
            if process is not None:
                process.side = self._sides
        links = [
            link
            for link in self._cluster.network.links
            if link.client.process.side != link.server.process.side
        ]
        for link in links:
            link.set_blocked(is_blocked=True)

        def heal() -> None:
            for process in (*cut_off, coordinator):
                if process is not None:
                    process.side = 0
            for link in links:
                if link.server.process.alive and link.client.process.alive:
                    link.set_blocked(is_blocked=False)
            if coordinator is not None and coordinator.alive:
                delay_ms = self._rng.choice((100.0, 5000.0))
                self._clock.after(delay_ms, coordinator.kill)

        self._clock.after(duration_ms, heal)
