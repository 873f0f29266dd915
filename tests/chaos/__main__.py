"""Chaos with real processes, of any size: see `--help`."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.machine import describe, print_table
from tests.chaos.campaign import Outcome, fault_table, run_campaign
from tests.chaos.plan import Size

_STEP_S: Final = 0.1
_COORDINATOR_S: Final = 2.0
_WORKER_S: Final = 0.5
_STALL_S: Final = 1.0
"""Rough duration of a step and of each fault, from which --minutes derives the number of steps."""


def size_for(minutes: float, coordinator_kills: int, worker_kills: int, stalls: int) -> Size:
    """Return a size whose steps fill the time that the faults leave."""
    drains = worker_kills // 10
    faults = coordinator_kills + worker_kills + stalls + drains
    lost_s = _COORDINATOR_S * coordinator_kills + _STALL_S * stalls
    lost_s += _WORKER_S * (worker_kills + drains)
    steps = max(int((minutes * 60 - lost_s) / _STEP_S), 2 * faults + 50)
    return Size(steps, coordinator_kills, worker_kills, stalls, drains)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Kill and stop coordinator and workers; compare with an undisturbed run.",
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="approximate duration [3]")
    parser.add_argument("--coordinator-kills", type=int, default=10)
    parser.add_argument("--worker-kills", type=int, default=40)
    parser.add_argument("--stalls", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep run and logs in this new directory")
    parser.add_argument(
        "--log", choices=("full", "checkpoint"), default="full", help="log mode of the run"
    )
    parser.add_argument(
        "--keep-log", action="store_true", help="keep all gradients: the audit replays every step"
    )
    parser.add_argument(
        "--sharded", action="store_true", help="workers average slices among themselves"
    )
    options = parser.parse_args()
    size = size_for(
        options.minutes, options.coordinator_kills, options.worker_kills, options.stalls
    )
    print(
        f"seed {options.seed}: {size.steps} steps, {size.fault_counts.total()} faults; {describe()}"
    )
    with tempfile.TemporaryDirectory() as name:
        directory = options.keep or Path(name)
        outcome = run_campaign(
            directory,
            options.seed,
            size,
            options.log,
            keep_log=options.keep_log,
            sharded=options.sharded,
        )
    _print(outcome)


def _print(outcome: Outcome) -> None:
    print_table(*fault_table(outcome))
    print(f"steps committed {outcome.steps}, repeated {outcome.repeated_commits}; "
          f"a step without faults takes {outcome.step_s:.3f} s")  # fmt: skip
    print(
        f"starts of the coordinator {outcome.starts}; "
        f"interrupted checkpoints {outcome.interrupted_checkpoints}; "
        f"chunks assigned to owners {outcome.owner_assignments} times"
    )
    seconds, fault_type, step = outcome.slowest
    print(f"slowest: {fault_type}, until the commit of step {step}, {seconds:.2f} s")
    print(f"{outcome.wall_s:.0f} s from the first commit to the end; load {os.getloadavg()[0]:.1f}")
    print(f"weights digest {outcome.weights_digest} and all losses: those of the undisturbed run")
    print(f"audit: {outcome.audit}")


if __name__ == "__main__":
    main()
