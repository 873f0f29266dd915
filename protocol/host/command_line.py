"""What the command lines of both daemons have in common."""

from __future__ import annotations

from typing import Any, Protocol

from protocol.base.errors import UsageError


class Context(Protocol):
    """What is needed of typer's context, which this package does not import."""

    @property
    def command(self) -> Any:
        """The command with its parameters."""

    @property
    def info_name(self) -> str | None:
        """The command's name."""

    @property
    def invoked_subcommand(self) -> str | None:
        """The subcommand that follows."""

    def get_parameter_source(self, name: str, /) -> Any:
        """Where a parameter's value comes from."""


def check_options_follow(context: Context) -> None:
    """A subcommand's options stand behind its name; before it they would have no effect.

    Args:
        context: Of the command that a subcommand follows.

    Raises:
        UsageError: There is an option before it.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name)
        # Variables are for the daemon and its subcommands alike.
        if source is not None and source.name == "COMMANDLINE":
            named, command = parameter.opts[0], f"{context.info_name} {context.invoked_subcommand}"
            raise UsageError(
                f"expected options of {command!r} after it, got {named} before it; "
                f"`{command} --help` lists them"
            )
