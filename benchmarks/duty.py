"""What an evaluating worker costs the training ones: their step time with and without it.

Devices are scripted, so that on two cores this measures the coordinator's work for the evaluator,
not two devices on one processor. A microbatch takes 20 ms, a held-out part a third of that.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import Cluster, scripted
from benchmarks.machine import print_heading, print_table
from benchmarks.timeline import intervals_us, step_times

MICROBATCH_MS = 20.0
MICROBATCHES = 4
EVALUATE_EVERY = 4
WARMING_STEPS = 4
BLOCKS, BLOCK_BYTES = 4, 262_144
WAYS = {
    "nobody evaluates": (0, ()),
    "a worker whose duty it is": (EVALUATE_EVERY, ("--duty", "evaluate")),
    "the worker that trains": (EVALUATE_EVERY, ()),
}


def run_spec(steps: int, evaluate_every: int) -> dict[str, Any]:
    """Four small blocks, plain SGD."""
    return {
        "name": "duty",
        "task": "scripted",
        "scripted": {"blocks": BLOCKS, "block_bytes": BLOCK_BYTES},
        "batch": {"samples": MICROBATCHES, "microbatch": 1},
        "optimizer": {"name": "sgd", "lr": 1e-3},
        "steps": steps + WARMING_STEPS + 1,
        "evaluate_every": evaluate_every,
    }


def measure(way: str, steps: int) -> list[float]:
    """Milliseconds of each step of the worker that trains."""
    evaluate_every, duty = WAYS[way]
    workers = [scripted(MICROBATCH_MS)]
    if duty:
        workers.append([*scripted(MICROBATCH_MS), *duty])
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(workers, Path(name))
        with cluster:
            run = cluster.run(run_spec(steps, evaluate_every))
        timeline = step_times(cluster.timelines()[:1], run.start_us, run.end_us)
    return [us / 1e3 for us in intervals_us(timeline[WARMING_STEPS:])]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each way in a turn")
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    print_heading(f"Steps of {MICROBATCHES} x {MICROBATCH_MS:g} ms, evaluated or not")
    measured: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.turns):
        for way in WAYS:
            measured[way] += measure(way, options.rounds)
    alone = measured["nobody evaluates"]
    lines = [
        [
            way,
            str(len(found)),
            f"{median(found):.2f}",
            f"{median(found) / median(alone):.3f}",
            f"{sum(found) / len(found) / (sum(alone) / len(alone)):.3f}",
            f"{min(found) / min(alone):.3f}",
        ]
        for way, found in measured.items()
    ]
    print_table(
        ["who evaluates", "steps", "median ms", "of medians", "of means", "of least"], lines
    )


if __name__ == "__main__":
    main()
