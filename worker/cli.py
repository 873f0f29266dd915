"""The `worker` command."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from protocol import __version__
from protocol.base.address import parse_address
from protocol.base.device_name import parse_devices
from protocol.base.errors import RunFailed, UsageError, describe_raised
from protocol.base.fields import Duty
from protocol.cli.command_line import (
    check_options_follow,
    end_with_standard_input,
    run_command,
    started_by_torchrun,
)
from protocol.wire.discovery import check_name
from worker import results_cli

if TYPE_CHECKING:
    from worker.main import WorkerOptions

DEFAULT_PORT = 9000
_END_OF_INPUT = "EOF when reading a line"
"""Python's text for `input()` at the end of standard input."""


def _parse_duty(text: str) -> Duty:
    match text:
        case "train" | "evaluate":
            return text
        case _:
            raise UsageError(f"--duty: expected train or evaluate, got {text!r}")


def _is_script(arguments: Sequence[str]) -> bool:
    return bool(arguments) and arguments[0].endswith(".py")


class _Commands(TyperGroup):
    """The subcommands, or a script followed by its arguments."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command; a script resolves to the hidden command that runs it."""
        return super().resolve_command(ctx, ["script", *args] if _is_script(args) else args)


app = typer.Typer(
    cls=_Commands,
    subcommand_metavar="[SCRIPT.py ARGS... | COMMAND ARGS...]",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Compute a share of every step on one or more devices.",
)

app.add_typer(results_cli.logits, name="logits")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"samestep worker {__version__}")
        raise typer.Exit


def _accept_scripts(value: bool) -> None:
    if value:
        from worker.scripts.launch import accept_scripts

        accept_scripts()


def _check_launch(*, shard: bool, has_script: bool, options: WorkerOptions) -> None:
    if shard and not started_by_torchrun():
        raise UsageError(
            "--shard: expected a group of ranks, got one process; start it with: "
            "torchrun --nproc-per-node N -m worker --shard"
        )
    if started_by_torchrun() and not shard:
        raise UsageError(
            "expected --shard under torchrun, got none: torchrun is for a frozen base that does "
            "not fit on one device; add --shard, or use several devices without torchrun: worker "
            "--gpus 0,1"
        )
    if has_script and started_by_torchrun():
        raise UsageError(
            "expected no SCRIPT under torchrun, got one; use --accept-scripts instead, so that the "
            "coordinator sends the script"
        )
    if started_by_torchrun() and len(options.devices) > 1:
        raise UsageError(
            "expected no --gpus under torchrun, which gives each rank a device; leave out --gpus"
        )
    if has_script and len(options.devices) > 1:
        raise UsageError(
            f"expected one device for a script that joins, got {len(options.devices)}: have the "
            "coordinator send the script (worker --accept-scripts --gpus "
            f"{','.join(map(str, options.devices))}), or start a worker for each device; the fit "
            'that begins the run may have several (device="cuda0-1")'
        )
    if has_script and options.trace is not None:
        raise UsageError(
            "--trace: expected no SCRIPT with it, got one; use --accept-scripts instead of SCRIPT"
        )


Coordinator = Annotated[
    str,
    typer.Option(
        envvar="SAMESTEP_COORDINATOR",
        metavar="HOST[:PORT]|NAME",
        help="The coordinator's address (default port: 9000), or the name it announces on the "
        "network [one on this machine, else one on the network].",
    ),
]
BackendName = Annotated[
    str,
    typer.Option(
        envvar="SAMESTEP_BACKEND",
        help="auto, cuda, cuda1 (one device), cuda0-3 (several), xpu, mps, accelerator, vulkan, "
        "cpu, or scripted[:MS] for tests.",
    ),
]
Gpus = Annotated[
    str,
    typer.Option(help="Devices, such as 0,1, or parts of names; several devices form one worker."),
]
Name = Annotated[
    str, typer.Option(envvar="SAMESTEP_NAME", help="Name shown to others [host name].")
]
AddressFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SAMESTEP_ADDRESS_FILE",
        metavar="FILE",
        help="Read the coordinator's address from this file, which its --address-file writes; "
        "read it again at each attempt to connect.",
    ),
]
RetryFor = Annotated[
    float,
    typer.Option(
        min=0,
        envvar="SAMESTEP_RETRY_FOR",
        metavar="SECONDS",
        help="Exit after this long without a coordinator or without a step.",
    ),
]
DutyName = Annotated[
    str,
    typer.Option(
        envvar="SAMESTEP_DUTY",
        metavar="train|evaluate",
        help="train, or evaluate: only evaluate held-out data while other workers train.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SAMESTEP_TOKEN_FILE",
        metavar="FILE",
        help="File that contains the join token; mode 0600.",
    ),
]
Plaintext = Annotated[
    bool,
    typer.Option(
        "--plaintext", help="No TLS; for a coordinator that was started with --plaintext."
    ),
]
Shard = Annotated[
    bool,
    typer.Option("--shard", help="Under torchrun: shard the frozen base over the ranks (FSDP2)."),
]
AcceptScripts = Annotated[
    bool,
    typer.Option(
        "--accept-scripts",
        envvar="SAMESTEP_ACCEPT_SCRIPTS",
        callback=_accept_scripts,
        help="Run scripts (samestep.fit) that the coordinator sends.",
    ),
]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    coordinator: Coordinator = "",
    backend: BackendName = "auto",
    gpus: Gpus = "",
    address_file: AddressFile = None,
    name: Name = "",
    retry_for: RetryFor = 300.0,
    token_file: TokenFile = None,
    plaintext: Plaintext = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of this worker to this file.")
    ] = None,
    duty: DutyName = "train",
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only problems.")] = False,
    processes: Annotated[int, typer.Option("--processes", min=0, hidden=True)] = 0,
    shard: Shard = False,
    accept_scripts: AcceptScripts = False,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Serve a coordinator until it says goodbye; with SCRIPT.py, join the runs of its `fit`."""
    del version, accept_scripts
    has_script = context.invoked_subcommand == "script"
    if context.invoked_subcommand is not None and not has_script:
        check_options_follow(context)
        return
    if end_with_stdin:
        end_with_standard_input("worker")
    backend, selection = parse_devices(backend, gpus)
    parsed_duty = _parse_duty(duty)
    from worker.join.credentials import WorkerCredentials
    from worker.main import WorkerOptions, main

    address, coordinator_name = _parse_coordinator(coordinator, address_file)
    credentials = WorkerCredentials(token_file, plaintext=plaintext)
    options = WorkerOptions(
        address, coordinator_name, name or _host_name(), backend, retry_for,
        selection, processes, trace, quiet, credentials, parsed_duty, shard, address_file,
    )  # fmt: skip
    _check_launch(shard=shard, has_script=has_script, options=options)
    if not has_script:
        raise typer.Exit(main(options))
    context.obj = options


@app.command(
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def script(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="SCRIPT.py")],
    arguments: Annotated[list[str] | None, typer.Argument()] = None,
) -> None:
    """Run a script; each `samestep.fit` in it joins the coordinator's run of the same script."""
    from worker.main import find_coordinator, make_repeated_search
    from worker.scripts.launch import JoinOptions, run_script

    options = context.obj
    _warn_of_misplaced_options(context, arguments or ())

    def print_line(text: str) -> None:
        if not options.quiet:
            print(f"worker: {text}", flush=True)

    join = JoinOptions(
        find_coordinator=lambda: find_coordinator(options, print_line),
        name=options.name,
        backend=options.backend,
        device=options.devices[0] if options.devices else None,
        retry_for_s=options.retry_for_s,
        credentials=options.credentials,
        duty=options.duty,
        print_line=print_line,
        search_again=make_repeated_search(options),
    )
    try:
        run_script(path, arguments or (), join)
    except EOFError as error:  # of which click prints only "Aborted!"
        if str(error) != _END_OF_INPUT:
            raise RunFailed(f"the script {path.name!r} raised {describe_raised(error)}") from error
        raise UsageError(
            f"expected a script that does not read standard input, got {path.name!r}, which read "
            "its end; pass values as arguments after the script"
        ) from None


def _warn_of_misplaced_options(context: typer.Context, arguments: Sequence[str]) -> None:
    """Warn if options after SCRIPT, which the script receives, look like the worker's."""
    assert context.parent is not None
    worker_options = {name for param in context.parent.command.params for name in param.opts}
    names = (argument.partition("=")[0] for argument in arguments)
    option = next((name for name in names if name in worker_options), None)
    if option is not None:
        text = (
            f"worker: {option} comes after the script, so the script receives it; put options of "
            f"the worker before the script: worker {option} ... SCRIPT.py"
        )
        print(text, file=sys.stderr, flush=True)


@app.command()
def devices(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, for scripts.")
    ] = False,
    canonical: Annotated[
        bool,
        typer.Option("--canonical", help="Test which canonical arithmetic each device supports."),
    ] = False,
) -> None:
    """List this machine's devices, the models that fit on each, and why a device is unusable."""
    from backends.canonical_devices import describe_canonical_support
    from backends.registry import devices as all_devices
    from worker.device_table import device_document, device_lines

    devices = all_devices()
    if as_json:
        document = device_document(devices, describe_canonical_support if canonical else None)
        typer.echo(json.dumps(document, indent=2))
        return
    if canonical:
        for info in (info for info in devices if info.usable):
            typer.echo(f"{info.backend} {info.index}: {info.name}")
            for line in describe_canonical_support(info):
                typer.echo(f"  {line}")
        return
    for line in device_lines(devices):
        typer.echo(line)


@app.command(hidden=True)
def recompute() -> None:
    """Recompute steps of a run, for an audit that sends requests on standard input."""
    from worker.recompute import serve as answer

    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # output of libraries must not mix with answers
        answer(sys.stdin.buffer, answers)


@app.command()
def doctor(
    coordinator: Coordinator = "",
    backend: BackendName = "auto",
    gpus: Gpus = "",
    address_file: AddressFile = None,
    name: Name = "",
    token_file: TokenFile = None,
    plaintext: Plaintext = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, for scripts.")
    ] = False,
) -> None:
    """Check this machine and its connection to the coordinator for common problems."""
    from protocol.cli.doctor import report_findings
    from worker.doctor import WorkerPlan, examine

    backend, selection = parse_devices(backend, gpus)
    address, coordinator_name = _parse_coordinator(coordinator, address_file)
    plan = WorkerPlan(
        coordinator=address,
        address_file=address_file,
        coordinator_name=coordinator_name,
        name=name or _host_name(),
        backend=backend,
        devices=selection,
        token_file=token_file,
        plaintext=plaintext,
    )
    raise typer.Exit(report_findings(examine(plan), typer.echo, as_json=as_json))


@app.command()
def data(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="A run spec.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Number of samples to show.")] = 5,
) -> None:
    """Show samples of a run's data as the model reads them, and statistics."""
    from protocol.spec.files.run_spec_file import load_run_spec
    from worker.data.data_view import CLOSE, OPEN
    from worker.tasks.registry import view_data

    colored = False
    for line in view_data(load_run_spec(run, overrides or ()), samples):
        # Tokens with loss may continue over several lines.
        for segment in re.split(f"([{OPEN}{CLOSE}])", line):
            colored = segment == OPEN or (colored and segment != CLOSE)
            typer.secho(segment, nl=False, fg="green" if colored or segment == CLOSE else None)
        typer.echo()


for command in (results_cli.classify, results_cli.generate, results_cli.merge, results_cli.export):
    app.command()(command)


def _parse_coordinator(
    coordinator: str, address_file: Path | None
) -> tuple[tuple[str, int] | None, str]:
    """Return the coordinator's address, or None, and its name, which may be empty.

    --coordinator is an address or a name. Without it, the address is MASTER_ADDR and MASTER_PORT,
    but not under torchrun. Both results are empty with an address file.
    """
    if address_file is not None:
        if coordinator:
            raise UsageError(
                "expected either --coordinator (SAMESTEP_COORDINATOR) or --address-file "
                "(SAMESTEP_ADDRESS_FILE), got both: leave one out"
            )
        return None, ""
    is_name = ":" not in coordinator and "." not in coordinator and coordinator != "localhost"
    if coordinator and is_name:
        return None, check_name(coordinator, "--coordinator")
    if coordinator:
        return parse_address(coordinator, "--coordinator", DEFAULT_PORT), ""
    if started_by_torchrun():
        return None, ""  # MASTER_ADDR is the meeting point of the ranks
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if host:
        return parse_address(f"{host}:{port}", "MASTER_ADDR:MASTER_PORT"), ""
    return None, ""


def _host_name() -> str:
    return socket.gethostname().partition(".")[0] or "worker"


def main() -> None:
    """Entry point."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # numbered as in nvidia-smi
    run_command(app, "worker")
