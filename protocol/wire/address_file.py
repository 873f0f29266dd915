"""The file in which a coordinator publishes its addresses (`--address-file`), as JSON.

A worker reads the file instead of an option with the address, and again after the connection is
lost: a coordinator that a scheduler has moved to another machine writes its new address there. The
content is not trusted: the peer that answers must have the certificate that the join token names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.base.address import parse_address
from protocol.base.errors import MessageError, UsageError
from protocol.base.regular_file import parse_json, read_regular

_MAX_BYTES: Final = 16_384
_HostAndPort = Annotated[str, Field(max_length=300)]


class PublishedAddress(BaseModel):
    """The addresses of a coordinator.

    Attributes:
        data: The address at which the coordinator listens for workers.
        control: The address of the control port, on the coordinator's machine.
        reachable: Addresses at which other machines reach `data`, that of the default route first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: _HostAndPort
    control: _HostAndPort
    reachable: Annotated[tuple[_HostAndPort, ...], Field(max_length=32)] = ()

    def to_json(self) -> str:
        """Return the content of the file."""
        return json.dumps(self.model_dump(), indent=2) + "\n"

    @property
    def worker_addresses(self) -> tuple[tuple[str, int], ...]:
        """Host and port of each address that a worker may try; at least one.

        Raises:
            MessageError: The file contains a text that is not an address.
        """
        try:
            return tuple(
                parse_address(text, "address file") for text in self.reachable or (self.data,)
            )
        except UsageError as error:
            raise MessageError(str(error)) from None


def read_address_file(path: Path) -> PublishedAddress | None:
    """Read a coordinator's address file; None if there is no such file yet.

    Raises:
        MessageError: The file is not one that a coordinator has written.
        OSError: The file cannot be read.
    """
    try:
        content = read_regular(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    try:
        return PublishedAddress.model_validate(parse_json(content))
    except (ValidationError, ValueError):
        raise MessageError(
            f"expected the addresses of a coordinator in {str(path)!r}, got {content[:60]!r}"
        ) from None
