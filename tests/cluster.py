"""A coordinator and workers as real processes on loopback, for tests that disturb them.

Nothing here waits for a fixed time: it waits for lines of the coordinator's event stream.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from coordinator.operator.control_client import control_token
from tests.processes import PATIENCE_S, ROOT, Process, start

RUNS = ROOT / "deploy" / "runs"


class Hold:
    """A step in which a worker pauses until the test releases it.

    `Cluster.start_paused_worker` creates one.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE_S)
        self._connection: socket.socket | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def wait_until_paused(self) -> int:
        """Wait until the worker pauses; return the step, before its first subtree is computed."""
        self._connection, _ = self._listener.accept()
        with self._connection.makefile("rb") as lines:
            return int(lines.readline())

    def release(self) -> None:
        """Let the worker continue."""
        assert self._connection is not None, "call `wait_until_paused` before `release`"
        self._connection.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()


class Cluster:
    """A coordinator process; tests start workers as they need them.

    Use it as a context manager: at its end all remaining processes are killed. The arguments are
    those of `tests.processes.start`.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        fresh: bool = False,
    ) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._address_file = directory / "address.json"
        self._events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._has_ended = False
        self._holds: list[Hold] = []
        self.workers: dict[str, Process] = {}
        self.coordinator = start(
            "coordinator", "--bind", "127.0.0.1:0", "--control", "127.0.0.1:0",
            "--address-file", str(self._address_file), "--out", str(directory / "out"), *arguments,
            environment=environment, cwd=cwd, fresh=fresh,
        )  # fmt: skip
        self.output: list[str] = []
        self._drainer: threading.Thread | None = None
        self.address = self._read_address()
        self._reader = threading.Thread(target=self._read_events, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.coordinator, *self.workers.values()):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        self._reader.join()
        self.whole_output()
        for process in (self.coordinator, *self.workers.values()):
            for stream in _streams(process):
                stream.close()
        for hold in self._holds:
            hold.close()

    def start_worker(
        self,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> Process:
        """Start a worker."""
        process = start(
            "worker", "--coordinator", self.address["data"], "--name", name, *arguments,
            environment=environment, cwd=cwd,
        )  # fmt: skip
        self.workers[name] = process
        return process

    def start_paused_worker(
        self, name: str, steps: int | str, *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> Hold:  # fmt: skip
        """Start a worker that pauses in this step, or a later one, before it computes a subtree.

        The run cannot end before the test releases the worker. With steps `4,8` it pauses twice;
        with `4g` it pauses between the embeddings and the gradients (see `tests.paused_worker`).
        """
        hold = Hold()
        self._holds.append(hold)
        self.workers[name] = start(
            "tests.paused_worker", str(steps), str(hold.port),
            "--coordinator", self.address["data"], "--name", name, *arguments,
            environment=environment,
        )  # fmt: skip
        return hold

    def wait_for(
        self, event: str, nth: int = 1, *, start: int = 0, from_step: int = 0, **fields: object
    ) -> dict[str, Any]:
        """Wait for the first (or nth) event of this name with these fields; return it.

        Args:
            event: Name of the event.
            nth: Number of matching events to wait for.
            start: A result of `event_count`: events before it do not count.
            from_step: Events of earlier steps do not count.
            fields: Fields that the event must have.
        """

        def matches(candidate: dict[str, Any]) -> bool:
            has_fields = candidate["event"] == event and fields.items() <= candidate.items()
            return has_fields and (not from_step or candidate["step"] >= from_step)

        def find() -> dict[str, Any] | None:
            candidates = filter(matches, self._events[start:])
            return next(itertools.islice(candidates, nth - 1, None), None)

        with self._changed:
            self._changed.wait_for(lambda: find() or self._has_ended, PATIENCE_S)
            match = find()
        assert match is not None, (
            f"no {event} {fields} in {self.event_names()} {self._exit_report()}"
        )
        return match

    def event_count(self) -> int:
        """Return the number of events so far, for `wait_for`."""
        return len(self._events)

    def event_names(self) -> list[str]:
        """Return the names of all events so far, for the text of a failing test."""
        return [document["event"] for document in self._events]

    def events_named(self, event: str) -> list[dict[str, Any]]:
        """Return all events of this name so far."""
        return [document for document in self._events if document["event"] == event]

    def has_reassigned_work(self) -> bool:
        """Return whether a lost or late worker's subtrees were computed by other workers."""
        return any(map(self.events_named, ("reassigned", "restarted", "speculated")))

    def ask(self, method: str, path: str, document: object = None) -> dict[str, Any]:
        """Send a request to the control port; return the JSON object of the response."""
        host, _, port = self.address["control"].rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
        body = json.dumps(document) if document is not None else None
        with contextlib.closing(connection):
            connection.request(method, path, body, self._authorization())
            response: dict[str, Any] = json.loads(connection.getresponse().read())
        return response

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {control_token(self.address['control'])}"}

    def result(self) -> dict[str, Any]:
        """Wait for the end of the only run and read its result."""
        self.wait_for_exit(self.coordinator)
        self._reader.join()
        file = self.directory / "out/result.json"
        assert file.exists(), f"no result after {self.event_names()} {self._exit_report()}"
        document: dict[str, Any] = json.loads(file.read_text())
        return document

    def wait_for_exit(self, process: Process) -> int:
        """Wait until a process ends; return its exit code."""
        return process.wait(PATIENCE_S)

    def whole_output(self) -> list[str]:
        """Return the lines of the coordinator's standard output, once it has ended."""
        if self._drainer is not None:
            self._drainer.join()
        return self.output

    def _exit_report(self) -> str:
        code = self.coordinator.poll()
        if code is None:
            return "(the coordinator still runs)"
        output = "".join([*self.whole_output(), *(s.read() for s in _streams(self.coordinator))])
        return f"(the coordinator ended with {code}) {output}"

    def _read_address(self) -> dict[str, str]:
        """Return the coordinator's addresses, once it has written the address file."""
        assert self.coordinator.stdout is not None
        for line in self.coordinator.stdout:
            if line.startswith("status:"):  # printed after the file is written
                address: dict[str, str] = json.loads(self._address_file.read_text())
                # Drained, so that a full pipe cannot block the coordinator.
                self._drainer = threading.Thread(target=self._drain_output, daemon=True)
                self._drainer.start()
                return address
        self.coordinator.wait(PATIENCE_S)  # the process has closed its output
        raise AssertionError(self._exit_report())

    def _drain_output(self) -> None:
        assert self.coordinator.stdout is not None
        self.output = list(self.coordinator.stdout)

    def _read_events(self) -> None:
        """Read all events until the coordinator has ended."""
        last_id = "0"
        try:
            while self.coordinator.poll() is None:
                try:
                    for event_id, event in self._stream(last_id):
                        last_id = event_id
                        with self._changed:
                            self._events.append(event)
                            self._changed.notify_all()
                except (OSError, http.client.HTTPException):
                    self.coordinator.wait()  # its port is closed
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _stream(self, last_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        host, _, port = self.address["control"].rpartition(":")
        connection = http.client.HTTPConnection(host, int(port))
        with contextlib.closing(connection):
            headers = {**self._authorization(), "Last-Event-ID": last_id}
            connection.request("GET", "/events", headers=headers)
            with connection.getresponse() as response:
                yield from _read_server_sent_events(response)


def _read_server_sent_events(
    response: http.client.HTTPResponse,
) -> Iterator[tuple[str, dict[str, Any]]]:
    event_id = ""
    for line in response:
        if line.startswith(b"id: "):
            event_id = line.removeprefix(b"id: ").decode().strip()
        if line.startswith(b"data: "):
            yield event_id, json.loads(line.removeprefix(b"data: "))


def _streams(process: Process) -> Iterator[Any]:
    return (stream for stream in (process.stdout, process.stderr) if stream is not None)
