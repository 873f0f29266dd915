"""The process of one device of several: the engine, and a pipe to the worker.

It joins nothing and fetches nothing. It ends when the worker says so, or ends itself.
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

from protocol.base.errors import DeviceError, DeviceOutOfMemory, ExitCode, SubnormalsFlushed
from protocol.cli.output import keep_reporting, never_wait_for_readers
from protocol.machine.allocator import keep_freed_memory
from protocol.machine.shared_memory import Extent, SharedMemory
from protocol.machine.trace import Tracer
from worker.local_device import LocalDevice
from worker.logic import events
from worker.logic.device_group import without_infinite_sums
from worker.shell.device_pipe import Pipe, order_codec, report_codec
from worker.shell.engine import BackendFactory, Engine

_END_TIMEOUT_S: Final = 5.0


class DeviceProcess:
    """Does what the worker says.

    Args:
        name: The device's, as the worker calls it.
        pipe: To the worker.
        shared: The worker's memory.
        own: This device's, which the worker reads.
    """

    def __init__(self, name: str, pipe: Pipe, shared: SharedMemory, own: SharedMemory) -> None:
        self._name, self._pipe = name, pipe
        self._orders, self._reports = order_codec(shared), report_codec(own)
        self._own = own

    def serve(self, engine: Engine) -> None:
        """Until the worker ends, or ends this."""
        for packed in self._pipe.received():
            if packed[0] == "free":
                for place in packed[1]:
                    self._own.give_back(Extent(*place))
            else:
                engine.do(self._orders.unpack(packed))

    def emit(self, event: events.GroupReport) -> None:
        """Any thread of the engine calls it: the worker is told once all of it is in memory.

        A device that has failed computes nothing more in this process: the process ends, and the
        worker starts another.

        Raises:
            SharedMemoryFull: There is no room for it.
        """
        if isinstance(event, events.DeviceFailed) and _breaks_the_process(event.error):
            self._pipe.send(["gone", str(event.error)])
            os._exit(ExitCode.FAILED)
        self._pipe.send(self._reports.pack(without_infinite_sums(event)))

    def prepares(self, text: str) -> None:
        """Tell the worker how far the preparation of a task is."""
        self._pipe.send(["preparing", text])

    def say(self, text: str) -> None:
        """To a person, through the worker."""
        self._pipe.send(["say", text])


def main(
    make: Callable[[str, int | str | None, Callable[[str], None]], BackendFactory],
    arguments: Sequence[str] | None = None,
) -> None:
    """Entry point of the process.

    Args:
        make: Takes the backend's name, the device that is wanted, and what tells people.
        arguments: See `worker.shell.device_processes`. Default: those of the command line.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    keep_reporting("worker")
    never_wait_for_readers()
    pipe_fd, shared_fd, own_fd = map(int, arguments[:3])
    name, backend, device, trace = arguments[3:7]
    # The worker ends it: signals of a terminal or a supervisor are for the worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    process = DeviceProcess(
        name,
        Pipe(socket.socket(fileno=pipe_fd)),
        SharedMemory(shared_fd, writable=False),
        SharedMemory(own_fd),
    )

    def say(text: str) -> None:
        process.say(f"{name}: {text}")

    tracer = Tracer.to_file(Path(trace), name) if trace else None
    toolbox = make(backend, int(device) if device.isdecimal() else device or None, say)
    engine = Engine(toolbox, process.emit, tracer, in_group=True, prepares=process.prepares)
    process.serve(engine)
    _end_within(_END_TIMEOUT_S, engine.close)
    if tracer is not None:
        tracer.close()
    os._exit(ExitCode.OK)


def _breaks_the_process(error: Exception) -> bool:
    """Whether a new process may use the device again."""
    is_repeated = isinstance(error, DeviceOutOfMemory | SubnormalsFlushed)
    return isinstance(error, DeviceError) and not is_repeated


def _end_within(seconds: float, work: Callable[[], object]) -> None:
    """A driver may hang; its process goes all the same."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


if __name__ == "__main__":
    main(LocalDevice)
