"""A coordinator and its workers as processes: the real commands, with traces.

They run on loopback or on simulated hosts (`benchmarks.hosts`); the coordinator is on the first
host.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.hosts import Host
from benchmarks.machine import peak_bytes
from benchmarks.timeline import Timeline, read_trace
from coordinator.operator.control_client import control_token
from protocol.cli.command_line import child_environment, command_of
from protocol.machine.trace import now_us

_START_TIMEOUT_S: Final = 200.0
_RUN_TIMEOUT_S: Final = 600.0
_END_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.02
_CHECK_INTERVAL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    """Times of a run's submission and of its result, on the monotonic clock."""

    start_us: float
    end_us: float


def scripted_worker(microbatch_ms: float) -> list[str]:
    """Return the command of a worker whose device sleeps for each microbatch."""
    return ["worker", "--quiet", "--backend", f"scripted:{microbatch_ms:g}"]


def run_to_end(
    spec: Path, out: Path, settings: Sequence[str] = (), *further_arguments: str, devices: int = 1
) -> dict[str, Any]:
    """Train with a coordinator and one worker on this machine; resume a run that `out` contains.

    Args:
        spec: The run spec.
        out: The run's directory.
        settings: Overrides of run spec keys, as for --set.
        further_arguments: Further arguments of the coordinator.
        devices: Number of the worker's device processes.

    Returns:
        The content of result.json.

    Raises:
        RuntimeError: The run failed; its output is above.
    """
    result = out / "result.json"
    if not result.exists():
        resume = ["--resume"] if (out / "run.json").exists() else []
        set_options = [part for setting in settings for part in ("--set", setting)]
        process = subprocess.run(  # noqa: S603 -- our own command
            [
                *command_of("coordinator"), "--run", str(spec), *set_options, *resume,
                *further_arguments,
                "--local-workers", str(devices), "--out", str(out), "--no-announce",
                "--bind", "127.0.0.1:0", "--control", "127.0.0.1:0",
            ],
            env=child_environment(), stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if process.returncode or not result.exists():
            raise RuntimeError(f"{spec.name} in {str(out)!r} failed")
    document: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return document


class Cluster:
    """One coordinator that runs jobs in order on the same workers.

    Args:
        workers: The command of each worker, without address, name and trace.
        directory: Directory of traces and results.
        coordinator: The command of the coordinator, without addresses.
        hosts: The host of each worker; the coordinator is on the first host. None: loopback.
        expected: Number of all workers' devices to wait for; 0: one per training worker.
    """

    def __init__(
        self,
        workers: Sequence[Sequence[str]],
        directory: Path,
        coordinator: Sequence[str] = ("coordinator",),
        hosts: Sequence[Host] | None = None,
        expected: int = 0,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._workers = tuple(workers)
        self._directory = directory
        self._coordinator = tuple(coordinator)
        self._hosts = hosts
        self._expected = expected
        self._processes: list[subprocess.Popen[bytes]] = []
        self._control = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, document: dict[str, Any]) -> Interval:
        """Submit a run spec and wait for its result.

        Raises:
            RuntimeError: A process ended, or the run failed, is halted or takes too long.
        """
        start_us = now_us()
        self.result(self.submit(document))
        return Interval(start_us, now_us())

    def submit(self, document: dict[str, Any]) -> str:
        """Submit a run; return its id."""
        return str(self._request("/submit", {"run": document})["run_id"])

    def result(self, run_id: str) -> dict[str, Any]:
        """Wait for a run's end; return the content of result.json.

        Raises:
            RuntimeError: As for `run`.
        """
        path = self._directory / run_id / "result.json"
        self._wait_for(path, _RUN_TIMEOUT_S)
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document

    def status(self) -> dict[str, Any]:
        """Return the status of the coordinator and its workers."""
        return self._request("/status")

    def kill(self, worker: int) -> None:
        """Kill a worker with SIGKILL, and remove it from this cluster."""
        process = self._processes.pop(1 + worker)
        process.kill()
        process.wait()

    def cpu_s(self) -> tuple[float, float]:
        """Return the processor time of the coordinator, and of all workers, since their start."""
        # The id of a process's clock, computed as in glibc's clock_getcpuclockid.
        coordinator_s, *worker_s = (
            time.clock_gettime((~process.pid << 3) | 2) for process in self._processes
        )
        return coordinator_s, sum(worker_s)

    def peak_bytes(self) -> list[int]:
        """Return the peak resident memory of each process: the coordinator, then workers."""
        return [peak_bytes(process.pid) for process in self._processes]

    def coordinator_traffic(self) -> tuple[int, int]:
        """Return the bytes that the coordinator received from the workers and sent to them."""
        workers = self.status()["workers"]
        counters = ("bytes_received", "bytes_sent")
        received_bytes, sent_bytes = (
            sum(worker[counter] for worker in workers) for counter in counters
        )
        return received_bytes, sent_bytes

    def timelines(self) -> list[Timeline]:
        """Return the trace of each worker, and of each of its devices, after the cluster has
        ended."""
        assert all(process.poll() is not None for process in self._processes)
        return [read_trace(path) for path in sorted(self._directory.glob("worker-*.trace*.json"))]

    def _start(self) -> None:
        addresses = self._directory / "addresses.json"
        hosts: Sequence[Host | None] = self._hosts or [None] * len(self._workers)
        bind_host = "127.0.0.1" if self._hosts is None else self._hosts[0].address
        expected = str(self._expected or self._trainers)
        self._spawn(
            hosts[0], *self._coordinator, "--expect-workers", expected,
            "--bind", f"{bind_host}:0", "--control", "127.0.0.1:0",
            "--out", str(self._directory), "--address-file", str(addresses),
        )  # fmt: skip
        self._wait_for(addresses, _START_TIMEOUT_S)
        address = json.loads(addresses.read_text())
        self._control = address["control"]
        for index, (command, host) in enumerate(zip(self._workers, hosts, strict=True)):
            self._spawn(
                host, *command, "--coordinator", address["data"],
                "--name", f"worker-{index}", "--trace", str(self._trace_of(index)),
            )  # fmt: skip

    @property
    def _trainers(self) -> int:
        return sum("--duty" not in command for command in self._workers)

    def _trace_of(self, index: int) -> Path:
        return self._directory / f"worker-{index}.trace.json"

    def _spawn(self, host: Host | None, module: str, *arguments: str) -> None:
        prefix = () if host is None else host.prefix
        self._processes.append(
            subprocess.Popen(  # noqa: S603 -- our own command
                [*prefix, sys.executable, "-m", module, *arguments], stdout=subprocess.DEVNULL
            )
        )

    def _wait_for(self, path: Path, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        next_check_s = time.monotonic() + _CHECK_INTERVAL_S
        while not path.exists():
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError("a process of the cluster ended; its output is above")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"expected {path.name} within {timeout_s:g} s")
            if time.monotonic() > next_check_s and self._control:
                next_check_s = time.monotonic() + _CHECK_INTERVAL_S
                status = self.status()
                if status["phase"] in ("failed", "halted"):
                    raise RuntimeError(f"the run {status['phase']}: {status['reason']}")
            time.sleep(_POLL_S)

    def _request(self, path: str, document: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(
            f"http://{self._control}{path}",
            data,
            {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {control_token(self._control)}",
            },
        )
        network = self._hosts[0].inside() if self._hosts else nullcontext()
        with network, urllib.request.urlopen(request, timeout=10) as response:  # noqa: S310 -- the coordinator's control port
            content: dict[str, Any] = json.load(response)
        return content

    def _end(self) -> None:
        """End the coordinator; its workers then end on their own."""
        if self._processes:
            self._processes[0].terminate()
        for process in self._processes:
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
