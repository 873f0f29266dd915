"""The coordinator process: service, control port, console and local workers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from coordinator.disk.directory_lock import remove_unused_directory
from coordinator.disk.durable_file import TEMPORARY_SUFFIX, storage_errors, write_output
from coordinator.files.blob_index import BlobIndex, index_blobs
from coordinator.local_workers import LocalWorkers
from coordinator.members.invitation import invitation, status_line
from coordinator.members.listening import is_loopback, reachable_addresses
from coordinator.operator.console import ProgressConsole, print_outcome
from coordinator.operator.control import ControlPort
from coordinator.operator.event_pipe import ConsoleLines, EventPipe
from coordinator.operator.status import status_document
from coordinator.operator.status_text import summary
from coordinator.operator.structured_log import set_up_logging
from coordinator.options import CoordinatorOptions, resume_command
from coordinator.run.outputs.events import Event
from coordinator.service.events import Draining
from coordinator.service.run_instance import abandoned_runs, unfinished_runs
from coordinator.service.service import Service, Settings
from coordinator.storage.copies import check_no_run, restore_copy
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.tracking.trackers import check_trackers
from coordinator.tracking.tracking import Tracking
from protocol.base import limits
from protocol.base.address import format_address
from protocol.base.errors import ExitCode, SamestepError, StorageFailed, UsageError
from protocol.base.option_names import option
from protocol.cli.command_line import check_writable, end_on_signals, require_open_files
from protocol.cli.output import never_wait_for_readers
from protocol.cli.systemd import Supervisor, SystemJournal
from protocol.exact.kernels.library import why_not_native
from protocol.exact.subnormals import check_subnormals
from protocol.machine.allocator import keep_freed_memory
from protocol.machine.event_loop import new_event_loop
from protocol.spec.manifest import INITIAL_ENTRIES
from protocol.wire.address_file import PublishedAddress

if TYPE_CHECKING:
    from coordinator.members.announcement import Announcement

DEFAULT_OUT = Path("runs")
_RECHECK_S = 0.1


def main(options: CoordinatorOptions, events: EventPipe | None = None) -> int:
    """Serve until the single run is over, or until drained.

    Args:
        options: The checked command line.
        events: Receives all lines of the console, and events; None: print to a console.

    Raises:
        SamestepError: The process cannot start.
    """
    check_subnormals("the coordinator")
    require_open_files(limits.COORDINATOR_FILES)
    trackers = check_trackers(options.trackers)
    if options.address_file is not None:
        check_writable(options.address_file, "--address-file")
    keep_freed_memory()
    never_wait_for_readers()
    journal = None if options.log_json else SystemJournal.for_stream("coordinator")
    set_up_logging(journal, as_json=options.log_json)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(replace(options, trackers=trackers), journal, events))


async def _serve(
    options: CoordinatorOptions, journal: SystemJournal | None, events: EventPipe | None
) -> int:
    _check_data_roots(options)
    if options.out is not None:
        with storage_errors("read", options.out):
            options.out.exists()  # the result does not matter: the name must be valid
    if options.from_copies is not None:
        _restore(options, options.from_copies)
    directory = _directory(options)
    is_one_run = options.resume and RunDirectory(directory).read_run_file() is not None
    # Before any file is created: an error in the data leaves no files.
    blobs = index_blobs(options.spec) if options.spec is not None and not is_one_run else None
    exits_after_run = options.spec is not None or is_one_run
    service = Service(_settings(options, directory, once=exits_after_run))
    control = ControlPort(service)
    # A pipe is not a terminal, even if a notebook asks for colors (FORCE_COLOR).
    lines = None if events is None else cast("TextIO", ConsoleLines(events))
    at_terminal = events is None and sys.stdout.isatty()
    console = Console(file=lines, highlight=False, force_terminal=at_terminal)
    progress = ProgressConsole(service, console, events or journal)
    supervisor = Supervisor()
    tracking = Tracking(options.trackers, partial(_run_in_progress, service), _say)
    service.event_sinks += [control, progress, _SystemdSink(supervisor), tracking]
    if not await _begin(options, service, control, console, blobs):
        return ExitCode.OK
    _print_addresses(options, service, control, console)
    if events is not None:
        events.write("", {"event": "listening", "address": format_address(*service.address)})
    announcement = _announce(options, service)
    local = LocalWorkers(
        service.address,
        options.local_backend,
        options.local_devices,
        service.credentials.token_file,
        _say,
        plaintext=options.plaintext,
    )
    end_on_signals(service.drain, service.should_end.set)
    each_second = (progress.tick, control.guard.restore_file)
    ticking = asyncio.create_task(_tick(each_second, service.loop_watch.run()))
    try:
        progress.start()
        await local.start(options.local_workers)
        supervisor.report_ready(lambda: summary(status_document(service, time.monotonic())))
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
    end = _ending(service)
    resume_command_for = partial(resume_command, options, control=control.address)
    _report_ending(end, service, console, resume_command_for, events)
    return local.could_not_begin or end.exit_code if end.exit_code else ExitCode.OK


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
    """Check --data-root before any file is created."""
    if options.data_roots and options.spec is not None:
        raise UsageError(
            "--data-root applies to submitted runs; a run on the command line reads what its run "
            "spec names: leave --data-root out"
        )
    for root in options.data_roots:
        if not root.is_dir():
            raise UsageError(f"--data-root: expected a directory, got {str(root)!r}")


def _say(text: str) -> None:
    print(f"coordinator: {text}", file=sys.stderr, flush=True)


def _run_in_progress(service: Service) -> Path | None:
    return service.current.directory if service.current is not None else None


async def _begin(
    options: CoordinatorOptions,
    service: Service,
    control: ControlPort,
    console: Console,
    blobs: BlobIndex | None,
) -> bool:
    """Listen, and queue the runs that the command line requests.

    Returns:
        False if the requested run has already finished; ports are closed and new files removed.

    Raises:
        SamestepError: The service cannot begin; ports are closed and new files removed.
    """
    is_new, has_queued_run = not service.settings.directory.exists(), False
    try:
        await service.start()
        await control.start(*options.control)
        has_queued_run = _queue(options, service, console, blobs)
    finally:
        if not has_queued_run:
            await service.stop()
            await control.stop()
            if is_new:
                remove_unused_directory(service.settings.directory)
    return has_queued_run


def _directory(options: CoordinatorOptions) -> Path:
    """Return the directory of runs, or of the single run."""
    if options.resume and options.spec is not None and options.out is None:
        raise UsageError(
            "--resume with a run spec needs --out: the directory to begin or continue in"
        )
    if options.from_step is not None:
        _check_rollback(options)
    if options.changes:
        _check_is_run(options.out)
    if options.out is None and options.spec is not None and not options.resume:
        return new_directory(options.spec.name)
    directory = options.out or DEFAULT_OUT
    if options.spec is not None:
        _check_free(directory)
    if options.resume and options.spec is None and not directory.is_dir():
        raise UsageError(
            f"expected runs to resume in {str(directory)!r}, found no such directory; name it with "
            f"{option('--out DIR')}"
        )
    return directory


def _restore(options: CoordinatorOptions, copies: str) -> None:
    if not options.resume or options.out is None:
        raise UsageError("--from needs --resume and --out: the new directory of the run")
    check_no_run(options.out)
    summary = restore_copy(Path(copies), options.out).summary
    print(f"coordinator: restored from {copies!r}: {summary}")


def _check_free(directory: Path) -> None:
    """Check that the directory of a new run has no other files."""
    if RunDirectory(directory).read_run_file() is not None or not directory.is_dir():
        return
    others = [
        path.name for path in sorted(directory.iterdir())
        if path.name not in INITIAL_ENTRIES
        and not path.name.startswith(".")
        and not path.name.endswith(TEMPORARY_SUFFIX)
    ]  # fmt: skip
    if others:
        raise UsageError(
            f"{option('--out')}: expected a new or empty directory, or a run's, got "
            f"{str(directory)!r} with {others[0]!r} in it; name another, such as "
            f"{str(directory / 'run')!r}"
        )


def _check_rollback(options: CoordinatorOptions) -> None:
    if not options.resume or options.out is None:
        raise UsageError("--from-step needs --resume and --out: the directory of the run")
    if RunDirectory(options.out).read_run_file() is None:
        raise UsageError(f"--from-step: expected a run in {str(options.out)!r}, found no run.json")


def _check_is_run(directory: Path | None) -> None:
    if directory is None:
        raise UsageError("--set with --resume needs --out: the directory of the run to change")
    if RunDirectory(directory).read_run_file() is None:
        raise UsageError(
            f"--set with --resume: expected the directory of one run, got {str(directory)!r} "
            "without run.json; name the run's own directory (--out)"
        )


def new_directory(name: str) -> Path:
    """Return a free directory for a run of this name, with the first free number."""
    number = 1
    while (path := DEFAULT_OUT / f"{name}-{number}").exists():
        number += 1
    return path


def _queue(
    options: CoordinatorOptions, service: Service, console: Console, blobs: BlobIndex | None
) -> bool:
    """Queue the requested runs; return False if the requested run has already finished."""
    directory = service.settings.directory
    if not options.resume:
        if options.spec is not None:
            service.submit(options.spec, directory, blobs)
        return True
    if RunDirectory(directory).read_run_file() is not None:
        spec, changes = options.spec, options.changes
        if options.may_change and spec is not None:
            instance = service.resume(directory, changes=spec)
        else:
            instance = service.resume(directory, spec, options.from_step, changes)
        if instance is not None:
            return True
        text = f"the run in {str(directory)!r} has finished; there is nothing to resume"
        console.print(Text(text), soft_wrap=True)
        return False
    if options.spec is not None:
        service.submit(options.spec, directory, blobs)
        return True
    if given_up := abandoned_runs(directory):
        text = f"not resumed, because an operator has given them up: {', '.join(given_up)}"
        console.print(Text(f"{text}; `coordinator resume RUN` resumes one"), soft_wrap=True)
    for run in unfinished_runs(directory):
        try:
            service.resume(run)
        except SamestepError as error:
            print(f"coordinator: {str(run)!r} is not resumed: {error}", file=sys.stderr)
    if not service.queue and service.current is None:
        console.print(Text(f"no unfinished run in {str(directory)!r}; waiting for new ones"))
    return True


class _SystemdSink:
    """Reports draining to systemd, which then gives the daemon time to drain."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def emit(self, event: Event, run_id: str = "") -> None:
        """See `EventSink`."""
        del run_id
        if isinstance(event, Draining):
            self._supervisor.report_stopping()


async def _tick(
    each_second: Sequence[Callable[[], None]], watching: Coroutine[Any, Any, None]
) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watching)
        while True:
            await asyncio.sleep(1)
            for tick in each_second:
                tick()


async def _until_over(service: Service, local: LocalWorkers | None) -> None:
    """Wait for the end of the service. A single run ends as failed once all local workers have
    ended and no other worker is connected."""

    async def end_with_workers() -> None:
        assert local is not None
        await local.all_ended()
        # The end of a process may be noticed before the end of its connection.
        while local.name in {s.hello.name for s in service.sessions.values()}:  # noqa: ASYNC110 -- rare and short
            await asyncio.sleep(_RECHECK_S)
        if not service.trainers and service.settings.once:
            reasons = service.current.run.unfit if service.current is not None else {}
            cannot = "".join(f"; {name}: {reason}" for name, reason in sorted(reasons.items()))
            service.give_up(
                f"all local workers have ended, and no other worker is connected{cannot}"
            )

    watch = asyncio.create_task(end_with_workers()) if local is not None else None
    await service.should_end.wait()
    if watch is not None:
        watch.cancel()


@dataclass(frozen=True, slots=True)
class _Ending:
    """The exit code of the process, and the reason.

    Attributes:
        reason: The reason for a failure; empty without a failure.
        is_resumable: Whether steps are left, and a checkpoint to resume from.
    """

    exit_code: int
    reason: str = ""
    is_resumable: bool = False


def _ending(service: Service) -> _Ending:
    if service.current is not None:
        run = service.current.run
        stopped = f"run {run.run_id!r} was stopped after {run.steps_committed} steps"
        return _Ending(ExitCode.FAILED, stopped, is_resumable=True)
    execution = service.finished
    if execution is None or execution.outcome is None or not service.settings.once:
        # A serving coordinator has reported each run's end already.
        return _Ending(ExitCode.OK)
    outcome, run = execution.outcome, execution.run
    if outcome.outcome == "failed":
        has_checkpoint = run.checkpoints.saved_step is not None and not execution.is_superseded
        is_resumable = has_checkpoint and outcome.is_resumable
        return _Ending(outcome.exit_code, outcome.reason, is_resumable)
    is_drained = outcome.outcome == "drained" and run.steps_committed > 0
    return _Ending(outcome.exit_code, is_resumable=is_drained)


def _report_ending(
    end: _Ending,
    service: Service,
    console: Console,
    resume_command_for: Callable[..., str],
    events: EventPipe | None,
) -> None:
    execution = service.current or service.finished
    command = ""
    if execution is not None and events is None:
        command = resume_command_for(service.address, execution.directory)
    if not end.reason and execution is not None and execution.outcome and service.settings.once:
        print_outcome(execution, console, command)
    if events is not None:
        events.write(end.reason, {"event": "ended", **asdict(end)})
    elif end.reason:
        resume = f"; to resume: {command}" if end.is_resumable else ""
        _say(f"{end.reason}{resume}")


def _announce(options: CoordinatorOptions, service: Service) -> Announcement | None:
    """Announce the coordinator on the network, unless it is local or disabled."""
    if not options.name or is_loopback(service.address[0]):
        return None
    from coordinator.members.announcement import Announcement  # noqa: PLC0415 -- 0.1 s, seldom needed

    certificate = "" if options.plaintext else service.credentials.fingerprint.hex()
    announcement = Announcement(options.name, service.address, certificate)
    announcement.start()
    return announcement


def _print_addresses(
    options: CoordinatorOptions, service: Service, control: ControlPort, console: Console
) -> None:
    data, page = format_address(*service.address), format_address(*control.address)
    if options.address_file is not None:
        host, port = service.address
        addresses = [format_address(address, port) for address in reachable_addresses(host)]
        published = PublishedAddress(data=data, control=page, reachable=tuple(addresses[:32]))
        try:
            write_output(options.address_file, published.to_json().encode())
        except StorageFailed as error:
            raise UsageError(f"--address-file: {error}") from None
    lines = invitation(
        service.credentials,
        service.address,
        name=options.name,
        plaintext=options.plaintext,
        to_terminal=console.is_terminal,
        script=options.script,
    )
    startup = [why_not_native(), service.credentials.replacement_note, *lines]
    if options.script is None:
        token = control.guard.token
        startup.append(status_line(control.address, token, to_terminal=console.is_terminal))
    for line in filter(None, startup):
        console.print(Text(line), soft_wrap=True)
