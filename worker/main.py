"""The worker process: client, engine and device put together."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backends.base.interface import Backend
from protocol.base.duty import Duty
from protocol.base.errors import DeviceError, ExitCode
from protocol.host.allocator import keep_freed_memory
from protocol.host.command_line import end_on_signals
from protocol.host.event_loop import new_event_loop
from protocol.host.loop_watch import LoopWatch
from protocol.host.supervisor import Supervisor
from protocol.host.system_journal import SystemJournal, write_error
from protocol.host.trace import Tracer
from protocol.spec.run_spec import RunSpec
from worker.joining.credentials import WorkerCredentials
from worker.joining.this_machine import HERE, someone_listens
from worker.shell.client import Client, Target
from worker.tasks.base import Task


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The command line of one worker process, checked.

    Attributes:
        address: Of the coordinator; None to look for it.
        coordinator: Its name, if it is one by name that is looked for.
        name: This worker's.
        device: The one that was asked for, by number or part of its name; None for the first.
        duty: What it is there for.
    """

    address: tuple[str, int] | None
    coordinator: str
    name: str
    backend: str
    retry_for_s: float
    device: int | str | None
    trace: Path | None
    quiet: bool
    credentials: WorkerCredentials
    duty: Duty = "train"


class LocalDevice:
    """The engine's toolbox: chooses the backend once, and builds tasks for it."""

    def __init__(self, name: str, wanted: int | str | None, tell: Callable[[str], None]) -> None:
        self._name = name
        self._wanted = wanted
        self._tell = tell
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        """See `engine.Toolbox`."""
        if self._backend is None:
            from backends.registry import choose  # noqa: PLC0415 -- may import torch: seconds

            choice = choose(self._name, self._wanted)
            info = choice.backend.info
            self._tell(f"device: {info.name}: {choice.reason}")
            if info.backend == "vulkan":
                _end_in_order(info.name)
            self._backend = choice.backend
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        """See `engine.Toolbox`."""
        from worker.tasks.registry import build  # noqa: PLC0415 -- may import torch: seconds

        return build(spec)


def _end_in_order(device: str) -> None:
    """One line and exit code 1 also where wgpu's library ends the process."""
    from backends.wgpu.device.last_words import on_abort  # noqa: PLC0415 -- for Vulkan alone

    reason = (
        "a library ended the process; wgpu does when the driver loses the device or has no memory "
        "left for a submission, and its own words stand above"
    )
    on_abort(lambda: write_error("worker", DeviceError(device, reason)), ExitCode.FAILED)


def main(options: WorkerOptions) -> ExitCode:
    """Serve until the coordinator says goodbye, or until told to end.

    Raises:
        SamestepError: No coordinator answers, or it refused.
    """
    keep_freed_memory()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(options))


async def _serve(options: WorkerOptions) -> ExitCode:
    journal = SystemJournal.behind("worker")

    def tell(text: str) -> None:
        if options.quiet:
            return
        if journal is not None:
            journal.write(text, client.place() if client else {})
        else:
            print(f"worker: {text}", flush=True)

    client: Client | None = None
    supervisor = Supervisor()
    supervisor.ready(lambda: client.status() if client else "looking for the coordinator")
    address = options.address or await _find(options, tell)
    target = Target(*address, options.name, options.backend, options.retry_for_s, options.duty)
    tracer = Tracer.to_file(options.trace, options.name) if options.trace else None
    toolbox = LocalDevice(options.backend, options.device, tell)
    client = Client(target, toolbox, options.credentials, tell, tracer)
    _end_on_signals(client, supervisor)
    watch = LoopWatch(lambda held_ms: tell(f"nobody was heard for {held_ms:.0f} ms: network held"))
    watching = asyncio.create_task(watch.run())
    try:
        return await client.serve()
    finally:
        watching.cancel()
        supervisor.close()
        if tracer is not None:
            tracer.close()


async def _find(options: WorkerOptions, tell: Callable[[str], None]) -> tuple[str, int]:
    """Where the coordinator is; the network is asked only if none is on this machine."""
    if not options.coordinator and someone_listens(*HERE):
        return HERE
    from worker.joining.discovery import find  # noqa: PLC0415 -- 0.1 s, and seldom needed

    def is_ours(certificate: str) -> bool:
        return options.credentials.is_for(bytes.fromhex(certificate), options.name)

    return await find(options.coordinator, is_ours, options.retry_for_s, tell)


def _end_on_signals(client: Client, supervisor: Supervisor) -> None:
    def drain() -> None:
        supervisor.stopping()
        client.drain()

    def stop() -> None:
        text = "worker: stopped at once; others compute what it had begun"
        print(text, file=sys.stderr, flush=True)
        os._exit(ExitCode.FAILED)  # an orderly end would wait for the device

    end_on_signals(drain, stop)
