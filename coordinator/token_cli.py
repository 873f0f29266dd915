"""`coordinator token`: the secrets of this user's coordinators, also while one runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from coordinator.members.credentials import CoordinatorCredentials

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Show and change what workers join with; also while a coordinator runs.",
)


@app.command()
def show() -> None:
    """Print the join token. Who has it can join: hand it to members' machines only."""
    typer.echo(_opened().join_token().reveal())


@app.command()
def rotate(
    everyone: Annotated[
        bool, typer.Option("--everyone", help="Also take the keys of all workers, who must rejoin.")
    ] = False,
) -> None:
    """Make a new join token; workers that have joined before keep their own keys."""
    _opened().rotate(everyone=everyone)
    typer.echo("the join token is new; the old one opens nothing")
    if everyone:
        typer.echo("every worker needs it to come back")


@app.command()
def revoke(name: Annotated[str, typer.Argument(help="See: coordinator token workers.")]) -> None:
    """Take one worker's key and the join token it knows; it is disconnected within seconds."""
    _opened().revoke(name)
    typer.echo(f"the key of {name!r} counts no more, and the join token is new; others stay")


@app.command()
def workers() -> None:
    """Show which workers have a key of their own: since when, its mark in journals, the name."""
    keys = _opened().keys
    marks = keys.marks()
    for name, since in keys.names().items():
        typer.echo(f"{since}  {marks[name]}  {name}")


@app.command()
def reader(
    new: Annotated[bool, typer.Option("--new", help="Make another; the old one opens nothing.")] = (
        False
    ),
) -> None:
    """Print the token that only reads: status, metrics, events. For Prometheus."""
    credentials = _opened()
    if new:
        credentials.renew_reader_token()
    typer.echo(credentials.reader_token)


@app.command()
def control(
    address: Annotated[
        str, typer.Argument(envvar="SAMESTEP_CONTROL", help="Of the control port.")
    ] = "127.0.0.1:9001",
) -> None:
    """Print a running coordinator's control token, which commands: for its page."""
    from coordinator.operator.control_client import control_token
    from protocol.base.errors import NotAuthorised

    token = control_token(address)
    if not token:
        raise NotAuthorised(f"no coordinator of this user has its control port at {address}")
    typer.echo(token)


def _opened() -> CoordinatorCredentials:
    """This user's; what had to be made anew is said."""
    from coordinator.members.credentials import CoordinatorCredentials

    credentials = CoordinatorCredentials.open()
    if credentials.made_anew:
        typer.echo(f"coordinator: {credentials.made_anew}", err=True)
    return credentials
