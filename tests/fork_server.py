"""`python -m tests.fork_server FD [PATHS...]`: fork processes that have imported everything.

A worker spends up to eight seconds of CPU time on importing torch, transformers and scikit-learn, a
coordinator one second on its imports, a test process ten more on the tests, and tests start
hundreds of processes. This server imports everything once. FD is a listening socket; each request
on a connection to it (see `tests.processes`) becomes a child that continues like
`python -m MODULE ARGUMENTS...`, or like `python -c CODE` with the tests of PATHS. The server ends
when its standard input is closed.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.forked_command import ADDRESS
from tests.no_disk_sync import disable_disk_sync

PRELOADED = (
    "torch", "torch.nn.functional", "wgpu.backends.wgpu_native", "backends.cpu",
    "backends.eager.eager", "backends.registry", "backends.scripted", "backends.wgpu.backend",
    "coordinator.cli", "coordinator.main", "coordinator.members.announcement",
    "coordinator.short_forms", "coordinator.token_cli",
    "cryptography.hazmat.backends.openssl.backend", "encodings.idna", "encodings.unicode_escape",
    "encodings.utf_8_sig", "protocol.wire.certificate", "typer._adapters",
    "typer._click.decorators", "uvloop", "worker.cli", "worker.join.discovery", "worker.main",
    "worker.shell.engine", "worker.tasks.checks.reachable_state", "worker.tasks.registry",
    "worker.tasks.small.regress",
)  # fmt: skip
"""None of these imports may start a thread, or read variables of one process's environment."""
PRELOADED_IF_INSTALLED = (
    "sklearn.datasets", "transformers.models.auto", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama", "peft", "peft.utils.transformers_weight_conversion",
    "worker.tasks.labels.classify", "worker.tasks.language.causal_lm",
    "worker.tasks.language.distil", "worker.tasks.language.dpo",
    "worker.tasks.language.teacher_logits", "worker.tasks.small.digits", "pyarrow.parquet",
    "coordinator.capture.captured_files",
)  # fmt: skip
"""Further imports, which need extras of samestep; the same holds for them."""

REQUEST_BYTES = 1 << 20
_MOST_FILES = 64
_FIRST_TEMPORARY_FD = 500
"""Lowest descriptor of temporary copies; inherited files have lower ones in the caller."""
_CLONE_NEWNET = 0x40000000
"""Constant of sched.h: a network namespace."""


class Server:
    """Fork at every request, and report how each child ended; the first request imports."""

    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, socket.socket] = {}
        self._children: dict[int, tuple[int, int]] = {}
        self._callers: dict[int, int] = {}
        """Children to kill when their caller ends: process number by status descriptor, whose pipe
        then breaks."""
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(sys.stdin, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Return, in a child, the command to run; in the server, None at the end."""
        while True:
            # Ended children last: closing their files frees descriptors that other events refer to.
            events = sorted(
                self._selector.select(), key=lambda event: event[0].fd in self._children
            )
            for key, _ in events:
                if key.fileobj is sys.stdin:
                    return None
                if key.fd in self._children:
                    self._report_exit(key.fd)
                elif key.fd in self._callers:
                    self._selector.unregister(key.fd)
                    os.kill(self._callers.pop(key.fd), signal.SIGKILL)
                elif key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._connections[connection.fileno()] = connection
                    self._selector.register(connection, selectors.EVENT_READ)
                elif (request := self._answer(self._connections[key.fd])) is not None:
                    return request

    def _answer(self, connection: socket.socket) -> dict[str, Any] | None:
        """Fork for one request; return, in the child, the command to run."""
        text, files = _read_request(connection)
        if not text:
            self._selector.unregister(connection)
            del self._connections[connection.fileno()]
            connection.close()
            return None
        *standard_files, status_fd = files[:4]
        request: dict[str, Any] = json.loads(text)
        inherited = dict(zip(request.get("inherited", ()), files[4:], strict=True))
        _import_all(with_tests=request["code"] is not None)
        # Before the answer: a namespace that is a thread's may end with that thread.
        networks = [os.open(path, os.O_RDONLY) for path in request["networks"]]
        pid = os.fork()
        if pid == 0:
            self._close_all()
            os.close(status_fd)
            for target, source in enumerate(standard_files):
                os.dup2(source, target)
                os.close(source)
            _enter(networks)
            _restore_descriptors(inherited)
            if request["session"]:
                os.setsid()
            return request
        for fd in (*standard_files, *networks, *inherited.values()):
            os.close(fd)
        if request.get("ends_with_caller"):
            self._callers[status_fd] = pid
            self._selector.register(
                status_fd, selectors.EVENT_READ
            )  # readable once the pipe breaks
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, status_fd)
        self._selector.register(pidfd, selectors.EVENT_READ)
        with contextlib.suppress(BrokenPipeError):  # the caller has already ended
            connection.sendall(b"%d" % pid)
        return None

    def _report_exit(self, pidfd: int) -> None:
        pid, status_fd = self._children.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if self._callers.pop(status_fd, None) is not None:
            self._selector.unregister(status_fd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # the requesting process has already ended
            os.write(status_fd, b"%d" % code)
        os.close(status_fd)

    def _close_all(self) -> None:
        for fd in (*self._children, *(status_fd for _, status_fd in self._children.values())):
            os.close(fd)
        self._selector.close()
        for connection in (self._listener, *self._connections.values()):
            connection.close()


def _read_request(connection: socket.socket) -> tuple[bytes, array.array[int]]:
    text, ancillary, _, _ = connection.recvmsg(REQUEST_BYTES, socket.CMSG_LEN(4 * _MOST_FILES))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    return text, files


def _restore_descriptors(inherited: dict[int, int]) -> None:
    """Give inherited files the descriptors that they have in the caller."""
    moved_files = {}
    for target, source in inherited.items():
        moved_files[target] = fcntl.fcntl(source, fcntl.F_DUPFD, _FIRST_TEMPORARY_FD)
        os.close(source)
    for target, source in moved_files.items():
        os.dup2(source, target)
        os.close(source)


def _fork_subprocesses() -> None:
    """Make the product fork the commands that it starts from this server, too."""
    command_line = importlib.import_module("protocol.cli.command_line")
    command_of = command_line.command_of
    fork_command = [sys.executable, "-SE", str(Path(__file__).with_name("forked_command.py"))]
    for module in [*sys.modules.values()]:
        names = getattr(module, "__dict__", {})
        if names.get("command_of") is command_of:
            names["command_of"] = lambda package: [*fork_command, package]


def _enter(networks: list[int]) -> None:
    """Enter the network namespace, if the list has one."""
    for network in networks:
        if ctypes.CDLL(None, use_errno=True).setns(network, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(network)


@cache
def _import_all(*, with_tests: bool) -> None:
    gc.disable()
    if with_tests:
        _import_tests(sys.argv[2:])
    for name in PRELOADED:
        importlib.import_module(name)
    for name in PRELOADED_IF_INSTALLED:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    adapters = sys.modules["backends.wgpu.device.adapters"].adapters
    assert not adapters.cache_info().currsize, "a test requests Vulkan devices on import"
    gc.freeze()  # children skip these objects in garbage collections, and share their memory
    gc.enable()


def _import_tests(paths: list[str]) -> None:
    """Import the tests as pytest does, which does not import a module twice. This must come first:
    pytest rewrites asserts of its plugins on import. A failure here also shows in a child."""
    import pytest

    options = ["--collect-only", "-n", "0", "-s", "-p", "no:cacheprovider", "-p", "no:randomly"]
    with contextlib.ExitStack() as stack:
        null_file = stack.enter_context(Path(os.devnull).open("w"))
        stack.enter_context(contextlib.redirect_stdout(null_file))
        stack.enter_context(contextlib.redirect_stderr(null_file))
        pytest.main([*options, *paths])


def main() -> None:
    """Serve; in a child, become the command."""
    disable_disk_sync()
    request = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is None:
        return
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if (code := request["code"]) is not None:
        sys.argv = ["-c"]
        main = sys.modules["__main__"] = ModuleType("__main__")
        _exit(_exit_code_of(lambda: exec(code, vars(main))))
    if ADDRESS in os.environ:
        _fork_subprocesses()
    sys.argv = [request["module"], *request["arguments"]]
    module = request["module"]
    if not hasattr(sys.modules.get(module), "__path__"):  # a package stays: its `__main__` runs
        sys.modules.pop(module, None)  # runpy warns of a module that is imported already
    _exit(_exit_code_of(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)))


def _exit_code_of(run: Callable[[], object]) -> int:
    """Return the exit code that the interpreter would give."""
    try:
        run()
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 -- the interpreter reports any exception
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _exit(code: int) -> None:
    """Exit like the interpreter, but without tearing down imported modules: that would copy the
    memory that children share, and take half a second of processor time."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
