"""The worker process: client, engine and device put together."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from backends.interface import Backend
from protocol.allocator import keep_freed_memory
from protocol.errors import ExitCode
from protocol.run_spec import RunSpec
from protocol.supervisor import Supervisor
from protocol.system_journal import SystemJournal
from protocol.trace import Tracer
from worker.client import Client, Target
from worker.credentials import Credentials
from worker.tasks.base import Task


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of one worker process, checked."""

    target: Target
    device: int | str
    trace: Path | None
    quiet: bool
    credentials: Credentials


class LocalDevice:
    """The engine's toolbox: chooses the backend once, and builds tasks for it."""

    def __init__(self, name: str, wanted: int | str, tell: Callable[[str], None]) -> None:
        self._name = name
        self._wanted = wanted
        self._tell = tell
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        """See `engine.Toolbox`."""
        if self._backend is None:
            from backends.registry import choose  # noqa: PLC0415 -- may import torch: seconds

            choice = choose(self._name, self._wanted)
            self._tell(f"device: {choice.backend.info.name}: {choice.reason}")
            self._backend = choice.backend
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        """See `engine.Toolbox`."""
        from worker.tasks.registry import build  # noqa: PLC0415 -- may import torch: seconds

        return build(spec)


def main(options: Options) -> ExitCode:
    """Serve until the coordinator says goodbye, or until told to end.

    Raises:
        SamestepError: No coordinator answers, or it refused.
    """
    keep_freed_memory()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(options))


async def _serve(options: Options) -> ExitCode:
    journal = SystemJournal.behind("worker")

    def tell(text: str) -> None:
        if options.quiet:
            return
        if journal is not None:
            journal.write(text, client.place())
        else:
            print(f"worker: {text}", flush=True)

    supervisor = Supervisor()
    tracer = Tracer.to_file(options.trace, options.target.name) if options.trace else None
    toolbox = LocalDevice(options.target.backend, options.device, tell)
    client = Client(options.target, toolbox, options.credentials, tell, tracer)
    _end_on_signals(client, supervisor)
    supervisor.ready(client.status)
    try:
        return await client.serve()
    finally:
        supervisor.close()
        if tracer is not None:
            tracer.close()


def _end_on_signals(client: Client, supervisor: Supervisor) -> None:
    """The first SIGTERM or SIGINT drains, the second ends at once."""
    loop = asyncio.get_running_loop()
    asked = 0

    def handle() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            supervisor.stopping()
            client.drain()
        else:
            sys.exit(ExitCode.FAILED)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle)
