"""What log and journal cost: the same steps with and without them, alternating.

Without them: `benchmarks.undurable_coordinator`, the real one that stores nothing. Two workers run
on two cores, so the coordinator's work slows them down.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.cluster import Cluster, Interval, scripted
from benchmarks.jobs import short
from benchmarks.machine import print_heading, print_table
from benchmarks.timeline import intervals_us, read_trace, step_times

WORKERS: Final = 2
WARMING_STEPS: Final = 2
OFF: Final = "off"
MODES: Final = ("full", "checkpoint")
HEAD: Final = ("what", "steps", "min ms", "median ms", "to off", "by turns", "least to most",
               "commit ms", "worst", "own cpu", "workers")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained.

    Attributes:
        name: For the table.
        document: The run spec, less `log`.
        worker: The command of each worker.
    """

    name: str
    document: dict[str, Any]
    worker: list[str]


def classify(steps: int) -> Job:
    """The job of deploy/runs/sms-spam.yaml."""
    return Job("classify (sms-spam)", short("sms-spam", steps), ["worker", "--quiet"])


def full_training(steps: int, block_bytes: int, microbatch_ms: float) -> Job:
    """Twelve layers that are trained in full; gradients stream while the device sleeps."""
    blocks = 12
    document = {
        "name": "full-training",
        "task": "scripted",
        "scripted": {"blocks": blocks, "block_bytes": block_bytes},
        "batch": {"samples": 2 * WORKERS, "microbatch": 1},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "steps": steps,
    }
    name = f"full training, {blocks * block_bytes / 1e6:.0f} MB a step"
    return Job(name, document, scripted(microbatch_ms))


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of keeping.

    Attributes:
        steps_ms: From update to update, each step.
        turns_ms: The median of each turn: turns of all ways alternate.
        waits_ms: What each step waited for its commit to be durable; empty where nothing is kept.
        coordinator_ms: Processor time of the coordinator per step, of each turn, with start and
            end of its run.
        workers_ms: The same of the workers.
    """

    steps_ms: list[float]
    turns_ms: list[float]
    waits_ms: list[float]
    coordinator_ms: list[float]
    workers_ms: list[float]

    def ratio(self, other: Measured) -> float:
        """Of median step times."""
        return median(self.steps_ms) / median(other.steps_ms)

    def turn_ratios(self, other: Measured) -> list[float]:
        """Turn by turn, sorted."""
        return sorted(a / b for a, b in zip(self.turns_ms, other.turns_ms, strict=True))


@dataclass(slots=True)
class _Way:
    """One cluster, its runs, and the processor time of each: coordinator, workers."""

    cluster: Cluster
    trace: Path
    mode: dict[str, str]
    intervals: list[Interval] = field(default_factory=list)
    cpu_s: list[tuple[float, float]] = field(default_factory=list)

    def run(self, document: dict[str, Any]) -> None:
        before = self.cluster.cpu_s()
        self.intervals.append(self.cluster.run(document | self.mode))
        after = self.cluster.cpu_s()
        self.cpu_s.append((after[0] - before[0], after[1] - before[1]))

    def measured(self, steps: int) -> Measured:
        """After the cluster has ended; the first turn is not counted."""
        timelines, own = self.cluster.timelines(), read_trace(self.trace)
        intervals = [(run.start_us, run.end_us) for run in self.intervals[1:]]
        by_turn = [
            [us / 1e3 for us in intervals_us(step_times(timelines, *interval))][WARMING_STEPS:]
            for interval in intervals
        ]
        waits_ms = [
            event["dur"] / 1e3
            for event in own.events
            if event["name"] == "sync the log"
            and any(start <= event["ts"] <= end for start, end in intervals)
        ]
        return Measured(
            [ms for turn in by_turn for ms in turn],
            [median(turn) for turn in by_turn],
            [] if self.mode == {} else waits_ms,
            [s * 1e3 / steps for s, _ in self.cpu_s[1:]],
            [s * 1e3 / steps for _, s in self.cpu_s[1:]],
        )


def measure(job: Job, turns: int) -> dict[str, Measured]:
    """Every way in each turn, while the others are idle."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        logged, off = (
            (Cluster([job.worker] * WORKERS, directory / module,
                     [module, "--trace", str(directory / f"{module}.json")]),
             directory / f"{module}.json")
            for module in ("coordinator", "benchmarks.undurable_coordinator")
        )  # fmt: skip
        ways = {OFF: _Way(*off, {}), **{mode: _Way(*logged, {"log": mode}) for mode in MODES}}
        with logged[0], off[0]:
            for turn in range(turns + 1):
                # Forth and back, so that none always comes after the same other.
                for way in [*ways.values()][:: 1 if turn % 2 else -1]:
                    way.run(job.document)
        return {name: way.measured(job.document["steps"]) for name, way in ways.items()}


def rows(job: Job, measured: dict[str, Measured]) -> list[list[str]]:
    """The lines of the table for one job."""
    lines = []
    for way, mine in measured.items():
        ratios = mine.turn_ratios(measured[OFF])
        waits = [f"{of(mine.waits_ms):.1f}" if mine.waits_ms else "" for of in (median, max)]
        name = OFF if way == OFF else f"log: {way}"
        lines.append(
            [f"{job.name}: {name}", str(len(mine.steps_ms)), f"{min(mine.steps_ms):.0f}",
             f"{median(mine.steps_ms):.0f}", f"{mine.ratio(measured[OFF]):.3f}",
             f"{median(ratios):.3f}", f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
             *waits, f"{median(mine.coordinator_ms):.0f}", f"{median(mine.workers_ms):.0f}"]
        )  # fmt: skip
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each way in each turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--only", choices=("classify", "33", "100"), help="one job of the three")
    options = parser.parse_args()
    steps = options.rounds + WARMING_STEPS + 1
    print_heading(f"Log and journal on and off, {WORKERS} workers, from update to update")
    jobs = {
        "classify": classify(steps),
        "33": full_training(steps, 2_777_776, 500.0),
        "100": full_training(steps, 8_333_332, 1000.0),
    }
    for name, job in jobs.items():
        if options.only in (None, name):
            print_table(HEAD, rows(job, measure(job, options.turns)))
            print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
