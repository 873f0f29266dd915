"""The worker process: client, engine and device put together."""

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
from protocol.cli.command_line import end_on_signals, need_open_files, started_by_torchrun
from protocol.cli.output import never_wait_for_readers
from protocol.cli.systemd import Supervisor, SystemJournal, write_error
from protocol.exact.kernels.library import why_not_native
from protocol.machine.allocator import keep_freed_memory
from protocol.machine.event_loop import LoopWatch, new_event_loop
from protocol.machine.presence import Presence
from protocol.machine.secret_file import state_home
from protocol.machine.trace import Tracer
from worker.join.address import HERE, find_in_file, has_listener
from worker.join.credentials import WorkerCredentials
from worker.local_device import LocalDevice
from worker.shell.client import Client, FindAgain, Target
from worker.shell.device_processes import DeviceProcesses
from worker.shell.group_engine import DeviceSet

if TYPE_CHECKING:
    from worker.torchrun.leader import GroupBackendFactory

_END_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The command line of one worker process, checked.

    Attributes:
        address: Of the coordinator; None to look for it.
        coordinator: Its name, if it is one by name that is looked for.
        address_file: Where the coordinator publishes its address; None to look for it otherwise.
        name: This worker's.
        devices: Those that were asked for, by number or part of their names; none: the first.
        processes: How many share them, if that is more.
        duty: What it is there for.
        shard: Of a group of ranks: lay a frozen base across them.
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
    """Serve until the coordinator says goodbye, or until told to end.

    Raises:
        SamestepError: No coordinator answers, or it refused.
    """
    never_wait_for_readers()
    keep_freed_memory()
    need_open_files(limits.WORKER_FILES)
    if started_by_torchrun():
        return _main_of_a_rank(options)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(options))


def _main_of_a_rank(options: WorkerOptions) -> ExitCode:
    """Rank 0 serves, with all ranks behind it; the others do what it tells."""
    from worker.torchrun.follower import Follower  # noqa: PLC0415 -- imports torch: seconds
    from worker.torchrun.group import RankGroup  # noqa: PLC0415
    from worker.torchrun.leader import GroupBackendFactory  # noqa: PLC0415

    group = RankGroup(cards=options.backend != "cpu")
    chosen = options.devices[0] if options.devices else None
    device = group.local_rank if group.cards else chosen
    own = LocalDevice(options.backend, device, lambda _: None, shard=True)
    try:
        if group.rank:
            # torchrun tells all ranks to end: rank 0 drains, and these end with it.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            group.watch_loss(_end_with_lost_rank)
            Follower(group, own).follow()
            return ExitCode.OK
        with (
            GroupBackendFactory(group, own) as leading,
            asyncio.Runner(loop_factory=new_event_loop) as runner,
        ):
            return runner.run(_serve(options, leading))
    finally:
        if group.loss:
            _end_whatever_hangs()
        else:
            group.close()


async def _serve(options: WorkerOptions, group: GroupBackendFactory | None = None) -> ExitCode:
    journal = SystemJournal.behind("worker")

    def tell(text: str) -> None:
        if options.quiet:
            return
        if journal is not None:
            journal.write(text, client.place() if client else {})
        else:
            print(f"worker: {text}", flush=True)

    def warn(text: str) -> None:
        if journal is not None:
            journal.write(text, client.place() if client else {})
        else:
            print(f"worker: {text}", file=sys.stderr, flush=True)

    client: Client | None = None
    supervisor = Supervisor()
    supervisor.ready(
        lambda: client.status() if client else "looking for the coordinator",
        is_alive=lambda: client is None or not client.is_device_hanging,
    )
    address = options.address or await _find(options, tell)
    target = Target(*address, options.name, options.backend, options.retry_for_s, options.duty)
    tracer = Tracer.to_file(options.trace, options.name) if options.trace else None
    toolbox = group or _devices(options, tell, warn)
    if reason := why_not_native():
        tell(reason)
    again = find_again(options)
    client = Client(target, toolbox, options.credentials, tell, tracer, find_again=again)
    _end_on_signals(client, supervisor)
    watch = LoopWatch(lambda held_ms: tell(f"nobody was heard for {held_ms:.0f} ms: network held"))
    watching = asyncio.create_task(watch.run())
    presence = Presence(state_home(), options.name)
    if warning := presence.begin():
        warn(warning)
    try:
        return await client.serve()
    finally:
        presence.end()
        watching.cancel()
        supervisor.close()
        if tracer is not None:
            tracer.close()
        if group is not None:
            group.is_busy = client.is_device_busy
        if client.is_device_hanging:
            _end_whatever_hangs()


def _end_with_lost_rank(reason: str) -> None:
    """End the process of a rank that waits for another in vain."""
    from worker.torchrun.group import GROUP  # noqa: PLC0415 -- imports torch: imported by now

    write_error("worker", DeviceError(GROUP, reason))
    os._exit(ExitCode.FAILED)


def _end_whatever_hangs() -> None:
    """End the process soon, with exit code 1, even if a driver hangs and holds Python's lock."""
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 -- open until the end
    faulthandler.dump_traceback_later(_END_TIMEOUT_S, exit=True, file=nowhere)


def find(options: WorkerOptions, tell: Callable[[str], None]) -> tuple[str, int]:
    """Where the coordinator is, for whoever runs no event loop of its own."""
    return options.address or asyncio.run(_find(options, tell))


async def _find(options: WorkerOptions, tell: Callable[[str], None]) -> tuple[str, int]:
    """Where the coordinator is; the network is asked only if none is on this machine."""
    if options.address_file is not None:
        return await find_in_file(options.address_file, options.retry_for_s, tell)
    if not options.coordinator and has_listener(*HERE):
        return HERE
    return await _ask_network(options, options.retry_for_s, tell)


def find_again(options: WorkerOptions) -> FindAgain | None:
    """Looks again for a coordinator that was found in a file or on the network; None for one whose
    address the user gave."""
    if (path := options.address_file) is not None:
        return lambda: find_in_file(path, 0.0, lambda _: None)
    if options.address is not None:
        return None
    return lambda: _ask_network(options, 0.0, lambda _: None)


async def _ask_network(
    options: WorkerOptions, retry_for_s: float, tell: Callable[[str], None]
) -> tuple[str, int]:
    from worker.join.discovery import find  # noqa: PLC0415 -- 0.1 s, and seldom needed

    def has_credentials(certificate: str) -> bool:
        return options.credentials.is_for(bytes.fromhex(certificate), options.name)

    return await find(options.coordinator, has_credentials, retry_for_s, tell)


def _end_on_signals(client: Client, supervisor: Supervisor) -> None:
    def drain() -> None:
        supervisor.stopping()
        client.drain()

    def stop() -> None:
        text = "worker: stopped at once; others compute what it had started"
        print(text, file=sys.stderr, flush=True)
        os._exit(ExitCode.FAILED)  # an orderly end would wait for the device

    end_on_signals(drain, stop)


def _devices(
    options: WorkerOptions, tell: Callable[[str], None], warn: Callable[[str], None]
) -> LocalDevice | DeviceSet:
    """One device in this process, or each of several in a process of its own."""
    selection: list[int | str | None] = [*options.devices] or [None]
    kind = "cpu" if options.backend == "cpu" else "gpu"
    names = [f"{kind}{device}".replace(" ", "-") for device in options.devices]
    if options.processes > len(names):
        names = [f"{options.name}-{number}" for number in range(options.processes)]
    if len(names) < 2:
        return LocalDevice(options.backend, selection[0], tell)
    dealt = {name: selection[number % len(selection)] for number, name in enumerate(names)}
    return DeviceSet(names, DeviceProcesses(dealt, options.backend, tell, options.trace), warn)
