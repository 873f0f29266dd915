"""`worker doctor`: what usually keeps a worker from computing, or from its coordinator.

It changes nothing, neither here nor at the coordinator.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backends.device_checks import Machine, device_findings
from protocol import host_checks, limits
from protocol.cache_directory import cache_directory
from protocol.doctor import Finding, failure, ok
from protocol.errors import NotAuthorised, SamestepError, UsageError
from protocol.secret_file import read_secret, state_home
from worker.credentials import Credentials
from worker.trial_join import trial_join

_LEAST_FREE_BYTES: Final = 5 * 1024 * limits.MIB
_LEAST_MEMORY_BYTES: Final = 2 * 1024 * limits.MIB
_FILES_NEEDED, _FILES_ENOUGH = 64, 256


@dataclass(frozen=True, slots=True)
class Plan:
    """How the worker is, or will be, started.

    Attributes:
        coordinator: Host and port; None if the user has not said which.
        name: The worker's.
        backend: As given to --backend.
        devices: By number or by part of their names.
        token_file: As given to --token-file.
        plaintext: Without TLS.
    """

    coordinator: tuple[str, int] | None
    name: str
    backend: str
    devices: tuple[int | str, ...]
    token_file: Path | None
    plaintext: bool


def examine(plan: Plan) -> Iterator[Finding]:
    """All checks; those that may take seconds come last."""
    scripted = plan.backend.startswith("scripted")
    yield host_checks.release()
    yield from host_checks.packages(() if scripted else ("worker",), ("hf", "vulkan"))
    yield from _directories()
    yield host_checks.open_files(_FILES_NEEDED, _FILES_ENOUGH)
    yield host_checks.memory(_LEAST_MEMORY_BYTES)
    yield host_checks.clock()
    if not scripted:
        yield from device_findings(plan.backend, plan.devices, Machine())
    yield from _keys()
    try:
        credentials = Credentials(plan.token_file, plaintext=plan.plaintext)
    except SamestepError as error:
        yield failure("token", str(error))
        return
    if plan.coordinator is None:
        yield _token_alone(credentials)
        return
    yield from trial_join(*plan.coordinator, plan.name, credentials)


def _directories() -> Iterator[Finding]:
    try:
        cache = cache_directory(os.environ)
    except SamestepError as error:
        yield failure("cache", str(error))
    else:
        yield from host_checks.directory("cache", cache, _LEAST_FREE_BYTES, "SAMESTEP_CACHE=DIR")
    yield from host_checks.directory(
        "state directory", state_home(), limits.MIB, "SAMESTEP_HOME=DIR keeps keys elsewhere"
    )


def _keys() -> Iterator[Finding]:
    """Keys that coordinators have given: private."""
    files = sorted((state_home() / "worker").glob("*.key"))
    try:
        for file in files:
            read_secret(file)
    except UsageError as error:
        yield failure("keys", str(error))
        return
    yield ok("keys", f"of {len(files)} coordinators and names" if files else "none yet")


def _token_alone(credentials: Credentials) -> Finding:
    """Without a coordinator to show it to: is there one."""
    try:
        credentials.secret(None, "")
    except NotAuthorised:
        return ok("coordinator", "not looked for: say where with --coordinator HOST:PORT")
    except SamestepError as error:
        return failure("token", str(error))
    note = "there is a join token; what it is worth shows with --coordinator HOST:PORT"
    return ok("coordinator", f"not looked for; {note}")
