"""The coordinator of one `fit`: a subprocess that reads a request and writes events, as JSON."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, Final, Self

from coordinator.members.listening import address_from_here
from protocol.base.address import parse_address
from protocol.base.errors import ExitCode, SamestepError, Unreachable, error_for
from protocol.cli.command_line import EndRequests, child_environment, command_of
from protocol.cli.output import say
from samestep.result import row_of_record

_DEFAULT_ADDRESS: Final = ("127.0.0.1", 9000)
_START_TIMEOUT_S: Final = 300.0
_END_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the user.

    Attributes:
        text: The line.
        is_error: Whether the line goes to standard error.
        unready_reason: Why a worker cannot take part, if the line reports that; else empty.
    """

    text: str
    is_error: bool = False
    unready_reason: str = ""


@dataclass(frozen=True, slots=True)
class NewRow:
    """A step was committed, or a state was evaluated.

    Attributes:
        row: The new row of `FitResult.history`.
    """

    row: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CoordinatorListening:
    """The coordinator accepts workers at this address."""

    address: tuple[str, int]


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """The set of ready workers has changed, or training has started.

    Attributes:
        workers: Names of the workers that are connected and not refused.
        has_started: Whether training has started.
    """

    workers: frozenset[str]
    has_started: bool


@dataclass(frozen=True, slots=True)
class CoordinatorEnded:
    """The subprocess has ended.

    Attributes:
        exit_code: The exit code; negative: the signal that ended the subprocess.
        reason: The error; empty if there was none.
        is_resumable: Whether the run is unfinished and has a checkpoint.
    """

    exit_code: int
    reason: str = ""
    is_resumable: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user or a supervisor asks this process to end."""


EventQueue = queue.SimpleQueue[Any]
"""Events of the coordinator, the worker and the signals of this process, in order of arrival."""


@contextlib.contextmanager
def queue_interrupts(event_queue: EventQueue) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into `Interrupted` events.

    A KeyboardInterrupt raised anywhere would end the run instead of draining it. Signals that the
    script handles itself are left alone.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    default_handlers = {
        signal.SIGINT: (signal.default_int_handler,),
        signal.SIGTERM: (signal.default_int_handler, signal.SIG_DFL),
    }
    previous_handlers = {
        n: signal.getsignal(n)
        for n in default_handlers
        if is_main_thread and signal.getsignal(n) in default_handlers[n]
    }
    requests = EndRequests()

    def interrupt(signal_number: int, _: object) -> None:
        if requests.is_new(signal_number, time.monotonic()):
            event_queue.put(Interrupted())

    for signal_number in previous_handlers:
        signal.signal(signal_number, interrupt)
    try:
        yield
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, handler)


class CoordinatorSubprocess:
    """The subprocess, as a context manager that ends it.

    Args:
        request: The request that `coordinator.embedded` reads.
        event_queue: Receives the coordinator's events.
    """

    def __init__(self, request: Mapping[str, Any], event_queue: EventQueue) -> None:
        self._event_queue = event_queue
        self._process = subprocess.Popen(  # noqa: S603 -- a command of samestep
            [*command_of("coordinator"), "embedded"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=child_environment(), start_new_session=True,
        )  # fmt: skip
        self._last_output = ""
        self._output = self._reader(self._read_output, self._process.stderr)
        self._events = self._reader(self._read_events, self._process.stdout)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # if it has already ended, its events say why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
        self._process.kill()
        self._process.wait()
        for reader in (self._events, self._output):
            reader.join(_END_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def wait_until_listening(self) -> tuple[str, int]:
        """Wait until the coordinator accepts workers; return its address.

        Raises:
            SamestepError: The coordinator ended, or did not start in time.
        """
        while True:
            try:
                event = self._event_queue.get(timeout=_START_TIMEOUT_S)
            except queue.Empty:
                raise Unreachable(
                    f"expected this fit's coordinator to start within {_START_TIMEOUT_S:.0f} s, "
                    "got no answer: free memory or processor time, then call fit again"
                ) from None
            match event:
                case CoordinatorListening(address):
                    return address
                case CoordinatorEnded():
                    raise error_from(event)
                case Line():
                    show(event)

    def drain(self) -> None:
        """Ask the coordinator to finish the step in progress, save and end; twice: to end at
        once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the subprocess, which has not ended in time."""
        self._process.kill()

    @staticmethod
    def _reader(target: Any, stream: IO[str] | None) -> threading.Thread:
        thread = threading.Thread(target=target, args=(stream,), daemon=True)
        thread.start()
        return thread

    def _read_events(self, stream: IO[str]) -> None:
        end_document: dict[str, Any] | None = None
        roster = _WorkerRoster()
        for line in stream:
            try:
                document = json.loads(line)
            except ValueError:  # cut off when the process ended
                break
            match document["event"]:
                case "listening":
                    host, port = parse_address(document["address"], "--bind")
                    self._event_queue.put(CoordinatorListening((address_from_here(host), port)))
                case "record":
                    if row := row_of_record(document["record"]):
                        self._event_queue.put(NewRow(row))
                case "ended":
                    end_document = document
                case event:
                    unready_reason = document["reason"] if event == "worker_unready" else ""
                    self._event_queue.put(Line(document["text"], unready_reason=unready_reason))
                    if change := roster.apply(document):
                        self._event_queue.put(change)
        code = self._process.wait()
        self._output.join(_END_TIMEOUT_S)
        if end_document is not None:
            end_event = CoordinatorEnded(code, end_document["reason"], end_document["is_resumable"])
        elif code < 0:
            name = signal.Signals(-code).name
            end_event = CoordinatorEnded(code, f"the coordinator of this fit was ended by {name}")
        else:
            reason = self._last_output or f"the coordinator of this fit ended with code {code}"
            end_event = CoordinatorEnded(code, reason)
        self._event_queue.put(end_event)

    def _read_output(self, stream: IO[str]) -> None:
        """Forward the output of libraries and of the interpreter."""
        for line in stream:
            self._last_output = line.strip() or self._last_output
            self._event_queue.put(Line(line.rstrip("\n"), is_error=True))


class _WorkerRoster:
    """The workers that can take part, derived from the coordinator's events."""

    def __init__(self) -> None:
        self._workers: set[str] = set()
        self._has_started = False

    def apply(self, document: Mapping[str, Any]) -> WorkersChanged | None:
        """Apply an event; return the change, or None if the event changes nothing."""
        match document["event"]:
            case "worker_connected":
                self._workers.add(document["worker"])
            case "worker_disconnected" | "worker_unready":
                self._workers.discard(document["worker"])
            case "started":
                self._has_started = True
            case _:
                return None
        return WorkersChanged(frozenset(self._workers), self._has_started)


def error_from(end: CoordinatorEnded, resume_call: str = "") -> SamestepError:
    """Return the error to raise in `fit` when the coordinator has ended.

    Args:
        end: The end of the coordinator.
        resume_call: The call of `fit` that resumes the run.
    """
    advice = f"; resume it: {resume_call}" if resume_call and end.is_resumable else ""
    code = end.exit_code if end.exit_code > 0 else ExitCode.FAILED
    return error_for(code, f"{end.reason}{advice}")


def default_bind() -> str:
    """Return the address that workers on this machine try first, or any free port if it is
    taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(_DEFAULT_ADDRESS)
        except OSError:
            return f"{_DEFAULT_ADDRESS[0]}:0"
    return f"{_DEFAULT_ADDRESS[0]}:{_DEFAULT_ADDRESS[1]}"


def show(line: Line) -> None:
    """Print a line to this process's standard streams; a notebook shows them in the cell."""
    say(line.text, sys.stderr if line.is_error else sys.stdout)
