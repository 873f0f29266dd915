"""`coordinator token`: the secrets of this user's coordinators, even while one is running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from coordinator.members.credentials import CoordinatorCredentials

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Show and change the tokens and keys of workers, also while a coordinator is running.",
)


@app.command()
def show() -> None:
    """Print the join token. Anyone who has it can join as a worker: keep it secret."""
    typer.echo(_open_credentials().join_token().reveal())


@app.command()
def rotate(
    everyone: Annotated[
        bool,
        typer.Option(
            "--everyone", help="Also revoke the keys of all workers, which must then rejoin."
        ),
    ] = False,
) -> None:
    """Make a new join token; workers that have joined before keep their own keys."""
    _open_credentials().rotate(everyone=everyone)
    typer.echo("the join token was replaced; the old one is no longer valid")
    if everyone:
        typer.echo("every worker needs the new token to rejoin")


@app.command()
def revoke(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The worker's name, as `token workers` prints it.")
    ],
) -> None:
    """Revoke one worker's key and the join token; the worker is disconnected within seconds."""
    _open_credentials().revoke(name)
    typer.echo(f"the key of {name!r} is revoked, and the join token is new; other keys stay valid")


@app.command()
def workers() -> None:
    """List the workers that have a key: issue date, the key's mark in journals, name."""
    keys = _open_credentials().keys
    marks = keys.marks()
    for name, since in keys.names().items():
        typer.echo(f"{since}  {marks[name]}  {name}")


@app.command()
def reader(
    new: Annotated[
        bool, typer.Option("--new", help="Make a new token; the old one becomes invalid.")
    ] = False,
) -> None:
    """Print the read-only token for status, metrics and events, such as for Prometheus."""
    credentials = _open_credentials()
    if new:
        credentials.renew_reader_token()
    typer.echo(credentials.reader_token)


@app.command()
def control(
    address: Annotated[
        str,
        typer.Argument(
            envvar="SAMESTEP_CONTROL", metavar="HOST:PORT", help="Address of the control port."
        ),
    ] = "127.0.0.1:9001",
) -> None:
    """Print a running coordinator's control token, which its page asks for before commands."""
    from coordinator.operator.control_client import control_token
    from protocol.base.errors import NotAuthorized

    token = control_token(address)
    if not token:
        raise NotAuthorized(
            f"no coordinator of this user has its control port at {address}; start one, or give "
            "the address of another"
        )
    typer.echo(token)


def _open_credentials() -> CoordinatorCredentials:
    """Open this user's credentials; report what had to be created again."""
    from coordinator.members.credentials import CoordinatorCredentials

    credentials = CoordinatorCredentials.open()
    if credentials.replacement_note:
        typer.echo(f"coordinator: {credentials.replacement_note}", err=True)
    return credentials
