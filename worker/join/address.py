"""Find a coordinator's address: in the file it publishes, or on this machine."""

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

HERE: Final = ("127.0.0.1", 9000)
"""The default address of a coordinator on this machine."""
_LOOK_EVERY_S: Final = 0.5
_TELL_EVERY_S: Final = 10.0


async def find_in_file(
    path: Path, retry_for_s: float, tell: Callable[[str], None]
) -> tuple[str, int]:
    """Wait until the file names a coordinator; return host and port of its nearest address.

    Args:
        path: The coordinator's `--address-file`.
        retry_for_s: How long to wait for it.
        tell: Prints a line.

    Raises:
        Unreachable: The file did not appear in time, or cannot be read.
    """
    since_s = time.monotonic()
    told_s = since_s
    while True:
        problem = "there is no such file"
        try:
            if published := read_address_file(path):
                by_host = {host: (host, port) for host, port in published.for_workers}
                return by_host[nearest(by_host)]
        except SamestepError as error:
            problem = str(error)
        except OSError as error:
            problem = error.strerror or str(error)
        waited_s = time.monotonic() - since_s
        if waited_s >= retry_for_s:
            raise Unreachable(
                f"no coordinator in the address file {str(path)!r} for {retry_for_s:g} s: "
                f"{problem}; start one with the same --address-file, on a file system that both "
                "machines share"
            )
        if time.monotonic() >= told_s:
            told_s = time.monotonic() + _TELL_EVERY_S
            tell(
                f"waiting for a coordinator's address in {str(path)!r}: {problem}; giving up in "
                f"{retry_for_s - waited_s:.0f} s"
            )
        await asyncio.sleep(_LOOK_EVERY_S)


def nearest(hosts: Iterable[str]) -> str:
    """Return the host whose address has the longest common prefix with the local source address.

    Addresses of this machine and host names rank last: bridges have the same address on every
    machine.
    """
    return max(hosts, key=_closeness)


def _closeness(address: str) -> int:
    try:
        there = ipaddress.ip_address(address)
    except ValueError:
        return -1
    family = socket.AF_INET6 if there.version == 6 else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends no packet; only selects the route
        here = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        if here == there:
            return 0
        return there.max_prefixlen - (int(here) ^ int(there)).bit_length()
    return -1


def has_listener(host: str, port: int) -> bool:
    """Return whether a local server listens on this address, without connecting to it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
