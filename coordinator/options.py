"""The checked command line of `coordinator`, and the command that resumes its run."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protocol.base.address import format_address

if TYPE_CHECKING:
    from protocol.spec.run_spec import RunSpec

_BIND: Final = ("127.0.0.1", 9000)
_CONTROL: Final = ("127.0.0.1", 9001)


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """The checked command line of `coordinator`.

    Attributes:
        name: The name announced on the network if other machines can reach `bind`; empty: no
            announcement.
        changes: With `resume` and no `spec`: `key=value` pairs to change in the run's spec.
        may_change: With `resume` and `spec`: whether `spec` may change the run's spec.
        script: The script whose `samestep.fit` started the coordinator; empty for a notebook; None
            if none did.
    """

    bind: tuple[str, int]
    control: tuple[str, int]
    plaintext: bool
    name: str
    expect_workers: int
    out: Path | None
    spec: RunSpec | None
    resume: bool
    from_step: int | None
    from_copies: str | None
    local_workers: int
    local_backend: str
    local_devices: tuple[int | str, ...]
    address_file: Path | None
    trace: Path | None
    trackers: tuple[str, ...]
    log_json: bool
    data_roots: tuple[Path, ...] = ()
    changes: tuple[str, ...] = ()
    may_change: bool = False
    script: str | None = None


def usual_name() -> str:
    """Return the default announced name: the host name, reduced to letters, digits and hyphens."""
    host = socket.gethostname().partition(".")[0]
    ascii_name = "".join(c if c.isalnum() and c.isascii() else "-" for c in host)
    return ascii_name.strip("-")[:40] or "coordinator"


def resume_command(
    options: CoordinatorOptions, bind: tuple[str, int], directory: Path, *, control: tuple[str, int]
) -> str:
    """Return the command that resumes a run, with every option that differs from its default.

    Args:
        options: The options of the stopped coordinator.
        bind: The address to which its workers reconnect.
        directory: The run's directory.
        control: The address of its control port.
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
