"""Rounds of replicas against torchft's DiLoCo: their duration, and the result after a kill.

    python -m benchmarks.diloco --torchft PYTHON   # an interpreter with torchft and torch

Both sides run three replicas on loopback, one process each, with inner steps of a fixed duration.
In the second run one process is killed halfway through a round and does not return. The final state
is compared with that of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.cluster import Cluster, scripted_worker
from benchmarks.machine import print_heading, print_table
from coordinator.run.outputs.events import Committed
from coordinator.storage.directory.journal import verify_journal

_TORCHFT_SCRIPT: Final = Path(__file__).with_name("torchft_side.py")
_REPLICAS: Final = 3
_POLL_INTERVAL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """The job to train."""

    blocks: int = 12
    block_elements: int = 250_000
    inner_steps: int = 20
    inner_ms: float = 100.0
    rounds: int = 6

    @property
    def kill_round(self) -> int:
        """Return the number of the round in which a process is killed, from 0."""
        return self.rounds // 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run.

    Attributes:
        round_ms: Mean duration of a round, from the second round on.
        digest: Digest of the final parameters.
        replicas_counted: Number of replicas in the last round's average.
    """

    round_ms: float
    digest: str
    replicas_counted: int


def run_samestep(case: Case, *, kill: bool, directory: Path) -> Outcome:
    """Run a coordinator and three workers."""
    spec: dict[str, Any] = {
        "name": "diloco", "task": "scripted",
        "scripted": {"blocks": case.blocks, "block_bytes": 4 * case.block_elements},
        "batch": {"samples": 1, "microbatch": 1},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "replicas": {"count": _REPLICAS, "inner_steps": case.inner_steps},
        "checkpoint": {"every": 0},
        "evaluate_every": 0,
    }  # fmt: skip
    with Cluster([scripted_worker(case.inner_ms)] * _REPLICAS, directory) as cluster:
        run_id = cluster.submit({**spec, "steps": case.rounds})
        if kill:
            _wait_for_mid_round(cluster, case)
            cluster.kill(_REPLICAS - 1)
        result = cluster.result(run_id)
    ends = [
        datetime.fromisoformat(entry.time)
        for entry in verify_journal(directory / run_id / "journal.jsonl").entries
        if isinstance(entry.record, Committed)
    ]
    round_ms = 1e3 * (ends[-1] - ends[0]).total_seconds() / (case.rounds - 1)
    return Outcome(round_ms, result["weights_digest"], _REPLICAS)


def _wait_for_mid_round(cluster: Cluster, case: Case) -> None:
    """Wait until the last worker is halfway through its inner phase."""
    name = f"worker-{_REPLICAS - 1}"
    while True:
        status = cluster.status()
        phases = {worker["name"]: worker["inner_phase"] for worker in status["workers"]}
        phase = phases.get(name)  # the worker may not have connected yet
        is_half_way = phase is not None and phase["inner_step"] >= case.inner_steps // 2
        if is_half_way and status["step"] >= case.kill_round:
            return
        time.sleep(_POLL_INTERVAL_S)


def run_torchft(python: Path, case: Case, *, kill: bool) -> Outcome:
    """Run a lighthouse and three replicas.

    Raises:
        RuntimeError: A process ended early; its output is above.
    """
    with ExitStack() as stack:
        lighthouse = stack.enter_context(_start_torchft(python, "lighthouse"))
        settings = {
            "inner_ms": case.inner_ms, "blocks": case.blocks, "rounds": case.rounds,
            "block_elements": case.block_elements, "inner_steps": case.inner_steps,
            "replicas": _REPLICAS, "lighthouse": _next_message(lighthouse)["address"],
        }  # fmt: skip
        replicas = [
            stack.enter_context(_start_torchft(python, json.dumps({**settings, "replica": number})))
            for number in range(_REPLICAS)
        ]
        for replica in replicas:
            _next_message(replica)  # the replica is ready
        for replica in replicas:
            assert replica.stdin is not None
            replica.stdin.close()
        if kill:
            while _next_message(replicas[-1]).get("halfway") != case.kill_round:
                pass
            replicas[-1].kill()
        ends = [line for line in _lines(replicas[0]) if "round" in line]
    if len(ends) != case.rounds:
        raise RuntimeError("a torchft replica ended early; its output is above")
    round_ms = 1e3 * (ends[-1]["at_s"] - ends[0]["at_s"]) / (case.rounds - 1)
    return Outcome(round_ms, ends[-1]["digest"], ends[-1]["taking_part"])


@contextmanager
def _start_torchft(python: Path, argument: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(  # noqa: S603 -- our own script
        [str(python), str(_TORCHFT_SCRIPT), argument],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def _lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    return (json.loads(line) for line in process.stdout if line.startswith("{"))


def _next_message(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = next(_lines(process), None)
    if line is None:
        raise RuntimeError(
            "a torchft process ended; run benchmarks/torchft_side.py by hand to see why"
        )
    return line


def rows(case: Case, runs: dict[str, tuple[Outcome, Outcome]]) -> list[list[str]]:
    """Return a row for each side, from its undisturbed run and its run with a kill."""
    table = []
    for side, (undisturbed, with_kill) in runs.items():
        exchange_ms = undisturbed.round_ms - case.inner_steps * case.inner_ms
        digest_text = "the same" if with_kill.digest == undisturbed.digest else "different"
        table.append([
            side, f"{undisturbed.round_ms:.0f} ms", f"{exchange_ms:.0f} ms",
            f"{with_kill.round_ms:.0f} ms", f"{with_kill.replicas_counted} of {_REPLICAS}",
            digest_text,
        ])  # fmt: skip
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the module documents it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diloco")
    parser.add_argument("--torchft", type=Path, required=True, help="an interpreter with torchft")
    parser.add_argument("--rounds", type=int, default=Case().rounds)
    options = parser.parse_args(arguments)
    case = Case(rounds=options.rounds)
    undisturbed = run_torchft(options.torchft, case, kill=False)
    runs = {"torchft": (undisturbed, run_torchft(options.torchft, case, kill=True))}
    with tempfile.TemporaryDirectory() as name:
        undisturbed = run_samestep(case, kill=False, directory=Path(name) / "calm")
        runs["samestep"] = (
            undisturbed,
            run_samestep(case, kill=True, directory=Path(name) / "killed"),
        )
    state_mb = 4 * case.blocks * case.block_elements / 1e6
    print_heading(
        f"{_REPLICAS} replicas, {state_mb:.0f} MB, {case.inner_steps} inner steps of "
        f"{case.inner_ms:.0f} ms, {case.rounds} rounds; a kill in the middle of round "
        f"{case.kill_round + 1}"
    )
    header = [
        "",
        "round",
        "of which exchange",
        "round with a kill",
        "replicas in the last round",
        "final state",
    ]
    print_table(header, rows(case, runs))


if __name__ == "__main__":
    main()
