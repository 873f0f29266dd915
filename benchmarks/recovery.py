"""From a kill to the next committed step, for the coordinator and for a worker.

The coordinator is killed (SIGKILL) at any moment of a step and restarted at once; its workers keep
their state and reconnect. Twenty logged steps follow the last checkpoint, which its replica must
apply again. State is parameters and both moments of AdamW. Devices sleep, so steps have a constant
length; what exceeds it is the recovery.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import print_heading, print_table
from tests.chaos.processes import Coordinator, Event, Worker

WORKERS = 2
MICROBATCHES = 8
LOGGED_STEPS = 20
"""Since the last checkpoint, at the kill."""
CALM_STEPS = 6
"""After each recovery, before anything else is done: the replica catches up in the first few."""


@dataclass(frozen=True, slots=True)
class Case:
    """A state of blocks of so many bytes of parameters, three times that in all."""

    blocks: int
    block_bytes: int
    microbatch_ms: float = 100.0

    @property
    def name(self) -> str:
        """By its state."""
        return f"{3 * self.blocks * self.block_bytes / 1e6:.0f} MB"

    @property
    def run_spec(self) -> dict[str, Any]:
        """Longer than any measurement; checkpoints only when asked for."""
        return {
            "name": "recovery",
            "task": "scripted",
            "scripted": {"blocks": self.blocks, "block_bytes": self.block_bytes},
            "batch": {"samples": MICROBATCHES, "microbatch": 1},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "steps": 400,  # more would be refused for want of room on the disk
            "log": "full",
            "checkpoint": {"every": 0},
        }


CASES = (Case(6, 888_888), Case(12, 2_777_776))


@dataclass(frozen=True, slots=True)
class Recovered:
    """One kill; seconds since it.

    Attributes:
        resumed_s: The new process has started and found the last committed step.
        connected_s: The first worker is back.
        ready_s: It has said which state it has.
        committed_s: The next step is committed.
        later_s: The longest that a step took of the next few, while the replica caught up.
    """

    resumed_s: float
    connected_s: float
    ready_s: float
    committed_s: float
    later_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What one case gave.

    Attributes:
        step_s: A step that nothing disturbs: median.
        coordinator: One for each of its kills.
        worker_s: From a worker's kill to the commit of the step in flight.
        stopped_s: The same of SIGSTOP: only its lease tells that it does nothing.
    """

    step_s: float
    coordinator: list[Recovered]
    worker_s: list[float]
    stopped_s: list[float]


class _Cluster:
    """A coordinator and workers, what is done to them, and when the commits came."""

    def __init__(self, coordinator: Coordinator, microbatch_ms: float, seed: int) -> None:
        self._coordinator = coordinator
        self._backend = f"scripted:{microbatch_ms:g}"
        self._source = random.Random(seed)
        self._workers = {f"w{number}": self._worker(f"w{number}") for number in range(WORKERS)}
        self._since = 0
        self.calm_s: list[float] = []

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def commits(self, count: int) -> list[Event]:
        """The next commits; the time between them is that of undisturbed steps, but the first."""
        return [self._next("committed") for _ in range(count)]

    def steady(self, count: int) -> None:
        """So many steps that count as undisturbed."""
        self.calm_s += [b.at_s - a.at_s for a, b in pairwise(self.commits(count))]

    def checkpoint(self) -> None:
        """Have one, and begin counting logged steps anew."""
        self._coordinator.ask("POST", "/checkpoint")
        self._next("checkpoint")

    def restart(self) -> Recovered:
        """Kill the coordinator within a step, and start it again."""
        self.checkpoint()
        self.steady(LOGGED_STEPS)
        self._within_a_step()
        at_s = self._coordinator.kill()
        self._since = since = len(self._coordinator.events)
        self._coordinator.start()
        first = self._next("committed")
        later = self.commits(CALM_STEPS)
        times = [first.at_s, *(event.at_s for event in later)]
        return Recovered(
            resumed_s=self._first("run_resumed", since) - at_s,
            connected_s=self._first("worker_connected", since) - at_s,
            ready_s=self._first("worker_ready", since) - at_s,
            committed_s=first.at_s - at_s,
            later_s=max(b - a for a, b in pairwise(times)),
        )

    def lose_worker(self) -> float:
        """Kill a worker within a step; seconds to that step's commit. Another takes its place."""
        self.steady(CALM_STEPS)
        self._within_a_step()
        name = self._source.choice(sorted(self._workers))
        since = len(self._coordinator.events)
        at_s = self._workers[name].kill()
        commit = self._coordinator.commit_after(at_s, since)
        self._since = len(self._coordinator.events)
        self._workers[name] = self._worker(name)
        self._next("worker_joined")
        self.commits(CALM_STEPS)
        return commit.at_s - at_s

    def stop_worker(self) -> float:
        """Stop a worker within a step; seconds to that step's commit. Then it goes on."""
        self.steady(CALM_STEPS)
        self._within_a_step()
        worker = self._workers[self._source.choice(sorted(self._workers))]
        since = len(self._coordinator.events)
        at_s = time.time()
        worker.stop()
        commit = self._coordinator.commit_after(at_s, since)
        worker.go_on()
        self._since = len(self._coordinator.events)
        self.commits(2 * CALM_STEPS)
        return commit.at_s - at_s

    def _worker(self, name: str) -> Worker:
        coordinator = self._coordinator
        return Worker(coordinator.address, name, self._backend, coordinator.directory)

    def _within_a_step(self) -> None:
        """Any moment of a step: no event says that one is half done."""
        time.sleep(self._source.uniform(0.0, median(self.calm_s)))

    def _next(self, name: str) -> Event:
        event = self._coordinator.wait_for(name, lambda e: e.name == name, since=self._since)
        self._since = self._coordinator.events.index(event, self._since) + 1
        return event

    def _first(self, name: str, since: int) -> float:
        return self._coordinator.wait_for(name, lambda e: e.name == name, since=since).at_s


def measure(case: Case, kills: int, seed: int = 1) -> Measured:
    """So many kills of each kind."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spec = directory / "run.yaml"
        spec.write_text(json.dumps(case.run_spec))
        arguments = ["--run", str(spec), "--expect-workers", str(WORKERS)]
        with Coordinator(directory, arguments) as coordinator:
            cluster = _Cluster(coordinator, case.microbatch_ms, seed)
            try:
                cluster.commits(2)
                cluster.steady(CALM_STEPS)
                restarts = [cluster.restart() for _ in range(kills)]
                worker_s = [cluster.lose_worker() for _ in range(kills)]
                stopped_s = [cluster.stop_worker() for _ in range(kills)]
            finally:
                cluster.close()
    return Measured(median(cluster.calm_s), restarts, worker_s, stopped_s)


def rows(case: Case, measured: Measured) -> list[list[str]]:
    """The lines of the table for one case."""
    step_s, restarts = measured.step_s, measured.coordinator
    lines: Sequence[tuple[str, list[float]]] = (
        ("coordinator killed, to the next commit", [r.committed_s for r in restarts]),
        ("  of that beyond a step", [r.committed_s - step_s for r in restarts]),
        ("  until it has the last step from disk", [r.resumed_s for r in restarts]),
        ("  then until a worker is connected", [r.connected_s - r.resumed_s for r in restarts]),
        ("  then until it is ready", [r.ready_s - r.connected_s for r in restarts]),
        ("  then until the commit", [r.committed_s - r.ready_s for r in restarts]),
        ("  longest step of the next six", [r.later_s for r in restarts]),
        ("worker killed, to the commit of its step", measured.worker_s),
        ("worker stopped, to the commit of its step", measured.stopped_s),
    )
    return [
        [f"state {case.name}: a step", "", f"{step_s:.2f}", ""],
        *(
            [what, str(len(seconds)), f"{median(seconds):.2f}", f"{max(seconds):.2f}"]
            for what, seconds in lines
        ),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9, help="kills of each kind")
    rounds = parser.parse_args().rounds
    print_heading(f"From a kill to the next commit, {WORKERS} workers; seconds")
    lines = [line for case in CASES for line in rows(case, measure(case, rounds))]
    print_table(["what", "kills", "median s", "worst s"], lines)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
