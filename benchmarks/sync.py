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
WARMING_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """What is averaged: blocks of so many bytes over so many workers.

    Attributes:
        quiet_ms: How long workers wait in each step before all gradients are there: enough for
            what is left of the step before (update, digest) to be over.
        precision: Of ours, in both directions; gloo's is float32.
        way: Whether all goes by way of the coordinator, or workers average among themselves.
    """

    workers: int
    blocks: int
    block_bytes: int
    quiet_ms: float
    precision: Precision = "float32"
    way: Topology = "star"

    @property
    def payload_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def run_spec(self, steps: int) -> dict[str, Any]:
        """One microbatch each, plain SGD."""
        return {
            "name": "sync",
            "task": "scripted",
            "scripted": {"blocks": self.blocks, "block_bytes": self.block_bytes},
            "batch": {"samples": self.workers, "microbatch": 1},
            "optimizer": {"name": "sgd", "lr": 1e-3},
            "exchange": {
                "precision": self.precision,
                "averages": self.precision,
                "topology": self.way,
            },
            "steps": steps,
        }


CASES = (Case(3, 6, 883_332, 200), Case(4, 12, 8_333_332, 1500))
"""5.3 MB as in LoRA of a small encoder; 100 MB in twelve layers."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of each round: over all ranks, from the first start to the last end.

    Attributes:
        averaged_ms: From the first payload sent to the last averaged chunk received.
        committed_ms: To the start of the update, thus with norm, digest, agreement and commit.
        gloo_ms: All-reduce and division.
        uneven_rounds: Left out, since not every worker had a part of the step.
    """

    averaged_ms: list[float]
    committed_ms: list[float]
    gloo_ms: list[float]
    uneven_rounds: int

    @property
    def ratio(self) -> float:
        """Ours to gloo's, of medians."""
        return median(self.averaged_ms) / median(self.gloo_ms)


def measure(case: Case, rounds: int, turns: int = TURNS, *, apart: bool = False) -> Measured:
    """Both ways by turns, `rounds` rounds in each turn, warming rounds not counted.

    Args:
        case: What is averaged.
        rounds: In each turn.
        turns: How many.
        apart: Each of ours is a worker of its own; else all are devices of one host.
    """
    intervals, gloo_us = [], []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        worker = ["benchmarks.ready_worker", "--quiet-ms", str(case.quiet_ms)]
        together = [[*worker, "--devices", str(case.workers)]]
        ours = [worker] * case.workers if apart else together
        cluster = Cluster(ours, directory / "ours", expected=case.workers)
        with cluster, Ranks(case.workers, directory / "gloo") as ranks:
            for _ in range(turns):
                intervals.append(cluster.run(case.run_spec(rounds + WARMING_ROUNDS)))
                command = {
                    "do": "all_reduce",
                    "payload_bytes": case.payload_bytes,
                    "rounds": rounds + WARMING_ROUNDS,
                    "quiet_ms": case.quiet_ms,
                }
                gloo_us += spans_us(ranks.ask(command))[WARMING_ROUNDS:]
        timelines = cluster.timelines()
    steps = [
        step
        for interval in intervals
        for step in step_times(timelines, interval.start_us, interval.end_us)[WARMING_ROUNDS:]
    ]
    even = [step for step in steps if step.senders == case.workers]
    return Measured(
        [(step.last_receive_us - step.first_send_us) / 1e3 for step in even],
        [(step.last_apply_us - step.first_send_us) / 1e3 for step in even],
        [us / 1e3 for us in gloo_us],
        len(steps) - len(even),
    )


def rows(case: Case, measured: Measured) -> list[list[str]]:
    """The lines of the table for one case."""
    what = f"{case.payload_bytes / 1e6:.1f} MB over {case.workers}"
    reference = median(measured.gloo_ms)
    ways: Sequence[tuple[str, list[float]]] = (
        ("gloo all-reduce, division", measured.gloo_ms),
        ("ours, last average received", measured.averaged_ms),
        ("ours, commit received", measured.committed_ms),
    )
    return [
        [f"{what}: {way}", str(len(ms)), f"{min(ms):.1f}", f"{median(ms):.1f}",
         f"{median(ms) / reference:.2f}"]
        for way, ms in ways
    ]  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10, help=f"in each of {TURNS} turns")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--apart", action="store_true", help="each a worker of its own")
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many")
    options = parser.parse_args()
    print_heading("Mean of N workers' gradients on loopback, per round, max over ranks")
    lines = [
        line
        for case in CASES[: options.cases]
        for line in rows(case, measure(case, options.rounds, options.turns, apart=options.apart))
    ]
    print_table(["what", "rounds", "min ms", "median ms", "ratio"], lines)


if __name__ == "__main__":
    main()
