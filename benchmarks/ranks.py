"""Processes of torch.distributed over gloo that execute commands one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from benchmarks.hosts import Host


class Ranks:
    """Ranks of `benchmarks.gloo`, which execute one command at a time, as JSON lines.

    Args:
        world: Number of ranks.
        directory: Directory of the file by which ranks find each other.
        hosts: The host of each rank; None: loopback.
    """

    def __init__(self, world: int, directory: Path, hosts: Sequence[Host] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._world = world
        self._prefixes = [host.prefix for host in hosts] if hosts else [()] * world
        self._interface = "eth0" if hosts else "lo"
        self._store = directory / "store"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        environment = {
            **os.environ, "GLOO_SOCKET_IFNAME": self._interface, "OMP_NUM_THREADS": "1"
        }  # fmt: skip
        for rank, prefix in enumerate(self._prefixes):
            self._processes.append(
                subprocess.Popen(  # noqa: S603 -- our own command
                    [
                        *prefix, sys.executable, "-m", "benchmarks.gloo",
                        str(rank), str(self._world), str(self._store),
                    ],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
                )
            )  # fmt: skip
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for process in self._processes:
            if error is not None:
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()

    def run_commands(
        self, commands: dict[str, Any] | Sequence[dict[str, Any]]
    ) -> list[list[list[float]]]:
        """Send each rank its command, or all ranks the same command.

        Returns:
            For each rank, start and end of each round or step in microseconds on the monotonic
            clock.

        Raises:
            RuntimeError: A rank ended instead of answering.
        """
        rank_commands = [commands] * self._world if isinstance(commands, dict) else commands
        for process, command in zip(self._processes, rank_commands, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank {rank} ended; its output is above")
            answers.append(json.loads(line))
        return answers


def spans_us(answers: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the duration of each round, from the first rank's start to the last rank's end."""
    return [
        max(end for _, end in spans) - min(start for start, _ in spans)
        for spans in zip(*answers, strict=True)
    ]


def intervals_us(answers: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the times between the ends of consecutive steps, each at its last rank."""
    ends = [max(end for _, end in spans) for spans in zip(*answers, strict=True)]
    return [next_us - previous_us for previous_us, next_us in pairwise(ends)]
