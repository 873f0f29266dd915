"""Code that both commands share: arguments, signals, limits, and how one command starts the
other."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import site
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from protocol.base.errors import (
    OUT_OF_THREADS,
    ExitCode,
    RunFailed,
    SamestepError,
    UsageError,
    is_out_of_threads,
)

_REPEAT_WINDOW_S: Final = 1.0
"""Signals within this time of the first one count as the same request."""


class Context(Protocol):
    """The part of typer's context that this package uses, without importing typer."""

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
        """The source of a parameter's value."""


def end_when_interrupted(command: str) -> None:
    """End on Ctrl-C with one line instead of a traceback, until a daemon handles signals itself."""

    def end(*_: object) -> None:
        sys.stderr.write(f"{command}: interrupted\n")
        sys.exit(ExitCode.INTERRUPTED)

    # A process started in a shell's background ignores Ctrl-C, and must continue to.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def run_command(app: Callable[..., object], name: str) -> None:
    """Run a typer app; every deliberate error is one line and its exit code."""
    from protocol.cli.systemd import write_error  # noqa: PLC0415 -- asyncio: see `end_on_signals`

    try:
        app(prog_name=name)
    except SamestepError as error:
        write_error(name, error)
        sys.exit(error.exit_code)
    except RuntimeError as error:
        if not is_out_of_threads(error):
            raise
        write_error(name, RunFailed(OUT_OF_THREADS))
        sys.exit(ExitCode.FAILED)


def require_open_files(minimum: int) -> None:
    """Raise the limit on open files to `minimum`, if it is lower.

    With a limit that is too low, new connections would wait forever without an error.

    Raises:
        UsageError: The hard limit is lower.
    """
    try:
        import resource  # noqa: PLC0415 -- Windows lacks this module
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= minimum:
        return
    if hard != resource.RLIM_INFINITY and hard < minimum:
        raise UsageError(
            f"open files: expected a limit of {minimum} or more, got {hard}; ulimit -n 1024, or "
            "LimitNOFILE=1024 in the service's unit"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (minimum, hard))


class EndRequests:
    """Counts the requests to end this process, which arrive as signals.

    Slurm sends SIGTERM to a step and then to its processes, within milliseconds. So signals within
    a second are one request, unless they are SIGINT, which people type.
    """

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def is_new(self, number: int, now_s: float) -> bool:
        """Count a signal; return whether it is a new request."""
        if self._first is None:
            self._first = number, now_s
            return True
        first, first_s = self._first
        is_typed = number == first == signal.SIGINT
        return is_typed or now_s - first_s >= _REPEAT_WINDOW_S


def end_on_signals(drain: Callable[[], None], stop: Callable[[], None]) -> None:
    """Drain at the first SIGTERM or SIGINT, stop at the second; needs a running event loop."""
    import asyncio  # noqa: PLC0415 -- `end_when_interrupted` must be called before this import

    loop = asyncio.get_running_loop()
    requests, request_count = EndRequests(), itertools.count()

    def handle(number: int) -> None:
        if requests.is_new(number, loop.time()):
            (stop if next(request_count) else drain)()

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, handle, number)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda n, _: loop.call_soon_threadsafe(handle, n))


def end_with_standard_input(command: str) -> None:
    """End this process when its standard input closes.

    The parent holds the other end of that pipe, which closes even if the parent is killed.
    """

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(OSError):
            os.write(2, f"{command}: the process that started it is gone; ending\n".encode())
        os._exit(ExitCode.FAILED)

    threading.Thread(target=watch, daemon=True, name="standard input").start()


def check_writable(path: Path, option: str) -> None:
    """Check that a file can be written, before any work is done for its content.

    Raises:
        UsageError: The file cannot be written.
    """
    try:
        # A regular file is replaced, which needs its directory; a pipe or device is written to.
        is_special = path.exists() and not path.is_file()
        target = path if is_special else Path(os.path.realpath(path)).parent
        is_writable = not path.is_dir() and os.access(target, os.W_OK)
    except OSError:  # the working directory was removed
        is_writable = False
    if not is_writable:
        raise UsageError(f"{option}: expected a file that can be written, got {str(path)!r}")


def check_options_follow(context: Context) -> None:
    """Refuse options of a subcommand that precede its name, where they would have no effect.

    Args:
        context: The context of the command that a subcommand follows.

    Raises:
        UsageError: There is such an option.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name)
        # Environment variables apply to the daemon and to its subcommands.
        if source is not None and source.name == "COMMANDLINE":
            name, command = parameter.opts[0], f"{context.info_name} {context.invoked_subcommand}"
            raise UsageError(
                f"expected options of {command!r} after it, got {name} before it; "
                f"`{command} --help` lists them"
            )


def command_of(package: str) -> list[str]:
    """Return the command that runs a package; start it in `child_environment`.

    `-P`, because `python -m worker` would otherwise run a user's `worker.py` in the working
    directory.
    """
    return [sys.executable, "-P", "-m", package]


def child_environment() -> dict[str, str]:
    """Return this process's environment, with which a child imports the same packages."""
    root = str(Path(__file__).parents[2])
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return dict(os.environ)
    # Not installed: a checkout.
    others = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{others}" if others else root}


def started_by_torchrun() -> bool:
    """Return whether torchrun started this process as one of several ranks.

    MASTER_ADDR and WORLD_SIZE alone may have been set by hand.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
