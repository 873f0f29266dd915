"""`worker SCRIPT ARGUMENTS...`: run the script so that every `samestep.fit` in it joins a run."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.base.errors import DataError, UsageError
from protocol.base.fields import Duty
from worker.join.credentials import WorkerCredentials
from worker.shell.client import CoordinatorSearch

_ACCEPT: Final = "SAMESTEP_ACCEPT_SCRIPTS"
"""An environment variable, so that device processes inherit it."""


@dataclass(slots=True)
class JoinOptions:
    """Options with which `samestep.fit` joins a run in a process that `worker SCRIPT` has started.

    Attributes:
        find_coordinator: Returns the coordinator's address; may search the network.
        name: The worker's name.
        backend: Value of --backend, without a device's number.
        device: Number or part of the name of the device; None for the first device.
        retry_for_s: How long to reconnect before the worker exits.
        print_line: Prints a line.
        search_again: Searches again for a coordinator that was found on the network.
        failure: Returns why the process that starts the run has failed; empty if it has not.
        fit_was_called: Whether the script has called `samestep.fit`, which sets this.
    """

    find_coordinator: Callable[[], tuple[str, int]]
    name: str
    backend: str
    device: int | str | None
    retry_for_s: float
    credentials: WorkerCredentials
    duty: Duty
    print_line: Callable[[str], None]
    search_again: CoordinatorSearch | None = None
    failure: Callable[[], str] = str
    fit_was_called: bool = False


_HOME: Final = Path(__file__).resolve().parents[2]
_JOIN_OPTIONS: list[JoinOptions] = []


def join_options() -> JoinOptions | None:
    """Return this process's options for joining runs; None without `worker SCRIPT`."""
    return _JOIN_OPTIONS[0] if _JOIN_OPTIONS else None


def accept_scripts() -> None:
    """Let this process and its device processes run scripts that their coordinator sends."""
    os.environ[_ACCEPT] = "1"


def accepts_scripts() -> bool:
    """Return whether this process runs scripts that its coordinator sends."""
    return os.environ.get(_ACCEPT) == "1"


def run_script(path: Path, arguments: Sequence[str], options: JoinOptions) -> None:
    """Run a script as `python SCRIPT ARGUMENTS...` does.

    Raises:
        UsageError: The file does not exist, or a file beside it is named like the samestep package.
        DataError: The script ended without a call of `fit`.
        SamestepError: The run refused this worker, or failed.
    """
    if not path.is_file():
        raise UsageError(f"expected a script, found no file {str(path)!r}; check the path")
    folder = path.resolve().parent
    if folder != _HOME and ((folder / "samestep.py").is_file() or (folder / "samestep").is_dir()):
        raise UsageError(
            f"the script {path.name!r} would import {str(folder / 'samestep')!r} instead of the "
            "package samestep: rename it"
        )
    _JOIN_OPTIONS[:] = [options]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(folder))
    # `fit` drains on either signal, as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        runpy.run_path(str(path.absolute()), run_name="__main__")
    except ImportError as error:
        if error.name != "samestep":  # raised by `samestep/__init__.py` if a file hides a package
            raise
        raise UsageError(str(error)) from None
    if not options.fit_was_called:
        raise DataError(
            f"expected a call of samestep.fit in the script {path.name!r}, got none; "
            "a worker joins a run through this call"
        )
