"""The cost of an evaluating worker for the training worker: step times with and without evaluation.

Devices are scripted, so that on two cores this measures the coordinator's work for the evaluator,
not two devices on one processor. A microbatch takes 20 ms, an evaluation part a third of this.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import Cluster, scripted_worker
from benchmarks.machine import print_heading, print_table
from benchmarks.timeline import intervals_us, step_times

MICROBATCH_MS = 20.0
MICROBATCHES = 4
EVALUATE_EVERY = 4
WARMUP_STEPS = 4
BLOCKS, BLOCK_BYTES = 4, 262_144
SETUPS = {
    "nobody evaluates": (0, ()),
    "a worker with duty evaluate": (EVALUATE_EVERY, ("--duty", "evaluate")),
    "the worker that trains": (EVALUATE_EVERY, ()),
}


def run_spec(steps: int, evaluate_every: int) -> dict[str, Any]:
    """Return a run spec with four small blocks and plain SGD."""
    return {
        "name": "duty",
        "task": "scripted",
        "scripted": {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES},
        "batch": {"samples": MICROBATCHES, "microbatch": 1},
        "optimizer": {"name": "sgd", "lr": 1e-3},
        "steps": steps + WARMUP_STEPS + 1,
        "evaluate_every": evaluate_every,
    }


def measure(setup: str, steps: int) -> list[float]:
    """Return the milliseconds of each step of the training worker."""
    evaluate_every, duty = SETUPS[setup]
    workers = [scripted_worker(MICROBATCH_MS)]
    if duty:
        workers.append([*scripted_worker(MICROBATCH_MS), *duty])
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(workers, Path(name))
        with cluster:
            run = cluster.run(run_spec(steps, evaluate_every))
        timeline = step_times(cluster.timelines()[:1], run.start_us, run.end_us)
    return [span_us / 1e3 for span_us in intervals_us(timeline[WARMUP_STEPS:])]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each setup in a turn")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    print_heading(f"Steps of {MICROBATCHES} x {MICROBATCH_MS:g} ms, evaluated or not")
    times_by_setup: dict[str, list[float]] = {setup: [] for setup in SETUPS}
    for _ in range(options.turns):
        for setup in SETUPS:
            times_by_setup[setup] += measure(setup, options.rounds)
    alone_ms = times_by_setup["nobody evaluates"]
    lines = [
        [
            setup,
            str(len(times_ms)),
            f"{median(times_ms):.2f}",
            f"{median(times_ms) / median(alone_ms):.3f}",
            f"{sum(times_ms) / len(times_ms) / (sum(alone_ms) / len(alone_ms)):.3f}",
            f"{min(times_ms) / min(alone_ms):.3f}",
        ]
        for setup, times_ms in times_by_setup.items()
    ]
    print_table(
        ["who evaluates", "steps", "median ms", "ratio of medians", "of means", "of minima"], lines
    )


if __name__ == "__main__":
    main()
