"""The command that goes on with a run, as it is printed where one stops: it works as it stands."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protocol.base.address import format_address

if TYPE_CHECKING:
    from coordinator.main import CoordinatorOptions

_BIND: Final = ("127.0.0.1", 9000)
_CONTROL: Final = ("127.0.0.1", 9001)


def usual_name() -> str:
    """Of a coordinator whose user names none: the host's, as far as it can be one."""
    host = socket.gethostname().partition(".")[0]
    plain = "".join(c if c.isalnum() and c.isascii() else "-" for c in host)
    return plain.strip("-")[:40] or "coordinator"


def resume_line(
    options: CoordinatorOptions, bind: tuple[str, int], directory: Path, *, control: tuple[str, int]
) -> str:
    """With the options that the user gave, as far as they are not what is usual.

    Args:
        options: Of the run that stops.
        bind: Where workers are; they look for the run there.
        directory: Where it is kept.
        control: Where its control port is.
    """
    words = ["coordinator", "--resume", "--out", str(directory)]
    if bind != _BIND:
        words += ["--bind", format_address(*bind)]
    if control != _CONTROL:
        words += ["--control", format_address(*control)]
    if options.name not in ("", usual_name()):
        words += ["--name", options.name]
    if not options.name:
        words.append("--no-announce")
    if options.plaintext:
        words.append("--plaintext")
    if options.local_workers:
        words += ["--local-workers", str(options.local_workers), "--backend", options.local_backend]
    if options.local_workers and options.local_devices:
        words += ["--gpus", ",".join(map(str, options.local_devices))]
    if options.expect_workers != max(options.local_workers, 1):
        words += ["--expect-workers", str(options.expect_workers)]
    return shlex.join(words)
