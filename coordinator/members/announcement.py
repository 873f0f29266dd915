"""Tells the local network where this coordinator is, so that workers there need no address.

Only for what others can reach, and over IPv4 (also where it listens on IPv6). The network may
refuse multicast, or have another of that name: then a coordinator serves all the same, and its log
says so.
"""

from __future__ import annotations

import asyncio
import ipaddress
import uuid
from typing import Final

import ifaddr
import structlog
from zeroconf import Error, InterfaceChoice, IPVersion
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from coordinator.members.invitation import reachable_address
from protocol import PROTOCOL_VERSION
from protocol.wire.discovery import SERVICE, Announced

log = structlog.get_logger("coordinator")

_GOODBYE_S: Final = 2.0


class Announcement:
    """Of one coordinator, from `start` to `stop`.

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
        self._task = asyncio.get_running_loop().create_task(self._announce())

    async def stop(self) -> None:
        """Take it back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._zeroconf is not None:
            try:
                async with asyncio.timeout(_GOODBYE_S):
                    await self._zeroconf.async_unregister_all_services()
                    await self._zeroconf.async_close()
            except (OSError, Error) as error:
                log.warning("still_announced", reason=str(error))

    async def _announce(self) -> None:
        try:
            announced = Announced(
                name=self._name,
                addresses=tuple(addresses_of(self._host)),
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
            log.warning("not_announced", reason=str(error) or repr(error))
            return
        log.info("announced", name=info.name.removesuffix(f".{SERVICE}"))

    def _interfaces(self) -> list[str] | InterfaceChoice:
        listening = ipaddress.ip_address(self._host)
        if listening.version == 6 or listening.is_unspecified:
            return InterfaceChoice.All
        return [self._host]


def addresses_of(host: str) -> list[str]:
    """Where others can reach what listens there; the one towards the default route comes first.

    Args:
        host: An address, or the one that stands for all.
    """
    listening = ipaddress.ip_address(host)
    if not listening.is_unspecified:
        return [host]
    found = [reachable_address(host)]
    for adapter in ifaddr.get_adapters():
        for each in adapter.ips:
            text = each.ip if isinstance(each.ip, str) else each.ip[0]
            address = ipaddress.ip_address(text)
            local = address.is_loopback or address.is_link_local
            if address.version == listening.version and not local:
                found.append(text)
    return [text for text in dict.fromkeys(found) if _is_address(text)]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
