"""How a coordinator is found on the local network: DNS-SD (RFC 6763) over multicast DNS (RFC 6762).

Nothing that is announced is trusted: it says where to knock. Who answers there must have the
certificate that the worker's join token names, and anyone may announce anything.
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
"""No dots and no colons: it is told from an address by that."""


class Announced(BaseModel):
    """What a coordinator says of itself.

    Attributes:
        name: Of the coordinator, unique on the network as far as all are honest.
        addresses: Where it listens, in its own order.
        port: At each of them.
        protocol: The version it speaks.
        certificate: Fingerprint of its certificate; empty without TLS.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    addresses: Annotated[tuple[IPvAnyAddress, ...], Field(min_length=1, max_length=32)]
    port: Annotated[int, Field(ge=1, le=65_535)]
    protocol: Annotated[int, Field(ge=0, le=255)]
    certificate: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]

    def properties(self) -> dict[str, str]:
        """What goes into the TXT record; the rest is in the others."""
        return {"protocol": str(self.protocol), "certificate": self.certificate}

    @staticmethod
    def read(
        full_name: str, addresses: list[str], port: int, properties: Mapping[str, str | None]
    ) -> Announced:
        """What someone on the network has announced.

        Raises:
            MessageError: It is no coordinator, or not of this release's kind.
        """
        try:
            return Announced(
                name=full_name.removesuffix(f".{SERVICE}"),
                addresses=tuple(addresses),
                port=port,
                protocol=int(properties.get("protocol") or "x"),
                certificate=properties.get("certificate") or "",
            )
        except (ValidationError, ValueError) as error:
            raise MessageError(f"expected what a coordinator announces, got {error}") from None


def check_name(name: str, option: str) -> str:
    """The name of a coordinator as a user gives it.

    Raises:
        UsageError: It is none.
    """
    if not re.fullmatch(_NAME, name):
        raise UsageError(
            f"{option}: expected a name of at most 40 letters, digits, - and _, got {name!r}"
        )
    return name
