"""Real processes on loopback: a coordinator that is killed and restarted, and its workers.

Events come from the coordinator's own log (`--log-json`). The log begins with the process, so no
event is missed while a reader connects, and each line has its time.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from coordinator.operator.control_client import control_token
from tests.free_ports import free_ports
from tests.processes import Process, start
from tests.resident_memory import Growth, measured_growth

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 60.0
"""The limit for any wait, also on a busy machine."""


class Stuck(AssertionError):
    """An expected event did not occur; the text has the coordinator's status and last output."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the coordinator's log.

    Attributes:
        name: What happened.
        at_s: Its time, in seconds of `time.time`.
        incarnation: The start of the coordinator that logged it; the first is 1.
        fields: All fields of the line.
    """

    name: str
    at_s: float
    incarnation: int
    fields: dict[str, Any]


class Coordinator:
    """A coordinator that can be restarted; it is killed at the end of the context.

    Attributes:
        address: Address for workers.
        events: Events of all incarnations, in order.
        incarnation: Number of starts.
        step: Steps committed, according to events.

    Args:
        directory: Directory for the run (in `run`) and logs.
        arguments: Arguments of the command besides addresses, --out and --resume.
        module: Python module to start.
        fresh: Import everything at each start, as users do; see `tests.processes`.
    """

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        module: str = "coordinator",
        *,
        fresh: bool = True,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.run = directory / "run"
        self.events: list[Event] = []
        self.incarnation = 0
        self.step = 0
        ports = free_ports(2)
        self.address, self.control = (f"127.0.0.1:{port}" for port in ports)
        self._fresh = fresh
        self._command = [
            module, "--bind", self.address, "--control", self.control,
            "--out", str(self.run), "--resume", "--log-json", *arguments,
        ]  # fmt: skip
        self._changed = threading.Condition()
        self._process: Process | None = None
        self._reader: threading.Thread | None = None
        self._last_lines: deque[str] = deque(maxlen=30)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start or restart the process."""
        self.incarnation += 1
        self._process = start(*self._command, stdout=Path(os.devnull), fresh=self._fresh)
        arguments = (self._process, self.incarnation)
        self._reader = threading.Thread(target=self._read, args=arguments, daemon=True)
        self._reader.start()

    def kill(self) -> float:
        """Send SIGKILL, and wait until its whole log is in `events`.

        Returns:
            The time of the kill, in seconds of `time.time`.
        """
        assert self._process is not None
        assert self._reader is not None
        at_s = time.time()
        self._process.kill()
        self._process.wait()
        self._reader.join()
        return at_s

    def wait_for_exit(self) -> int:
        """Wait for the end of the run and return the exit code."""
        assert self._process is not None
        assert self._reader is not None
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Stuck(self.describe_failure("the coordinator does not end")) from None
        self._reader.join()
        return code

    @property
    def cpu_s(self) -> float:
        """Processor time of the current process."""
        assert self._process is not None
        # The clock id of a process, computed as in glibc's clock_getcpuclockid.
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def memory(self) -> AbstractContextManager[Growth]:
        """Measure how much its memory grows within a `with` block."""
        assert self._process is not None
        return measured_growth(self._process.pid)

    def wait_for(
        self, event_name: str, accept: Callable[[Event], bool], since: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> Event:  # fmt: skip
        """Wait for the first event that `accept` accepts, and return it.

        Args:
            event_name: Name of the event in the error.
            accept: Predicate.
            since: Index in `events` to start from.
            patience_s: Longest time to wait.

        Raises:
            Stuck: The event did not occur, or the coordinator has ended.
        """
        deadline_s = time.monotonic() + patience_s
        index = since
        with self._changed:
            while True:
                exit_error = self._has_ended
                while index < len(self.events):
                    event = self.events[index]
                    index += 1
                    if accept(event):
                        return event
                left_s = deadline_s - time.monotonic()
                if exit_error or left_s <= 0:
                    raise Stuck(
                        self.describe_failure(f"waited for {event_name}, which did not occur")
                    )
                self._changed.wait(min(left_s, 1.0))

    def commit_after(self, at_s: float, since: int) -> Event:
        """Wait for the first commit after this time, and return it."""
        return self.wait_for(
            "a commit", lambda e: e.name == "committed" and e.at_s > at_s, since=since
        )

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """Send one request to the control port and return the answer.

        Raises:
            OSError: The coordinator does not answer.
        """
        host, _, port = self.control.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        with contextlib.closing(connection):
            token = control_token(self.control)
            connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    def describe_failure(self, complaint: str) -> str:
        """Return the complaint with the status and the last lines of the log."""
        lines = [complaint]
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            lines.append(f"status: {self.ask('GET', '/status')}")
        lines.append(f"coordinator, start {self.incarnation}, the end of its log:")
        return "\n".join([*lines, *self._last_lines])

    @property
    def _has_ended(self) -> bool:
        assert self._process is not None
        assert self._reader is not None
        return self._process.poll() is not None and not self._reader.is_alive()

    def _read(self, process: Process, incarnation: int) -> None:
        assert process.stderr is not None
        log = self.directory / "coordinator.log"
        with process.stderr, log.open("a") as log_file:
            for line in process.stderr:
                log_file.write(line)
                self._last_lines.append(line.rstrip())
                event = _event(line, incarnation)
                if event is None:
                    continue
                with self._changed:
                    self.events.append(event)
                    if event.name == "committed":
                        self.step = event.fields["step"] + 1
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


_NUMBERS = itertools.count(1)


class Worker:
    """A worker process that writes its output to a file in `logs`; `fresh` and `module` are as in
    `Coordinator`."""

    def __init__(
        self,
        address: str,
        name: str,
        backend: str,
        logs: Path,
        *,
        fresh: bool = True,
        module: str = "worker",
    ) -> None:
        self.name = name
        self.stopped = False
        # One file per process: an earlier worker of this name may still be writing to its own.
        self.log = logs / f"{name}-{next(_NUMBERS)}.log"
        self._process = start(
            module, "--coordinator", address, "--name", name, "--backend", backend,
            "--retry-for", "120", stdout=self.log, stderr=self.log, fresh=fresh,
        )  # fmt: skip

    def kill(self) -> float:
        """Send SIGKILL; return the time, in seconds of `time.time`."""
        at_s = time.time()
        self._process.kill()
        self._process.wait()
        return at_s

    def stop(self) -> None:
        """Send SIGSTOP."""
        self.stopped = True
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        self._process.send_signal(signal.SIGCONT)
        self.stopped = False

    def drain(self) -> None:
        """Send SIGTERM: the worker finishes its microbatches and leaves."""
        self._process.terminate()

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end of the process and return the exit code.

        Raises:
            Stuck: The process does not end.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Stuck(f"worker {self.name!r} does not end: {self.output_end()}") from None

    def output_end(self) -> str:
        """Return the end of the worker's output."""
        return self.log.read_text(errors="replace")[-2000:]


def _event(line: str, incarnation: int) -> Event | None:
    """Parse a line of the log; None if it is not an event, such as a line of a traceback."""
    try:
        fields = json.loads(line)
        at_s = dt.datetime.fromisoformat(fields["timestamp"]).timestamp()
        return Event(str(fields["event"]), at_s, incarnation, fields)
    except (ValueError, KeyError, TypeError):
        return None
