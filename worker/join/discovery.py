"""Find a coordinator on this machine or its network, for a worker without an address.

Discovery only yields an address and is not trusted: the worker's join token and keys determine
which certificate is accepted there, and which of several coordinators is chosen.
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
from protocol.wire.discovery import SERVICE, CoordinatorAnnouncement
from worker.join.address import LOCAL_COORDINATOR, has_listener, nearest_host

SETTLED_S: Final = 1.5
"""Within this time, all coordinators on a network have usually answered (RFC 6762, 5.2 and 6)."""
_POLL_INTERVAL_S: Final = 0.5
_REPORT_INTERVAL_S: Final = 10.0
_RESOLVE_MS: Final = 3_000
_MAX_ANNOUNCEMENTS: Final = 256

Address = tuple[str, int]


async def find_coordinator(
    name: str,
    has_credentials: Callable[[str], bool],
    retry_for_s: float,
    print_line: Callable[[str], None],
) -> Address:
    """Search until a coordinator is found; return its address.

    Args:
        name: The coordinator's name; empty for any.
        has_credentials: Returns whether this worker has a token or key for a fingerprint.
        retry_for_s: How long to search, but at least `SETTLED_S`.
        print_line: Prints a line.

    Raises:
        Unreachable: No coordinator was found.
        UsageError: Several were found, and the worker has credentials for none or several.
    """
    start_s = time.monotonic()
    next_report_s = start_s + SETTLED_S
    async with _Browser() as browser:
        while True:
            now_s = time.monotonic()
            if not name and has_listener(*LOCAL_COORDINATOR):
                return LOCAL_COORDINATOR
            coordinator = choose_coordinator(
                [*browser.announcements.values()], name, has_credentials
            )
            is_settled = now_s - start_s >= SETTLED_S
            if coordinator is not None and (
                is_settled or name or has_credentials(coordinator.certificate)
            ):
                address = nearest_host(map(str, coordinator.addresses))
                print_line(
                    f"found coordinator {coordinator.name!r} at "
                    f"{format_address(address, coordinator.port)}"
                )
                return address, coordinator.port
            if is_settled and coordinator is None and browser.announcements and not name:
                raise UsageError(_describe_several(browser.announcements.values()))
            if is_settled and now_s - start_s >= retry_for_s:
                raise Unreachable(_describe_none(name, browser))
            if now_s >= next_report_s:
                next_report_s = now_s + _REPORT_INTERVAL_S
                left_s = max(retry_for_s - (now_s - start_s), 0)
                print_line(
                    f"{_describe_none(name, browser)}; still looking, giving up in {left_s:.0f} s"
                )
            await browser.wait(_POLL_INTERVAL_S)


def choose_coordinator(
    candidates: list[CoordinatorAnnouncement], name: str, has_credentials: Callable[[str], bool]
) -> CoordinatorAnnouncement | None:
    """Choose a coordinator: by name, else the only one, else the only one with credentials here.

    Returns None if none or several are left.
    """
    if name:
        return next((candidate for candidate in candidates if candidate.name == name), None)
    if len(candidates) > 1:
        candidates = [c for c in candidates if has_credentials(c.certificate)]
    return candidates[0] if len(candidates) == 1 else None


def _describe_several(coordinators: Iterable[CoordinatorAnnouncement]) -> str:
    listing = ", ".join(
        f"{c.name} ({format_address(nearest_host(map(str, c.addresses)), c.port)})"
        for c in sorted(coordinators, key=lambda c: c.name)
    )
    return f"found several coordinators: {listing}; choose one: worker --coordinator NAME"


def _describe_none(name: str, browser: _Browser) -> str:
    if browser.failure:
        return (
            "no coordinator on this machine, and the network cannot be searched "
            f"({browser.failure}); give its address: worker --coordinator HOST:PORT"
        )
    if name:
        names = ", ".join(sorted(c.name for c in browser.announcements.values()))
        return (
            f"no coordinator announces itself as {name!r} on the network (found: "
            f"{names or 'none'}); give its address instead: worker --coordinator HOST:PORT"
        )
    return (
        f"no coordinator at {format_address(*LOCAL_COORDINATOR)}, and none announces itself on the "
        "network; give its address: worker --coordinator HOST:PORT"
    )


class _Browser:
    """Tracks announcements on the network.

    Attributes:
        announcements: The current announcements, by full name.
        failure: Why the network cannot be searched; empty if it can.
    """

    def __init__(self) -> None:
        self.announcements: dict[str, CoordinatorAnnouncement] = {}
        self.failure = ""
        self._change = asyncio.Event()
        self._resolve_tasks: set[asyncio.Task[None]] = set()
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None

    async def __aenter__(self) -> Self:
        try:
            self._zeroconf = AsyncZeroconf(ip_version=IPVersion.V4Only)
            self._browser = AsyncServiceBrowser(
                self._zeroconf.zeroconf, SERVICE, handlers=[self._handle_change]
            )
        except (OSError, Error) as error:
            self.failure = str(error)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._resolve_tasks:
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

    def _handle_change(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        del service_type
        if state_change is ServiceStateChange.Removed:
            self.announcements.pop(name, None)
        elif len(self._resolve_tasks) < _MAX_ANNOUNCEMENTS:
            task = asyncio.get_running_loop().create_task(self._resolve(zeroconf, name))
            self._resolve_tasks.add(task)
            task.add_done_callback(self._resolve_tasks.discard)

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        info = AsyncServiceInfo(SERVICE, name)
        with contextlib.suppress(OSError, Error, MessageError):
            if (
                await info.async_request(zeroconf, _RESOLVE_MS)
                and len(self.announcements) < _MAX_ANNOUNCEMENTS
            ):
                self.announcements[name] = CoordinatorAnnouncement.read(
                    name, info.parsed_addresses(), info.port or 0, info.decoded_properties
                )
                self._change.set()
