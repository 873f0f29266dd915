"""Throughput of N workers, against N times that of one worker, with the same batch per step.

Scripted devices sleep 50 ms per microbatch, so any number of them fits on one machine; coordinator,
workers and exchange are real. One case has up to 4 workers; its 16 devices are 4 workers with 4
devices each. The last cases are real CPU workers with one thread each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import Cluster, Interval, scripted_worker
from benchmarks.jobs import short_job
from benchmarks.machine import print_heading, print_table
from benchmarks.timeline import intervals_us, step_times

TURNS = 2
WARMUP_STEPS = 3
"""The planner measures speeds and moves work in these steps."""
CPU_WORKER = ("worker", "--quiet", "--backend", "cpu")


@dataclass(frozen=True, slots=True)
class Case:
    """One job, and the numbers of workers to run it with.

    Attributes:
        name: Name in the table.
        command: The command of each worker.
        document: The run spec.
        workers: Numbers of workers to measure; the first is 1.
        round_factor: Factor on `--rounds`, the number of steps.
        hosts: Number of multi-device workers, if there are more devices; 0: every device is a
            separate worker.
    """

    name: str
    command: tuple[str, ...]
    document: dict[str, Any]
    workers: tuple[int, ...]
    round_factor: float = 1.0
    hosts: int = 0

    def cluster(self, count: int, directory: Path) -> Cluster:
        """Return a cluster of `count` workers or devices."""
        hosts = min(self.hosts or count, count)
        devices = ",".join(map(str, range(count // hosts)))
        device_options = ("--gpus", devices) if count > hosts else ()
        return Cluster([(*self.command, *device_options)] * hosts, directory, expected=count)


def scripted_case(
    workers: tuple[int, ...] = (1, 2, 4),
    microbatches: int = 32,
    microbatch_ms: float = 50.0,
    hosts: int = 0,
) -> Case:
    """Return a job of 5.3 MB in six blocks, like LoRA of a small encoder, with plain SGD."""
    document = {
        "name": "scaling",
        "task": "scripted",
        "scripted": {"blocks": 6, "block_bytes": 883_332},
        "batch": {"samples": microbatches, "microbatch": 1},
        "optimizer": {"name": "sgd", "lr": 1e-3},
        "steps": 1,
    }
    command = tuple(scripted_worker(microbatch_ms))
    name = f"scripted, {microbatch_ms:g} ms" + (f", {hosts} hosts" if hosts else "")
    return Case(name, command, document, workers, hosts=hosts)


def cases() -> tuple[Case, ...]:
    """Return the cases to measure."""
    return (
        scripted_case(),
        scripted_case((1, 4, 16), 64, hosts=4),
        Case("real CPU, sms-spam", CPU_WORKER, short_job("sms-spam", 1), (1, 2), 0.5),
        Case("real CPU, digits", CPU_WORKER, short_job("digits", 1), (1, 2), 10.0),
    )


StepTimes = dict[int, list[float]]
"""Seconds from each step's update to the next update, by number of workers."""


def measure(case: Case, rounds: int, turns: int = TURNS) -> StepTimes:
    """Measure each number of workers in each turn, while the other clusters are idle."""
    steps = max(1, round(rounds * case.round_factor)) + WARMUP_STEPS + 1
    document = {**case.document, "steps": steps}
    runs: dict[int, list[Interval]] = {count: [] for count in case.workers}
    with tempfile.TemporaryDirectory() as name:
        clusters = {count: case.cluster(count, Path(name) / str(count)) for count in case.workers}
        with ExitStack() as stack:
            for cluster in clusters.values():
                stack.enter_context(cluster)
            for _ in range(turns):
                for count, cluster in clusters.items():
                    runs[count].append(cluster.run(document))
        timelines = {count: cluster.timelines() for count, cluster in clusters.items()}
    return {
        count: [
            span_us / 1e6
            for run in runs[count]
            for span_us in intervals_us(
                step_times(timelines[count], run.start_us, run.end_us)[WARMUP_STEPS:]
            )
        ]
        for count in case.workers
    }


def rows(case: Case, times_by_workers: StepTimes) -> list[list[str]]:
    """Return the rows for one case: samples per second, and their ratio to N times one worker's."""
    samples = case.document["batch"]["samples"]
    return [
        [
            f"{case.name}: {count} worker{'s' if count > 1 else ''}",
            str(len(step_s)),
            f"{samples / median(step_s):.1f}",
            f"{samples / min(step_s):.1f}",
            f"{median(times_by_workers[1]) / median(step_s) / count:.3f}",
            f"{min(times_by_workers[1]) / min(step_s) / count:.3f}",
        ]
        for count, step_s in times_by_workers.items()
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        help=f"steps in each of {TURNS} turns, more if steps are short",
    )
    parser.add_argument("--only", default="", help="text in the names of cases to measure")
    options = parser.parse_args()
    print_heading("Throughput of N workers, against N times that of one worker")
    selection = [case for case in cases() if options.only in case.name]
    lines = [line for case in selection for line in rows(case, measure(case, options.rounds))]
    header = ["what", "steps", "median samples/s", "best", "of N x one", "of best"]
    print_table(header, lines)
    print(f"load {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores")


if __name__ == "__main__":
    main()
