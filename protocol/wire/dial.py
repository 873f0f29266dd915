"""Make TCP connections with a time limit, to all addresses of a name in parallel (RFC 8305).

Names are resolved in a daemon thread, which is abandoned at the time limit: getaddrinfo(3) cannot
be interrupted, and a process waits at exit for the threads of an executor.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from protocol.base.address import format_address

Cause = Literal["refused", "no route", "no answer", "unknown name", "no name server", "other"]

STAGGER_S: Final = 0.25
"""Delay before the next address is tried too, unless the attempt fails earlier (RFC 8305, 5)."""
_UNREACHABLE: Final = frozenset(
    {
        errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL,
        errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENODEV,
    }
)  # fmt: skip
"""EINVAL: a blackhole route, or a link-local address without its zone."""
_ADVICE: Final[dict[Cause, str]] = {
    "refused": "start it there, with --bind 0.0.0.0:PORT for other machines, or correct the "
    "address",
    "no route": "check the address, and that both machines are on one network or VPN",
    "no answer": "the machine is off, the address is wrong, or a firewall drops packets to it",
    "unknown name": "check the spelling, or give the IP address",
    "no name server": "check the network and /etc/resolv.conf, or give the IP address",
    "other": "",
}


class DialError(OSError):
    """A connection could not be made.

    Attributes:
        cause: The cause of the failure.
        observation: The attempt and its result.
        advice: What to do.
    """

    def __init__(self, cause: Cause, observation: str, advice: str = "") -> None:
        self.cause: Cause = cause
        self.observation = observation
        self.advice = advice or _ADVICE[cause]
        super().__init__(f"{observation}; {self.advice}" if self.advice else observation)


class Address(NamedTuple):
    """A socket address, as returned by getaddrinfo."""

    family: int
    socket_address: tuple[Any, ...]

    @property
    def host(self) -> str:
        """The IP address; a link-local one includes its zone."""
        return host_of(self.socket_address)

    def __str__(self) -> str:
        return format_address(self.host, self.socket_address[1])


def host_of(socket_address: tuple[Any, ...]) -> str:
    """Return the IP address of a socket address; a link-local one includes the name of its zone."""
    host, scope = str(socket_address[0]), socket_address[3] if len(socket_address) == 4 else 0
    if not scope or "%" in host or not host.startswith("fe80:"):
        return host
    with suppress(OSError):
        return f"{host}%{socket.if_indextoname(scope)}"
    return f"{host}%{scope}"


async def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connected non-blocking socket.

    Args:
        host: A name or an IP address.
        port: The port, at each address of the host.
        timeout_s: The limit for name resolution and connection together.

    Raises:
        DialError: No address of the host accepts the connection.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    addresses = await resolve(host, port, timeout_s)
    remaining_s = max(deadline_s - asyncio.get_running_loop().time(), 0.0)
    endpoint, _ = await connect_first(addresses, remaining_s)
    return endpoint


def connect_blocking(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connected blocking socket with this timeout; see `connect`."""
    with ThreadPoolExecutor(
        1
    ) as thread:  # the caller's thread may run an event loop, as in a notebook
        endpoint = thread.submit(asyncio.run, connect(host, port, timeout_s)).result()
    endpoint.settimeout(timeout_s)
    return endpoint


async def resolve(host: str, port: int, timeout_s: float, flags: int = 0) -> list[Address]:
    """Return the addresses of a host, in the system's order of preference.

    Args:
        host: A name or an IP address.
        port: The port of the addresses.
        timeout_s: The limit for the name servers.
        flags: Further flags for getaddrinfo(3).

    Raises:
        DialError: The host has no address, or no name server answers in time.
    """

    def ask(extra_flags: int) -> list[Address]:
        addresses = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=flags | extra_flags
        )
        return list(
            dict.fromkeys(Address(family, address) for family, _, _, _, address in addresses)
        )

    with suppress(OSError, UnicodeError):
        return ask(socket.AI_NUMERICHOST)  # needs no name server
    try:
        async with asyncio.timeout(timeout_s):
            return await _in_abandoned_thread(lambda: ask(0))
    except TimeoutError:
        reason = f"no name server answered for {host!r} within {timeout_s:.0f} s"
        raise DialError("no name server", reason) from None
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            reason = f"the name servers have no answer for {host!r} just now"
            raise DialError("no name server", reason) from None
        raise DialError("unknown name", f"no address is known for {host!r}") from None
    except (OSError, UnicodeError):
        raise DialError("unknown name", f"no address is known for {host!r}") from None


async def connect_first(
    addresses: list[Address], timeout_s: float
) -> tuple[socket.socket, Address]:
    """Connect to the address that answers first, starting attempts `STAGGER_S` apart.

    Raises:
        DialError: No address answers in time.
    """
    addresses_left, errors = _interleave(addresses), list[DialError]()
    running: dict[asyncio.Task[socket.socket], Address] = {}
    try:
        async with asyncio.timeout(timeout_s):
            while addresses_left or running:
                if addresses_left:
                    address = addresses_left.pop(0)
                    running[asyncio.create_task(_connect_one(address))] = address
                stagger_s = STAGGER_S if addresses_left else None
                finished, _ = await asyncio.wait(
                    running, timeout=stagger_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in finished:
                    address = running.pop(task)
                    if (error := task.exception()) is None:
                        return task.result(), address
                    errors.append(as_dial_error(error, str(address)))
    except TimeoutError:
        no_answer = DialError("no answer", _describe_no_answer(running.values(), timeout_s))
        raise _combine_errors([*errors, no_answer]) from None
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_close_if_connected)
    raise _combine_errors(errors)


def as_dial_error(error: BaseException, address: str) -> DialError:
    """Convert an error of the system to a `DialError`.

    Args:
        error: The system's error.
        address: The address that was dialed.
    """
    if isinstance(error, DialError):
        return error
    if isinstance(error, TimeoutError):
        return DialError("no answer", f"no answer from {address}")
    if isinstance(error, ConnectionRefusedError):
        return DialError("refused", f"{address} refused the connection")
    if isinstance(error, socket.gaierror):
        return DialError("unknown name", f"no address is known for {address}")
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if (
        getattr(error, "errno", None) == errno.EINVAL
        and address.startswith("[fe80:")
        and "%" not in address
    ):
        advice = "give the interface of a link-local address: [fe80::1%eth0]:PORT"
        return DialError("no route", f"no route to {address} ({reason})", advice)
    if getattr(error, "errno", None) in _UNREACHABLE:
        return DialError("no route", f"no route to {address} ({reason})")
    return DialError("other", f"no connection to {address} ({reason})")


async def _connect_one(address: Address) -> socket.socket:
    endpoint = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        endpoint.setblocking(False)
        # Not the loop's sock_connect: uvloop's loses the zone of a link-local address.
        with suppress(BlockingIOError):
            endpoint.connect(address.socket_address)
            return endpoint
        await _wait_connected(endpoint)
    except BaseException:
        endpoint.close()
        raise
    return endpoint


async def _wait_connected(endpoint: socket.socket) -> None:
    """Wait until the connection is made; raise OSError if it fails."""
    loop, writable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(endpoint, writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(endpoint)
    if number := endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(number, os.strerror(number))


def _close_if_connected(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def _interleave(addresses: list[Address]) -> list[Address]:
    """Alternate address families, starting with the first address's (RFC 8305, 4)."""
    families = dict.fromkeys(address.family for address in addresses)
    rows = (
        [candidate for candidate in addresses if candidate.family == family] for family in families
    )
    return [
        candidate
        for rank in itertools.zip_longest(*rows)
        for candidate in rank
        if candidate is not None
    ]


def _describe_no_answer(addresses: Iterable[Address], timeout_s: float) -> str:
    return f"no answer from {', '.join(map(str, addresses))} within {timeout_s:.0f} s"


def _combine_errors(errors: list[DialError]) -> DialError:
    """Combine the errors of all addresses into one, with the advice for the first cause."""
    first = errors[0]
    return DialError(first.cause, ", ".join(error.observation for error in errors), first.advice)


async def _in_abandoned_thread(work: Callable[[], list[Address]]) -> list[Address]:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Address]] = loop.create_future()

    def deliver(outcome: list[Address] | Exception) -> None:
        if answer.done():
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def run() -> None:
        try:
            outcome: list[Address] | Exception = work()
        except (OSError, UnicodeError) as error:
            outcome = error
        with suppress(RuntimeError):  # the loop is closed: the caller no longer waits
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=run, name="name resolution", daemon=True).start()
    return await answer
