"""Find a coordinator's address in the file that it publishes, or on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from protocol.base.errors import SamestepError, Unreachable
from protocol.wire.address_file import read_address_file

LOCAL_COORDINATOR: Final = ("127.0.0.1", 9000)
"""The default address of a coordinator on this machine."""
_POLL_INTERVAL_S: Final = 0.5
_REPORT_INTERVAL_S: Final = 10.0


async def find_in_file(
    path: Path, retry_for_s: float, print_line: Callable[[str], None]
) -> tuple[str, int]:
    """Wait until the file names a coordinator; return host and port of its nearest address.

    Args:
        path: The coordinator's `--address-file`.
        retry_for_s: How long to wait for the file.
        print_line: Prints a line.

    Raises:
        Unreachable: The file did not appear in time, cannot be read, or has no address.
    """
    start_s = time.monotonic()
    next_report_s = start_s
    while True:
        problem = "there is no such file"
        try:
            if addresses := read_address_file(path):
                by_host = {host: (host, port) for host, port in addresses.worker_addresses}
                return by_host[nearest_host(by_host)]
        except SamestepError as error:
            problem = str(error)
        except OSError as error:
            problem = error.strerror or str(error)
        waited_s = time.monotonic() - start_s
        if waited_s >= retry_for_s:
            raise Unreachable(
                f"no coordinator in the address file {str(path)!r} for {retry_for_s:g} s: "
                f"{problem}; start one with the same --address-file, on a file system that both "
                "machines share"
            )
        if time.monotonic() >= next_report_s:
            next_report_s = time.monotonic() + _REPORT_INTERVAL_S
            print_line(
                f"waiting for a coordinator's address in {str(path)!r}: {problem}; giving up in "
                f"{retry_for_s - waited_s:.0f} s"
            )
        await asyncio.sleep(_POLL_INTERVAL_S)


def nearest_host(hosts: Iterable[str]) -> str:
    """Return the host whose address has the longest common prefix with this machine's address.

    An address of this machine counts as one without a common prefix, because bridges have the same
    address on every machine. Host names, and addresses without a route, rank last.
    """
    return max(hosts, key=_closeness)


def _closeness(address: str) -> int:
    try:
        remote = ipaddress.ip_address(address)
    except ValueError:
        return -1
    family = socket.AF_INET6 if remote.version == 6 else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends no packet; only selects the route
        local = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        if local == remote:
            return 0
        return remote.max_prefixlen - (int(local) ^ int(remote)).bit_length()
    return -1


def has_listener(host: str, port: int) -> bool:
    """Return whether a server on this machine listens at this address, without connecting."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
