"""Documents for members that average chunks among themselves: peers, keys and chunk owners.

The coordinator sends each of them, over its authenticated connection, the addresses and
certificates of the others, and for each of the others a key that only the two have. So no member
can impersonate another: the dialing one knows which certificate must answer, and both prove that
they have the key of the pair.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.base import limits
from protocol.base.errors import MessageError
from protocol.base.fields import Number, Small

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
HERE: Final = ""
"""Stands for the coordinator's own machine: peers replace it by their address of the
coordinator."""
COORDINATOR: Final = ""
"""The coordinator's name, as an owner of chunks and as a sender."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """Return the document as JSON."""
        return self.model_dump_json().encode()


class Peer(_Document):
    """Another member, as its peers know it.

    Attributes:
        name: Its name.
        host: Its address; `HERE` on the coordinator's machine.
        port: Where it listens; 0 if nowhere.
        fingerprint: SHA-256 of its certificate.
        key: The key of the pair.
    """

    name: Small
    host: Small
    port: Annotated[int, Field(ge=0, le=65_535)]
    fingerprint: Hex32
    key: Hex32


class PeerList(_Document):
    """The peers that a member is to reach.

    Attributes:
        me: The member's own name.
        listens: Whether it listens for peers.
        peers: The others.
    """

    me: Small
    listens: bool
    peers: Annotated[tuple[Peer, ...], Field(max_length=limits.WORKERS)]


class Traffic(_Document):
    """Bytes sent to each peer, and bytes received from it."""

    peers: Annotated[dict[Small, tuple[Number, Number]], Field(max_length=limits.WORKERS)]


class OwnerTable(_Document):
    """The owner of each chunk, which averages it.

    Attributes:
        members: Workers that send each other sums and averages; the coordinator forwards the sums
            of all other workers. In a star, the coordinator alone: workers and coordinator are
            never members together.
        owners: For each chunk, in the order of `protocol.exact.reduction.chunk_grid`, the owner's
            index in `members`.
        scribe: The member that sends all averages to the coordinator; None: each owner sends its
            own.
    """

    members: Annotated[tuple[Small, ...], Field(min_length=1, max_length=limits.WORKERS)]
    owners: Annotated[tuple[int, ...], Field(max_length=2**20)]
    scribe: Small | None

    @classmethod
    def star(cls, chunks: int) -> OwnerTable:
        """Return the table whose only owner is the coordinator."""
        return cls(members=(COORDINATOR,), owners=(0,) * chunks, scribe=None)

    @property
    def has_peers(self) -> bool:
        """Whether any worker averages."""
        return self.members != (COORDINATOR,)

    def owner(self, number: int) -> str:
        """Return the owner of a chunk."""
        return self.members[self.owners[number]]

    def owned_by(self, member: str) -> set[int]:
        """Return the chunks that a member owns."""
        if member not in self.members:
            return set()
        index = self.members.index(member)
        return {number for number, owner in enumerate(self.owners) if owner == index}


_Kind = TypeVar("_Kind", bound=_Document)


def parse(kind: type[_Kind], document: bytes) -> _Kind:
    """Decode a received document.

    Raises:
        MessageError: The bytes are not a document of this kind.
    """
    try:
        message = kind.model_validate_json(document)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "the document"
        raise MessageError(f"{kind.__name__}: {location}: {first['msg']}") from None
    if isinstance(message, OwnerTable) and not all(
        0 <= owner < len(message.members) for owner in message.owners
    ):
        raise MessageError("OwnerTable: an owner that is no member")
    if isinstance(message, OwnerTable) and message.has_peers and COORDINATOR in message.members:
        raise MessageError("OwnerTable: expected workers or the coordinator, got both")
    return message


def pair_key(secret: bytes, first_name: str, second_name: str) -> bytes:
    """Derive the key of two members.

    Args:
        secret: The run's secret; it never leaves the coordinator.
        first_name: The name of one member.
        second_name: The name of the other.
    """
    first, second = sorted((first_name.encode(), second_name.encode()))
    framed = len(first).to_bytes(4, "big") + first + second
    return hmac.digest(secret, b"samestep pair" + framed, "sha256")
