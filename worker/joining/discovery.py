"""Finds the coordinator of a worker that was given no address, on this machine or its network.

What is found is an address to knock at, and no more: the join token says which certificate has to
answer there, and where several coordinators are found, which of them is meant.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final, Self

from zeroconf import Error, IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from protocol.base.address import format_address
from protocol.base.errors import MessageError, Unreachable, UsageError
from protocol.wire.discovery import SERVICE, Announced
from worker.joining.this_machine import HERE, someone_listens

SETTLED_S: Final = 1.5
"""All coordinators of a network have answered by then, as a rule (RFC 6762, 5.2 and 6)."""
_LOOK_HERE_EVERY_S: Final = 0.5
_TELL_EVERY_S: Final = 10.0
_RESOLVE_MS: Final = 3_000
_MOST: Final = 256

Address = tuple[str, int]


async def find(
    name: str,
    is_ours: Callable[[str], bool],
    retry_for_s: float,
    tell: Callable[[str], None],
) -> Address:
    """Look until there is one.

    Args:
        name: Of the coordinator; empty for any.
        is_ours: Whether this worker has a token or key for the certificate of that fingerprint.
        retry_for_s: For how long; the network is given the time to answer in any case.
        tell: Says what was found.

    Raises:
        Unreachable: None was found.
        UsageError: Several were, and nothing says which.
    """
    since_s = time.monotonic()
    told_s = since_s + SETTLED_S
    async with _Browser() as browser:
        while True:
            now_s = time.monotonic()
            if not name and someone_listens(*HERE):
                return HERE
            chosen = choose([*browser.found.values()], name, is_ours)
            settled = now_s - since_s >= SETTLED_S
            if chosen is not None and (settled or name or is_ours(chosen.certificate)):
                address = nearest(chosen)
                tell(f"found coordinator {chosen.name!r} at {format_address(address, chosen.port)}")
                return address, chosen.port
            if settled and chosen is None and browser.found and not name:
                raise UsageError(_several(browser.found.values()))
            if settled and now_s - since_s >= retry_for_s:
                raise Unreachable(_none(name, browser))
            if now_s >= told_s:
                told_s = now_s + _TELL_EVERY_S
                left_s = max(retry_for_s - (now_s - since_s), 0)
                tell(f"{_none(name, browser)}; looking on, giving up in {left_s:.0f} s")
            await browser.wait(_LOOK_HERE_EVERY_S)


def choose(found: list[Announced], name: str, is_ours: Callable[[str], bool]) -> Announced | None:
    """The one that is meant: by its name, else the only one, else the only one that is ours."""
    if name:
        return next((each for each in found if each.name == name), None)
    if len(found) > 1:
        found = [each for each in found if is_ours(each.certificate)]
    return found[0] if len(found) == 1 else None


def nearest(announced: Announced) -> str:
    """That of its addresses which has most bits in common with this machine's way to it.

    One that is also this machine's own is another network's: bridges have the same everywhere.
    """
    texts = [str(address) for address in announced.addresses]
    return max(texts, key=_closeness)


def _closeness(address: str) -> int:
    there = ipaddress.ip_address(address)
    family = socket.AF_INET6 if there.version == 6 else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing; it only finds the way
        here = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        if here == there:
            return 0
        return there.max_prefixlen - (int(here) ^ int(there)).bit_length()
    return -1


def _several(found: Iterable[Announced]) -> str:
    every = ", ".join(
        f"{each.name} ({format_address(nearest(each), each.port)})"
        for each in sorted(found, key=lambda each: each.name)
    )
    return f"found several coordinators: {every}; say which one: worker --coordinator NAME"


def _none(name: str, browser: _Browser) -> str:
    if browser.failure:
        return (
            f"no coordinator on this machine, and the network cannot be asked ({browser.failure}); "
            "give its address: worker --coordinator HOST:PORT"
        )
    if name:
        others = ", ".join(sorted(each.name for each in browser.found.values()))
        return (
            f"no coordinator announces itself as {name!r} on the network (found: "
            f"{others or 'none'}); perhaps give its address: worker --coordinator HOST:PORT"
        )
    return (
        f"no coordinator at {HERE[0]}:{HERE[1]}, and none announces itself on the network; "
        "give its address: worker --coordinator HOST:PORT"
    )


class _Browser:
    """What is announced on the network, as it comes and goes.

    Attributes:
        found: By full name.
        failure: Why the network cannot be asked; empty if it can.
    """

    def __init__(self) -> None:
        self.found: dict[str, Announced] = {}
        self.failure = ""
        self._changed = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None

    async def __aenter__(self) -> Self:
        try:
            self._zeroconf = AsyncZeroconf(ip_version=IPVersion.V4Only)
            self._browser = AsyncServiceBrowser(
                self._zeroconf.zeroconf, SERVICE, handlers=[self._heard]
            )
        except (OSError, Error) as error:
            self.failure = str(error)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._asking:
            task.cancel()
        if self._browser is not None:
            await self._browser.async_cancel()
        if self._zeroconf is not None:
            await self._zeroconf.async_close()

    async def wait(self, seconds: float) -> None:
        """Until something has changed, or for so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()

    def _heard(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        del service_type
        if state_change is ServiceStateChange.Removed:
            self.found.pop(name, None)
        elif len(self._asking) < _MOST:
            task = asyncio.get_running_loop().create_task(self._ask(zeroconf, name))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        with contextlib.suppress(OSError, Error, MessageError):
            if await info.async_request(zeroconf, _RESOLVE_MS) and len(self.found) < _MOST:
                self.found[name] = Announced.read(
                    name, info.parsed_addresses(), info.port or 0, info.decoded_properties
                )
                self._changed.set()
