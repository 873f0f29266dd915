"""What the command lines of both daemons have in common."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from protocol.base.errors import ExitCode, UsageError


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


def end_when_interrupted(command: str) -> None:
    """Until a daemon listens to signals itself, Ctrl-C is its end, in one line and no traceback."""

    def end(*_: object) -> None:
        sys.stderr.write(f"{command}: interrupted\n")
        sys.exit(ExitCode.INTERRUPTED)

    # One that was started in a shell's background ignores Ctrl-C, and is to.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def need_open_files(least: int) -> None:
    """See that this process may have so many files and connections open; with fewer a connection
    would wait for ever, and nobody be told.

    Raises:
        UsageError: It may not.
    """
    try:
        import resource  # noqa: PLC0415 -- not for every system
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= least:
        return
    if hard != resource.RLIM_INFINITY and hard < least:
        raise UsageError(
            f"open files: expected a limit of {least} or more, got {hard}; ulimit -n 1024, or "
            "LimitNOFILE=1024 in its unit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


def end_on_signals(drain: Callable[[], None], stop: Callable[[], None]) -> None:
    """In the running loop: the first SIGTERM or SIGINT drains, the second ends at once."""
    import asyncio  # noqa: PLC0415 -- before its import `end_when_interrupted` has to be called

    asked = itertools.count()

    def handle() -> None:
        (stop if next(asked) else drain)()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, handle)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(handle))


def end_with_standard_input(command: str) -> None:
    """End this process when its standard input does: whoever started it holds the other end of
    that pipe, which closes with it however it ends."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(OSError):
            os.write(2, f"{command}: whoever started it is gone, so it ends\n".encode())
        os._exit(ExitCode.FAILED)

    threading.Thread(target=watch, daemon=True, name="standard input").start()


def check_writable(path: Path, option: str) -> None:
    """See that a file can be written, before anything is done for what it is to hold.

    Raises:
        UsageError: It cannot.
    """
    try:
        # A link is followed; into a pipe or device is written, beside a file its next content.
        there = path.exists() and not path.is_file()
        target = path if there else Path(os.path.realpath(path)).parent
        is_writable = not path.is_dir() and os.access(target, os.W_OK)
    except OSError:  # a working directory that was removed
        is_writable = False
    if not is_writable:
        raise UsageError(f"{option}: expected a file that can be written, got {str(path)!r}")


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
