"""The process of one device of a host: the engine, and a pipe to the host.

It joins nothing and fetches nothing. Its end is the host's word, or the host's own end.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from protocol.base.errors import ExitCode
from protocol.command.output import keep_reporting, never_wait_for_readers
from protocol.host.allocator import keep_freed_memory
from protocol.host.shared_memory import Extent, SharedMemory
from protocol.host.trace import Tracer
from worker.local_device import LocalDevice
from worker.logic import events
from worker.logic.host import as_reported
from worker.shell.device_pipe import Pipe, pack_report, unpack_order
from worker.shell.engine import Engine, Toolbox

_END_TIMEOUT_S: Final = 5.0


class DeviceProcess:
    """Does what the host says.

    Args:
        pipe: To the host.
        host: The host's memory.
        own: This device's, which the host reads.
    """

    def __init__(self, pipe: Pipe, host: SharedMemory, own: SharedMemory) -> None:
        self._pipe = pipe
        self._host = host
        self._own = own

    def serve(self, engine: Engine) -> None:
        """Until the host ends, or ends this."""
        for packed in self._pipe.received():
            if packed[0] == "free":
                for place in packed[1]:
                    self._own.give_back(Extent(*place))
            else:
                engine.do(unpack_order(packed, self._host), self._taken)

    def emit(self, event: events.Event) -> None:
        """Any thread of the engine calls it: the host is told once all of it is in memory.

        Raises:
            SharedMemoryFull: There is no room for it.
        """
        self._pipe.send(pack_report(as_reported(event), self._own))

    def say(self, text: str) -> None:
        """To a person, who sees what the host tells."""
        self._pipe.send(["say", text])

    def _taken(self) -> None:
        """The engine needs no more of the host's memory that was given first."""
        self._pipe.send(["taken"])


def main(make: Callable[[str, int | str | None, Callable[[str], None]], Toolbox]) -> None:
    """Entry point of the process; see `worker.shell.device_processes` for its arguments.

    Args:
        make: Takes the backend's name, the device that is wanted, and what tells people.
    """
    keep_reporting("worker")
    never_wait_for_readers()
    pipe_fd, host_fd, own_fd = map(int, sys.argv[1:4])
    name, backend, wanted, trace = sys.argv[4:8]
    # The host ends it: a terminal's and a supervisor's word are for the host.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
    process = DeviceProcess(
        Pipe(socket.socket(fileno=pipe_fd)),
        SharedMemory(host_fd, writable=False),
        SharedMemory(own_fd),
    )

    def say(text: str) -> None:
        process.say(f"{name}: {text}")

    tracer = Tracer.to_file(Path(trace), name) if trace else None
    toolbox = make(backend, int(wanted) if wanted.isdecimal() else wanted or None, say)
    engine = Engine(toolbox, process.emit, tracer)
    process.serve(engine)
    _end_within(_END_TIMEOUT_S, engine.close)
    if tracer is not None:
        tracer.close()
    os._exit(ExitCode.OK)


def _end_within(seconds: float, work: Callable[[], None]) -> None:
    """A driver may hang; its process goes all the same."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)


if __name__ == "__main__":
    main(LocalDevice)
