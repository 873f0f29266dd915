"""The `coordinator` command."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator import token_cli
from coordinator.options import CoordinatorOptions, usual_name
from protocol import __version__
from protocol.base.address import parse_address
from protocol.base.device_name import parse_devices
from protocol.base.errors import (
    ExitCode,
    UsageError,
)
from protocol.cli.command_line import (
    check_options_follow,
    check_writable,
    run_command,
)
from protocol.wire.discovery import check_name

if TYPE_CHECKING:
    from coordinator.audit.audit import AuditResult
    from coordinator.audit.recomputed import RecomputeRequest

DEFAULT_BIND = "127.0.0.1:9000"
DEFAULT_CONTROL = "127.0.0.1:9001"
_HASHING_TIMEOUT_S = 600.0
"""Timeout of commands that hash all files of a run."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Assign the work of each step, sum the gradients, and commit the step on all workers.",
)

app.add_typer(token_cli.app, name="token")

Control = Annotated[
    str,
    typer.Option(
        envvar="SAMESTEP_CONTROL",
        metavar="HOST:PORT",
        help="Address of the coordinator's control port.",
    ),
]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run spec.")
]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"samestep coordinator {__version__}")
        raise typer.Exit


ExpectWorkers = Annotated[
    int | None,
    typer.Option(
        min=1,
        envvar="SAMESTEP_EXPECT_WORKERS",
        metavar="N",
        help="Start a run once this many workers are ready.",
    ),
]
Bind = Annotated[
    str,
    typer.Option(
        envvar="SAMESTEP_BIND",
        metavar="HOST:PORT",
        help="Address for workers; port 0: any free port.",
    ),
]
Plaintext = Annotated[
    bool,
    typer.Option(
        "--plaintext", help="Turn TLS off: anyone on the path can read and change everything."
    ),
]
Name = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Name under which workers find the coordinator on the network; default: host name.",
    ),
]
Announce = Annotated[
    bool,
    typer.Option(
        "--announce/--no-announce",
        help="Announce the coordinator on the network, if --bind is reachable from there.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="DIR", help="Directory of the run; default: a new one in runs/."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume the run in --out, or all runs below it.")
]
FromStep = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="With --resume: roll back to the checkpoint of step N."),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="DIR",
        help="With --resume and a new --out: first restore the run from its newest copy "
        "(checkpoint.copies) in this directory.",
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="DIR", help="A run's directory.")]
RunFile = Annotated[
    Path | None, typer.Option(metavar="RUN.yaml", help="Execute this run, then exit.")
]
Task = Annotated[
    str | None, typer.Option(metavar="TASK", help="Execute one run of this task; see also --set.")
]
Model = Annotated[
    str | None, typer.Option(metavar="DIR|NAME", help="Short for --set model.source=...")
]
Data = Annotated[str | None, typer.Option(metavar="FILE", help="Short for --set data.train=...")]
NumClasses = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Short for --set data.num_classes=...")
]
Steps = Annotated[int | None, typer.Option(min=1, metavar="N", help="Short for --set steps=...")]
Epochs = Annotated[int | None, typer.Option(min=1, metavar="N", help="Short for --set epochs=...")]
LocalWorkers = Annotated[
    int, typer.Option(min=0, metavar="N", help="Also start this many workers on this machine.")
]
Backend = Annotated[str, typer.Option(metavar="BACKEND", help="Backend of the local workers.")]
Gpus = Annotated[
    str,
    typer.Option(
        metavar="LIST", help="Devices of the local workers, such as 0,1, or parts of names."
    ),
]
AddressFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SAMESTEP_ADDRESS_FILE",
        metavar="FILE",
        help="Write the addresses in use to this file, as JSON; workers read it.",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a Chrome trace of all steps to this file."),
]
Track = Annotated[
    list[str],
    typer.Option(
        "--track",
        metavar="TRACKER",
        help="Also log to tensorboard, wandb or mlflow.",
    ),
]
DataRoot = Annotated[
    list[Path],
    typer.Option(
        "--data-root",
        metavar="DIR",
        help="Submitted runs may read only files below this directory; repeatable. Default: all "
        "files except secrets.",
    ),
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log as JSON lines on standard error.")]
Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    expect_workers: ExpectWorkers = None,
    bind: Bind = DEFAULT_BIND,
    plaintext: Plaintext = False,
    name: Name = "",
    announce: Announce = True,
    control: Control = DEFAULT_CONTROL,
    out: Out = None,
    resume: Resume = False,
    from_step: FromStep = None,
    from_copies: From = None,
    run: RunFile = None,
    task: Task = None,
    model: Model = None,
    data: Data = None,
    num_classes: NumClasses = None,
    steps: Steps = None,
    epochs: Epochs = None,
    overrides: Overrides = [],  # noqa: B006 -- typer copies it
    local_workers: LocalWorkers = 0,
    backend: Backend = "auto",
    gpus: Gpus = "",
    address_file: AddressFile = None,
    trace: Trace = None,
    track: Track = [],  # noqa: B006
    data_root: DataRoot = [],  # noqa: B006
    log_json: LogJson = False,
    version: Version = False,
) -> None:
    """Serve runs to workers, or execute one run with --run."""
    del version
    if context.invoked_subcommand is not None:
        check_options_follow(context)
        return
    # Cheap checks come first: the imports below take a second.
    bind_at, control_at = parse_address(bind, "--bind"), parse_address(control, "--control")
    local_backend, local_devices = _local_devices(backend, gpus, local_workers)
    from coordinator.short_forms import ShortForms, run_spec_or_changes

    short_forms = ShortForms(task, model, data, num_classes, steps, epochs)
    spec, changes = run_spec_or_changes(run, short_forms, overrides, resume=resume)
    from coordinator.main import main

    options = CoordinatorOptions(
        bind=bind_at,
        control=control_at,
        plaintext=plaintext,
        name=(check_name(name, "--name") if name else usual_name()) if announce else "",
        expect_workers=_expected_workers(expect_workers, local_workers, resume=resume),
        out=out, resume=resume, from_copies=from_copies, from_step=from_step,
        spec=spec,
        local_workers=local_workers,
        local_backend=local_backend,
        local_devices=local_devices,
        address_file=address_file,
        trace=trace,
        trackers=tuple(track), log_json=log_json, data_roots=tuple(data_root), changes=changes,
    )  # fmt: skip
    raise typer.Exit(main(options))


def _local_devices(
    backend: str, gpus: str, local_workers: int
) -> tuple[str, tuple[int | str, ...]]:
    local_backend, local_devices = parse_devices(backend, gpus)
    if len(local_devices) > local_workers:
        raise UsageError(
            f"expected a local worker for each device, got {len(local_devices)} in --gpus or "
            f"--backend and --local-workers {local_workers}"
        )
    return local_backend, local_devices


def _expected_workers(expect_workers: int | None, local_workers: int, *, resume: bool) -> int:
    """Return the flag, else torchrun's WORLD_SIZE, else the local workers, else 1 for --resume."""
    if expect_workers is not None:
        return expect_workers
    world = os.environ.get("WORLD_SIZE", "")
    if world:
        if not world.isdecimal() or int(world) < 1:
            raise UsageError(f"WORLD_SIZE: expected a whole number above 0, got {world!r}")
        return int(world)
    if local_workers or resume:
        return max(local_workers, 1)
    raise UsageError(
        "expected --expect-workers N, got none; give the number of workers that the run waits for"
    )


@app.command()
def submit(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="A run spec.")],
    overrides: Overrides = [],  # noqa: B006
    control: Control = DEFAULT_CONTROL,
) -> None:
    """Submit a run spec to a serving coordinator."""
    from protocol.spec.files.run_spec_file import load_run_spec

    document = json.loads(load_run_spec(run, overrides).to_bytes())
    submission = {"run": document}
    answer = _ask(control, "POST", "/submit", submission, timeout_s=_HASHING_TIMEOUT_S)
    typer.echo(answer["run_id"])


@app.command()
def status(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole document as JSON.")
    ] = False,
    control: Control = DEFAULT_CONTROL,
) -> None:
    """Show the run, the workers, and what the run waits for."""
    document = _ask(control, "GET", "/status")
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    from coordinator.operator.status_text import status_lines

    for line in status_lines(document):
        typer.echo(line)


@app.command()
def halt(control: Control = DEFAULT_CONTROL) -> None:
    """Stop the run at once; the step in progress is not applied."""
    typer.echo(_ask(control, "POST", "/halt", {})["phase"])


@app.command("continue")
def continue_(
    skip_step: Annotated[
        bool, typer.Option("--skip-step", help="Skip the halted step; its samples count as used.")
    ] = False,
    control: Control = DEFAULT_CONTROL,
) -> None:
    """End a halt: try the same step again, or skip it."""
    typer.echo(_ask(control, "POST", "/continue", {"skip_step": skip_step})["phase"])


@app.command()
def drain(control: Control = DEFAULT_CONTROL) -> None:
    """Finish the step in progress, save, and end."""
    _ask(control, "POST", "/drain", {})
    typer.echo("draining")


@app.command()
def checkpoint(control: Control = DEFAULT_CONTROL) -> None:
    """Save a checkpoint of the run now."""
    typer.echo(f"saving the state after step {_ask(control, 'POST', '/checkpoint', {})['step']}")


@app.command()
def track(
    run: RunPath,
    to: Annotated[str, typer.Option(metavar="TRACKER", help="tensorboard, wandb or mlflow.")],
    follow: Annotated[bool, typer.Option("--follow", hidden=True)] = False,
) -> None:
    """Send a tracker all steps of a run that it does not have yet."""
    from coordinator.tracking.feeding import feed, from_standard_input
    from coordinator.tracking.trackers import check_trackers

    [name] = check_trackers((to,))

    count, last = feed(name, run, from_standard_input if follow else None)
    typer.echo(f"{name}: sent {count} steps; it has the run up to step {last}")


@app.command("give-up")
def give_up(control: Control = DEFAULT_CONTROL) -> None:
    """End the run in progress as failed, so that the next one begins; it can be resumed."""
    answer = _ask(control, "POST", "/give-up", {})
    serving_command = f"coordinator resume {answer['run_id']}"
    resume_command = (
        serving_command
        if answer["serving"]
        else f"coordinator --resume --out {shlex.quote(answer['directory'])}"
    )
    typer.echo(
        f"gave up {answer['run_id']} after {answer['step']} steps; to resume: {resume_command}"
    )


@app.command()
def resume(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="ID of the run, as printed by status or submit.")
    ],
    from_step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="First roll back to the checkpoint of step N."),
    ] = None,
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a key of the run spec, such as steps."
        ),
    ] = [],  # noqa: B006
    control: Control = DEFAULT_CONTROL,
) -> None:
    """Resume a run that was given up, failed or was drained, on a serving coordinator."""
    command = {"run_id": run, "from_step": from_step, "changes": overrides}
    answer = _ask(control, "POST", "/resume", command, timeout_s=_HASHING_TIMEOUT_S)
    typer.echo(f"{answer['run_id']} continues when the runs before it are over")


@app.command()
def audit(
    directory: RunPath,
    recompute: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Recompute N random steps on this CPU and compare bits; for runs with canonical "
            "arithmetic whose model and data are on this machine.",
        ),
    ] = 0,
) -> None:
    """Prove from a run's files that each sample counted once, and that all digests match."""
    from coordinator.disk.directory_lock import is_locked

    if is_locked(directory):
        raise UsageError(
            f"the run in {str(directory)!r} is in progress and its files change; audit it when it "
            "has ended, or drain it first"
        )
    if recompute:
        from coordinator.audit.recomputed import RecomputeRequest
        from coordinator.recomputing import Recomputing

        with Recomputing(directory) as computing:
            result = _audited(directory, RecomputeRequest(recompute, computing))
    else:
        result = _audited(directory)
    for line in result.lines():
        typer.echo(line)
    raise typer.Exit(ExitCode.OK if result.ok else ExitCode.FAILED)


def _audited(directory: Path, request: RecomputeRequest | None = None) -> AuditResult:
    """Audit a run, with a progress bar at a terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    from coordinator.audit.audit import audit as audit_run

    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("steps", total=None)
        return audit_run(
            directory,
            lambda completed, total: bar.update(task, completed=completed, total=total),
            request,
        )


@app.command()
def report(
    directory: RunPath,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Default: DIR/report.html.")
    ] = None,
) -> None:
    """Write an HTML report: curves, workers, faults, inputs, digests, and the audit's findings."""
    from coordinator.audit.report import report as report_on
    from coordinator.disk.directory_lock import is_locked
    from coordinator.disk.durable_file import write_output

    target = output or directory / "report.html"
    if not os.path.isdir(directory):  # noqa: PTH112 -- False for an invalid name
        raise UsageError(
            f"expected a run in {str(directory)!r}, found no such directory; name a run's directory"
        )
    check_writable(target, "--output")  # before an audit of minutes
    audited = None if is_locked(directory) else _audited(directory)  # locked: files change
    if write_output(target, report_on(directory, audited).encode()):
        typer.echo(str(target))


@app.command()
def doctor(
    bind: Bind = DEFAULT_BIND,
    control: Control = DEFAULT_CONTROL,
    out: Out = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, for scripts.")
    ] = False,
) -> None:
    """Check this machine for common problems, and say what to do."""
    from coordinator.doctor import ServicePlan, examine
    from coordinator.main import DEFAULT_OUT
    from protocol.cli.doctor import report_findings
    from protocol.machine.secret_file import state_home

    ports = parse_address(bind, "--bind"), parse_address(control, "--control")
    plan = ServicePlan(*ports, out or DEFAULT_OUT, state_home())
    raise typer.Exit(report_findings(examine(plan), typer.echo, as_json=as_json))


@app.command(hidden=True)
def embedded() -> None:
    """Execute the run of a `samestep.fit`, with a request on standard input and events as
    output."""
    from coordinator.embedded import serve as serve_fit

    raise typer.Exit(serve_fit())


@app.command()
def schema(
    like: Annotated[
        str, typer.Argument(metavar="[KEY]", help="With --text: only keys that resemble this one.")
    ] = "",
    as_text: Annotated[bool, typer.Option("--text", help="Print one line per key.")] = False,
) -> None:
    """Print every key of a run spec, as JSON schema or as text."""
    from protocol.spec.run_spec import run_spec_schema
    from protocol.spec.schema_text import schema_lines

    if as_text or like:
        for line in schema_lines(like):
            typer.echo(line)
        return
    typer.echo(json.dumps(run_spec_schema(), indent=2))


def _ask(
    control: str, method: str, path: str, document: Any = None, timeout_s: float = 10.0
) -> dict[str, Any]:
    from coordinator.operator.control_client import request

    parse_address(control, "--control")
    return _run(request(control, method, path, document, timeout_s))


def _run(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    return asyncio.run(work)


def main() -> None:
    """Entry point."""
    run_command(app, "coordinator")
