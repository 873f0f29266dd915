"""Discovery of coordinators on the local network: DNS-SD (RFC 6763) over mDNS (RFC 6762).

Announcements are not trusted, since any machine can send them: they only give addresses to try. The
peer that answers there must have the certificate that the worker's join token names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.networks import IPvAnyAddress

from protocol.base.errors import MessageError, UsageError

SERVICE: Final = "_samestep._tcp.local."
_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}"
"""No dots and no colons, which distinguishes a name from an address."""


class CoordinatorAnnouncement(BaseModel):
    """The announcement of a coordinator.

    Attributes:
        name: The coordinator's name; unique on the network unless another machine imitates it.
        addresses: The addresses at which it listens, in the coordinator's order.
        port: The port, at each address.
        protocol: The coordinator's protocol version.
        certificate: Fingerprint of the coordinator's certificate; empty without TLS.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    addresses: Annotated[tuple[IPvAnyAddress, ...], Field(min_length=1, max_length=32)]
    port: Annotated[int, Field(ge=1, le=65_535)]
    protocol: Annotated[int, Field(ge=0, le=255)]
    certificate: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]

    def properties(self) -> dict[str, str]:
        """Return the content of the TXT record; the other fields are in other records."""
        return {"protocol": str(self.protocol), "certificate": self.certificate}

    @staticmethod
    def read(
        full_name: str, addresses: list[str], port: int, properties: Mapping[str, str | None]
    ) -> CoordinatorAnnouncement:
        """Validate an announcement from the network.

        Raises:
            MessageError: The announcement is not a coordinator's, or has another format.
        """
        try:
            return CoordinatorAnnouncement(
                name=full_name.removesuffix(f".{SERVICE}"),
                addresses=tuple(addresses),
                port=port,
                protocol=int(properties.get("protocol") or "x"),
                certificate=properties.get("certificate") or "",
            )
        except (ValidationError, ValueError) as error:
            raise MessageError(f"expected a coordinator's announcement, got {error}") from None


def check_name(name: str, option: str) -> str:
    """Validate a coordinator's name that the user entered.

    Raises:
        UsageError: The name is not valid.
    """
    if not re.fullmatch(_NAME, name):
        raise UsageError(
            f"{option}: expected a name of at most 40 letters, digits, - and _, got {name!r}"
        )
    return name
