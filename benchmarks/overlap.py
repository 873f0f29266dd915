"""Communication that backward does not hide: a step's time minus its compute time.

Twelve blocks of 20 ms backward and 2 MB each, after 120 ms of forward; one microbatch per worker.
samestep against DistributedDataParallel over gloo, with its default and other bucket sizes. The
sides alternate, a few steps each, while the other sides are idle.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.cluster import Cluster, Interval, scripted_worker
from benchmarks.machine import print_heading, print_table
from benchmarks.ranks import Ranks
from benchmarks.ranks import intervals_us as rank_intervals_us
from benchmarks.timeline import intervals_us, step_times

TURNS = 3
WARMUP_STEPS = 3
"""Steps that are not counted: DDP rearranges its buckets after the first step."""
WORKERS = (2, 3)
BUCKETS_MB: Final = (None, 1, 2, 4, 8)
"""DDP's bucket_cap_mb, in MiB; None for its default: 1 for the first bucket, then 25."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model that sleeps instead of computing."""

    workers: int
    blocks: int = 12
    block_bytes: int = 2_000_000
    block_ms: float = 20.0

    @property
    def forward_ms(self) -> float:
        """Return the duration of forward, half that of backward."""
        return self.blocks * self.block_ms / 2

    @property
    def compute_ms(self) -> float:
        """Return the computing time of a step on every worker."""
        return self.forward_ms + self.blocks * self.block_ms

    def run_spec(self, steps: int) -> dict[str, Any]:
        """Return a run spec with one microbatch per worker and plain SGD."""
        return {
            "name": "overlap",
            "task": "scripted",
            "scripted": {"blocks": self.blocks, "block_bytes": self.block_bytes},
            "batch": {"samples": self.workers, "microbatch": 1},
            "optimizer": {"name": "sgd", "lr": 1e-3},
            "steps": steps,
        }

    def train_command(self, steps: int, bucket_mb: int | None) -> dict[str, Any]:
        """Return the same job as a command for `benchmarks.gloo`."""
        return {
            "do": "train",
            "blocks": self.blocks,
            "block_bytes": self.block_bytes,
            "forward_ms": self.forward_ms,
            "block_ms": self.block_ms,
            "microbatches": 1,
            "steps": steps,
            "bucket_mb": bucket_mb,
        }


ExposedMs = dict[str, list[float]]
"""By side: milliseconds of each step beyond its compute time."""


def measure(case: Case, rounds: int, turns: int = TURNS) -> ExposedMs:
    """Measure all sides alternately, `rounds` steps in each turn; the first side is samestep."""
    steps = rounds + WARMUP_STEPS + 1
    runs: list[Interval] = []
    step_us: dict[str, list[float]] = {"samestep": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cluster = Cluster([scripted_worker(case.compute_ms)] * case.workers, directory / "samestep")
        with cluster, Ranks(case.workers, directory / "gloo") as ranks:
            for _ in range(turns):
                runs.append(cluster.run(case.run_spec(steps)))
                for bucket_mb in BUCKETS_MB:
                    answers = ranks.run_commands(case.train_command(steps, bucket_mb))
                    rank_us = rank_intervals_us(answers)[WARMUP_STEPS:]
                    step_us.setdefault(_side_name(bucket_mb), []).extend(rank_us)
        timelines = cluster.timelines()
    for run in runs:
        steps_of_run = step_times(timelines, run.start_us, run.end_us)
        step_us["samestep"] += intervals_us(steps_of_run[WARMUP_STEPS:])
    return {
        side: [span_us / 1e3 - case.compute_ms for span_us in spans]
        for side, spans in step_us.items()
    }


def _side_name(bucket_mb: int | None) -> str:
    return "DDP, default buckets" if bucket_mb is None else f"DDP, buckets of {bucket_mb} MiB"


def rows(case: Case, exposed_ms: ExposedMs) -> list[list[str]]:
    """Return the rows of the table for one case."""
    reference = median(exposed_ms[_side_name(None)])
    return [
        [
            f"{case.workers} workers: {side}",
            str(len(ms)),
            f"{min(ms):.1f}",
            f"{median(ms):.1f}",
            f"{100 * median(ms) / case.compute_ms:.1f} %",
            f"{median(ms) / reference:.2f}",
        ]
        for side, ms in exposed_ms.items()
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=8, help=f"steps in each of {TURNS} turns")
    rounds = parser.parse_args().rounds
    cases = [Case(workers) for workers in WORKERS]
    print_heading(f"Exposed communication of steps that compute for {cases[0].compute_ms:g} ms")
    lines = [line for case in cases for line in rows(case, measure(case, rounds))]
    header = ["side", "steps", "min ms", "median ms", "of compute", "to default DDP"]
    print_table(header, lines)


if __name__ == "__main__":
    main()
