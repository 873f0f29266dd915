"""A run under attack: 1,000 hostile connections from one address, beside a run and newcomers.

Turn by turn with and without the attack (`benchmarks.attack`): how long a legitimate join from
another address takes, from its connection to its Welcome; how long a step takes; how much of a
processor the coordinator takes, and how much memory more than before, at its peak. Devices sleep,
so a step is as long as its exchange and this machine make it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from benchmarks.attack import FROM
from benchmarks.machine import print_heading, print_table
from protocol.base.errors import ExitCode
from protocol.wire.messages import Goodbye
from tests.chaos.processes import Coordinator, Worker
from tests.hostile_worker import HostileWorker

WORKERS: Final = 2
SPEC: Final[dict[str, Any]] = {
    "name": "hostile",
    "task": "scripted",
    "scripted": {"blocks": 6, "block_bytes": 888_888},
    "batch": {"samples": 8, "microbatch": 1},
    "steps": 5_000,
    "checkpoint": {"every": 500},
}
MICROBATCH_MS: Final = 50.0
JOINS_A_SECOND: Final = 10
MOST_JOIN_MS: Final = 250.0
MOST_STEP_RATIO: Final = 1.05
MOST_MEMORY_MIB: Final = 24.0
"""The aims of `--check`, under attack: p99 of joins; a median step to a calm one; peak growth."""
_MIB: Final = 1 << 20


@dataclass(slots=True)
class Measured:
    """What all turns of one kind gave."""

    joins_ms: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    elapsed_s: float = 0.0
    processor_s: float = 0.0

    @property
    def join_ms(self) -> float:
        """What 99 of 100 joins take at most."""
        return quantiles(self.joins_ms, n=100, method="inclusive")[98]

    @property
    def memory_mib(self) -> float:
        """Growth at its peak."""
        return max(self.memory_bytes) / _MIB

    def row(self, name: str) -> list[str]:
        """A line of the table."""
        return [
            name, str(len(self.joins_ms)), f"{median(self.joins_ms):.0f}", f"{self.join_ms:.0f}",
            str(len(self.steps_ms)), f"{median(self.steps_ms):.1f}", f"{min(self.steps_ms):.1f}",
            f"{self.processor_s / self.elapsed_s:.1%}", f"{self.memory_mib:.1f}",
        ]  # fmt: skip


class Attacker:
    """The process of `benchmarks.attack`."""

    def __init__(self, port: int, connections: int) -> None:
        self.begun: Counter[str] = Counter()
        command = [sys.executable, "-m", "benchmarks.attack", str(port)]
        self._process = subprocess.Popen(  # noqa: S603 -- our own command
            [*command, "--connections", str(connections)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def told(self, word: str) -> None:
        """Attack, rest, or count; returns once it does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(word, file=self._process.stdin, flush=True)
        self.begun.update(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        with self._process:
            self._process.kill()


async def _joins(port: int, count: int) -> list[float]:
    """So many legitimate joins, one after the other at their times; milliseconds of each."""
    times_ms = []
    for number in range(count):
        begin_s = time.perf_counter()
        async with HostileWorker(port, f"newcomer-{number % 8}") as newcomer:
            await newcomer.join()
            elapsed_s = time.perf_counter() - begin_s
            newcomer.send(Goodbye(reason="", retry=False, exit_code=ExitCode.OK))
            await newcomer.farewell()
        times_ms.append(elapsed_s * 1e3)
        await asyncio.sleep(max(0.0, 1 / JOINS_A_SECOND - elapsed_s))
    return times_ms


def _turn(coordinator: Coordinator, port: int, seconds: float, measured: Measured) -> None:
    """Let the run go on for so long, with joins beside it."""
    since = len(coordinator.events)
    coordinator.wait_for("a commit", lambda event: event.name == "committed", since)
    begin_s, begin_cpu_s = time.monotonic(), coordinator.cpu_s
    with coordinator.memory() as growth:
        measured.joins_ms += asyncio.run(_joins(port, round(seconds * JOINS_A_SECOND)))
    measured.elapsed_s += time.monotonic() - begin_s
    measured.processor_s += coordinator.cpu_s - begin_cpu_s
    measured.memory_bytes.append(growth.peak_bytes)
    at_s = [event.at_s for event in coordinator.events[since:] if event.name == "committed"]
    measured.steps_ms += [(b - a) * 1e3 for a, b in pairwise(at_s)]


@contextlib.contextmanager
def running_cluster(directory: Path) -> Iterator[Coordinator]:
    """A run that goes on."""
    spec = directory / "run.yaml"
    spec.write_text(json.dumps(SPEC))
    arguments = ["--run", str(spec), "--expect-workers", str(WORKERS)]
    workers: list[Worker] = []
    with Coordinator(directory, arguments) as coordinator:
        coordinator.wait_for("its start", lambda event: event.name == "run_accepted")
        backend = f"scripted:{MICROBATCH_MS:g}"
        workers.extend(
            Worker(coordinator.address, f"w{number}", backend, directory)
            for number in range(WORKERS)
        )
        try:
            for step in (3, 10):
                coordinator.wait_for(f"step {step}", _is_past(coordinator, step))
            yield coordinator
        finally:
            for worker in workers:
                worker.kill()


def _is_past(coordinator: Coordinator, step: int) -> Callable[[object], bool]:
    return lambda _: coordinator.step > step


def measure(
    turns: int, seconds: float, connections: int
) -> tuple[Measured, Measured, Counter[str]]:
    """Calm and attacked turns, and how many connections of each kind the attack had."""
    calm, attacked = Measured(), Measured()
    with tempfile.TemporaryDirectory() as name, running_cluster(Path(name)) as coordinator:
        port = int(coordinator.address.rpartition(":")[2])
        attacker = Attacker(port, connections)
        try:
            _turn(coordinator, port, 1.0, Measured())
            for _ in range(turns):
                attacker.told("rest")
                _turn(coordinator, port, seconds, calm)
                attacker.told("attack")
                _turn(coordinator, port, seconds, attacked)
            attacker.told("rest")
        finally:
            attacker.close()
    return calm, attacked, attacker.begun


def step_ratio(calm: Measured, attacked: Measured) -> float:
    """How long a step takes under attack, to a calm one."""
    return median(attacked.steps_ms) / median(calm.steps_ms)


def missed(calm: Measured, attacked: Measured) -> list[str]:
    """The aims that were not reached, each with what was measured."""
    aims = [
        ("p99 of joins", attacked.join_ms, MOST_JOIN_MS, "ms"),
        ("step to a calm one", step_ratio(calm, attacked), MOST_STEP_RATIO, ""),
        ("memory", attacked.memory_mib, MOST_MEMORY_MIB, "MiB"),
    ]
    return [
        f"{what} {value:.4g}, at most {most:g} {unit}".strip()
        for what, value, most, unit in aims
        if not value <= most
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="turns of each kind")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    parser.add_argument("--connections", type=int, default=1_000)
    parser.add_argument("--check", action="store_true", help="exit 1 if an aim is missed")
    options = parser.parse_args()
    print_heading(f"{options.connections} hostile connections from {FROM} beside a run")
    calm, attacked, connections = measure(options.rounds, options.seconds, options.connections)
    head = ["", "joins", "median ms", "p99 ms", "steps", "median ms", "min ms", "processor", "MiB"]
    print_table(head, [calm.row("calm"), attacked.row("attacked")])
    print(f"step under attack to calm: {step_ratio(calm, attacked):.3f}")
    print("connections begun:", ", ".join(f"{count} {kind}" for kind, count in connections.items()))
    print(f"load {os.getloadavg()[0]:.1f}")
    if options.check and (short := missed(calm, attacked)):
        sys.exit(f"missed: {'; '.join(short)}")


if __name__ == "__main__":
    main()
