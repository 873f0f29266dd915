"""Tells the local network where this coordinator is, so that workers there need no address.

Only for what others can reach, and over IPv4 (also where it listens on IPv6). The network may
refuse multicast, or have another of that name: then a coordinator serves all the same, and its log
says so.
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
from protocol.wire.discovery import SERVICE, Announced

log = structlog.get_logger("coordinator")

LOOK_EVERY_S: Final = 5.0
"""How often the interfaces are asked for their addresses."""
_GOODBYE_S: Final = 2.0
_MOST_ADDRESSES: Final = 32


class Announcement:
    """Of one coordinator, from `start` to `stop`; made anew when this machine's addresses change.

    Args:
        name: Its own; with a number after it if another has that name.
        address: Where it listens: one address, or all that it has.
        certificate: Its fingerprint; empty without TLS.
    """

    def __init__(self, name: str, address: tuple[str, int], certificate: str) -> None:
        self._name = name
        self._host, self._port = address
        self._certificate = certificate
        self._zeroconf: AsyncZeroconf | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Announce it; nobody waits for that."""
        self._task = asyncio.get_running_loop().create_task(self._keep_announced())

    async def stop(self) -> None:
        """Take it back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self._withdraw()

    async def _keep_announced(self) -> None:
        announced: list[str] | None = None
        failure = ""
        while True:
            reachable = (each for each in reachable_addresses(self._host) if "%" not in each)
            addresses = [*itertools.islice(reachable, _MOST_ADDRESSES)]
            if addresses != announced:
                await self._withdraw()
                reason = await self._announce(addresses)
                if reason and reason != failure:
                    log.warning("not_announced", reason=reason)
                announced, failure = (None if reason else addresses), reason
            await asyncio.sleep(LOOK_EVERY_S)

    async def _announce(self, addresses: list[str]) -> str:
        """Announce it at these addresses; why that is not possible, else an empty text."""
        if not addresses:
            return "there is no address that others reach without a zone; check --bind and ip addr"
        try:
            announced = Announced(
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
                properties=announced.properties(),
                parsed_addresses=[str(address) for address in announced.addresses],
                # Not the machine's own name there, which others may announce already.
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
