"""Workers of different speeds together, against the sum of their separate rates.

Devices are scripted: they sleep 100, 200 and 400 ms per microbatch. With equal shares, as in DDP,
all run at the speed of the slowest worker.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import Cluster, scripted_worker
from benchmarks.machine import print_heading, print_table
from benchmarks.ranks import Ranks
from benchmarks.ranks import intervals_us as rank_intervals_us
from benchmarks.timeline import intervals_us, step_times

SPEEDS_MS = (100.0, 200.0, 400.0)
GOOD_FIT = 28
"""Microbatches of a step; shares of 16, 8 and 4 take 1.6 s each."""
POOR_FIT = 12
"""Microbatches of a step; with shares of 8, 3 and 1, or 7, 3 and 2, the last worker to finish needs
800 ms. Divisible microbatches would take 686 ms.
"""
WARMUP_STEPS = 4
"""Steps that are not counted: the planner measures speeds and moves work in them."""
BLOCKS, BLOCK_BYTES = 4, 262_144


@dataclass(frozen=True, slots=True)
class Rate:
    """Microbatches per second after warm-up, of the median step and of the fastest step."""

    median: float
    fastest: float


def run_spec(microbatches: int, steps: int) -> dict[str, Any]:
    """Return a run spec with four small blocks and plain SGD."""
    return {
        "name": "uneven",
        "task": "scripted",
        "scripted": {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES},
        "batch": {"samples": microbatches, "microbatch": 1},
        "optimizer": {"name": "sgd", "lr": 1e-3},
        "steps": steps,
    }


def rate_of(microbatches: int, step_us: list[float]) -> Rate:
    """Return the rate from the time of each step."""
    return Rate(1e6 * microbatches / median(step_us), 1e6 * microbatches / min(step_us))


def measure(speeds_ms: tuple[float, ...], microbatches: int, steps: int) -> Rate:
    """Measure samestep with workers of these speeds together."""
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster([scripted_worker(ms) for ms in speeds_ms], Path(name))
        with cluster:
            run = cluster.run(run_spec(microbatches, steps + WARMUP_STEPS + 1))
        timeline = step_times(cluster.timelines(), run.start_us, run.end_us)
    return rate_of(microbatches, intervals_us(timeline[WARMUP_STEPS:]))


def measure_equal_shares(speeds_ms: tuple[float, ...], steps: int) -> Rate:
    """Measure DDP over gloo, with one microbatch per rank and step."""
    commands = [
        {
            "do": "train",
            "blocks": BLOCKS,
            "block_bytes": BLOCK_BYTES,
            "forward_ms": ms / 3,
            "block_ms": 2 * ms / 3 / BLOCKS,
            "microbatches": 1,
            "steps": steps + WARMUP_STEPS + 1,
            "bucket_mb": None,
        }
        for ms in speeds_ms
    ]
    with tempfile.TemporaryDirectory() as name, Ranks(len(speeds_ms), Path(name)) as ranks:
        step_us = rank_intervals_us(ranks.run_commands(commands))[WARMUP_STEPS:]
    return rate_of(len(speeds_ms), step_us)


def measure_alone(speeds_ms: tuple[float, ...], microbatches: int, steps: int) -> list[Rate]:
    """Measure each worker alone, with its share of the common step."""
    rates = [1 / ms for ms in speeds_ms]
    return [
        measure((ms,), round(microbatches * rate / sum(rates)), steps)
        for ms, rate in zip(speeds_ms, rates, strict=True)
    ]


def row(label: str, joint_rate: Rate, alone_sum: float, nominal_sum: float) -> list[str]:
    """Return a row of the table: microbatches per second, and the ratio to both sums."""
    return [
        label,
        f"{joint_rate.median:.2f}",
        f"{joint_rate.fastest:.2f}",
        f"{100 * joint_rate.median / alone_sum:.1f} %",
        f"{100 * joint_rate.median / nominal_sum:.1f} %",
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each case, after warm-up")
    rounds = parser.parse_args().rounds
    print_heading(f"Workers at {', '.join(f'{ms:g}' for ms in SPEEDS_MS)} ms per microbatch")
    nominal = sum(1e3 / ms for ms in SPEEDS_MS)
    rates = measure_alone(SPEEDS_MS, GOOD_FIT, rounds)
    alone_sum = sum(worker_rate.median for worker_rate in rates)
    lines = [
        row(f"alone, {ms:g} ms", worker_rate, alone_sum, nominal)
        for ms, worker_rate in zip(SPEEDS_MS, rates, strict=True)
    ]
    lines += [
        row(
            f"together, {count} microbatches", measure(SPEEDS_MS, count, rounds), alone_sum, nominal
        )
        for count in (GOOD_FIT, POOR_FIT)
    ]
    equal = measure_equal_shares(SPEEDS_MS, rounds)
    lines.append(row("DDP over gloo, equal shares", equal, alone_sum, nominal))
    header = ["case", "median /s", "max /s", f"of {alone_sum:.2f} alone", f"of {nominal:g} nominal"]
    print_table(header, lines)


if __name__ == "__main__":
    main()
