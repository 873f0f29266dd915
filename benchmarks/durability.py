"""What log and journal cost: the same steps with them and without, by turns.

Without: `benchmarks.undurable_coordinator`, the real one with nothing kept. Two workers on two
cores, so what the coordinator does is taken from them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.cluster import Cluster, Interval, scripted
from benchmarks.jobs import short
from benchmarks.machine import print_heading, print_table
from benchmarks.timeline import intervals_us, step_times

WORKERS: Final = 2
WARMING_STEPS: Final = 2
OFF: Final = "off"
MODES: Final = ("full", "checkpoint")


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
        cpu_ms: Processor time of coordinator and workers, per step of each turn, with start and
            end of its run.
    """

    steps_ms: list[float]
    turns_ms: list[float]
    cpu_ms: list[float]

    def ratio(self, other: Measured) -> float:
        """Of median step times."""
        return median(self.steps_ms) / median(other.steps_ms)

    def turn_ratios(self, other: Measured) -> list[float]:
        """Turn by turn, sorted."""
        return sorted(a / b for a, b in zip(self.turns_ms, other.turns_ms, strict=True))

    def cpu_ratio(self, other: Measured) -> float:
        """Of processor time."""
        return median(self.cpu_ms) / median(other.cpu_ms)


def measure(job: Job, turns: int) -> dict[str, Measured]:
    """Every way in each turn, while the others are idle; the first turn is not counted."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        workers = [job.worker] * WORKERS
        kept = Cluster(workers, directory / "kept")
        off = Cluster(workers, directory / OFF, "benchmarks.undurable_coordinator")
        ways = {OFF: off, **dict.fromkeys(MODES, kept)}
        intervals: dict[str, list[Interval]] = {way: [] for way in ways}
        cpu_s: dict[str, list[float]] = {way: [] for way in ways}
        with kept, off:
            for turn in range(turns + 1):
                for way in _order(ways, turn):
                    mode = {} if way == OFF else {"log": way}
                    since_s = ways[way].cpu_s()
                    intervals[way].append(ways[way].run(job.document | mode))
                    cpu_s[way].append(ways[way].cpu_s() - since_s)
        timelines = {way: cluster.timelines() for way, cluster in ways.items()}
    found = {}
    for way in ways:
        by_turn = [
            [us / 1e3 for us in intervals_us(step_times(timelines[way], run.start_us, run.end_us))]
            for run in intervals[way][1:]
        ]
        counted = [times[WARMING_STEPS:] for times in by_turn]
        found[way] = Measured(
            [ms for times in counted for ms in times],
            [median(times) for times in counted],
            [s * 1e3 / job.document["steps"] for s in cpu_s[way][1:]],
        )
    return found


def _order(ways: Mapping[str, Cluster], turn: int) -> Sequence[str]:
    """Forth and back, so that none always comes after the same other."""
    return [*ways] if turn % 2 else [*ways][::-1]


def rows(job: Job, measured: dict[str, Measured]) -> list[list[str]]:
    """The lines of the table for one job."""
    off = measured[OFF]
    lines = []
    for way, mine in measured.items():
        ratios = mine.turn_ratios(off)
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        name = OFF if way == OFF else f"log: {way}"
        lines.append(
            [f"{job.name}: {name}", str(len(mine.steps_ms)), f"{min(mine.steps_ms):.0f}",
             f"{median(mine.steps_ms):.0f}", f"{mine.ratio(off):.3f}",
             f"{median(ratios):.3f}", "" if way == OFF else spread,
             f"{median(mine.cpu_ms):.0f}", f"{mine.cpu_ratio(off):.3f}"]
        )  # fmt: skip
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each way in each turn")
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args()
    steps = given.rounds + WARMING_STEPS + 1
    print_heading(f"Log and journal on and off, {WORKERS} workers, from update to update")
    jobs = (
        classify(steps),
        full_training(steps, 2_777_776, 500.0),
        full_training(steps, 8_333_332, 1000.0),
    )
    head = ["what", "steps", "min ms", "median ms", "to off", "of turns", "spread", "cpu ms",
            "to off"]  # fmt: skip
    print_table(head, [line for job in jobs for line in rows(job, measure(job, given.turns))])
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
