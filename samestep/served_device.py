"""The device that this process serves, if it is the process of one device of a `fit` with several.

See `samestep.script_devices`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

from protocol.base.errors import ExitCode, SamestepError
from protocol.spec.run_spec import RunSpec
from samestep.script_devices import ScriptStart
from worker import device_process
from worker.local_device import LocalDevice
from worker.shell.device_pipe import Pipe
from worker.tasks.base.task import Task

_POLL_INTERVAL_MS: Final = 1000
_HELD_OUTPUT: Final = 7
"""Index of the descriptor of the file for held output among the process's arguments."""


@dataclass(slots=True)
class ServedDevice:
    """The device that this process serves.

    Attributes:
        start: How this process runs the script.
        backend: The backend's name.
        device: The device, by number or part of its name.
    """

    start: ScriptStart
    backend: str
    device: int | str | None
    _arguments: list[str]
    _is_serving: threading.Event = field(default_factory=threading.Event)
    _stderr_fd: int | None = None
    """A copy of the original standard error, while output is held; else None."""

    def serve(self, failure: SamestepError | None = None) -> NoReturn:
        """Execute the worker's requests, and end with the worker.

        Args:
            failure: The error to raise when the worker requests the task; None: build the task.
        """
        self._is_serving.set()
        with socket.socket(fileno=os.dup(int(self._arguments[0]))) as pipe_end:
            Pipe(pipe_end).send(["reached fit"])

        def make_device(
            name: str, device: int | str | None, say: Callable[[str], None]
        ) -> LocalDevice:
            return _Device(name, device, say, failure, self.release_output)

        device_process.main(make_device, self._arguments)
        raise AssertionError("the process has ended")

    def hold_output(self) -> None:
        """Write standard output and error to the file that the worker drops or shows."""
        held_fd = int(self._arguments[_HELD_OUTPUT])
        self._stderr_fd = os.dup(2)
        for fd in (1, 2):
            os.dup2(held_fd, fd)
        os.close(held_fd)

    def release_output(self) -> None:
        """Drop standard output from now on, and write standard error to the original stream."""
        if self._stderr_fd is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os.dup2(self._stderr_fd, 2)
        os.close(self._stderr_fd)
        self._stderr_fd = None
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 -- the user's process prints the same
            os.dup2(nowhere.fileno(), 1)

    def end_with_worker(self) -> None:
        """End this process if the worker is gone while the script runs."""
        poll = select.poll()
        poll.register(int(self._arguments[0]), 0)  # only whether the other end is closed

        def watch() -> None:
            while not self._is_serving.is_set():
                if poll.poll(_POLL_INTERVAL_MS):
                    os._exit(ExitCode.FAILED)

        threading.Thread(target=watch, name="worker's pipe", daemon=True).start()


class _Device(LocalDevice):
    """The device of this process.

    Args:
        name: The backend's name.
        device: The device, by number or part of its name.
        print_line: Prints a line.
        failure: Raised instead of building a task; None if the script reached the call.
        on_task: Called after each task that is built.
    """

    def __init__(
        self,
        name: str,
        device: int | str | None,
        print_line: Callable[[str], None],
        failure: SamestepError | None,
        on_task: Callable[[], None],
    ) -> None:
        super().__init__(name, device, print_line)
        self._failure, self._on_task = failure, on_task

    def task(self, spec: RunSpec) -> Task:
        """See `engine.BackendFactory`."""
        if self._failure is not None:
            raise self._failure
        task = super().task(spec)
        self._on_task()
        return task


_SERVED: Final[list[ServedDevice]] = []


def served_device() -> ServedDevice | None:
    """Return the device that this process serves; None in a process that the user started."""
    return _SERVED[0] if _SERVED else None


def set_served_device(served: ServedDevice) -> None:
    """Set the device that this process serves."""
    _SERVED[:] = [served]
