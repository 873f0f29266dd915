"""Announce a coordinator on the local network by mDNS, so that workers there need no address.

Only addresses that other machines can reach are announced, over IPv4 multicast (also if the
coordinator listens on IPv6). If the network refuses multicast, the coordinator logs that and runs
without an announcement.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import uuid
from typing import Final

import structlog
from zeroconf import Error, InterfaceChoice, IPVersion
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from coordinator.members.listening import reachable_addresses
from protocol import PROTOCOL_VERSION
from protocol.wire.discovery import SERVICE, CoordinatorAnnouncement

log = structlog.get_logger("coordinator")

CHECK_INTERVAL_S: Final = 5.0
"""Seconds between two checks of the interfaces' addresses."""
_GOODBYE_S: Final = 2.0
_MOST_ADDRESSES: Final = 32


class Announcement:
    """The announcement of one coordinator; renewed when this machine's addresses change.

    Args:
        name: The coordinator's name; a number is appended if the network has that name already.
        address: The address that the coordinator listens on; `0.0.0.0` or `::` for all.
        certificate: The certificate's fingerprint; empty without TLS.
    """

    def __init__(self, name: str, address: tuple[str, int], certificate: str) -> None:
        self._name = name
        self._host, self._port = address
        self._certificate = certificate
        self._zeroconf: AsyncZeroconf | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start announcing in the background."""
        self._task = asyncio.get_running_loop().create_task(self._keep_announced())

    async def stop(self) -> None:
        """Withdraw the announcement."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self._withdraw()

    async def _keep_announced(self) -> None:
        last_addresses: list[str] | None = None
        failure = ""
        while True:
            reachable = (
                address for address in reachable_addresses(self._host) if "%" not in address
            )
            addresses = [*itertools.islice(reachable, _MOST_ADDRESSES)]
            if addresses != last_addresses:
                await self._withdraw()
                reason = await self._announce(addresses)
                if reason and reason != failure:
                    log.warning("not_announced", reason=reason)
                last_addresses, failure = (None if reason else addresses), reason
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _announce(self, addresses: list[str]) -> str:
        """Announce these addresses; return the reason if that fails, else an empty string."""
        if not addresses:
            return (
                "this machine has no address that other machines reach without a zone; check "
                "--bind and ip addr"
            )
        try:
            announcement = CoordinatorAnnouncement(
                name=self._name,
                addresses=tuple(addresses),
                port=self._port,
                protocol=PROTOCOL_VERSION,
                certificate=self._certificate,
            )
            info = AsyncServiceInfo(
                SERVICE,
                f"{self._name}.{SERVICE}",
                port=self._port,
                properties=announcement.properties(),
                parsed_addresses=[str(address) for address in announcement.addresses],
                # Not the machine's hostname, which another service may have announced already.
                server=f"samestep-{uuid.uuid4().hex[:12]}.local.",
            )
            self._zeroconf = AsyncZeroconf(self._interfaces(), ip_version=IPVersion.V4Only)
            await (await self._zeroconf.async_register_service(info, allow_name_change=True))
        except (OSError, Error, ValueError) as error:
            return str(error) or repr(error)
        log.info("announced", name=info.name.removesuffix(f".{SERVICE}"), addresses=addresses)
        return ""

    async def _withdraw(self) -> None:
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is None:
            return
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await zeroconf.async_unregister_all_services()
                await zeroconf.async_close()
        except (OSError, Error) as error:
            log.warning("still_announced", reason=str(error))

    def _interfaces(self) -> list[str] | InterfaceChoice:
        listening = ipaddress.ip_address(self._host)
        if listening.version == 6 or listening.is_unspecified:
            return InterfaceChoice.All
        return [self._host]
