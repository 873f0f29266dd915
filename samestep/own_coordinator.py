"""A coordinator of one run, started by `fit` as a process of its own, and told of line by line."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from coordinator.members.listening import from_here
from protocol.base.address import parse_address
from protocol.base.errors import ExitCode, error_for
from protocol.base.regular_file import read_json
from protocol.command.output import say
from protocol.command.own_command import own_command, own_environment
from samestep.words import in_a_scripts_words

_USUAL: Final = ("127.0.0.1", 9000)
LAST_WORDS: Final = "coordinator: "
"""Before the line on standard error that a coordinator ends with."""


@dataclass(frozen=True, slots=True)
class Line:
    """Something that it said."""

    text: str
    fault: bool


@dataclass(frozen=True, slots=True)
class CoordinatorEnded:
    """It is over."""

    exit_code: int


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Somebody wants this process to leave."""


Happened = queue.SimpleQueue[Any]
"""What comes from the coordinator, the worker of this process and its signals, in its order."""


@contextlib.contextmanager
def interrupts_into(happened: Happened) -> Iterator[None]:
    """Meanwhile what would raise KeyboardInterrupt is something that happened instead: raised
    between two events, or in the midst of one, it would end the run that it is to drain. So is
    SIGTERM, unless the script sees to it: a shell lets what it starts in the background ignore
    SIGINT."""
    ours = threading.current_thread() is threading.main_thread()
    plain = {
        signal.SIGINT: (signal.default_int_handler,),
        signal.SIGTERM: (signal.default_int_handler, signal.SIG_DFL),
    }
    before = {n: signal.getsignal(n) for n in plain if ours and signal.getsignal(n) in plain[n]}
    for number in before:
        signal.signal(number, lambda *_: happened.put(Interrupted()))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class OwnCoordinator:
    """The process; a context that ends it.

    Args:
        spec: The run, as a document.
        home: A directory for what is handed to it.
        options: More of its command line.
        happened: Where its lines and its end go.
    """

    def __init__(
        self, spec: Mapping[str, Any], home: Path, options: Sequence[str], happened: Happened
    ) -> None:
        self._happened = happened
        self._addresses = home / "address.json"
        self.last_fault = ""
        self.first_lines: list[str] = []
        run = home / "run.yaml"
        run.write_text(json.dumps(spec), encoding="utf-8")
        self._process = subprocess.Popen(  # noqa: S603 -- our own command
            [
                *own_command("coordinator"), "--run", str(run), "--end-with-stdin",
                "--address-file", str(self._addresses), *options,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=own_environment(), start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_faults, args=(self._process.stderr,), daemon=True)
        ]
        self._readers[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def listening(self) -> tuple[str, int]:
        """Wait until it listens; its address for workers.

        Raises:
            SamestepError: It has ended instead, and says why.
        """
        output = self._process.stdout
        assert output is not None
        for line in output:
            if line.startswith("status:"):
                reader = threading.Thread(target=self._read_lines, args=(output,), daemon=True)
                self._readers.append(reader)
                reader.start()
                data = read_json(self._addresses)["data"]
                host, port = parse_address(data, "--bind")
                return from_here(host), port
            self.first_lines.append(line.rstrip("\n"))
        code = self._process.wait()
        self._readers[0].join()
        raise self.error(code)

    def drain(self) -> None:
        """Finish the step in progress, save, and end; the second time end at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    def error(self, code: int) -> Exception:
        """What its exit code and its last words on standard error say."""
        known = code if code > 0 else ExitCode.FAILED
        return error_for(known, self.last_fault or f"the coordinator ended with code {code}")

    def _read_lines(self, output: IO[str]) -> None:
        for line in output:
            self._happened.put(Line(line.rstrip("\n"), fault=False))
        self._readers[0].join()
        self._happened.put(CoordinatorEnded(self._process.wait()))

    def _read_faults(self, output: IO[str]) -> None:
        for line in output:
            told = in_a_scripts_words(line.rstrip("\n"))
            self.last_fault = told.removeprefix(LAST_WORDS)
            self._happened.put(Line(told, fault=True))


def usual_bind() -> str:
    """Where workers look first on this machine, or any free port if that is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(_USUAL)
        except OSError:
            return f"{_USUAL[0]}:0"
    return f"{_USUAL[0]}:{_USUAL[1]}"


def show(line: Line) -> None:
    """Print it where this process's own lines go: in a notebook into the cell."""
    say(line.text, sys.stderr if line.fault else sys.stdout)
