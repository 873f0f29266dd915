"""The two commands as processes: `start` gives one, forked off a server that has imported all."""

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
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import IO, Protocol

from tests.fork_server import REQUEST_BYTES

ROOT = Path(__file__).parent.parent


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
) -> Process:
    """One of the two commands as a process.

    One with an environment of its own is started anew, since libraries read theirs when they are
    imported; so is one in a thread of another network (`network_hosts`).
    """
    everyone = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    if environment or not _in_the_network_of_all():
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=cwd,
            env={**everyone, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    return _server().start(module, arguments, everyone, cwd)


def _in_the_network_of_all() -> bool:
    mine, main = (Path(f"/proc/{each}/ns/net").stat() for each in ("thread-self", "self"))
    return mine.st_ino == main.st_ino


class _Forked:
    """A child of the server: how it ended comes through a pipe."""

    def __init__(self, pid: int, out: int, err: int, told: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[str] = os.fdopen(out)
        self.stderr: IO[str] = os.fdopen(err)
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
        said = ["", ""]

        def read(place: int, stream: IO[str]) -> None:
            with stream:
                said[place] = stream.read()

        readers = [
            threading.Thread(target=read, args=each, daemon=True)
            for each in enumerate((self.stdout, self.stderr))
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return said[0], said[1]

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
            cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        theirs.close()
        atexit.register(self._close)

    def _close(self) -> None:
        self._requests.close()
        self._process.wait()

    def start(
        self, module: str, arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path
    ) -> _Forked:
        (out, their_out), (err, their_err), (told, their_told) = (os.pipe() for _ in range(3))
        theirs = (their_out, their_err, their_told)
        request = {
            "module": module,
            "arguments": arguments,
            "environment": dict(environment),
            "cwd": str(cwd),
        }
        files = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", theirs))
        with self._lock:
            self._requests.sendmsg([json.dumps(request).encode()], [files])
            for each in theirs:
                os.close(each)
            pid = int(self._requests.recv(16))
        return _Forked(pid, out, err, told)


@cache
def _server() -> _Server:
    return _Server()
