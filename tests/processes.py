"""The two commands as processes, forked from a server that has imported everything."""

from __future__ import annotations

import array
import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

from tests.fork_server import REQUEST_BYTES

ROOT = Path(__file__).parent.parent
ADDRESS = "TESTS_FORK_SERVER"
"""The variable of the environment that says where the fork server listens."""
PATIENCE_S = 400.0
"""For whatever has to come: only a test that fails waits so long."""


_READ_LATE = {
    "ATEN_CPU_CAPABILITY", "CACHE_DIRECTORY", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HOME",
    "MASTER_ADDR", "MASTER_PORT", "RUST_BACKTRACE",
}  # fmt: skip
started = {"forked": 0, "anew": 0}
"""How many processes `start` has begun here, by how: conftest bounds them for each test."""


class Process(Protocol):
    """As much of `subprocess.Popen` as the tests use."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    @property
    def stderr(self) -> IO[str] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def start(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    network: Path | None = None,
    stdout: Path | None = None,
    stderr: Path | None = None,
    anew: bool = False,
) -> Process:
    """One of the two commands as a process.

    Args:
        module: That `python -m` would be told.
        arguments: That it is given.
        environment: Beside this process's own.
        cwd: Its working directory.
        network: The file of the network namespace that it is in; that of the calling thread.
        stdout: The file that its standard output is added to; None for a pipe.
        stderr: Likewise its standard error.
        anew: It shares nothing with others: what it has imported is of its own memory. So it is
            too if its environment says something that libraries read when they are imported.
    """
    everyone = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    everyone |= environment or {}
    network = network or _network_of_this_thread()
    with contextlib.ExitStack() as files:
        out, err = (
            files.enter_context(path.open("a")) if path is not None else None
            for path in (stdout, stderr)
        )
        if anew or not all(map(_read_late, environment or {})):
            started["anew"] += 1
            enter = [] if network is None else ["nsenter", f"--net={network}"]
            return subprocess.Popen(
                [*enter, sys.executable, "-m", module, *arguments],
                cwd=cwd,
                env=everyone,
                stdin=subprocess.DEVNULL,
                stdout=out or subprocess.PIPE,
                stderr=err or subprocess.PIPE,
                text=True,
            )
        request = {
            "code": None,
            "module": module,
            "arguments": arguments,
            "environment": everyone,
            "cwd": str(cwd),
            "networks": [] if network is None else [str(network)],
            "session": False,
        }
        started["forked"] += 1
        return _server().start(request, out, err)


def forked_popen(
    command: Sequence[str], *, env: Mapping[str, str], start_new_session: bool, **pipes: object
) -> Process:
    """What `subprocess.Popen` does with an `command_of`, all three standard files being pipes."""
    assert command[:3] == [sys.executable, "-P", "-m"], command
    assert pipes == {
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True,
    }, pipes  # fmt: skip
    request = {
        "code": None, "module": command[3], "arguments": command[4:], "environment": dict(env),
        "cwd": str(Path.cwd()), "networks": [], "session": start_new_session,
    }  # fmt: skip
    started["forked"] += 1
    return _server().start(request, None, None, with_input=True)


def ended(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """One of the two commands as a process, once it has ended."""
    process = start(module, *arguments, environment=environment, cwd=cwd)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess([module, *arguments], process.wait(), out, err)


def _read_late(name: str) -> bool:
    """Whether what the fork server imports reads this variable when it is used, not imported.

    Vulkan's are read once, by the first in a process who asks for a device: some tests do when they
    are imported.
    """
    return name in _READ_LATE or name.startswith(("SAMESTEP_", "XDG_"))


def _network_of_this_thread() -> Path | None:
    """None if it is that of all others."""
    mine, main = (Path("/proc", each).resolve() / "ns/net" for each in ("thread-self", "self"))
    return mine if mine.stat().st_ino != main.stat().st_ino else None


class _Forked:
    """A child of the server: how it ended comes through a pipe."""

    def __init__(
        self, pid: int, into: int | None, out: int | None, err: int | None, told: int
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None if into is None else os.fdopen(into, "w")
        self.stdout: IO[str] | None = None if out is None else os.fdopen(out)
        self.stderr: IO[str] | None = None if err is None else os.fdopen(err)
        self._told = told
        # Not sooner: several threads may wait for it.
        weakref.finalize(self, os.close, told)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._told, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._lock:
                if self.returncode is None:
                    self.returncode = int(os.read(self._told, 16))
        assert self.returncode is not None
        return self.returncode

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        output = ["", ""]

        def read(place: int, stream: IO[str]) -> None:
            with stream:
                output[place] = stream.read()

        readers = [
            threading.Thread(target=read, args=(place, stream), daemon=True)
            for place, stream in enumerate((self.stdout, self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return output[0], output[1]

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """A connection to the fork server."""

    def __init__(self, path: str) -> None:
        self._lock = threading.Lock()
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        self._requests.connect(path)
        atexit.register(self._requests.close)

    def start(
        self,
        request: Mapping[str, Any],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
        *,
        with_input: bool = False,
    ) -> _Forked:
        """A child that does this; its output and errors go to the files, or to pipes."""
        own_end, their_told = os.pipe()
        nothing = None if with_input else os.open(os.devnull, os.O_RDONLY)
        their_in, into = os.pipe() if nothing is None else (nothing, None)
        out, their_out = (None, os.dup(stdout.fileno())) if stdout else os.pipe()
        err, their_err = (None, os.dup(stderr.fileno())) if stderr else os.pipe()
        pid = self.begin(request, (their_in, their_out, their_err, their_told))
        return _Forked(pid, into, out, err, own_end)

    def begin(self, request: Mapping[str, Any], theirs: tuple[int, int, int, int]) -> int:
        """The number of a child that does this, with these for its standard files, and the last
        to say how it has ended. They are closed here."""
        files = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", theirs))
        with self._lock:
            self._requests.sendmsg([json.dumps(request).encode()], [files])
            for each in theirs:
                os.close(each)
            return int(self._requests.recv(16))


@cache
def _server() -> _Server:
    if ADDRESS not in os.environ:
        begin_fork_server()
    return _Server(os.environ[ADDRESS])


def begin_fork_server(*tests: str) -> None:
    """Have one for this process and its children; it imports nothing before somebody asks it.

    Args:
        tests: Where those are that processes of tests will run.
    """
    directory = tempfile.TemporaryDirectory(prefix="samestep-")
    path = f"{directory.name}/fork-server"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(path)
        door.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(door.fileno()), *tests],
            pass_fds=[door.fileno()], stdin=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    os.environ[ADDRESS] = path

    def end() -> None:
        server.communicate()  # nothing: it ends with its standard input
        directory.cleanup()

    atexit.register(end)


def go_on_as_a_child_of_the_server(code: str) -> int:
    """Be `python -c CODE` with all imported; the exit code."""
    own_end, their_told = os.pipe()
    request = {
        "code": code, "module": "", "arguments": (), "environment": dict(os.environ),
        "cwd": str(Path.cwd()), "networks": [], "session": False,
    }  # fmt: skip
    _server().begin(request, (os.dup(0), os.dup(1), os.dup(2), their_told))
    for each in range(3):
        os.close(each)
    return int(os.read(own_end, 16) or 1)
