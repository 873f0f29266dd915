"""The cost of log and journal: the same steps with and without them, alternating.

Without them, `benchmarks.undurable_coordinator` runs: the real coordinator, storing nothing. Two
workers run on two cores, so the coordinator's work slows them down.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.cluster import Cluster, Interval, scripted_worker
from benchmarks.jobs import short_job
from benchmarks.machine import print_heading, print_table
from benchmarks.timeline import intervals_us, read_trace, step_times

WORKERS: Final = 2
WARMUP_STEPS: Final = 2
OFF: Final = "off"
MODES: Final = ("full", "checkpoint")
HEADER: Final = ("job: log", "steps", "min ms", "median ms", "to off", "to off by turn",
                 "min to max", "commit wait ms", "max", "coordinator cpu",
                 "workers cpu")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """The job to train.

    Attributes:
        name: Name in the table.
        document: The run spec, without `log`.
        worker: The command of each worker.
    """

    name: str
    document: dict[str, Any]
    worker: list[str]


def classify(steps: int) -> Job:
    """Return the job of deploy/runs/sms-spam.yaml."""
    return Job("classify (sms-spam)", short_job("sms-spam", steps), ["worker", "--quiet"])


def full_training(steps: int, block_bytes: int, microbatch_ms: float) -> Job:
    """Return a job of twelve layers trained in full; gradients stream while the device sleeps."""
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
    return Job(name, document, scripted_worker(microbatch_ms))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements of one variant.

    Attributes:
        steps_ms: Time from update to update of each step.
        turns_ms: Median of each turn; turns of all variants alternate.
        waits_ms: Time that each step waited for its commit to be durable; empty if nothing is
            stored.
        coordinator_ms: Processor time of the coordinator per step, for each turn, including start
            and end of its run.
        workers_ms: Processor time of the workers per step, likewise.
    """

    steps_ms: list[float]
    turns_ms: list[float]
    waits_ms: list[float]
    coordinator_ms: list[float]
    workers_ms: list[float]

    def ratio(self, reference: Measurement) -> float:
        """Return the ratio of median step times."""
        return median(self.steps_ms) / median(reference.steps_ms)

    def turn_ratios(self, reference: Measurement) -> list[float]:
        """Return the ratios of the turns' medians, sorted."""
        return sorted(
            turn_ms / reference_ms
            for turn_ms, reference_ms in zip(self.turns_ms, reference.turns_ms, strict=True)
        )


@dataclass(slots=True)
class _Variant:
    """One cluster, its runs, and the processor time of coordinator and workers in each."""

    cluster: Cluster
    trace: Path
    mode: dict[str, str]
    intervals: list[Interval] = field(default_factory=list)
    cpu_s: list[tuple[float, float]] = field(default_factory=list)

    def run(self, document: dict[str, Any]) -> None:
        cpu_before = self.cluster.cpu_s()
        self.intervals.append(self.cluster.run(document | self.mode))
        cpu_after = self.cluster.cpu_s()
        self.cpu_s.append((cpu_after[0] - cpu_before[0], cpu_after[1] - cpu_before[1]))

    def measurement(self, steps: int) -> Measurement:
        """Return the measurements, after the cluster has ended; the first turn is not counted."""
        timelines, coordinator_events = self.cluster.timelines(), read_trace(self.trace)
        intervals = [(run.start_us, run.end_us) for run in self.intervals[1:]]
        turns_ms = [
            [span_us / 1e3 for span_us in intervals_us(step_times(timelines, *interval))][
                WARMUP_STEPS:
            ]
            for interval in intervals
        ]
        waits_ms = [
            event["dur"] / 1e3
            for event in coordinator_events.events
            if event["name"] == "sync the log"
            and any(start <= event["ts"] <= end for start, end in intervals)
        ]
        return Measurement(
            [ms for turn in turns_ms for ms in turn],
            [median(turn) for turn in turns_ms],
            [] if self.mode == {} else waits_ms,
            [s * 1e3 / steps for s, _ in self.cpu_s[1:]],
            [s * 1e3 / steps for _, s in self.cpu_s[1:]],
        )


def measure(job: Job, turns: int) -> dict[str, Measurement]:
    """Measure each variant in each turn, while the other variants are idle."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        durable_cluster, undurable_cluster = (
            (Cluster([job.worker] * WORKERS, directory / module,
                     [module, "--trace", str(directory / f"{module}.json")]),
             directory / f"{module}.json")
            for module in ("coordinator", "benchmarks.undurable_coordinator")
        )  # fmt: skip
        variants = {
            OFF: _Variant(*undurable_cluster, {}),
            **{mode: _Variant(*durable_cluster, {"log": mode}) for mode in MODES},
        }
        with durable_cluster[0], undurable_cluster[0]:
            for turn in range(turns + 1):
                # Alternate the order, so that no variant always follows the same one.
                for variant in [*variants.values()][:: 1 if turn % 2 else -1]:
                    variant.run(job.document)
        return {
            name: variant.measurement(job.document["steps"]) for name, variant in variants.items()
        }


def rows(job: Job, measurements: dict[str, Measurement]) -> list[list[str]]:
    """Return the rows of the table for one job."""
    lines = []
    for variant, measurement in measurements.items():
        ratios = measurement.turn_ratios(measurements[OFF])
        waits = [
            f"{statistic(measurement.waits_ms):.1f}" if measurement.waits_ms else ""
            for statistic in (median, max)
        ]
        name = OFF if variant == OFF else f"log: {variant}"
        lines.append(
            [f"{job.name}: {name}", str(len(measurement.steps_ms)),
             f"{min(measurement.steps_ms):.0f}", f"{median(measurement.steps_ms):.0f}",
             f"{measurement.ratio(measurements[OFF]):.3f}",
             f"{median(ratios):.3f}", f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
             *waits, f"{median(measurement.coordinator_ms):.0f}",
             f"{median(measurement.workers_ms):.0f}"]
        )  # fmt: skip
    return lines


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each variant in each turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--only", choices=("classify", "33", "100"), help="one job of the three")
    options = parser.parse_args()
    steps = options.rounds + WARMUP_STEPS + 1
    print_heading(f"Log and journal on and off, {WORKERS} workers, from update to update")
    jobs = {
        "classify": classify(steps),
        "33": full_training(steps, 2_777_776, 500.0),
        "100": full_training(steps, 8_333_332, 1000.0),
    }
    for name, job in jobs.items():
        if options.only in (None, name):
            print_table(HEADER, rows(job, measure(job, options.turns)))
            print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
