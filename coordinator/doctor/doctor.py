"""`coordinator doctor`: what usually keeps a coordinator from working, or others from reaching it.

It changes nothing and may run beside a coordinator that works; then that one is what it examines.
"""

from __future__ import annotations

import os
import ssl
import stat
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.disk.claim import is_held
from coordinator.doctor.port_checks import control_port, workers_port
from coordinator.members.credentials import RENEWAL
from coordinator.members.worker_keys import WorkerKeys
from coordinator.service.accepted_run import is_unfinished, unfinished_runs
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.base import limits
from protocol.base.errors import SamestepError, UsageError
from protocol.command import host_checks
from protocol.command.doctor import Finding, failure, ok, warning
from protocol.host.secret_file import join_token_file, read_secret
from protocol.wire import tls
from protocol.wire.join_token import JoinToken

_LEAST_FREE_BYTES: Final = 2048 * limits.MIB
_LEAST_MEMORY_BYTES: Final = 1024 * limits.MIB
_FILES_ENOUGH: Final = (
    limits.WORKERS + limits.UNAUTHENTICATED_CONNECTIONS + 256  # files of the run, readers of events
)
_SYNCS: Final = 16
SLOW_SYNC_MS: Final = 50.0
"""A step waits for one sync of the gradient log."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """How the coordinator is, or will be, started.

    Attributes:
        bind: Host and port for workers.
        control: Host and port of the control port.
        directory: Where runs are kept.
        home: Where tokens and keys are.
    """

    bind: tuple[str, int]
    control: tuple[str, int]
    directory: Path
    home: Path


def examine(plan: ServicePlan) -> Iterator[Finding]:
    """All checks, in the order in which they would matter."""
    yield host_checks.release()
    yield from host_checks.packages()
    yield from _state(plan.home)
    yield from _secrets(join_token_file(plan.home).parent)
    yield from host_checks.directory(
        "run directory", plan.directory, _LEAST_FREE_BYTES, "--out DIR"
    )
    yield from _syncs(plan.directory)
    yield from _runs(plan.directory)
    yield from workers_port(*plan.bind, _fingerprint(plan.home))
    yield from control_port(*plan.control)
    yield host_checks.open_files(limits.COORDINATOR_FILES, _FILES_ENOUGH)
    yield host_checks.memory(_LEAST_MEMORY_BYTES)
    yield host_checks.killed()
    yield host_checks.clock()


def _state(home: Path) -> Iterator[Finding]:
    """The directory of tokens and keys."""
    yield from host_checks.directory(
        "state directory", home, limits.MIB, "SAMESTEP_HOME=DIR keeps tokens elsewhere"
    )
    directory = join_token_file(home).parent
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
    except OSError:
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield warning(
            "state mode", f"{str(directory)!r} is open to others (mode {mode:04o})",
            f"chmod 700 {directory}",
        )  # fmt: skip
    else:
        yield ok("state mode", f"{mode:04o}")


def _secrets(directory: Path) -> Iterator[Finding]:
    """Certificate, key, join token and workers' keys: there, private, and of one another."""
    names = ("certificate.pem", "key.pem", "join.token", "workers.json")
    try:
        certificate, key, token, workers = (read_secret(directory / name) for name in names)
        WorkerKeys(directory / "workers.json").refresh()
        read_secret(directory / "reader.token")
    except UsageError as error:
        yield failure("secrets", str(error))
        return
    if certificate is None and key is None and token is None and workers is None:
        yield ok("secrets", "none yet; the first start makes certificate and join token")
        return
    if certificate is None or key is None:
        there = {"certificate.pem": certificate, "key.pem": key}
        lost = [name for name, text in there.items() if text is None]
        told = f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} missing"
        if len(lost) == 1 and not (certificate is None and token is None and workers is None):
            yield failure("secrets", f"{told} in {str(directory)!r}", RENEWAL)
            return
        yield warning(
            "secrets", f"{told} in {str(directory)!r}",
            "bring it back, or the next start makes a new certificate and join token, and every "
            "worker needs that token",
        )  # fmt: skip
        return
    try:
        tls.server_context(directory / "certificate.pem", directory / "key.pem")
        fingerprint = tls.fingerprint(ssl.PEM_cert_to_DER_cert(certificate))
    except (OSError, ValueError) as error:
        empty = [name for name, text in zip(names, (certificate, key), strict=False) if not text]
        what = f"{' and '.join(empty)} is empty" if empty else str(error)
        yield failure(
            "secrets", f"certificate.pem and key.pem in {str(directory)!r} cannot be used: {what}",
            RENEWAL,
        )  # fmt: skip
        return
    if what := _token_fault(token, fingerprint):
        yield warning(
            "secrets", f"the join token {what}",
            "the next start makes a new one; workers that have joined before need it not",
        )  # fmt: skip
        return
    keys = "some workers' keys" if workers is not None else "no worker's key yet"
    yield ok("secrets", f"certificate {fingerprint.hex()[:16]}..., join token, {keys}")


def _token_fault(token: str | None, fingerprint: bytes) -> str:
    """What is wrong with the text of the join token; empty if nothing is."""
    if token is None:
        return "is missing"
    try:
        named = JoinToken.parse(token, "join.token").fingerprint
    except UsageError:
        return "in join.token is none" if token.strip() else "is missing: join.token is empty"
    return "" if named == fingerprint else "is of another certificate"


def _fingerprint(home: Path) -> bytes | None:
    """Of this user's certificate; None if there is none to compare with."""
    try:
        pem = read_secret(join_token_file(home).with_name("certificate.pem"))
        return tls.fingerprint(ssl.PEM_cert_to_DER_cert(pem)) if pem is not None else None
    except (UsageError, ValueError):
        return None


def _syncs(directory: Path) -> Iterator[Finding]:
    """How long the disk takes to make something durable: each step waits for that once."""
    took_ms: list[float] = []
    try:
        with tempfile.TemporaryFile(dir=host_checks.nearest(directory), buffering=0) as file:
            for _ in range(_SYNCS):
                file.write(bytes(4096))
                began_s = time.perf_counter()
                os.fsync(file.fileno())
                took_ms.append((time.perf_counter() - began_s) * 1000)
    except OSError as error:
        yield failure(
            "sync", f"the disk cannot make a file durable: {error.strerror or error}",
            "look after the disk, or choose another with --out DIR",
        )  # fmt: skip
        return
    middle, worst = statistics.median(took_ms), max(took_ms)
    found = f"{middle:.1f} ms, at most {worst:.1f} ms in {_SYNCS}"
    if middle > SLOW_SYNC_MS:
        yield warning("sync", found, "each step waits for that once; a local SSD takes a few ms")
    else:
        yield ok("sync", found)


def _runs(directory: Path) -> Iterator[Finding]:
    """Runs that are not finished."""
    alone = RunDirectory(directory).run_file.exists()
    try:
        found = [directory] if alone and is_unfinished(directory) else []
        if not alone and directory.is_dir():
            found = unfinished_runs(directory)
        held = is_held(directory)
    except (OSError, SamestepError) as error:
        yield failure("runs", f"cannot be read: {error}")
        return
    names = ", ".join(str(path) for path in found)
    if held:
        yield ok("runs", f"a coordinator works in {str(directory)!r}: {names or 'no run now'}")
    elif found:
        yield warning("runs", f"unfinished: {names}", f"coordinator --out {directory} --resume")
    else:
        yield ok("runs", f"none unfinished in {str(directory)!r}")
