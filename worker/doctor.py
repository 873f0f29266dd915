"""`worker doctor`: check for common problems of the machine and of the connection.

The checks do not change this machine or the coordinator.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backends.device_checks import KernelFiles, device_findings
from protocol.base import limits
from protocol.base.address import format_address
from protocol.base.errors import SamestepError, Unreachable, UsageError
from protocol.cli import doctor as machine_checks
from protocol.cli.doctor import Finding, failure, ok, warning
from protocol.machine.cache_directory import cache_directory
from protocol.machine.secret_file import state_home
from worker.join.address import LOCAL_COORDINATOR, find_in_file, has_listener
from worker.join.credentials import WorkerCredentials, key_fault
from worker.join.trial_join import trial_join

_MIN_FREE_BYTES: Final = 5 * 1024 * limits.MIB
_MIN_MEMORY_BYTES: Final = 2 * 1024 * limits.MIB
_ENOUGH_FILES = 256
_NOT_FOUND: Final = "networks that drop multicast (many wireless ones) need the address"


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The options of the worker to check.

    Attributes:
        coordinator: Host and port; None to search for a coordinator.
        coordinator_name: The name that the coordinator announces; empty for any.
        name: The worker's name.
        backend: Value of --backend.
        devices: Numbers or parts of names of devices.
        token_file: Value of --token-file.
        plaintext: Whether to connect without TLS.
        address_file: Value of --address-file.
    """

    coordinator: tuple[str, int] | None
    coordinator_name: str
    name: str
    backend: str
    devices: tuple[int | str, ...]
    token_file: Path | None
    plaintext: bool
    address_file: Path | None = None


def examine(plan: WorkerPlan) -> Iterator[Finding]:
    """Yield the findings of all checks; those that may take seconds come last."""
    is_scripted = plan.backend.startswith("scripted")
    yield machine_checks.check_release()
    yield from machine_checks.check_packages(() if is_scripted else ("worker",), ("hf", "vulkan"))
    yield machine_checks.check_kernels()
    yield from _check_directories()
    yield machine_checks.check_open_files(limits.WORKER_FILES, _ENOUGH_FILES)
    yield machine_checks.check_memory(_MIN_MEMORY_BYTES)
    yield machine_checks.check_oom_kills()
    yield machine_checks.check_clock()
    if not is_scripted:
        yield from device_findings(plan.backend, plan.devices, KernelFiles())
    yield from _check_keys()
    try:
        credentials = WorkerCredentials(plan.token_file, plaintext=plan.plaintext)
    except SamestepError as error:
        yield failure("token", str(error))
        return
    address = plan.coordinator
    if plan.address_file is not None:
        address = yield from _find_in_file(plan.address_file)
    elif address is None:
        address = yield from _find_coordinator(plan, credentials)
    if address is not None:
        yield from trial_join(*address, plan.name, credentials)


def _check_directories() -> Iterator[Finding]:
    try:
        cache = cache_directory(os.environ)
    except SamestepError as error:
        yield failure("cache", str(error))
    else:
        yield from machine_checks.check_directory(
            "cache", cache, _MIN_FREE_BYTES, "SAMESTEP_CACHE=DIR"
        )
    yield from machine_checks.check_directory(
        "state directory", state_home(), limits.MIB, "SAMESTEP_HOME=DIR keeps keys elsewhere"
    )


def _check_keys() -> Iterator[Finding]:
    """Check that the keys that coordinators issued are private and undamaged."""
    files = sorted((state_home() / "worker").glob("*.key"))
    faults: list[str] = []
    for file in files:
        try:
            if fault := key_fault(file):
                faults.append(f"{str(file)!r} {fault}")
        except UsageError as error:
            faults.append(str(error))
    if faults:
        yield failure(
            "keys", "; ".join(faults),
            "restore a damaged key from a backup, or remove it and join with a token: run "
            "coordinator token show on the coordinator's machine",
        )  # fmt: skip
        return
    yield ok("keys", f"of {len(files)} coordinators and names" if files else "none yet")


def _find_in_file(path: Path) -> Generator[Finding, None, tuple[str, int] | None]:
    """Read the coordinator's address file once."""
    try:
        address = asyncio.run(find_in_file(path, 0.0, lambda _: None))
    except Unreachable as error:
        yield failure("coordinator", str(error))
        return None
    yield ok("coordinator", f"{format_address(*address)}, from {str(path)!r}")
    return address


def _find_coordinator(
    plan: WorkerPlan, credentials: WorkerCredentials
) -> Generator[Finding, None, tuple[str, int] | None]:
    """Search for the coordinator like a worker without an address; return its address."""
    if not plan.coordinator_name and has_listener(*LOCAL_COORDINATOR):
        yield ok("coordinator", "no address was given; one may be on this machine")
        return LOCAL_COORDINATOR
    from worker.join.discovery import find_coordinator  # noqa: PLC0415 -- 0.1 s, and rarely needed

    def has_credentials(certificate: str) -> bool:
        return credentials.has_secret_for(bytes.fromhex(certificate), plan.name)

    lines: list[str] = []
    try:
        address = asyncio.run(
            find_coordinator(plan.coordinator_name, has_credentials, 0.0, lines.append)
        )
    except Unreachable as error:
        # A warning if no name was given: the coordinator may not be started yet.
        finding = failure if plan.coordinator_name else warning
        yield finding("coordinator", str(error), _NOT_FOUND)
        return None
    except UsageError as error:
        yield failure("coordinator", str(error))
        return None
    yield ok("coordinator", lines[-1])
    return address
