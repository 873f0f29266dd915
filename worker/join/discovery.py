"""Find a coordinator on this machine or its network, for a worker without an address.

Discovery only yields an address and is not trusted: the join token says which certificate must
answer there, and which of several coordinators to choose.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Final, Self

from zeroconf import Error, IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from protocol.base.address import format_address
from protocol.base.errors import MessageError, Unreachable, UsageError
from protocol.wire.discovery import SERVICE, Announced
from worker.join.address import HERE, has_listener, nearest

SETTLED_S: Final = 1.5
"""By then all coordinators on a network have usually answered (RFC 6762, 5.2 and 6)."""
_LOOK_HERE_EVERY_S: Final = 0.5
_TELL_EVERY_S: Final = 10.0
_RESOLVE_MS: Final = 3_000
_MOST: Final = 256

Address = tuple[str, int]


async def find(
    name: str,
    has_credentials: Callable[[str], bool],
    retry_for_s: float,
    tell: Callable[[str], None],
) -> Address:
    """Search until a coordinator is found; return its address.

    Args:
        name: The coordinator's name; empty for any.
        has_credentials: Returns whether this worker has a token or key for a fingerprint.
        retry_for_s: How long to search, but at least `SETTLED_S`.
        tell: Prints a line.

    Raises:
        Unreachable: No coordinator was found.
        UsageError: Several were found, and the worker has credentials for none or several.
    """
    since_s = time.monotonic()
    told_s = since_s + SETTLED_S
    async with _Browser() as browser:
        while True:
            now_s = time.monotonic()
            if not name and has_listener(*HERE):
                return HERE
            chosen = choose([*browser.announced.values()], name, has_credentials)
            settled = now_s - since_s >= SETTLED_S
            if chosen is not None and (settled or name or has_credentials(chosen.certificate)):
                address = nearest(map(str, chosen.addresses))
                tell(f"found coordinator {chosen.name!r} at {format_address(address, chosen.port)}")
                return address, chosen.port
            if settled and chosen is None and browser.announced and not name:
                raise UsageError(_several(browser.announced.values()))
            if settled and now_s - since_s >= retry_for_s:
                raise Unreachable(_none(name, browser))
            if now_s >= told_s:
                told_s = now_s + _TELL_EVERY_S
                left_s = max(retry_for_s - (now_s - since_s), 0)
                tell(f"{_none(name, browser)}; still looking, giving up in {left_s:.0f} s")
            await browser.wait(_LOOK_HERE_EVERY_S)


def choose(
    candidates: list[Announced], name: str, has_credentials: Callable[[str], bool]
) -> Announced | None:
    """Choose a coordinator: by name, else the only one, else the only one with our credentials."""
    if name:
        return next((each for each in candidates if each.name == name), None)
    if len(candidates) > 1:
        candidates = [each for each in candidates if has_credentials(each.certificate)]
    return candidates[0] if len(candidates) == 1 else None


def _several(coordinators: Iterable[Announced]) -> str:
    every = ", ".join(
        f"{each.name} ({format_address(nearest(map(str, each.addresses)), each.port)})"
        for each in sorted(coordinators, key=lambda each: each.name)
    )
    return f"found several coordinators: {every}; say which one: worker --coordinator NAME"


def _none(name: str, browser: _Browser) -> str:
    if browser.failure:
        return (
            f"no coordinator on this machine, and the network cannot be asked ({browser.failure}); "
            "give its address: worker --coordinator HOST:PORT"
        )
    if name:
        others = ", ".join(sorted(each.name for each in browser.announced.values()))
        return (
            f"no coordinator announces itself as {name!r} on the network (found: "
            f"{others or 'none'}); or give its address: worker --coordinator HOST:PORT"
        )
    return (
        f"no coordinator at {HERE[0]}:{HERE[1]}, and none announces itself on the network; "
        "give its address: worker --coordinator HOST:PORT"
    )


class _Browser:
    """Tracks announcements on the network.

    Attributes:
        announced: The present announcements, by full name.
        failure: Why the network cannot be searched; empty if it can.
    """

    def __init__(self) -> None:
        self.announced: dict[str, Announced] = {}
        self.failure = ""
        self._change = asyncio.Event()
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
        """Wait for a change, at most this long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._change.wait(), seconds)
        self._change.clear()

    def _heard(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        del service_type
        if state_change is ServiceStateChange.Removed:
            self.announced.pop(name, None)
        elif len(self._asking) < _MOST:
            task = asyncio.get_running_loop().create_task(self._ask(zeroconf, name))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        with contextlib.suppress(OSError, Error, MessageError):
            if await info.async_request(zeroconf, _RESOLVE_MS) and len(self.announced) < _MOST:
                self.announced[name] = Announced.read(
                    name, info.parsed_addresses(), info.port or 0, info.decoded_properties
                )
                self._change.set()
