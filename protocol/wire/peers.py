"""Documents for members that average chunks among themselves: peers, keys and chunk owners.

The coordinator sends each member, over the member's authenticated connection, the addresses and
certificates of its peers, and for each peer a key that only the two have. So no member can
impersonate another: the dialing member knows which certificate must answer, and both prove that
they have the key of the pair.
"""

from __future__ import annotations

import hmac
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.base import limits
from protocol.base.errors import MessageError
from protocol.base.fields import Number, ShortText

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
COORDINATOR_HOST: Final = ""
"""Host of a peer on the coordinator's machine: the receiver replaces it by the address at which it
reaches the coordinator."""
COORDINATOR: Final = ""
"""The coordinator's name, as an owner of chunks and as a sender."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """Return the document as JSON."""
        return self.model_dump_json().encode()


class Peer(_Document):
    """One peer of a member.

    Attributes:
        name: The peer's name.
        host: The peer's address, or `COORDINATOR_HOST`.
        port: The port at which the peer listens; 0 if it does not listen.
        fingerprint: SHA-256 of the peer's certificate.
        key: The key of this pair of members.
    """

    name: ShortText
    host: ShortText
    port: Annotated[int, Field(ge=0, le=65_535)]
    fingerprint: Hex32
    key: Hex32


class PeerList(_Document):
    """The peers that a member should connect to.

    Attributes:
        me: The member's own name.
        listens: Whether the member listens for peers.
        peers: The peers.
    """

    me: ShortText
    listens: bool
    peers: Annotated[tuple[Peer, ...], Field(max_length=limits.WORKERS)]


class Traffic(_Document):
    """Bytes sent to each peer, and bytes received from it."""

    peers: Annotated[dict[ShortText, tuple[Number, Number]], Field(max_length=limits.WORKERS)]


class OwnerTable(_Document):
    """The owner of each chunk, which averages it.

    Attributes:
        members: Workers that send each other sums and averages; the coordinator forwards the sums
            of workers that are not members. In a star, the only member is the coordinator: workers
            and coordinator are never members of the same table.
        owners: For each chunk, in the order of `protocol.exact.reduction.chunk_grid`, the owner's
            index in `members`.
        scribe: The member that sends all averages to the coordinator; None: each owner sends its
            own.
    """

    members: Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=limits.WORKERS)]
    owners: Annotated[tuple[int, ...], Field(max_length=2**20)]
    scribe: ShortText | None

    @classmethod
    def star(cls, chunks: int) -> OwnerTable:
        """Return the table whose only owner is the coordinator."""
        return cls(members=(COORDINATOR,), owners=(0,) * chunks, scribe=None)

    @property
    def has_peers(self) -> bool:
        """Whether workers average chunks."""
        return self.members != (COORDINATOR,)

    def owner(self, chunk: int) -> str:
        """Return the owner of a chunk."""
        return self.members[self.owners[chunk]]

    def chunks_of(self, member: str) -> set[int]:
        """Return the chunks that a member owns."""
        if member not in self.members:
            return set()
        index = self.members.index(member)
        return {chunk for chunk, owner in enumerate(self.owners) if owner == index}


_DocumentT = TypeVar("_DocumentT", bound=_Document)


def parse(document_type: type[_DocumentT], content: bytes) -> _DocumentT:
    """Decode a received document.

    Raises:
        MessageError: The bytes are not a document of this type.
    """
    try:
        document = document_type.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "the document"
        raise MessageError(f"{document_type.__name__}: {location}: {first['msg']}") from None
    if isinstance(document, OwnerTable) and not all(
        0 <= owner < len(document.members) for owner in document.owners
    ):
        raise MessageError("OwnerTable: expected owners among the members, got another")
    if isinstance(document, OwnerTable) and document.has_peers and COORDINATOR in document.members:
        raise MessageError("OwnerTable: expected workers or the coordinator, got both")
    return document


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
