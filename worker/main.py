"""The worker process: connects client, engine and devices."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protocol.base import limits
from protocol.base.errors import DeviceError, ExitCode
from protocol.base.fields import Duty
from protocol.cli.command_line import end_on_signals, require_open_files, started_by_torchrun
from protocol.cli.output import never_wait_for_readers
from protocol.cli.systemd import Supervisor, SystemJournal, write_error
from protocol.exact.kernels.library import why_not_native
from protocol.machine.allocator import keep_freed_memory
from protocol.machine.event_loop import LoopWatch, new_event_loop
from protocol.machine.presence import Presence
from protocol.machine.secret_file import state_home
from protocol.machine.trace import Tracer
from worker.join.address import LOCAL_COORDINATOR, find_in_file, has_listener
from worker.join.credentials import WorkerCredentials
from worker.local_device import LocalDevice
from worker.shell.client import Client, CoordinatorSearch, Target
from worker.shell.device_processes import DeviceProcesses
from worker.shell.group_engine import DeviceSet

if TYPE_CHECKING:
    from worker.torchrun.leader import GroupBackendFactory

_END_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The validated command line of one worker process.

    Attributes:
        address: The coordinator's host and port; None to search for a coordinator.
        coordinator: The coordinator's name for the search; empty for any.
        name: This worker's name.
        backend: Value of --backend, without a device's number.
        retry_for_s: How long to search and to reconnect before the worker exits.
        devices: Numbers or parts of names of devices; empty for the first device.
        processes: Number of device processes, if more than devices.
        trace: File for a Chrome trace; None without one.
        quiet: Whether to print only problems.
        duty: Whether to train or only to evaluate.
        shard: Whether to shard a frozen base over the ranks of torchrun.
        address_file: File in which the coordinator publishes its address; None without one.
    """

    address: tuple[str, int] | None
    coordinator: str
    name: str
    backend: str
    retry_for_s: float
    devices: tuple[int | str, ...]
    processes: int
    trace: Path | None
    quiet: bool
    credentials: WorkerCredentials
    duty: Duty = "train"
    shard: bool = False
    address_file: Path | None = None


def main(options: WorkerOptions) -> ExitCode:
    """Serve until the coordinator says goodbye or a signal ends the worker.

    Raises:
        SamestepError: A named device is missing, no coordinator answers, or it refuses this worker.
    """
    never_wait_for_readers()
    keep_freed_memory()
    require_open_files(limits.WORKER_FILES)
    if started_by_torchrun():
        return _main_of_rank(options)
    _refuse_missing_names(options)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(options))


def _refuse_missing_names(options: WorkerOptions) -> None:
    """Refuse a name in --gpus that no device has, before the search for a coordinator.

    Only names are checked: the check imports torch, which a worker of several devices lacks.

    Raises:
        BackendUnavailable: No device has the name.
    """
    for device in options.devices:
        if isinstance(device, str):
            from backends.registry import refuse_missing_device  # noqa: PLC0415 -- imports torch: seconds

            refuse_missing_device(options.backend, device)


def _main_of_rank(options: WorkerOptions) -> ExitCode:
    """Run one torchrun rank: rank 0 serves the coordinator, the others follow rank 0."""
    from worker.torchrun.follower import Follower  # noqa: PLC0415 -- imports torch: seconds
    from worker.torchrun.group import RankGroup  # noqa: PLC0415
    from worker.torchrun.leader import GroupBackendFactory  # noqa: PLC0415

    group = RankGroup(uses_cards=options.backend != "cpu")
    selected_device = options.devices[0] if options.devices else None
    device = group.local_rank if group.uses_cards else selected_device
    local_device = LocalDevice(options.backend, device, lambda _: None, shard=True)
    try:
        if group.rank:
            # torchrun signals all ranks: rank 0 drains, and the others end with it.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            group.watch_loss(_end_with_lost_rank)
            Follower(group, local_device).follow()
            return ExitCode.OK
        with (
            GroupBackendFactory(group, local_device) as factory,
            asyncio.Runner(loop_factory=new_event_loop) as runner,
        ):
            return runner.run(_serve(options, factory))
    finally:
        if group.loss_reason:
            _end_process_soon()
            group.end_watch()
        else:
            group.close()


async def _serve(options: WorkerOptions, group: GroupBackendFactory | None = None) -> ExitCode:
    journal = SystemJournal.for_stream("worker")

    def print_line(text: str) -> None:
        if options.quiet:
            return
        if journal is not None:
            journal.write(text, client.log_fields() if client else {})
        else:
            print(f"worker: {text}", flush=True)

    def warn(text: str) -> None:
        if journal is not None:
            journal.write(text, client.log_fields() if client else {})
        else:
            print(f"worker: {text}", file=sys.stderr, flush=True)

    client: Client | None = None
    supervisor = Supervisor()
    supervisor.report_ready(
        lambda: client.status() if client else "looking for the coordinator",
        is_alive=lambda: client is None or not client.is_device_hanging,
    )
    address = options.address or await _search(options, print_line)
    target = Target(*address, options.name, options.backend, options.retry_for_s, options.duty)
    tracer = Tracer.to_file(options.trace, options.name) if options.trace else None
    devices = group or _devices(options, print_line, warn)
    if reason := why_not_native():
        print_line(reason)
    search = make_repeated_search(options)
    client = Client(target, devices, options.credentials, print_line, tracer, search_again=search)
    _end_on_signals(client, supervisor)
    watch = LoopWatch(
        lambda pause_ms: print_line(f"the event loop was blocked for {pause_ms:.0f} ms")
    )
    watch_task = asyncio.create_task(watch.run())
    presence = Presence(state_home(), options.name)
    if warning := presence.begin():
        warn(warning)
    try:
        exit_code = await client.serve()
    finally:
        presence.end()
        watch_task.cancel()
        supervisor.close()
        if tracer is not None:
            tracer.close()
        if group is not None:
            group.is_busy = client.is_device_busy
        if client.is_device_hanging:
            _end_process_soon()
    if group is None and client.is_device_busy:
        # The interpreter's end unloads libraries that the device's thread still uses.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(exit_code)
    return exit_code


def _end_with_lost_rank(reason: str) -> None:
    """End this rank's process, which may be waiting for the lost rank forever."""
    from worker.torchrun.group import GROUP  # noqa: PLC0415 -- torch, already imported

    write_error("worker", DeviceError(GROUP, reason))
    os._exit(ExitCode.FAILED)


def _end_process_soon() -> None:
    """End the process soon, with exit code 1, even if a driver hangs and holds Python's lock."""
    devnull = Path(os.devnull).open("w")  # noqa: SIM115 -- open until the end
    faulthandler.dump_traceback_later(_END_TIMEOUT_S, exit=True, file=devnull)


def find_coordinator(options: WorkerOptions, print_line: Callable[[str], None]) -> tuple[str, int]:
    """Return the coordinator's address; for callers without an event loop."""
    return options.address or asyncio.run(_search(options, print_line))


async def _search(options: WorkerOptions, print_line: Callable[[str], None]) -> tuple[str, int]:
    """Return the coordinator's address: from the file, on this machine, or else on the network."""
    if options.address_file is not None:
        return await find_in_file(options.address_file, options.retry_for_s, print_line)
    if not options.coordinator and has_listener(*LOCAL_COORDINATOR):
        return LOCAL_COORDINATOR
    return await _search_network(options, options.retry_for_s, print_line)


def make_repeated_search(options: WorkerOptions) -> CoordinatorSearch | None:
    """Return a function that searches again; None if the user gave the coordinator's address."""
    if (path := options.address_file) is not None:
        return lambda: find_in_file(path, 0.0, lambda _: None)
    if options.address is not None:
        return None
    return lambda: _search_network(options, 0.0, lambda _: None)


async def _search_network(
    options: WorkerOptions, retry_for_s: float, print_line: Callable[[str], None]
) -> tuple[str, int]:
    from worker.join.discovery import find_coordinator  # noqa: PLC0415 -- 0.1 s, and rarely needed

    def has_credentials(certificate: str) -> bool:
        return options.credentials.has_secret_for(bytes.fromhex(certificate), options.name)

    return await find_coordinator(options.coordinator, has_credentials, retry_for_s, print_line)


def _end_on_signals(client: Client, supervisor: Supervisor) -> None:
    def drain() -> None:
        supervisor.report_stopping()
        client.drain()

    def stop() -> None:
        text = "worker: stopped at once; other workers compute its unfinished work"
        print(text, file=sys.stderr, flush=True)
        os._exit(ExitCode.FAILED)  # an orderly end would wait for the device

    end_on_signals(drain, stop)


def _devices(
    options: WorkerOptions, print_line: Callable[[str], None], warn: Callable[[str], None]
) -> LocalDevice | DeviceSet:
    """Return one device in this process, or several in separate processes."""
    selection: list[int | str | None] = [*options.devices] or [None]
    prefix = "cpu" if options.backend == "cpu" else "gpu"
    names = [f"{prefix}{device}".replace(" ", "-") for device in options.devices]
    if options.processes > len(names):
        names = [f"{options.name}-{number}" for number in range(options.processes)]
    if len(names) < 2:
        return LocalDevice(options.backend, selection[0], print_line)
    devices_by_name = {
        name: selection[number % len(selection)] for number, name in enumerate(names)
    }
    return DeviceSet(
        names, DeviceProcesses(devices_by_name, options.backend, print_line, options.trace), warn
    )
