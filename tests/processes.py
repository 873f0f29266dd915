"""Start the product's commands as processes, forked from a server that has imported everything."""

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
from tests.forked_command import ADDRESS

ROOT = Path(__file__).parent.parent
PATIENCE_S = 400.0
"""Limit for any wait: only a failing test waits this long."""


_READ_AT_USE = {
    "ATEN_CPU_CAPABILITY", "CACHE_DIRECTORY", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HOME",
    "MASTER_ADDR", "MASTER_PORT", "RUST_BACKTRACE",
}  # fmt: skip
"""Environment variables that libraries read at use, not on import."""
started = {"forked": 0, "fresh": 0}
"""Number of processes that `start` has started, by method; conftest limits them for each test."""


class Process(Protocol):
    """The part of `subprocess.Popen` that the tests use."""

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
    fresh: bool = False,
) -> Process:
    """Start one of the two commands as a process.

    Args:
        module: Module for `python -m`.
        arguments: The module's arguments.
        environment: Variables to add to this process's environment.
        cwd: Working directory of the new process.
        network: File of the network namespace; by default that of the calling thread.
        stdout: File to append standard output to; None for a pipe.
        stderr: File to append standard error to; None for a pipe.
        fresh: Start a fresh interpreter, which shares no imported modules. This also happens if the
            environment has a variable that libraries read on import.
    """
    full_environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    full_environment |= environment or {}
    network = network or _network_of_this_thread()
    with contextlib.ExitStack() as files:
        out, err = (
            files.enter_context(path.open("a")) if path is not None else None
            for path in (stdout, stderr)
        )
        if fresh or not all(map(_is_read_at_use, environment or {})):
            started["fresh"] += 1
            enter_network = [] if network is None else ["nsenter", f"--net={network}"]
            return subprocess.Popen(
                [*enter_network, sys.executable, "-m", module, *arguments],
                cwd=cwd,
                env=full_environment,
                stdin=subprocess.DEVNULL,
                stdout=out or subprocess.PIPE,
                stderr=err or subprocess.PIPE,
                text=True,
            )
        request = {
            "code": None,
            "module": module,
            "arguments": arguments,
            "environment": full_environment,
            "cwd": str(cwd),
            "networks": [] if network is None else [str(network)],
            "session": False,
        }
        started["forked"] += 1
        return _server().start(request, out, err)


def forked_popen(
    command: Sequence[str], *, env: Mapping[str, str], start_new_session: bool, **pipes: object
) -> Process:
    """Start a command as `subprocess.Popen` does, forked, with pipes for all three standard files.

    The command must be one that `command_of` returns, with arguments.
    """
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


def run_to_end(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run one of the two commands as a process, and wait until it ends."""
    process = start(module, *arguments, environment=environment, cwd=cwd)
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess([module, *arguments], process.wait(), out, err)


def _is_read_at_use(name: str) -> bool:
    """Return whether this variable is read at use instead of by the fork server's imports.

    Variables of Vulkan are read once per process, by the first request for a device.
    """
    return name in _READ_AT_USE or name.startswith(("FAULTY_VULKAN_", "SAMESTEP_", "VK_", "XDG_"))


def _network_of_this_thread() -> Path | None:
    """Return the calling thread's network namespace; None if it is that of the process."""
    thread_namespace, process_namespace = (
        Path("/proc", name).resolve() / "ns/net" for name in ("thread-self", "self")
    )
    is_shared = thread_namespace.stat().st_ino == process_namespace.stat().st_ino
    return None if is_shared else thread_namespace


class _ForkedProcess:
    """A child of the server; its exit status arrives through a pipe."""

    def __init__(
        self,
        pid: int,
        stdin_fd: int | None,
        stdout_fd: int | None,
        stderr_fd: int | None,
        status_fd: int,
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None if stdin_fd is None else os.fdopen(stdin_fd, "w")
        self.stdout: IO[str] | None = None if stdout_fd is None else os.fdopen(stdout_fd)
        self.stderr: IO[str] | None = None if stderr_fd is None else os.fdopen(stderr_fd)
        self._status_fd = status_fd
        # Closed only with this object: several threads may wait for the status.
        weakref.finalize(self, os.close, status_fd)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._status_fd, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._lock:
                if self.returncode is None:
                    self.returncode = int(os.read(self._status_fd, 16))
        assert self.returncode is not None
        return self.returncode

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        output = ["", ""]

        def read(index: int, stream: IO[str]) -> None:
            with stream:
                output[index] = stream.read()

        readers = [
            threading.Thread(target=read, args=(index, stream), daemon=True)
            for index, stream in enumerate((self.stdout, self.stderr))
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
    ) -> _ForkedProcess:
        """Start a child for this request; its output and errors go to the files, or to pipes."""
        status_fd, child_status = os.pipe()
        null_fd = None if with_input else os.open(os.devnull, os.O_RDONLY)
        child_stdin, stdin_fd = os.pipe() if null_fd is None else (null_fd, None)
        stdout_fd, child_stdout = (None, os.dup(stdout.fileno())) if stdout else os.pipe()
        stderr_fd, child_stderr = (None, os.dup(stderr.fileno())) if stderr else os.pipe()
        pid = self.fork(request, (child_stdin, child_stdout, child_stderr, child_status))
        return _ForkedProcess(pid, stdin_fd, stdout_fd, stderr_fd, status_fd)

    def fork(self, request: Mapping[str, Any], child_files: tuple[int, int, int, int]) -> int:
        """Start a child; return its process number.

        `child_files` are the child's standard files and the file that reports its exit status; they
        are closed in this process.
        """
        files = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", child_files))
        with self._lock:
            self._requests.sendmsg([json.dumps(request).encode()], [files])
            for fd in child_files:
                os.close(fd)
            return int(self._requests.recv(16))


@cache
def _server() -> _Server:
    if ADDRESS not in os.environ:
        begin_fork_server()
    return _Server(os.environ[ADDRESS])


def begin_fork_server(*tests: str) -> None:
    """Start a fork server for this process and its children; it imports at the first request.

    Args:
        tests: Paths whose tests will run in its processes.
    """
    directory = tempfile.TemporaryDirectory(prefix="samestep-")
    path = f"{directory.name}/fork-server"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(listener.fileno()), *tests],
            pass_fds=[listener.fileno()], stdin=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    os.environ[ADDRESS] = path

    def end() -> None:
        server.communicate()  # an idle server ends with its standard input
        directory.cleanup()

    atexit.register(end)


def continue_as_server_child(code: str) -> int:
    """Run `python -c CODE` with all modules imported; return the exit code."""
    status_fd, child_status = os.pipe()
    request = {
        "code": code, "module": "", "arguments": (), "environment": dict(os.environ),
        "cwd": str(Path.cwd()), "networks": [], "session": False,
    }  # fmt: skip
    _server().fork(request, (os.dup(0), os.dup(1), os.dup(2), child_status))
    for fd in range(3):
        os.close(fd)
    return int(os.read(status_fd, 16) or 1)
