"""The exchange of a step: the mean of N workers' gradients, against gloo's all-reduce.

samestep runs its real commands: blocks are streamed, checked for non-finite values, summed along
the tree, scaled, broadcast, digested and committed. gloo runs one all-reduce of one tensor and a
division. The sides alternate, a few rounds each, while the other is idle.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.machine import print_heading, print_table
from benchmarks.ranks import Ranks, spans_us
from benchmarks.timeline import step_times
from protocol.spec.sections.exchange import Precision, Topology

TURNS = 5
WARMUP_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """The job whose gradients are averaged: blocks of `block_bytes` over a number of workers.

    Attributes:
        quiet_ms: Time that workers wait in each step before all gradients are ready, enough for the
            previous step's update and digest.
        precision: Precision of samestep's messages in both directions; gloo uses float32.
        topology: `star`: the coordinator averages; `sharded`: the workers do.
    """

    workers: int
    blocks: int
    block_bytes: int
    quiet_ms: float
    precision: Precision = "float32"
    topology: Topology = "star"

    @property
    def payload_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def run_spec(self, steps: int) -> dict[str, Any]:
        """Return a run spec with one microbatch per worker and plain SGD."""
        return {
            "name": "sync",
            "task": "scripted",
            "scripted": {"blocks": self.blocks, "block_bytes": self.block_bytes},
            "batch": {"samples": self.workers, "microbatch": 1},
            "optimizer": {"name": "sgd", "lr": 1e-3},
            "exchange": {
                "precision": self.precision,
                "averages": self.precision,
                "topology": self.topology,
            },
            "steps": steps,
        }


CASES = (Case(3, 6, 883_332, 200), Case(4, 12, 8_333_332, 1500))
"""5.3 MB as in LoRA of a small encoder; 100 MB in twelve layers."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Milliseconds of each round over all ranks, from the first start to the last end.

    Attributes:
        averaged_ms: Time from the first payload sent to the last average received.
        committed_ms: Time to the start of the update, including norm, digest, agreement and commit.
        gloo_ms: Time of all-reduce and division.
        uneven_rounds: Number of omitted rounds, in which some worker sent no payload.
    """

    averaged_ms: list[float]
    committed_ms: list[float]
    gloo_ms: list[float]
    uneven_rounds: int

    @property
    def ratio(self) -> float:
        """Return the ratio of medians, samestep to gloo."""
        return median(self.averaged_ms) / median(self.gloo_ms)


def measure(
    case: Case, rounds: int, turns: int = TURNS, *, are_separate: bool = False
) -> Measurement:
    """Measure both sides alternately, `rounds` rounds in each turn, plus warm-up rounds.

    Args:
        case: The job whose gradients are averaged.
        rounds: Rounds in each turn.
        turns: Number of turns.
        are_separate: Whether each device is a separate worker; otherwise all are one worker.
    """
    intervals, gloo_us = [], []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        worker = ["benchmarks.ready_worker", "--quiet-ms", str(case.quiet_ms)]
        multi_device_worker = [[*worker, "--devices", str(case.workers)]]
        workers = [worker] * case.workers if are_separate else multi_device_worker
        cluster = Cluster(workers, directory / "ours", expected=case.workers)
        with cluster, Ranks(case.workers, directory / "gloo") as ranks:
            for _ in range(turns):
                intervals.append(cluster.run(case.run_spec(rounds + WARMUP_ROUNDS)))
                command = {
                    "do": "all_reduce",
                    "payload_bytes": case.payload_bytes,
                    "rounds": rounds + WARMUP_ROUNDS,
                    "quiet_ms": case.quiet_ms,
                }
                gloo_us += spans_us(ranks.run_commands(command))[WARMUP_ROUNDS:]
        timelines = cluster.timelines()
    steps = [
        step
        for interval in intervals
        for step in step_times(timelines, interval.start_us, interval.end_us)[WARMUP_ROUNDS:]
    ]
    even_steps = [step for step in steps if step.senders == case.workers]
    return Measurement(
        [(step.last_receive_us - step.first_send_us) / 1e3 for step in even_steps],
        [(step.last_apply_us - step.first_send_us) / 1e3 for step in even_steps],
        [span_us / 1e3 for span_us in gloo_us],
        len(steps) - len(even_steps),
    )


def rows(case: Case, measurement: Measurement) -> list[list[str]]:
    """Return the rows of the table for one case."""
    label = f"{case.payload_bytes / 1e6:.1f} MB over {case.workers}"
    reference = median(measurement.gloo_ms)
    series: Sequence[tuple[str, list[float]]] = (
        ("gloo all-reduce, division", measurement.gloo_ms),
        ("samestep, last average received", measurement.averaged_ms),
        ("samestep, commit received", measurement.committed_ms),
    )
    return [
        [f"{label}: {side}", str(len(ms)), f"{min(ms):.1f}", f"{median(ms):.1f}",
         f"{median(ms) / reference:.2f}"]
        for side, ms in series
    ]  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10, help=f"in each of {TURNS} turns")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--apart", action="store_true", help="each device is a separate worker")
    parser.add_argument("--cases", type=int, default=len(CASES), help="number of cases to measure")
    options = parser.parse_args()
    print_heading("Mean of N workers' gradients on loopback, per round, max over ranks")
    lines = [
        line
        for case in CASES[: options.cases]
        for line in rows(
            case, measure(case, options.rounds, options.turns, are_separate=options.apart)
        )
    ]
    print_table(["what", "rounds", "min ms", "median ms", "ratio"], lines)


if __name__ == "__main__":
    main()
