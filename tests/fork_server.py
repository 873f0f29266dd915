"""`python -m tests.fork_server FD [PATHS...]`: fork processes that have imported everything.

A worker spends up to eight seconds of CPU time on importing torch, transformers and scikit-learn, a
coordinator one on its imports, a test process ten more on the tests, and hundreds are started. Here
that happens once. FD is a listening socket; each request on a connection to it (see
`tests.processes`) becomes a child that continues like `python -m MODULE ARGUMENTS...`, or like
`python -c CODE` with the tests of PATHS. It ends when its standard input does.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.no_disk_sync import wait_for_no_disk

PRELOADED = (
    "torch", "torch.nn.functional", "wgpu.backends.wgpu_native", "backends.cpu",
    "backends.eager.eager", "backends.scripted", "backends.wgpu.backend", "coordinator.cli",
    "coordinator.main", "coordinator.members.announcement", "coordinator.short_forms",
    "coordinator.token_cli", "encodings.idna", "encodings.utf_8_sig", "protocol.wire.certificate",
    "worker.cli", "worker.join.discovery", "worker.main", "worker.shell.engine",
    "worker.tasks.small.regress",
)  # fmt: skip
"""Nothing of them may start a thread, or read what the environment says of one process."""
PRELOADED_IF_THERE = (
    "sklearn.datasets", "transformers.models.auto", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama", "peft", "peft.utils.transformers_weight_conversion",
    "worker.tasks.labels.classify", "worker.tasks.language.causal_lm", "worker.tasks.small.digits",
)  # fmt: skip
"""Likewise, of extras that may not be installed."""

REQUEST_BYTES = 1 << 20
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of sched.h."""


class Server:
    """Forks at every request, and tells how each child ended. It imports once somebody connects."""

    def __init__(self, door: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._open: dict[int, socket.socket] = {}
        self._ends: dict[int, tuple[int, int]] = {}
        self._door = door
        self._selector.register(door, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """In a child: what it is to run. In the server, at the end: None."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    return None
                if key.fd in self._ends:
                    self._has_ended(key.fd)
                elif key.fileobj is self._door:
                    connection, _ = self._door.accept()
                    self._open[connection.fileno()] = connection
                    self._selector.register(connection, selectors.EVENT_READ)
                elif (request := self._answer(self._open[key.fd])) is not None:
                    return request

    def _answer(self, connection: socket.socket) -> dict[str, Any] | None:
        """In a child: what it is to run."""
        text, files = _request(connection)
        if not text:
            self._selector.unregister(connection)
            del self._open[connection.fileno()]
            connection.close()
            return None
        *standard, notice = files
        request: dict[str, Any] = json.loads(text)
        _import_all(with_tests=request["code"] is not None)
        # Before the answer: a thread's network may end with it.
        networks = [os.open(path, os.O_RDONLY) for path in request["networks"]]
        pid = os.fork()
        if pid == 0:
            self._close_all()
            os.close(notice)
            for target, source in enumerate(standard):
                os.dup2(source, target)
                os.close(source)
            _enter(networks)
            if request["session"]:
                os.setsid()
            return request
        for each in (*standard, *networks):
            os.close(each)
        follower = os.pidfd_open(pid)
        self._ends[follower] = (pid, notice)
        self._selector.register(follower, selectors.EVENT_READ)
        connection.sendall(b"%d" % pid)
        return None

    def _has_ended(self, follower: int) -> None:
        pid, notice = self._ends.pop(follower)
        self._selector.unregister(follower)
        os.close(follower)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # whoever asked for it has ended before
            os.write(notice, b"%d" % code)
        os.close(notice)

    def _close_all(self) -> None:
        for each in (*self._ends, *(end for _, end in self._ends.values())):
            os.close(each)
        self._selector.close()
        for connection in (self._door, *self._open.values()):
            connection.close()


def _request(connection: socket.socket) -> tuple[bytes, array.array[int]]:
    text, ancillary, _, _ = connection.recvmsg(REQUEST_BYTES, socket.CMSG_LEN(4 * 4))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    return text, files


def _enter(networks: list[int]) -> None:
    """Be in that network namespace, if there is one."""
    for each in networks:
        if ctypes.CDLL(None, use_errno=True).setns(each, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(each)


@cache
def _import_all(*, with_tests: bool) -> None:
    gc.disable()
    if with_tests:
        _import_tests(sys.argv[2:])
    for name in PRELOADED:
        importlib.import_module(name)
    for name in PRELOADED_IF_THERE:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    gc.freeze()  # children do not look through all of it, and share its memory
    gc.enable()


def _import_tests(paths: list[str]) -> None:
    """As pytest does, which does not import again what is imported. It comes before all else:
    asserts of its plugins are rewritten as they are imported. What fails here fails in a child."""
    import pytest

    alone = ["--collect-only", "-n", "0", "-s", "-p", "no:cacheprovider", "-p", "no:randomly"]
    with contextlib.ExitStack() as silent:
        nowhere = silent.enter_context(Path(os.devnull).open("w"))
        silent.enter_context(contextlib.redirect_stdout(nowhere))
        silent.enter_context(contextlib.redirect_stderr(nowhere))
        pytest.main([*alone, *paths])


def main() -> None:
    """Serve; in a child become the command."""
    wait_for_no_disk()
    request = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is None:
        return
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if (code := request["code"]) is not None:
        sys.argv = ["-c"]
        main = sys.modules["__main__"] = ModuleType("__main__")
        _end(_run(lambda: exec(code, vars(main))))
    sys.argv = [request["module"], *request["arguments"]]
    module = request["module"]
    _end(_run(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)))


def _run(run: Callable[[], object]) -> int:
    """The exit code, as the interpreter would give it."""
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 -- whatever it is, the interpreter's last words
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(code: int) -> None:
    """As the interpreter does, but that it does not take apart all that it has imported: that
    would copy the memory which a child shares, half a second of processor."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
