"""One worker against a bare PyTorch loop with the same arithmetic, and the time to the first step.

Real coordinator, real worker, one thread; the job of deploy/runs/sms-spam.yaml. The sides alternate
on the same steps while the other is idle, so every step is compared with itself.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import startup
from benchmarks.bare import BareLoop, BareRun
from benchmarks.cluster import Cluster, Interval
from benchmarks.jobs import short
from benchmarks.machine import print_heading, print_table
from benchmarks.step_time import StepTime, step_times
from protocol.machine.allocator import keep_freed_memory
from protocol.spec.run_spec import parse_run_spec

JOB = "sms-spam"
TURNS = 5
WARMING_STEPS = 2
"""The first of each turn is not measured at all: a time goes from update to update."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The same steps in the same order, both ways, turn after turn.

    Attributes:
        ours: The worker's.
        bare: The plain loop's.
        ours_cpu_ms: Processor time of the worker's process per step, of each turn: whole runs,
            thus with their start and end.
        bare_cpu_ms: The same of the plain loop.
        loss_difference: The largest, relative, of any step: that both do the same.
    """

    ours: list[StepTime]
    bare: list[StepTime]
    ours_cpu_ms: list[float]
    bare_cpu_ms: list[float]
    loss_difference: float

    @property
    def ratio(self) -> float:
        """Ours to bare, of median step times."""
        return _median(self.ours) / _median(self.bare)

    @property
    def paired_ratio(self) -> float:
        """Median of each step's ratio to its own counterpart: long steps count no more."""
        return median(a.total_ms / b.total_ms for a, b in zip(self.ours, self.bare, strict=True))

    @property
    def best_ratio(self) -> float:
        """Each step at its fastest, summed: what is left on a machine that is never busy."""
        return sum(_fastest(self.ours)) / sum(_fastest(self.bare))

    @property
    def cpu_ratio(self) -> float:
        """Of processor time: nearly the same however busy the machine is."""
        return median(self.ours_cpu_ms) / median(self.bare_cpu_ms)


class _OneWorker(Cluster):
    """A cluster of one, whose worker's processor time can be read."""

    def worker_cpu_s(self) -> float:
        """Of all its threads, since its start."""
        # A process's clock by its number, made as in glibc's clock_getcpuclockid.
        return time.clock_gettime((~self._processes[-1].pid << 3) | 2)


def measure(document: dict[str, Any], turns: int = TURNS, backend: str = "cpu") -> Measured:
    """Both ways by turns, each the whole run from step 0; the first turn is not counted."""
    loop = BareLoop(parse_run_spec(document), backend)
    intervals: list[Interval] = []
    bare: list[BareRun] = []
    cpu_s: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        worker = ["worker", "--quiet", "--backend", backend]
        cluster = _OneWorker([worker], directory)
        with cluster:
            for _ in range(turns + 1):
                since_s = cluster.worker_cpu_s()
                intervals.append(cluster.run(document))
                cpu_s.append(cluster.worker_cpu_s() - since_s)
                bare.append(loop.run())
        timeline = cluster.timelines()[0]
        losses = [
            json.loads(path.read_text())["losses"] for path in directory.glob("*/result.json")
        ]
    ours = [step_times(timeline, run.start_us, run.end_us) for run in intervals]
    per_step = 1e3 / document["steps"]
    return Measured(
        [step for steps in ours[1:] for step in steps[WARMING_STEPS - 1 :]],
        [step for run in bare[1:] for step in run.steps[WARMING_STEPS - 1 :]],
        [s * per_step for s in cpu_s[1:]],
        [run.cpu_s * per_step for run in bare[1:]],
        max(_difference(mine, run.losses) for mine, run in zip(losses, bare, strict=True)),
    )


def _difference(ours: Sequence[float], bare: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, bare, strict=True))


def _median(steps: Sequence[StepTime]) -> float:
    return median(step.total_ms for step in steps)


def _fastest(steps: Sequence[StepTime]) -> list[float]:
    """By step number."""
    fastest: dict[int, float] = {}
    for step in steps:
        fastest[step.step] = min(step.total_ms, fastest.get(step.step, step.total_ms))
    return [fastest[number] for number in sorted(fastest)]


def rows(measured: Measured) -> list[list[str]]:
    """The lines of the table of steps."""
    parts: Sequence[Callable[[StepTime], float]] = (
        lambda step: step.compute_ms,
        lambda step: step.update_ms,
        lambda step: step.rest_ms,
    )
    ways = (
        ("bare loop", measured.bare, measured.bare_cpu_ms),
        ("one worker", measured.ours, measured.ours_cpu_ms),
    )
    return [
        [way, str(len(steps)), f"{min(step.total_ms for step in steps):.1f}",
         f"{_median(steps):.1f}", *(f"{median(map(part, steps)):.1f}" for part in parts),
         f"{median(cpu_ms):.1f}"]
        for way, steps, cpu_ms in ways
    ]  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=4, help=f"steps in each of {TURNS} turns")
    parser.add_argument("--backend", choices=("cpu", "cuda", "xpu"), default="cpu")
    options = parser.parse_args()
    # As the worker does: else the bare loop would pay for page faults that we do not.
    keep_freed_memory()
    print_heading(f"One worker against a bare PyTorch loop, {JOB}, from update to update")
    with tempfile.TemporaryDirectory() as name:
        times = startup.measure(short(JOB, 1), options.backend, Path(name))
    measured = measure(short(JOB, options.rounds + WARMING_STEPS), backend=options.backend)
    head = ["way", "steps", "min ms", "median ms", "compute", "update", "rest", "cpu"]
    print_table(head, rows(measured))
    print(f"ratio of medians {measured.ratio:.3f}; each step to itself, median "
          f"{measured.paired_ratio:.3f}; each step's fastest {measured.best_ratio:.3f}; "
          f"processor time {measured.cpu_ratio:.3f}")  # fmt: skip
    print(f"losses differ by at most {measured.loss_difference:.1e}; load {os.getloadavg()[0]:.1f}")
    print(f"worker start to connected {times.connected_s:.1f} s, to ready {times.ready_s:.1f} s, "
          f"to the start of the run {times.started_s:.1f} s, "
          f"to the first commit {times.committed_s:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
