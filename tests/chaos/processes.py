"""A coordinator that is killed and started again, and workers, as real processes on loopback.

Events come from the coordinator's own log (`--log-json`): it begins with the process, so nothing
is missed while a reader connects, and each line says when it happened.
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
"""Longer than anything here may take, on a busy machine too."""


class Stuck(AssertionError):
    """What was waited for did not come; the text has the last words of everyone."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the coordinator's log.

    Attributes:
        name: What happened.
        at_s: When, in seconds of `time.time`.
        life: Which start of the coordinator said it; the first is 1.
        fields: All of the line.
    """

    name: str
    at_s: float
    life: int
    fields: dict[str, Any]


class Coordinator:
    """One command line, started again and again. At the end of the context it is killed.

    Attributes:
        address: For workers.
        events: Of all lives, in order.
        life: How often it was started.
        step: Steps committed, as far as events have said.

    Args:
        directory: For the run (in `run`) and logs.
        arguments: Of the command, less addresses, --out and --resume.
        module: What is started.
        anew: Each start imports everything, as a user's does; see `tests.processes`.
    """

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        module: str = "coordinator",
        *,
        anew: bool = True,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.run = directory / "run"
        self.events: list[Event] = []
        self.life = 0
        self.step = 0
        ports = free_ports(2)
        self.address, self.control = (f"127.0.0.1:{port}" for port in ports)
        self._anew = anew
        self._command = [
            module, "--bind", self.address, "--control", self.control,
            "--out", str(self.run), "--resume", "--log-json", *arguments,
        ]  # fmt: skip
        self._changed = threading.Condition()
        self._process: Process | None = None
        self._reader: threading.Thread | None = None
        self._words: deque[str] = deque(maxlen=30)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, for the first time or again."""
        self.life += 1
        self._process = start(*self._command, stdout=Path(os.devnull), anew=self._anew)
        reading = (self._process, self.life)
        self._reader = threading.Thread(target=self._read, args=reading, daemon=True)
        self._reader.start()

    def kill(self) -> float:
        """End it with SIGKILL; returns once all that it has said is in `events`.

        Returns:
            When it was killed, in seconds of `time.time`.
        """
        assert self._process is not None
        assert self._reader is not None
        at_s = time.time()
        self._process.kill()
        self._process.wait()
        self._reader.join()
        return at_s

    def wait_for_exit(self) -> int:
        """Its exit code, once the run is over."""
        assert self._process is not None
        assert self._reader is not None
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Stuck(self.told("the coordinator does not end")) from None
        self._reader.join()
        return code

    @property
    def cpu_s(self) -> float:
        """Processor time of the process that runs now."""
        assert self._process is not None
        # A process's clock by its number, made as in glibc's clock_getcpuclockid.
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def memory(self) -> AbstractContextManager[Growth]:
        """How much its memory grows during the body of a with statement."""
        assert self._process is not None
        return measured_growth(self._process.pid)

    def wait_for(
        self, what: str, accept: Callable[[Event], bool], since: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> Event:  # fmt: skip
        """The first event that is accepted.

        Args:
            what: For the text, if it does not come.
            accept: Says which.
            since: Those before this place in `events` are not looked at.
            patience_s: How long it may take.

        Raises:
            Stuck: It did not come, or the coordinator has ended by itself.
        """
        deadline_s = time.monotonic() + patience_s
        looked_at = since
        with self._changed:
            while True:
                ended = self._ended
                while looked_at < len(self.events):
                    event = self.events[looked_at]
                    looked_at += 1
                    if accept(event):
                        return event
                left_s = deadline_s - time.monotonic()
                if ended or left_s <= 0:
                    raise Stuck(self.told(f"waited for {what} and it did not come"))
                self._changed.wait(min(left_s, 1.0))

    def commit_after(self, at_s: float, since: int) -> Event:
        """The first step committed after this time."""
        return self.wait_for(
            "a commit", lambda e: e.name == "committed" and e.at_s > at_s, since=since
        )

    def ask(self, method: str, path: str) -> dict[str, Any]:
        """One request to the control port.

        Raises:
            OSError: It does not answer.
        """
        host, _, port = self.control.rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        with contextlib.closing(connection):
            token = control_token(self.control)
            connection.request(method, path, headers={"Authorization": f"Bearer {token}"})
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    def told(self, complaint: str) -> str:
        """The complaint, with what is known of the present."""
        lines = [complaint]
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            lines.append(f"status: {self.ask('GET', '/status')}")
        lines.append(f"coordinator, life {self.life}, its last words:")
        return "\n".join([*lines, *self._words])

    @property
    def _ended(self) -> bool:
        assert self._process is not None
        assert self._reader is not None
        return self._process.poll() is not None and not self._reader.is_alive()

    def _read(self, process: Process, life: int) -> None:
        assert process.stderr is not None
        log = self.directory / "coordinator.log"
        with process.stderr, log.open("a") as kept:
            for line in process.stderr:
                kept.write(line)
                self._words.append(line.rstrip())
                event = _event(line, life)
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
    """One worker process; what it says goes to a file in `logs`. `anew` and `module` as of
    `Coordinator`."""

    def __init__(
        self,
        address: str,
        name: str,
        backend: str,
        logs: Path,
        *,
        anew: bool = True,
        module: str = "worker",
    ) -> None:
        self.name = name
        self.stopped = False
        # A file of its own: one of the same name may still be writing to the last.
        self.log = logs / f"{name}-{next(_NUMBERS)}.log"
        self._process = start(
            module, "--coordinator", address, "--name", name, "--backend", backend,
            "--retry-for", "120", stdout=self.log, stderr=self.log, anew=anew,
        )  # fmt: skip

    def kill(self) -> float:
        """End it with SIGKILL; when, in seconds of `time.time`."""
        at_s = time.time()
        self._process.kill()
        self._process.wait()
        return at_s

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)
        self.stopped = False

    def drain(self) -> None:
        """SIGTERM: it finishes what it has and leaves."""
        self._process.terminate()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit code.

        Raises:
            Stuck: It does not end.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Stuck(f"worker {self.name!r} does not end: {self.words()}") from None

    def words(self) -> str:
        """The last of what it has said."""
        return self.log.read_text(errors="replace")[-2000:]


def _event(line: str, life: int) -> Event | None:
    """A line of the log; None if it is none, such as a traceback's."""
    try:
        fields = json.loads(line)
        at_s = dt.datetime.fromisoformat(fields["timestamp"]).timestamp()
        return Event(str(fields["event"]), at_s, life, fields)
    except (ValueError, KeyError, TypeError):
        return None
