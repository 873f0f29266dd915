"""The process of one device of a multi-device worker: an engine, and a pipe to the worker.

It has no connection to the coordinator and fetches no files. It ends when the worker closes the
pipe or ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from backends.base.interface import Array
from protocol.base.errors import DeviceError, DeviceOutOfMemory, ExitCode, SubnormalsFlushed
from protocol.cli.output import never_wait_for_readers, tolerate_stream_failures
from protocol.exact.reduction.average import copy_finite
from protocol.machine.allocator import keep_freed_memory
from protocol.machine.shared_memory import Extent, SharedMemory
from protocol.machine.trace import Tracer
from worker.local_device import LocalDevice
from worker.logic import events
from worker.logic.device_group import replace_non_finite
from worker.shell.device_pipe import Pipe, order_codec, report_codec
from worker.shell.engine import BackendFactory, Engine

_END_TIMEOUT_S: Final = 5.0


class DeviceProcess:
    """Executes the worker's orders and sends reports.

    Args:
        pipe: The pipe to the worker.
        worker_memory: The worker's shared memory.
        device_memory: This device's shared memory, which the worker reads.
    """

    def __init__(
        self, pipe: Pipe, worker_memory: SharedMemory, device_memory: SharedMemory
    ) -> None:
        self._pipe = pipe
        self._orders, self._reports = order_codec(worker_memory), report_codec(device_memory)
        self._device_memory = device_memory

    def serve(self, engine: Engine) -> None:
        """Execute orders until the pipe is closed."""
        for message in self._pipe.receive():
            if message[0] == "free":
                for extent in message[1]:
                    self._device_memory.give_back(Extent(*extent))
            else:
                engine.do(self._orders.unpack(message))

    def emit(self, event: events.GroupReport) -> None:
        """Send an event to the worker, after writing its arrays to shared memory.

        Any thread of the engine may call this. After a device failure that a new process may
        survive, this process ends, and the worker starts another.

        Raises:
            SharedMemoryFull: There is no room for the arrays.
        """
        if isinstance(event, events.DeviceFailed) and _needs_new_process(event.error):
            self._pipe.send(["gone", str(event.error)])
            os._exit(ExitCode.FAILED)
        self._pipe.send(self._reports.pack(replace_non_finite(event, self._copy_to_shared_memory)))

    def _copy_to_shared_memory(self, values: Array) -> Array | None:
        """Copy a sum to shared memory; return None if a value is not finite.

        The worker frees the copy.
        """
        extent = self._device_memory.allocate(values.nbytes)
        copy: Array = self._device_memory.array(extent)
        if copy_finite(values.reshape(-1), copy):
            return copy
        self._device_memory.give_back(extent)
        return None

    def report_progress(self, text: str) -> None:
        """Send the worker the progress of the task's preparation."""
        self._pipe.send(["preparing", text])

    def say(self, text: str) -> None:
        """Have the worker print a line for the user."""
        self._pipe.send(["say", text])


def main(
    make_factory: Callable[[str, int | str | None, Callable[[str], None]], BackendFactory],
    arguments: Sequence[str] | None = None,
) -> None:
    """Entry point of the process.

    Args:
        make_factory: Creates a backend factory from the backend's name, the device's number or part
            of its name, and a function that prints a line.
        arguments: See `worker.shell.device_processes`. Default: the command line's arguments.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    tolerate_stream_failures("worker")
    never_wait_for_readers()
    pipe_fd, worker_memory_fd, device_memory_fd = map(int, arguments[:3])
    name, backend, device, trace = arguments[3:7]
    # Signals from a terminal or supervisor are for the worker, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    process = DeviceProcess(
        Pipe(socket.socket(fileno=pipe_fd)),
        SharedMemory(worker_memory_fd, is_writable=False),
        SharedMemory(device_memory_fd),
    )

    def say(text: str) -> None:
        process.say(f"{name}: {text}")

    tracer = Tracer.to_file(Path(trace), name) if trace else None
    factory = make_factory(backend, int(device) if device.isdecimal() else device or None, say)
    engine = Engine(
        factory, process.emit, tracer, in_group=True, on_progress=process.report_progress
    )
    process.serve(engine)
    _run_with_timeout(_END_TIMEOUT_S, engine.close)
    if tracer is not None:
        tracer.close()
    os._exit(ExitCode.OK)


def _needs_new_process(error: Exception) -> bool:
    """Return whether a new process may be able to use the device again."""
    will_recur = isinstance(error, DeviceOutOfMemory | SubnormalsFlushed)
    return isinstance(error, DeviceError) and not will_recur


def _run_with_timeout(seconds: float, work: Callable[[], object]) -> None:
    """Run `work` for at most this long: a driver may hang."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


if __name__ == "__main__":
    main(LocalDevice)
