"""The device that this process serves, if it is the process of one device of a `fit` with several.

See `samestep.script_devices`.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NoReturn

from protocol.base.errors import ExitCode, SamestepError
from protocol.spec.run_spec import RunSpec
from samestep.script_devices import ScriptStart
from worker import device_process
from worker.local_device import LocalDevice
from worker.tasks.base.task import Task

_POLL_INTERVAL_MS: Final = 1000


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

    def serve(self, failure: SamestepError | None = None) -> NoReturn:
        """Compute what the worker requests, and end with the worker.

        Args:
            failure: Why there is no task; raised when the worker requests the task.
        """
        self._is_serving.set()

        def make(name: str, device: int | str | None, say: Callable[[str], None]) -> LocalDevice:
            return _Device(name, device, say, failure)

        device_process.main(make, self._arguments)
        raise AssertionError("the process has ended")

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
    """A device; `failure` says why there is no task for it."""

    def __init__(
        self,
        name: str,
        device: int | str | None,
        tell: Callable[[str], None],
        failure: SamestepError | None,
    ) -> None:
        super().__init__(name, device, tell)
        self._failure = failure

    def task(self, spec: RunSpec) -> Task:
        """See `engine.BackendFactory`."""
        if self._failure is not None:
            raise self._failure
        return super().task(spec)


_SERVED: Final[list[ServedDevice]] = []


def served_device() -> ServedDevice | None:
    """Return the device that this process serves; None in a process that the user started."""
    return _SERVED[0] if _SERVED else None


def set_served_device(served: ServedDevice) -> None:
    """Set the device that this process serves."""
    _SERVED[:] = [served]
