"""Time from a kill to the next committed step, for the coordinator and for a worker.

The coordinator is killed (SIGKILL) at a random time within a step and restarted at once; its
workers keep their state and reconnect. Its replica must apply the twenty logged steps since the
last checkpoint again. State is parameters and both moments of AdamW. Devices sleep, so all steps
take the same time; the excess is the recovery.
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
from typing import Any, Final

from benchmarks.machine import print_heading, print_table
from tests.chaos.processes import Coordinator, Event, Worker

WORKERS = 2
MICROBATCHES = 8
LOGGED_STEPS = 20
"""Steps between the last checkpoint and the kill."""
UNDISTURBED_STEPS = 6
"""Undisturbed steps after each recovery: the replica catches up in the first few."""

FIRST_STEPS: Final = 120
"""Steps before the first kill, and a reserve for a busy machine, on which a worker joins late."""
STEPS_PER_ROUND: Final = 80
"""Steps of three kills, with those during which a new worker joins. The log of all steps must fit
on the disk: 3 GB for each round."""


@dataclass(frozen=True, slots=True)
class Case:
    """Size of a state: `block_bytes` counts parameters; two moments triple it."""

    blocks: int
    block_bytes: int
    microbatch_ms: float = 100.0

    @property
    def name(self) -> str:
        """Return the size of the state."""
        return f"{3 * self.blocks * self.block_bytes / 1e6:.0f} MB"

    def run_spec(self, rounds: int) -> dict[str, Any]:
        """Return the run spec; checkpoints are written on request only."""
        return {
            "name": "recovery",
            "task": "scripted",
            "scripted": {"blocks": self.blocks, "block_bytes": self.block_bytes},
            "batch": {"samples": MICROBATCHES, "microbatch": 1},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "steps": FIRST_STEPS + rounds * STEPS_PER_ROUND,
            "log": "full",
            "checkpoint": {"every": 0},
        }


CASES = (Case(6, 888_888), Case(12, 2_777_776))


@dataclass(frozen=True, slots=True)
class Recovery:
    """Times after one kill of the coordinator, in seconds since the kill.

    Attributes:
        resumed_s: Until the new process has found the last committed step.
        connected_s: Until the first worker has reconnected.
        ready_s: Until the first worker has reported its state.
        committed_s: Until the next step is committed.
        later_s: Duration of the longest of the next six steps, while the replica catches up.
    """

    resumed_s: float
    connected_s: float
    ready_s: float
    committed_s: float
    later_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements of one case.

    Attributes:
        step_s: Median duration of an undisturbed step.
        coordinator: One entry per kill of the coordinator.
        worker_s: Seconds from the kill of a worker to the commit of the step in progress.
        stopped_s: Seconds from SIGSTOP of a worker to the commit; only the lease reveals the stop.
    """

    step_s: float
    coordinator: list[Recovery]
    worker_s: list[float]
    stopped_s: list[float]


class _Cluster:
    """A coordinator and its workers, the faults injected into them, and the times of commits."""

    def __init__(self, coordinator: Coordinator, microbatch_ms: float, seed: int) -> None:
        self._coordinator = coordinator
        self._backend = f"scripted:{microbatch_ms:g}"
        self._rng = random.Random(seed)
        self._workers = {f"w{number}": self._worker(f"w{number}") for number in range(WORKERS)}
        self._next_index = 0
        self.undisturbed_s: list[float] = []

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def commits(self, count: int) -> list[Event]:
        """Wait for the next commits and return them."""
        return [self._next_event("committed") for _ in range(count)]

    def wait_steps(self, count: int) -> None:
        """Wait for some commits; the times between them count as undisturbed steps."""
        self.undisturbed_s += [
            later.at_s - earlier.at_s for earlier, later in pairwise(self.commits(count))
        ]

    def checkpoint(self) -> None:
        """Request a checkpoint, after which logged steps count from 0."""
        self._coordinator.ask("POST", "/checkpoint")
        self._next_event("checkpoint")

    def restart(self) -> Recovery:
        """Kill the coordinator within a step, and start it again."""
        self.checkpoint()
        self.wait_steps(LOGGED_STEPS)
        self._sleep_within_step()
        killed_s = self._coordinator.kill()
        self._next_index = first_index = len(self._coordinator.events)
        self._coordinator.start()
        first_commit = self._next_event("committed")
        later_commits = self.commits(UNDISTURBED_STEPS)
        times = [first_commit.at_s, *(event.at_s for event in later_commits)]
        return Recovery(
            resumed_s=self._first_event("run_resumed", first_index) - killed_s,
            connected_s=self._first_event("worker_connected", first_index) - killed_s,
            ready_s=self._first_event("worker_ready", first_index) - killed_s,
            committed_s=first_commit.at_s - killed_s,
            later_s=max(b - a for a, b in pairwise(times)),
        )

    def lose_worker(self) -> float:
        """Kill a worker within a step and replace it; return the seconds to the commit."""
        self.wait_steps(UNDISTURBED_STEPS)
        self._sleep_within_step()
        name = self._rng.choice(sorted(self._workers))
        first_index = len(self._coordinator.events)
        killed_s = self._workers[name].kill()
        commit = self._coordinator.commit_after(killed_s, first_index)
        self._next_index = len(self._coordinator.events)
        self._workers[name] = self._worker(name)
        self._next_event("worker_joined")
        self.commits(UNDISTURBED_STEPS)
        return commit.at_s - killed_s

    def stop_worker(self) -> float:
        """Stop a worker within a step, then resume it; return the seconds to the commit."""
        self.wait_steps(UNDISTURBED_STEPS)
        self._sleep_within_step()
        worker = self._workers[self._rng.choice(sorted(self._workers))]
        first_index = len(self._coordinator.events)
        stopped_s = time.time()
        worker.stop()
        commit = self._coordinator.commit_after(stopped_s, first_index)
        worker.resume()
        self._next_index = len(self._coordinator.events)
        self.commits(2 * UNDISTURBED_STEPS)
        return commit.at_s - stopped_s

    def _worker(self, name: str) -> Worker:
        coordinator = self._coordinator
        return Worker(coordinator.address, name, self._backend, coordinator.directory)

    def _sleep_within_step(self) -> None:
        """Sleep for a random part of a step: no event marks the middle of a step."""
        time.sleep(self._rng.uniform(0.0, median(self.undisturbed_s)))

    def _next_event(self, name: str) -> Event:
        event = self._coordinator.wait_for(
            name, lambda candidate: candidate.name == name, since=self._next_index
        )
        self._next_index = self._coordinator.events.index(event, self._next_index) + 1
        return event

    def _first_event(self, name: str, first_index: int) -> float:
        return self._coordinator.wait_for(name, lambda e: e.name == name, since=first_index).at_s


def measure(case: Case, kills: int, seed: int = 1) -> Measurement:
    """Measure `kills` restarts of the coordinator, kills of a worker and stops of a worker."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spec = directory / "run.yaml"
        spec.write_text(json.dumps(case.run_spec(kills)))
        arguments = ["--run", str(spec), "--expect-workers", str(WORKERS)]
        with Coordinator(directory, arguments) as coordinator:
            cluster = _Cluster(coordinator, case.microbatch_ms, seed)
            try:
                cluster.commits(2)
                cluster.wait_steps(UNDISTURBED_STEPS)
                restarts = [cluster.restart() for _ in range(kills)]
                worker_s = [cluster.lose_worker() for _ in range(kills)]
                stopped_s = [cluster.stop_worker() for _ in range(kills)]
            finally:
                cluster.close()
    return Measurement(median(cluster.undisturbed_s), restarts, worker_s, stopped_s)


def rows(case: Case, measurement: Measurement) -> list[list[str]]:
    """Return the rows of the table for one case."""
    step_s, restarts = measurement.step_s, measurement.coordinator
    lines: Sequence[tuple[str, list[float]]] = (
        ("coordinator killed, to the next commit", [restart.committed_s for restart in restarts]),
        ("  longer than a step by", [restart.committed_s - step_s for restart in restarts]),
        (
            "  until it has read the last step from disk",
            [restart.resumed_s for restart in restarts],
        ),
        (
            "  then until a worker is connected",
            [restart.connected_s - restart.resumed_s for restart in restarts],
        ),
        (
            "  then until it is ready",
            [restart.ready_s - restart.connected_s for restart in restarts],
        ),
        (
            "  then until the commit",
            [restart.committed_s - restart.ready_s for restart in restarts],
        ),
        ("  longest step of the next six", [restart.later_s for restart in restarts]),
        ("worker killed, to the commit of its step", measurement.worker_s),
        ("worker stopped, to the commit of its step", measurement.stopped_s),
    )
    return [
        [f"state {case.name}: a step", "", f"{step_s:.2f}", ""],
        *(
            [label, str(len(seconds)), f"{median(seconds):.2f}", f"{max(seconds):.2f}"]
            for label, seconds in lines
        ),
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=6, help="kills of each kind")
    rounds = parser.parse_args().rounds
    print_heading(f"From a kill to the next commit, {WORKERS} workers; seconds")
    lines = [line for case in CASES for line in rows(case, measure(case, rounds))]
    print_table(["what", "kills", "median s", "max s"], lines)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
