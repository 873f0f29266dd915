"""One worker against a bare PyTorch loop with the same arithmetic, and the time to the first step.

Real coordinator, real worker, one thread; the job of deploy/runs/sms-spam.yaml. The sides
alternate, one idle while the other runs. Both take the same steps and are compared step by step.
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
from benchmarks.jobs import short_job
from benchmarks.machine import print_heading, print_table
from benchmarks.step_time import StepTime, step_times
from protocol.machine.allocator import keep_freed_memory
from protocol.spec.run_spec import parse_run_spec

JOB = "sms-spam"
TURNS = 5
WARMUP_STEPS = 2
"""Includes the first step of each turn, which has no time from update to update."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of the same steps on both sides.

    Attributes:
        worker_steps: Steps of the worker.
        bare_steps: Steps of the plain loop.
        worker_cpu_ms: Processor time of the worker's process per step, for each turn, including
            start and end of the run.
        bare_cpu_ms: Processor time of the plain loop per step, likewise.
        loss_difference: Largest relative difference of the losses of any step.
    """

    worker_steps: list[StepTime]
    bare_steps: list[StepTime]
    worker_cpu_ms: list[float]
    bare_cpu_ms: list[float]
    loss_difference: float

    @property
    def ratio(self) -> float:
        """Return the ratio of median step times, worker to plain loop."""
        return _median(self.worker_steps) / _median(self.bare_steps)

    @property
    def paired_ratio(self) -> float:
        """Return the median ratio of each step to its counterpart, which weighs all steps
        equally."""
        return median(
            a.total_ms / b.total_ms for a, b in zip(self.worker_steps, self.bare_steps, strict=True)
        )

    @property
    def best_ratio(self) -> float:
        """Return the ratio of the sums of each step's fastest time, an estimate for an idle
        machine."""
        return sum(_fastest_times(self.worker_steps)) / sum(_fastest_times(self.bare_steps))

    @property
    def cpu_ratio(self) -> float:
        """Return the ratio of processor time, which depends little on other load."""
        return median(self.worker_cpu_ms) / median(self.bare_cpu_ms)


class _OneWorker(Cluster):
    """A cluster of one worker, whose processor time can be read."""

    def worker_cpu_s(self) -> float:
        """Return the processor time of the worker's threads since its start."""
        # The id of a process's clock, computed as in glibc's clock_getcpuclockid.
        return time.clock_gettime((~self._processes[-1].pid << 3) | 2)


def measure(document: dict[str, Any], turns: int = TURNS, backend: str = "cpu") -> Measurement:
    """Measure both sides alternately, whole runs from step 0; the first turn is not counted."""
    loop = BareLoop(parse_run_spec(document), backend)
    intervals: list[Interval] = []
    bare_runs: list[BareRun] = []
    cpu_s: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        worker = ["worker", "--quiet", "--backend", backend]
        cluster = _OneWorker([worker], directory)
        with cluster:
            for _ in range(turns + 1):
                start_s = cluster.worker_cpu_s()
                intervals.append(cluster.run(document))
                cpu_s.append(cluster.worker_cpu_s() - start_s)
                bare_runs.append(loop.run())
        timeline = cluster.timelines()[0]
        losses = [
            json.loads(path.read_text())["losses"] for path in directory.glob("*/result.json")
        ]
    worker_steps = [step_times(timeline, run.start_us, run.end_us) for run in intervals]
    per_step = 1e3 / document["steps"]
    return Measurement(
        [step for steps in worker_steps[1:] for step in steps[WARMUP_STEPS - 1 :]],
        [step for run in bare_runs[1:] for step in run.steps[WARMUP_STEPS - 1 :]],
        [s * per_step for s in cpu_s[1:]],
        [run.cpu_s * per_step for run in bare_runs[1:]],
        max(
            _difference(worker_losses, run.losses)
            for worker_losses, run in zip(losses, bare_runs, strict=True)
        ),
    )


def _difference(worker_losses: Sequence[float], bare_losses: Sequence[float]) -> float:
    return max(
        abs(worker_loss - bare_loss) / abs(bare_loss)
        for worker_loss, bare_loss in zip(worker_losses, bare_losses, strict=True)
    )


def _median(steps: Sequence[StepTime]) -> float:
    return median(step.total_ms for step in steps)


def _fastest_times(steps: Sequence[StepTime]) -> list[float]:
    """Return the fastest time of each step, by step number."""
    fastest_by_step: dict[int, float] = {}
    for step in steps:
        fastest_by_step[step.step] = min(
            step.total_ms, fastest_by_step.get(step.step, step.total_ms)
        )
    return [fastest_by_step[number] for number in sorted(fastest_by_step)]


def rows(measurement: Measurement) -> list[list[str]]:
    """Return the rows of the table of steps."""
    parts: Sequence[Callable[[StepTime], float]] = (
        lambda step: step.compute_ms,
        lambda step: step.update_ms,
        lambda step: step.rest_ms,
    )
    sides = (
        ("bare loop", measurement.bare_steps, measurement.bare_cpu_ms),
        ("one worker", measurement.worker_steps, measurement.worker_cpu_ms),
    )
    return [
        [side, str(len(steps)), f"{min(step.total_ms for step in steps):.1f}",
         f"{_median(steps):.1f}", *(f"{median(map(part, steps)):.1f}" for part in parts),
         f"{median(cpu_ms):.1f}"]
        for side, steps, cpu_ms in sides
    ]  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=4, help=f"steps in each of {TURNS} turns")
    parser.add_argument("--backend", choices=("cpu", "cuda", "xpu"), default="cpu")
    options = parser.parse_args()
    # The worker does so too; otherwise only the bare loop would have page faults.
    keep_freed_memory()
    print_heading(f"One worker against a bare PyTorch loop, {JOB}, from update to update")
    with tempfile.TemporaryDirectory() as name:
        times = startup.measure(short_job(JOB, 1), options.backend, Path(name))
    measurement = measure(short_job(JOB, options.rounds + WARMUP_STEPS), backend=options.backend)
    header = ["side", "steps", "min ms", "median ms", "compute", "update", "rest", "cpu"]
    print_table(header, rows(measurement))
    print(f"ratio of medians {measurement.ratio:.3f}; median of step ratios "
          f"{measurement.paired_ratio:.3f}; of fastest steps {measurement.best_ratio:.3f}; "
          f"processor time {measurement.cpu_ratio:.3f}")  # fmt: skip
    print(
        f"losses differ by at most {measurement.loss_difference:.1e}; load {os.getloadavg()[0]:.1f}"
    )
    print(f"worker start to connected {times.connected_s:.1f} s, to ready {times.ready_s:.1f} s, "
          f"to the start of the run {times.started_s:.1f} s, "
          f"to the first commit {times.committed_s:.1f} s")  # fmt: skip


if __name__ == "__main__":
    main()
