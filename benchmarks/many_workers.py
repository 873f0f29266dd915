"""One coordinator and up to 256 workers: joins, steps per second, memory, and the status.

`python -m benchmarks.many_workers [--workers N ...] [--topologies T ...] [--steps N]`. The workers
are real ones with scripted devices, 32 in a process, in network namespaces (`benchmarks.hosts`,
needs root), so that they use TLS over TCP. They share this machine's processor with the
coordinator, so the coordinator's own processor time per step is measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.hosts import Host, Network, why_unavailable
from benchmarks.machine import peak_bytes, print_heading, print_table
from coordinator.operator.control_client import control_token
from protocol.base.address import parse_address
from worker.join.credentials import WorkerCredentials
from worker.local_device import LocalDevice
from worker.shell.client import Client, Target

_WORKERS_PER_PROCESS: Final = 32
_LINK_MBIT: Final = 10_000
_START_TIMEOUT_S: Final = 120.0
_RUN_TIMEOUT_S: Final = 500.0
_POLL_S: Final = 0.05
BLOCKS: Final = 4


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurements for one number of workers.

    Attributes:
        join_s: Time from the start of the first worker's process to the last join.
        ready_s: Time from the submission to the first step.
        steps_per_s: Rate from the first step to the last.
        cpu_ms: Processor time of the coordinator per step.
        peak_mb: Peak resident memory of the coordinator.
        status_ms: Time of the slowest of the first ten status requests during training.
        load: Load average at the end.
    """

    join_s: float
    ready_s: float
    steps_per_s: float
    cpu_ms: float
    peak_mb: float
    status_ms: float
    load: float


def run_spec(workers: int, topology: str, steps: int, payload_bytes: int) -> dict[str, Any]:
    """Return a run spec with one microbatch per worker."""
    return {
        "name": "many-workers",
        "task": "scripted",
        "scripted": {"blocks": BLOCKS, "block_bytes": payload_bytes // BLOCKS // 4 * 4},
        "batch": {"samples": workers, "microbatch": 1},
        "optimizer": {"name": "sgd", "lr": 1e-3},
        "steps": steps,
        "exchange": {"topology": topology},
        "log": "checkpoint",
    }


class Coordinator:
    """A coordinator process, controlled through its control port.

    Args:
        host: The host on which the coordinator listens.
        directory: Directory of the coordinator's files.
        workers: Number of workers that a run waits for.
    """

    def __init__(self, host: Host, directory: Path, workers: int) -> None:
        self._host, addresses = host, directory / "address.json"
        self.process = subprocess.Popen(  # noqa: S603 -- our own command
            [
                *host.prefix, sys.executable, "-m", "coordinator",
                "--expect-workers", str(workers), "--bind", f"{host.address}:0",
                "--control", "127.0.0.1:0", "--out", str(directory / "runs"), "--no-announce",
                "--address-file", str(addresses),
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        _wait(addresses.exists, _START_TIMEOUT_S)
        addresses_document = json.loads(addresses.read_text())
        self.address, self._control = addresses_document["data"], addresses_document["control"]

    def request(self, path: str, document: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request; return the JSON object of the response."""
        data = None if document is None else json.dumps(document).encode()
        token = control_token(self._control)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"http://{self._control}{path}", data, headers)
        with self._host.inside(), urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            content: dict[str, Any] = json.load(response)
        return content

    def cpu_s(self) -> float:
        """Return the processor time since the start."""
        # The id of a process's clock, computed as in glibc's clock_getcpuclockid.
        return time.clock_gettime((~self.process.pid << 3) | 2)


def measure(workers: int, topology: str, steps: int, payload_bytes: int) -> Measurement:
    """Join workers to one coordinator, and train."""
    processes = -(-workers // _WORKERS_PER_PROCESS)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="many-")))
        network = stack.enter_context(Network([_LINK_MBIT] * (1 + processes)))
        coordinator = Coordinator(network.hosts[0], directory, workers)
        stack.callback(_end, coordinator.process)
        start_s = time.monotonic()
        for number, host in enumerate(network.hosts[1:]):
            count = min(_WORKERS_PER_PROCESS, workers - number * _WORKERS_PER_PROCESS)
            command = [
                *host.prefix, sys.executable, "-m", "benchmarks.many_workers", "--serve",
                coordinator.address, str(number * _WORKERS_PER_PROCESS), str(count),
            ]  # fmt: skip
            stack.callback(_end, subprocess.Popen(command, stdout=subprocess.DEVNULL))  # noqa: S603
        _wait(lambda: len(coordinator.request("/status")["workers"]) >= workers, _START_TIMEOUT_S)
        join_s = time.monotonic() - start_s
        return _train(coordinator, run_spec(workers, topology, steps, payload_bytes), join_s)


def _train(coordinator: Coordinator, document: dict[str, Any], join_s: float) -> Measurement:
    start_s = time.monotonic()
    coordinator.request("/submit", {"run": document})

    def read_step() -> int:
        status = coordinator.request("/status")
        if status["phase"] in ("failed", "halted"):
            raise RuntimeError(f"the run {status['phase']}: {status['reason']}")
        return int(status.get("step") or 0)

    _wait(lambda: read_step() >= 1, _RUN_TIMEOUT_S)
    ready_s = time.monotonic() - start_s
    from_step, from_s, from_cpu_s = read_step(), time.monotonic(), coordinator.cpu_s()
    status_s: list[float] = []
    to_step = from_step
    while to_step < document["steps"] - 1:
        request_s = time.monotonic()
        to_step = read_step()
        to_s, to_cpu_s = time.monotonic(), coordinator.cpu_s()
        if len(status_s) < 10:
            status_s.append(to_s - request_s)
        time.sleep(1.0)
        if to_s - from_s > _RUN_TIMEOUT_S:
            break
    step_count = max(to_step - from_step, 1)
    return Measurement(
        join_s, ready_s, step_count / (to_s - from_s), 1e3 * (to_cpu_s - from_cpu_s) / step_count,
        peak_bytes(coordinator.process.pid) / 1e6, 1e3 * max(status_s), os.getloadavg()[0],
    )  # fmt: skip


def _wait(condition: Any, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"a condition was not met within {timeout_s:g} s")
        time.sleep(_POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


async def serve(address: str, first_number: int, count: int) -> None:
    """Serve with several workers in this process, until it is killed."""
    host, port = parse_address(address, "--serve")

    def drop_line(text: str) -> None:
        """Drop a line of output, which all 256 workers would print."""

    def client(number: int) -> Client:
        target = Target(host, port, f"worker-{number}", "scripted", 300.0)
        return Client(
            target, LocalDevice("scripted", None, drop_line), WorkerCredentials(), drop_line
        )

    clients = [client(number) for number in range(first_number, first_number + count)]
    await asyncio.gather(*(worker_client.serve() for worker_client in clients))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--topologies", nargs="+", default=["star"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--payload-kb", type=int, nargs="+", default=[64])
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve is not None:
        address, first_number, count = options.serve
        asyncio.run(serve(address, int(first_number), int(count)))
        return
    if reason := why_unavailable():
        sys.exit(reason)
    print_heading("Many workers on one coordinator")
    header = ["workers", "payload", "join s", "first step s", "steps/s", "coordinator CPU ms/step"]
    rows = []
    for topology in options.topologies:
        for payload_kb in options.payload_kb:
            for workers in options.workers:
                measurement = measure(workers, topology, options.steps, payload_kb * 1000)
                rows.append([
                    f"{workers}, {topology}", f"{payload_kb} kB", f"{measurement.join_s:.1f}",
                    f"{measurement.ready_s:.1f}", f"{measurement.steps_per_s:.2f}",
                    f"{measurement.cpu_ms:.0f}",
                    f"{measurement.peak_mb:.0f}", f"{measurement.status_ms:.0f}",
                    f"{measurement.load:.1f}",
                ])  # fmt: skip
                print(rows[-1], file=sys.stderr, flush=True)
    print_table([*header, "peak MB", "status ms", "load"], rows)


if __name__ == "__main__":
    main()
