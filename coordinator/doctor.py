"""`coordinator doctor`: check for common causes that keep a coordinator from working, or workers
from reaching it.

The command changes nothing. If a coordinator is running, the command examines it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import os
import shlex
import socket
import ssl
import stat
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.disk.directory_lock import is_locked
from coordinator.members.credentials import RENEWAL
from coordinator.members.listening import (
    address_from_here,
    bind_failure,
    is_loopback,
    reachable_addresses,
    require_loopback,
)
from coordinator.members.worker_keys import WorkerKeys
from coordinator.service.run_instance import is_unfinished, unfinished_runs
from coordinator.storage.directory.run_directory import RunDirectory
from protocol.base import limits
from protocol.base.address import format_address
from protocol.base.errors import SamestepError, UsageError
from protocol.cli import doctor as machine_checks
from protocol.cli.doctor import Finding, failure, ok, warning
from protocol.machine.secret_file import join_token_file, read_secret
from protocol.wire import dial, tls
from protocol.wire.dial import as_dial_error
from protocol.wire.join_token import JoinToken

_PATIENCE_S: Final = 5.0
_LEAST_FREE_BYTES: Final = 2048 * limits.MIB
_LEAST_MEMORY_BYTES: Final = 1024 * limits.MIB
_FILES_ENOUGH: Final = (
    limits.WORKERS + limits.UNAUTHENTICATED_CONNECTIONS + 256  # the run's files, readers of events
)
_SYNCS: Final = 16
SLOW_SYNC_MS: Final = 50.0
"""Each step waits for one sync of the gradient log."""


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """The options with which the coordinator is, or will be, started.

    Attributes:
        bind: Host and port for workers.
        control: Host and port of the control port.
        directory: The directory of runs.
        home: The directory of tokens and keys.
    """

    bind: tuple[str, int]
    control: tuple[str, int]
    directory: Path
    home: Path


def examine(plan: ServicePlan) -> Iterator[Finding]:
    """Yield the findings of all checks, the most important checks first."""
    yield machine_checks.check_release()
    yield from machine_checks.check_packages()
    yield machine_checks.check_kernels()
    yield from _state(plan.home)
    yield from _secrets(join_token_file(plan.home).parent)
    yield from machine_checks.check_directory(
        "run directory", plan.directory, _LEAST_FREE_BYTES, "--out DIR"
    )
    yield from _syncs(plan.directory)
    yield from _runs(plan.directory)
    yield from _workers_port(*plan.bind, _fingerprint(plan.home))
    yield from _control_port(*plan.control)
    yield machine_checks.check_open_files(limits.COORDINATOR_FILES, _FILES_ENOUGH)
    yield machine_checks.check_memory(_LEAST_MEMORY_BYTES)
    yield machine_checks.check_oom_kills()
    yield machine_checks.check_clock()


def _state(home: Path) -> Iterator[Finding]:
    """Check the directory of tokens and keys."""
    yield from machine_checks.check_directory(
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
            f"chmod 700 {shlex.quote(str(directory))}",
        )  # fmt: skip
    else:
        yield ok("state mode", f"{mode:04o}")


def _secrets(directory: Path) -> Iterator[Finding]:
    """Check that certificate, key, join token and workers' keys exist, match and are private."""
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
        files = {"certificate.pem": certificate, "key.pem": key}
        missing = [name for name, text in files.items() if text is None]
        text = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        if len(missing) == 1 and not (certificate is None and token is None and workers is None):
            yield failure("secrets", f"{text} in {str(directory)!r}", RENEWAL)
            return
        yield warning(
            "secrets", f"{text} in {str(directory)!r}",
            "restore it, or the next start makes a new certificate and join token, and every "
            "worker needs that token",
        )  # fmt: skip
        return
    try:
        tls.server_context(directory / "certificate.pem", directory / "key.pem")
        fingerprint = tls.fingerprint(ssl.PEM_cert_to_DER_cert(certificate))
    except (OSError, ValueError) as error:
        empty_files = [
            name for name, text in zip(names, (certificate, key), strict=False) if not text
        ]
        fault = f"{' and '.join(empty_files)} is empty" if empty_files else str(error)
        yield failure(
            "secrets", f"certificate.pem and key.pem in {str(directory)!r} cannot be used: {fault}",
            RENEWAL,
        )  # fmt: skip
        return
    if fault := _token_fault(token, fingerprint):
        yield warning(
            "secrets", f"the join token {fault}",
            "the next start makes a new one; workers that have joined before do not need it",
        )  # fmt: skip
        return
    keys = "some workers' keys" if workers is not None else "no worker's key yet"
    yield ok("secrets", f"certificate {fingerprint.hex()[:16]}..., join token, {keys}")


def _token_fault(token: str | None, fingerprint: bytes) -> str:
    """Describe the fault in the join token; empty if there is none."""
    if token is None:
        return "is missing"
    try:
        token_fingerprint = JoinToken.parse(token, "join.token").fingerprint
    except UsageError:
        return (
            "in join.token is not a join token"
            if token.strip()
            else "is missing: join.token is empty"
        )
    return "" if token_fingerprint == fingerprint else "belongs to another certificate"


def _fingerprint(home: Path) -> bytes | None:
    """Return the fingerprint of this user's certificate; None if there is none."""
    try:
        pem = read_secret(join_token_file(home).with_name("certificate.pem"))
        return tls.fingerprint(ssl.PEM_cert_to_DER_cert(pem)) if pem is not None else None
    except (UsageError, ValueError):
        return None


def _syncs(directory: Path) -> Iterator[Finding]:
    """Measure how long a sync of the disk takes."""
    times_ms: list[float] = []
    try:
        with tempfile.TemporaryFile(
            dir=machine_checks.nearest_existing(directory), buffering=0
        ) as file:
            for _ in range(_SYNCS):
                file.write(bytes(4096))
                began_s = time.perf_counter()
                os.fsync(file.fileno())
                times_ms.append((time.perf_counter() - began_s) * 1000)
    except OSError as error:
        yield failure(
            "sync", f"the disk cannot make a file durable: {error.strerror or error}",
            "check the disk, or choose another with --out DIR",
        )  # fmt: skip
        return
    median_ms, worst_ms = statistics.median(times_ms), max(times_ms)
    times = f"{median_ms:.1f} ms, at most {worst_ms:.1f} ms in {_SYNCS}"
    if median_ms > SLOW_SYNC_MS:
        yield warning("sync", times, "each step waits for one sync; a local SSD takes a few ms")
    else:
        yield ok("sync", times)


def _runs(directory: Path) -> Iterator[Finding]:
    """Check for unfinished runs."""
    is_run = RunDirectory(directory).run_file.exists()
    try:
        unfinished = [directory] if is_run and is_unfinished(directory) else []
        if not is_run and directory.is_dir():
            unfinished = unfinished_runs(directory)
        has_coordinator = is_locked(directory)
    except (OSError, SamestepError) as error:
        yield failure("runs", f"cannot be read: {error}")
        return
    names = ", ".join(str(path) for path in unfinished)
    if has_coordinator:
        yield ok("runs", f"a coordinator works in {str(directory)!r}: {names or 'no run now'}")
    elif unfinished:
        command = f"coordinator --out {shlex.quote(str(directory))} --resume"
        yield warning("runs", f"unfinished: {names}", command)
    else:
        yield ok("runs", f"none unfinished in {str(directory)!r}")


# Ports. If a port is in use, this user's coordinator may be listening there.


def _workers_port(host: str, port: int, certificate: bytes | None) -> Iterator[Finding]:
    """Check the address for workers.

    Args:
        host: As the user wrote it.
        port: The port; 0: any free port.
        certificate: Fingerprint of this user's certificate; None if there is none yet.
    """
    check = "workers' port"
    try:
        with _listening(host, port) as (listener, at):
            yield from _check_addresses(check, host, at[1], listener)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            yield failure(check, bind_failure("--bind", host, port, error))
            return
        served_certificate = _certificate_at(address_from_here(host), port)
        if served_certificate is None or served_certificate != certificate:
            yield failure(check, bind_failure("--bind", host, port, error))
            return
        yield ok(check, f"this user's coordinator listens at {format_address(host, port)}")
        yield from _open_to_others(check, host, port)


def _control_port(host: str, port: int) -> Iterator[Finding]:
    """Check the address of the control port."""
    check = "control port"
    try:
        require_loopback(host, "--control")
        with _listening(host, port) as (_, at):
            yield ok(check, f"{format_address(host, at[1])} is free")
    except UsageError as error:
        yield failure(check, str(error))
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _is_healthy(host, port):
            yield ok(check, f"a coordinator answers at {format_address(host, port)}")
        else:
            yield failure(check, bind_failure("--control", host, port, error))


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[tuple[socket.socket, tuple[str, int]]]:
    """Listen at the address as the coordinator would; yield the listener and its address.

    Raises:
        OSError: The address cannot be bound.
    """
    address, *_ = asyncio.run(dial.resolve(host, port, _PATIENCE_S, socket.AI_PASSIVE))
    with socket.socket(address.family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address.socket_address)
        listener.listen(1)
        yield listener, listener.getsockname()[:2]


def _check_addresses(
    check: str, host: str, port: int, listener: socket.socket
) -> Iterator[Finding]:
    """Connect to the listener by each address that others would use."""
    for address in reachable_addresses(host):
        at = format_address(address, port)
        try:
            with dial.connect_blocking(address, port, _PATIENCE_S):
                listener.settimeout(_PATIENCE_S)
                listener.accept()[0].close()
        except OSError as error:
            yield failure(
                check, f"{format_address(host, port)} is free, but cannot be reached at {at} even "
                f"from here ({as_dial_error(error, at).observation})",
                "check the addresses (ip addr) and the firewall",
            )  # fmt: skip
            return
    yield ok(check, f"{format_address(host, port)} is free")
    yield from _open_to_others(check, host, port)


def _open_to_others(check: str, host: str, port: int) -> Iterator[Finding]:
    """Check whether other machines can connect, as far as this machine can tell."""
    check = "reachable"
    loopback = _loopback_only(host)
    if loopback:
        yield warning(
            check, f"{loopback}: only workers on this machine can connect",
            f"for others: --bind 0.0.0.0:{port}",
        )  # fmt: skip
        return
    addresses = [format_address(address, port) for address in reachable_addresses(host)]
    if not addresses:
        yield failure(
            check, "this machine has no address that others can reach",
            "connect it to a network (ip addr)",
        )  # fmt: skip
        return
    yield ok(
        check,
        f"others connect to {' or '.join(addresses)}; check from another machine with: "
        f"worker doctor --coordinator {addresses[0]}",
    )


def _loopback_only(host: str) -> str:
    """Return a text if the host resolves only to loopback, as a machine's name often does; else
    empty."""
    if is_loopback(host):
        return host
    hosts = {
        resolved_address.host
        for resolved_address in asyncio.run(dial.resolve(host, 0, _PATIENCE_S))
    }
    if all(is_loopback(address) for address in hosts):
        return f"{host} resolves to {', '.join(sorted(hosts))} here (/etc/hosts)"
    return ""


def _certificate_at(host: str, port: int) -> bytes | None:
    """Return the fingerprint of the certificate served at an address; None without TLS 1.3."""
    with (
        contextlib.suppress(OSError),
        dial.connect_blocking(host, port, _PATIENCE_S) as plain_socket,
        tls.client_context().wrap_socket(plain_socket) as secured,
    ):
        certificate = secured.getpeercert(binary_form=True)
        return tls.fingerprint(certificate) if certificate else None
    return None


def _is_healthy(host: str, port: int) -> bool:
    """Return whether a coordinator's control port answers there."""
    connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/healthz")
            return bool(json.loads(connection.getresponse().read(4096)) == {"ok": True})
        except (OSError, http.client.HTTPException, ValueError):
            return False
