"""The coordinator process: service, control port, console and local workers put together."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.text import Text

from coordinator.disk.artifacts import json_text
from coordinator.disk.claim import forget
from coordinator.disk.durable_file import TEMPORARY_SUFFIX, storing, write_output
from coordinator.files.blob_index import BlobIndex, index_blobs
from coordinator.local_workers import LocalWorkers
from coordinator.members.invitation import invitation, status_line
from coordinator.members.listening import is_loopback
from coordinator.operator.console import ProgressConsole, print_outcome
from coordinator.operator.control import ControlPort
from coordinator.operator.status import status_document
from coordinator.operator.status_text import summary
from coordinator.operator.structured_log import set_up_logging
from coordinator.resume_line import resume_line
from coordinator.run.outputs.facts import Fact
from coordinator.service.accepted_run import given_up_runs, unfinished_runs
from coordinator.service.listener import Draining, WorkerConnected
from coordinator.service.service import Service, Settings
from coordinator.service.worker_copies import fetch_copy
from coordinator.storage.copies import bring_back, check_no_run
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.tracking.trackers import check_trackers
from coordinator.tracking.tracking import Tracking
from protocol.base import limits
from protocol.base.address import format_address
from protocol.base.errors import ExitCode, SamestepError, StorageFailed, UsageError
from protocol.base.place import is_directory
from protocol.command.command_line import check_writable, end_on_signals, need_open_files
from protocol.command.output import never_wait_for_readers
from protocol.command.supervisor import Supervisor
from protocol.command.system_journal import SystemJournal
from protocol.exact.subnormals import check_subnormals
from protocol.host.allocator import keep_freed_memory
from protocol.host.event_loop import new_event_loop
from protocol.spec.run_spec import RunSpec

if TYPE_CHECKING:
    from coordinator.members.announcement import Announcement

DEFAULT_OUT = Path("runs")
_BEFORE_A_RUN = ("lock", "epoch.json", "lost+found")
"""What may lie in a run's directory though no run is there: of one that was not accepted."""
_FIRST_WORD_S: Final = 5.0
_WORDS_EVERY_S: Final = 30.0
"""While a worker that has copies is waited for."""


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """The command line of `coordinator`, checked.

    Attributes:
        name: Under which it is announced on the network, if others can reach it; empty: not at all.
    """

    bind: tuple[str, int]
    control: tuple[str, int]
    plaintext: bool
    name: str
    expect_workers: int
    out: Path | None
    spec: RunSpec | None
    resume: bool
    from_step: int | None
    from_copies: str | None
    local_workers: int
    local_backend: str
    local_devices: tuple[int | str, ...]
    address_file: Path | None
    trace: Path | None
    trackers: tuple[str, ...]
    log_json: bool
    data_roots: tuple[Path, ...] = ()


def main(options: CoordinatorOptions) -> int:
    """Run until the one run is over, or until drained.

    Raises:
        SamestepError: The process cannot start.
    """
    check_subnormals("the coordinator")
    need_open_files(limits.COORDINATOR_FILES)
    trackers = check_trackers(options.trackers)
    if options.address_file is not None:
        check_writable(options.address_file, "--address-file")
    keep_freed_memory()
    never_wait_for_readers()
    journal = None if options.log_json else SystemJournal.behind("coordinator")
    set_up_logging(journal, as_json=options.log_json)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(replace(options, trackers=trackers), journal))


async def _serve(options: CoordinatorOptions, journal: SystemJournal | None) -> int:
    _check_data_roots(options)
    if options.out is not None:
        with storing("read", options.out):
            options.out.exists()  # no matter whether: its name must be one
    if options.from_copies is not None:
        await _bring_back(options, options.from_copies)
    directory = _directory(options)
    alone = options.resume and RunDirectory(directory).read_run_file() is not None
    # Before anything is made: a mistake in the data leaves nothing behind.
    blobs = index_blobs(options.spec) if options.spec is not None and not alone else None
    once = options.spec is not None or alone
    service = Service(_settings(options, directory, once=once))
    control = ControlPort(service)
    # A pipe is no terminal, also where a notebook asks for colours (FORCE_COLOR).
    console = Console(highlight=False, force_terminal=sys.stdout.isatty())
    progress = ProgressConsole(service, console, journal)
    supervisor = Supervisor()
    tracking = Tracking(options.trackers, partial(_run_in_progress, service), _say)
    service.listeners += [control, progress, _TellsOfTheEnd(supervisor), tracking]
    if not await _begun(options, service, control, console, blobs):
        return ExitCode.OK
    _say_where(options, service, control, console)
    announcement = _announced(options, service)
    local = LocalWorkers(
        service.address,
        options.local_backend,
        options.local_devices,
        service.credentials.token_file,
        _say,
        plaintext=options.plaintext,
    )
    end_on_signals(service.drain, service.over.set)
    each_second = (progress.tick, control.guard.write_again)
    ticking = asyncio.create_task(_tick(each_second, service.loop_watch.run()))
    try:
        progress.start()
        await local.start(options.local_workers)
        supervisor.ready(lambda: summary(status_document(service, time.monotonic())))
        await _until_over(service, local if options.local_workers else None)
    finally:
        ticking.cancel()
        progress.stop()
        if announcement is not None:
            await announcement.stop()
        await service.stop()
        await local.stop()
        await control.stop()
        await asyncio.to_thread(tracking.stop)
        supervisor.close()
    code = _conclude(service, console, partial(resume_line, options, control=control.address))
    return local.could_not_begin or code if code else code


def _settings(options: CoordinatorOptions, directory: Path, *, once: bool) -> Settings:
    return Settings(
        bind=options.bind,
        expect_workers=options.expect_workers,
        directory=directory,
        once=once,
        trace=options.trace,
        plaintext=options.plaintext,
        data_roots=options.data_roots,
    )


def _check_data_roots(options: CoordinatorOptions) -> None:
    """Before anything is made."""
    if options.data_roots and options.spec is not None:
        raise UsageError(
            "--data-root is for runs that are submitted; one that is given here reads what its run "
            "spec names, so leave it out"
        )
    for root in options.data_roots:
        if not root.is_dir():
            raise UsageError(f"--data-root: expected a directory, got {str(root)!r}")


def _say(text: str) -> None:
    print(f"coordinator: {text}", file=sys.stderr, flush=True)


def _run_in_progress(service: Service) -> Path | None:
    return service.current.directory if service.current is not None else None


async def _begun(
    options: CoordinatorOptions,
    service: Service,
    control: ControlPort,
    console: Console,
    blobs: BlobIndex | None,
) -> bool:
    """Listen and queue what is asked for; False, with nothing left open or behind, if that has
    finished already.

    Raises:
        SamestepError: It cannot begin; nothing is left open or behind either.
    """
    new, queued = not service.settings.directory.exists(), False
    try:
        await service.start()
        await control.start(*options.control)
        queued = _queue(options, service, console, blobs)
    finally:
        if not queued:
            await service.stop()
            await control.stop()
            if new:
                forget(service.settings.directory)
    return queued


def _directory(options: CoordinatorOptions) -> Path:
    """Where runs are kept, or the one run that is told."""
    if options.resume and options.spec is not None and options.out is None:
        raise UsageError("--resume with a run spec needs --out: the directory to begin or go on in")
    if options.from_step is not None:
        _check_way_back(options)
    if options.out is None and options.spec is not None and not options.resume:
        return new_directory(options.spec.name)
    directory = options.out or DEFAULT_OUT
    if options.spec is not None:
        _check_free(directory)
    if options.resume and options.spec is None and not directory.is_dir():
        raise UsageError(f"expected runs to resume in {str(directory)!r}, found no such directory")
    return directory


async def _bring_back(options: CoordinatorOptions, copies: str) -> None:
    if not options.resume or options.out is None:
        raise UsageError("--from needs --resume and --out: the directory that the run gets")
    check_no_run(options.out)
    if is_directory(copies):
        told = bring_back(Path(copies), options.out).told
    else:
        told = await _bring_back_from_worker(options, copies, options.out)
    print(f"coordinator: brought back from {copies!r}: {told}")


async def _bring_back_from_worker(options: CoordinatorOptions, copies: str, out: Path) -> str:
    """Wait for the worker, have its copy, and let it come again once the run goes on."""
    name, _, run_id = copies.partition(":")
    scratch = out.with_name(f"{out.name}.from-worker{TEMPORARY_SUFFIX}")
    service = Service(Settings(options.bind, 1, scratch, once=False, plaintext=options.plaintext))
    arrival, ending = _Arrival(name), "the coordinator ends: no run was brought back"
    service.listeners.append(arrival)
    try:
        await service.start()
        for line in invitation(
            service.credentials, service.address, name=options.name, plaintext=options.plaintext,
            to_terminal=sys.stdout.isatty(),
        ):  # fmt: skip
            print(line)
        print(f"coordinator: waiting for worker {name!r}, which has the copies", flush=True)
        await _arrived(arrival, service)
        copy = await fetch_copy(
            service.sessions[name].questions, scratch / "copies", name, run_id or None
        )
        told = bring_back(copy, out).told
        ending = f"the run goes on from the copy that {name!r} keeps"
        return told
    finally:
        for session in list(service.sessions.values()):
            session.channel.goodbye(ending, retry=True)
        await service.stop()
        shutil.rmtree(scratch, ignore_errors=True)


class _Arrival:
    """Of a worker by name."""

    def __init__(self, name: str) -> None:
        self.seen = asyncio.Event()
        self.name = name

    def reported(self, fact: Fact, run_id: str = "") -> None:
        """See `listener.Listener`."""
        del run_id
        if isinstance(fact, WorkerConnected) and fact.worker == self.name:
            self.seen.set()


async def _arrived(arrival: _Arrival, service: Service) -> None:
    """Wait, and say now and then for whom, and who is there instead."""
    wait_s = _FIRST_WORD_S
    while not arrival.seen.is_set():
        try:
            await asyncio.wait_for(arrival.seen.wait(), wait_s)
        except TimeoutError:
            there = ", ".join(map(repr, sorted(service.sessions))) or "nobody"
            print(f"coordinator: connected: {there}; waiting for {arrival.name!r}", flush=True)
            wait_s = _WORDS_EVERY_S


def _check_free(directory: Path) -> None:
    """A run's files are put among no others; those of a run say themselves whether they fit."""
    if RunDirectory(directory).read_run_file() is not None or not directory.is_dir():
        return
    others = [
        path.name for path in sorted(directory.iterdir())
        if path.name not in _BEFORE_A_RUN
        and not path.name.startswith(".")
        and not path.name.endswith(TEMPORARY_SUFFIX)
    ]  # fmt: skip
    if others:
        raise UsageError(
            f"--out: expected a new or empty directory, or a run's, got {str(directory)!r} with "
            f"{others[0]!r} in it; name another, such as {str(directory / 'run')!r}"
        )


def _check_way_back(options: CoordinatorOptions) -> None:
    if not options.resume or options.out is None:
        raise UsageError("--from-step needs --resume and --out: the directory of the run")
    if RunDirectory(options.out).read_run_file() is None:
        raise UsageError(f"--from-step: expected a run in {str(options.out)!r}, found no run.json")


def new_directory(name: str) -> Path:
    """Where a run of this name is kept if the user does not say: the first number that is free."""
    number = 1
    while (path := DEFAULT_OUT / f"{name}-{number}").exists():
        number += 1
    return path


def _queue(
    options: CoordinatorOptions, service: Service, console: Console, blobs: BlobIndex | None
) -> bool:
    """Queue what the command line asks for; False if that has finished already."""
    directory = service.settings.directory
    if not options.resume:
        if options.spec is not None:
            service.submit(options.spec, directory, blobs)
        return True
    if RunDirectory(directory).read_run_file() is not None:
        if service.resume(directory, options.spec, options.from_step) is not None:
            return True
        told = f"the run in {str(directory)!r} has finished; nothing is to be done"
        console.print(Text(told), soft_wrap=True)
        return False
    if options.spec is not None:
        service.submit(options.spec, directory, blobs)
        return True
    if given_up := given_up_runs(directory):
        told = f"given up before, and left alone: {', '.join(given_up)}"
        console.print(Text(f"{told}; `coordinator resume RUN` goes on with one"), soft_wrap=True)
    for found in unfinished_runs(directory):
        try:
            service.resume(found)
        except SamestepError as error:
            print(f"coordinator: {str(found)!r} is left alone: {error}", file=sys.stderr)
    if not service.waiting and service.current is None:
        console.print(Text(f"no unfinished run in {str(directory)!r}; waiting for new ones"))
    return True


class _TellsOfTheEnd:
    """systemd gives a daemon that says so the time to drain, whoever has asked for it."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def reported(self, fact: Fact, run_id: str = "") -> None:
        """See `listener.Listener`."""
        del run_id
        if isinstance(fact, Draining):
            self._supervisor.stopping()


async def _tick(
    each_second: Sequence[Callable[[], None]], watching: Coroutine[Any, Any, None]
) -> None:
    async with asyncio.TaskGroup() as beside:
        beside.create_task(watching)
        while True:
            await asyncio.sleep(1)
            for tick in each_second:
                tick()


async def _until_over(service: Service, local: LocalWorkers | None) -> None:
    """Wait for the end; when all local workers are gone and nobody else is, it is the end."""

    async def end_with_workers() -> None:
        assert local is not None
        await local.all_ended()
        if not service.trainers and service.settings.once:
            unfit = service.current.run.unfit if service.current is not None else {}
            cannot = "".join(f"; {name}: {why}" for name, why in sorted(unfit.items()))
            service.give_up(f"all local workers have ended, and no other is connected{cannot}")

    watch = asyncio.create_task(end_with_workers()) if local is not None else None
    await service.over.wait()
    if watch is not None:
        watch.cancel()


def _conclude(service: Service, console: Console, again: Callable[..., str]) -> int:
    if service.current is not None:
        run, directory = service.current.run, service.current.directory
        place = f"run {run.run_id!r} was stopped after {run.step} steps"
        print(
            f"coordinator: {place}; go on with it: {again(service.address, directory)}",
            file=sys.stderr,
        )
        return ExitCode.FAILED
    execution = service.finished
    if execution is None or execution.outcome is None:
        return ExitCode.OK
    outcome = execution.outcome
    if not service.settings.once:
        return ExitCode.OK  # how each run ended was told then; to serve runs was what this was for
    way_on = again(service.address, execution.directory)
    if outcome.outcome == "failed":
        has_checkpoint = execution.run.saves.saved is not None and not execution.superseded
        is_resumable = has_checkpoint and outcome.is_resumable
        told = f"; go on with it: {way_on}" if is_resumable else ""
        print(f"coordinator: {outcome.reason}{told}", file=sys.stderr)
        return outcome.exit_code
    print_outcome(execution, console, way_on)
    return outcome.exit_code


def _announced(options: CoordinatorOptions, service: Service) -> Announcement | None:
    """Begin to tell the network where the coordinator is, if it is to know."""
    if not options.name or is_loopback(service.address[0]):
        return None
    from coordinator.members.announcement import Announcement  # noqa: PLC0415 -- 0.1 s, seldom needed

    certificate = "" if options.plaintext else service.credentials.fingerprint.hex()
    announcement = Announcement(options.name, service.address, certificate)
    announcement.start()
    return announcement


def _say_where(
    options: CoordinatorOptions, service: Service, control: ControlPort, console: Console
) -> None:
    data, page = format_address(*service.address), format_address(*control.address)
    if options.address_file is not None:
        try:
            write_output(options.address_file, json_text({"data": data, "control": page}))
        except StorageFailed as error:
            raise UsageError(f"--address-file: {error}") from None
    lines = invitation(
        service.credentials,
        service.address,
        name=options.name,
        plaintext=options.plaintext,
        to_terminal=console.is_terminal,
    )
    token = control.guard.token
    status = status_line(control.address, token, to_terminal=console.is_terminal)
    for line in filter(None, (service.credentials.made_anew, *lines, status)):
        console.print(Text(line), soft_wrap=True)
