"""A worker's time from its start to its first step, from the coordinator's log."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

_TIMEOUT_S: Final = 300.0
_POLL_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds from the start of the worker's process.

    Attributes:
        connected_s: Until the handshake is done.
        ready_s: Until the task is built, with model and data read.
        started_s: Until the worker's state agrees with the run's.
        committed_s: Until the first step is committed.
    """

    connected_s: float
    ready_s: float
    started_s: float
    committed_s: float


def measure(document: dict[str, Any], backend: str, directory: Path) -> Startup:
    """Start a coordinator with this run, then one worker.

    Raises:
        RuntimeError: The coordinator ended early, or the run failed.
        subprocess.TimeoutExpired: A process does not end in time.
    """
    directory.mkdir(parents=True, exist_ok=True)
    spec, addresses, log = (directory / name for name in ("run.json", "addresses.json", "log"))
    spec.write_text(json.dumps(document), encoding="utf-8")
    with log.open("w", encoding="utf-8") as log_file:
        coordinator = _spawn(
            "coordinator", "--expect-workers", "1", "--run", str(spec), "--log-json",
            "--bind", "127.0.0.1:0", "--control", "127.0.0.1:0",
            "--out", str(directory / "out"), "--address-file", str(addresses), stderr=log_file,
        )  # fmt: skip
    processes = [coordinator]
    try:
        while not addresses.exists():
            if coordinator.poll() is not None:
                raise RuntimeError(f"the coordinator ended: {log.read_text(encoding='utf-8')}")
            time.sleep(_POLL_S)
        address = json.loads(addresses.read_text(encoding="utf-8"))["data"]
        start = datetime.now(UTC)
        processes.append(
            _spawn("worker", "--quiet", "--backend", backend, "--coordinator", address)
        )
        codes = [process.wait(_TIMEOUT_S) for process in processes]
        if any(codes):
            raise RuntimeError(f"the run failed: {log.read_text(encoding='utf-8')}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return read_log(log.read_text(encoding="utf-8"), start)


def read_log(log: str, start: datetime) -> Startup:
    """Read the first time of each event from the coordinator's log of JSON lines."""
    first_times: dict[str, float] = {}
    for line in log.splitlines():
        record = json.loads(line)
        event_time = datetime.fromisoformat(record["timestamp"])
        first_times.setdefault(record["event"], (event_time - start).total_seconds())
    events = ("worker_connected", "worker_ready", "started", "committed")
    return Startup(*(first_times[event] for event in events))


def _spawn(module: str, *arguments: str, stderr: Any = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 -- our own command
        [sys.executable, "-m", module, *arguments], stdout=subprocess.DEVNULL, stderr=stderr
    )
