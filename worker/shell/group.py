"""One process per device under one command: `worker --gpus 0,1`."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import FrameType

from protocol.base.errors import ExitCode
from protocol.host.own_command import own_command, own_environment


def run_group(arguments: list[str], devices: list[int | str], name: str) -> int:
    """Run this command once for each device, and wait for all.

    If one's device cannot be had, the others are asked to end: they are not all that was asked for.

    Args:
        arguments: This command's own, without the program's name.
        devices: Their numbers or parts of their names.
        name: Each process is named after it and its device.

    Returns:
        0 if all ended with 0, else the first of a child that ended by itself.
    """
    base = _without(arguments, "--gpus", "--name")
    children = [
        subprocess.Popen(  # noqa: S603 -- our own command line again
            [*own_command("worker"), *base, "--gpus", str(d), "--name", _name(name, d)],
            env=own_environment(),
        )
        for d in devices
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        del frame
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    # A terminal sends SIGINT to the whole group already.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ThreadPoolExecutor(len(children)) as threads:
        ends = [threads.submit(child.wait) for child in children]
        for end in as_completed(ends):
            if end.result() in (ExitCode.USAGE, ExitCode.UNREACHABLE):
                pass_on(signal.SIGTERM, None)
    codes = [end.result() for end in ends]
    # A child that a signal ended has a negative code; a command's own must fit a byte.
    return next((code for code in codes if code > 0), int(ExitCode.FAILED) if any(codes) else 0)


def _name(group: str, device: int | str) -> str:
    """A part of a device's name may hold spaces, which a worker's name may not."""
    return f"{group}-gpu{device}".replace(" ", "-")


def _without(arguments: list[str], *options: str) -> list[str]:
    """The arguments less these options and their values."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        option, equals, _ = argument.partition("=")
        if option in options:
            if not equals:
                next(rest, None)
            continue
        kept.append(argument)
    return kept
