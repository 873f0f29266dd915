"""A run under attack: 1,000 hostile connections from one address, while workers train and join.

Measures alternately with and without the attack (`benchmarks.attack`): the time of a legitimate
join from another address, from its connection to its Welcome; the time of a step; the coordinator's
share of a processor, and its peak growth of memory. Devices sleep, so the exchange and this machine
determine the time of a step.
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

from benchmarks.attack import SOURCE_ADDRESS
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
MAX_JOIN_MS: Final = 250.0
MAX_STEP_RATIO: Final = 1.05
MAX_MEMORY_MIB: Final = 24.0
"""Limits of `--check` under attack: 99th percentile of joins; step time relative to an undisturbed
step; peak growth of memory."""
_MIB: Final = 1 << 20


@dataclass(slots=True)
class Measurement:
    """The measurements of all turns with the attack, or of all turns without."""

    joins_ms: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    elapsed_s: float = 0.0
    processor_s: float = 0.0

    @property
    def join_p99_ms(self) -> float:
        """Return the 99th percentile of the join times."""
        return quantiles(self.joins_ms, n=100, method="inclusive")[98]

    @property
    def peak_growth_mib(self) -> float:
        """Return the peak growth of the coordinator's memory."""
        return max(self.memory_bytes) / _MIB

    def row(self, name: str) -> list[str]:
        """Return a row of the table."""
        return [
            name, str(len(self.joins_ms)), f"{median(self.joins_ms):.0f}",
            f"{self.join_p99_ms:.0f}",
            str(len(self.steps_ms)), f"{median(self.steps_ms):.1f}", f"{min(self.steps_ms):.1f}",
            f"{self.processor_s / self.elapsed_s:.1%}", f"{self.peak_growth_mib:.1f}",
        ]  # fmt: skip


class Attacker:
    """The process of `benchmarks.attack`."""

    def __init__(self, port: int, connections: int) -> None:
        self.attempts: Counter[str] = Counter()
        command = [sys.executable, "-m", "benchmarks.attack", str(port)]
        self._process = subprocess.Popen(  # noqa: S603 -- our own command
            [*command, "--connections", str(connections)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def send_command(self, word: str) -> None:
        """Send `attack`, `rest` or `count`; add the connections since the last command."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(word, file=self._process.stdin, flush=True)
        self.attempts.update(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        with self._process:
            self._process.kill()


async def _measure_joins(port: int, count: int) -> list[float]:
    """Join at regular times; return the milliseconds of each join."""
    times_ms = []
    for number in range(count):
        begin_s = time.perf_counter()
        async with HostileWorker(port, f"newcomer-{number % 8}") as newcomer:
            await newcomer.join()
            elapsed_s = time.perf_counter() - begin_s
            newcomer.send(Goodbye(reason="", retry=False, exit_code=ExitCode.OK))
            await newcomer.wait_for_goodbye()
        times_ms.append(elapsed_s * 1e3)
        await asyncio.sleep(max(0.0, 1 / JOINS_A_SECOND - elapsed_s))
    return times_ms


def _measure_turn(
    coordinator: Coordinator, port: int, seconds: float, measurement: Measurement
) -> None:
    """Measure the run for some seconds, with joins at the same time."""
    first_event = len(coordinator.events)
    coordinator.wait_for("a commit", lambda event: event.name == "committed", first_event)
    begin_s, begin_cpu_s = time.monotonic(), coordinator.cpu_s
    with coordinator.memory() as growth:
        measurement.joins_ms += asyncio.run(_measure_joins(port, round(seconds * JOINS_A_SECOND)))
    measurement.elapsed_s += time.monotonic() - begin_s
    measurement.processor_s += coordinator.cpu_s - begin_cpu_s
    measurement.memory_bytes.append(growth.peak_bytes)
    commit_times_s = [
        event.at_s for event in coordinator.events[first_event:] if event.name == "committed"
    ]
    measurement.steps_ms += [
        (next_s - previous_s) * 1e3 for previous_s, next_s in pairwise(commit_times_s)
    ]


@contextlib.contextmanager
def running_cluster(directory: Path) -> Iterator[Coordinator]:
    """Start a run that does not end by itself."""
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
) -> tuple[Measurement, Measurement, Counter[str]]:
    """Return the measurements without and with the attack, and its connections by attack."""
    undisturbed, attacked = Measurement(), Measurement()
    with tempfile.TemporaryDirectory() as name, running_cluster(Path(name)) as coordinator:
        port = int(coordinator.address.rpartition(":")[2])
        attacker = Attacker(port, connections)
        try:
            _measure_turn(coordinator, port, 1.0, Measurement())
            for _ in range(turns):
                attacker.send_command("rest")
                _measure_turn(coordinator, port, seconds, undisturbed)
                attacker.send_command("attack")
                _measure_turn(coordinator, port, seconds, attacked)
            attacker.send_command("rest")
        finally:
            attacker.close()
    return undisturbed, attacked, attacker.attempts


def step_ratio(undisturbed: Measurement, attacked: Measurement) -> float:
    """Return the ratio of a step's median time under attack to that without."""
    return median(attacked.steps_ms) / median(undisturbed.steps_ms)


def missed_limits(undisturbed: Measurement, attacked: Measurement) -> list[str]:
    """Return the missed limits, each with its measurement."""
    limits = [
        ("p99 of joins", attacked.join_p99_ms, MAX_JOIN_MS, "ms"),
        ("ratio to an undisturbed step", step_ratio(undisturbed, attacked), MAX_STEP_RATIO, ""),
        ("memory", attacked.peak_growth_mib, MAX_MEMORY_MIB, "MiB"),
    ]
    return [
        f"{name} {value:.4g}, at most {limit:g} {unit}".strip()
        for name, value, limit, unit in limits
        if not value <= limit
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="turns of each kind")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    parser.add_argument("--connections", type=int, default=1_000)
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit is exceeded")
    options = parser.parse_args()
    print_heading(f"{options.connections} hostile connections from {SOURCE_ADDRESS} during a run")
    undisturbed, attacked, connections = measure(
        options.rounds, options.seconds, options.connections
    )
    header = [
        "",
        "joins",
        "median ms",
        "p99 ms",
        "steps",
        "median ms",
        "min ms",
        "processor",
        "MiB",
    ]
    print_table(header, [undisturbed.row("undisturbed"), attacked.row("attacked")])
    print(f"step under attack to undisturbed: {step_ratio(undisturbed, attacked):.3f}")
    print(
        "connections opened:", ", ".join(f"{count} {kind}" for kind, count in connections.items())
    )
    print(f"load {os.getloadavg()[0]:.1f}")
    if options.check and (violations := missed_limits(undisturbed, attacked)):
        sys.exit(f"limits exceeded: {'; '.join(violations)}")


if __name__ == "__main__":
    main()
