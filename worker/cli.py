"""The `worker` command."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from protocol import __version__
from protocol.base.address import parse_address
from protocol.base.byte_size import byte_size
from protocol.base.device_name import parse_devices
from protocol.base.duty import parse_duty
from protocol.base.errors import SamestepError
from protocol.host.command_line import check_options_follow, end_with_standard_input
from protocol.host.system_journal import write_error
from protocol.wire.discovery import check_name
from worker import after_cli
from worker.logits_cli import app as logits

DEFAULT_PORT = 9000

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Computes its part of every step on one device or several, the same step as everyone's.",
)

app.add_typer(logits, name="logits")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"samestep worker {__version__}")
        raise typer.Exit


Coordinator = Annotated[
    str,
    typer.Option(
        envvar="SAMESTEP_COORDINATOR",
        metavar="HOST[:PORT]|NAME",
        help="The coordinator's address (port 9000 if none is given), or the name it announces on "
        "the network [the one on this machine, else on the network].",
    ),
]
BackendName = Annotated[
    str,
    typer.Option(
        envvar="SAMESTEP_BACKEND",
        help="auto, cuda, cuda1 (a device), cuda0-3, vulkan, cpu, or scripted[:MS] for tests.",
    ),
]
Gpus = Annotated[
    str,
    typer.Option(help="Devices, such as 0,1, or parts of names: several are one worker."),
]
Name = Annotated[
    str, typer.Option(envvar="SAMESTEP_NAME", help="Name shown to others [host name].")
]
RetryFor = Annotated[
    float,
    typer.Option(
        min=0,
        envvar="SAMESTEP_RETRY_FOR",
        metavar="SECONDS",
        help="Give up after so long without coordinator.",
    ),
]
DutyName = Annotated[
    str,
    typer.Option(
        envvar="SAMESTEP_DUTY",
        metavar="train|evaluate",
        help="evaluate: measure held-out data while the others train, and train nothing.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SAMESTEP_TOKEN_FILE", metavar="FILE", help="Holds the join token; mode 0600."
    ),
]
Plaintext = Annotated[
    bool, typer.Option("--plaintext", help="No TLS, as the coordinator's --plaintext.")
]


@app.callback(invoke_without_command=True)
def serve(
    context: typer.Context,
    coordinator: Coordinator = "",
    backend: BackendName = "auto",
    gpus: Gpus = "",
    name: Name = "",
    retry_for: RetryFor = 300.0,
    token_file: TokenFile = None,
    plaintext: Plaintext = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace of this worker to this file.")
    ] = None,
    duty: DutyName = "train",
    quiet: Annotated[bool, typer.Option("--quiet", help="Say only what went wrong.")] = False,
    processes: Annotated[int, typer.Option("--processes", min=0, hidden=True)] = 0,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve a coordinator until it says goodbye."""
    del version
    if context.invoked_subcommand is not None:
        check_options_follow(context)
        return
    if end_with_stdin:
        end_with_standard_input("worker")
    backend, wanted = parse_devices(backend, gpus)
    to_do = parse_duty(duty)
    from worker.joining.credentials import WorkerCredentials
    from worker.main import WorkerOptions, main

    address, named = _coordinator(coordinator)
    credentials = WorkerCredentials(token_file, plaintext=plaintext)
    raise typer.Exit(
        main(
            WorkerOptions(
                address, named, name or _host_name(), backend, retry_for,
                wanted, processes, trace, quiet, credentials, to_do,
            )
        )
    )  # fmt: skip


@app.command()
def devices() -> None:
    """Show what is here, and why a device is not usable."""
    from backends.registry import devices as all_devices

    for info in all_devices():
        memory = f", {byte_size(info.memory_bytes)}" if info.memory_bytes else ""
        verdict = "usable" if info.usable else f"not usable: {info.reason}"
        verdict += " (software: taken only with --backend vulkan)" if info.software else ""
        typer.echo(f"{info.backend} {info.index}: {info.name}{memory}: {verdict}")


@app.command()
def doctor(
    coordinator: Coordinator = "",
    backend: BackendName = "auto",
    gpus: Gpus = "",
    name: Name = "",
    token_file: TokenFile = None,
    plaintext: Plaintext = False,
    as_json: Annotated[bool, typer.Option("--json", help="One document, for scripts.")] = False,
) -> None:
    """Check this machine, and the way to the coordinator, for what usually goes wrong."""
    from protocol.host.doctor import tell
    from worker.doctor import WorkerPlan, examine

    backend, wanted = parse_devices(backend, gpus)
    address, named = _coordinator(coordinator)
    plan = WorkerPlan(
        coordinator=address,
        coordinator_name=named,
        name=name or _host_name(),
        backend=backend,
        devices=wanted,
        token_file=token_file,
        plaintext=plaintext,
    )
    raise typer.Exit(tell(examine(plan), typer.echo, as_json=as_json))


@app.command()
def data(
    run: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="A run spec.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="How many samples.")] = 5,
) -> None:
    """Show what a language model will read of a run's data, and how much of it."""
    from protocol.spec.run_spec import load_run_spec
    from worker.tasks.registry import view

    for line in view(load_run_spec(run, overrides or ()), samples):
        typer.echo(line)


for command in (after_cli.classify, after_cli.generate, after_cli.merge, after_cli.export):
    app.command()(command)


def _coordinator(coordinator: str) -> tuple[tuple[str, int] | None, str]:
    """Address or name in the flag or its variable, else torchrun's MASTER_ADDR and MASTER_PORT."""
    named = ":" not in coordinator and "." not in coordinator and coordinator != "localhost"
    if coordinator and named:
        return None, check_name(coordinator, "--coordinator")
    if coordinator:
        return parse_address(coordinator, "--coordinator", DEFAULT_PORT), ""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", str(DEFAULT_PORT))
    if host:
        return parse_address(f"{host}:{port}", "MASTER_ADDR:MASTER_PORT"), ""
    return None, ""


def _host_name() -> str:
    return socket.gethostname().partition(".")[0] or "worker"


def main() -> None:
    """Entry point: every deliberate error is one line and its exit code."""
    try:
        app(prog_name="worker")
    except SamestepError as error:
        write_error("worker", error)
        sys.exit(error.exit_code)
