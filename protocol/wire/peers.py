"""Members that average among themselves: who they are, and what each owns.

The coordinator tells each of them the others' addresses and certificates, inside the session in
which that member has proved itself, and with every other member a key of the two alone. So nobody
can pass for another member: who dials knows the certificate that must answer, and both prove that
they have the key of this pair.
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
"""The address of a member on the coordinator's machine: others dial that as they know it."""
COORDINATOR: Final = ""
"""The coordinator's name, as an owner of chunks and as a sender."""


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_bytes(self) -> bytes:
        """As it travels."""
        return self.model_dump_json().encode()


class Peer(_Document):
    """Another member, as this one knows it.

    Attributes:
        name: Its name.
        host: Its address; `HERE` on the coordinator's machine.
        port: Where it listens; 0 if nowhere.
        fingerprint: SHA-256 of its certificate.
        key: Of the two.
    """

    name: Small
    host: Small
    port: Annotated[int, Field(ge=0, le=65_535)]
    fingerprint: Hex32
    key: Hex32


class PeerList(_Document):
    """All that a member is to reach.

    Attributes:
        me: Its own name.
        listens: Whether it has a port for links.
        peers: The others.
    """

    me: Small
    listens: bool
    peers: Annotated[tuple[Peer, ...], Field(max_length=limits.WORKERS)]


class Traffic(_Document):
    """By peer the bytes that were sent to it, and that were received from it."""

    peers: Annotated[dict[Small, tuple[Number, Number]], Field(max_length=limits.WORKERS)]


class OwnerTable(_Document):
    """Who averages which chunk.

    Attributes:
        members: Workers that send each other sums and averages; the coordinator passes on the sums
            of all others. Or the coordinator alone, in a star: it is never a member among workers.
        owners: For each chunk, in the order of `protocol.exact.chunk_grid`, the owner's index in
            `members`.
        scribe: Who gives the coordinator the averages, its own and others'; None: each owner does.
    """

    members: Annotated[tuple[Small, ...], Field(min_length=1, max_length=limits.WORKERS)]
    owners: Annotated[tuple[int, ...], Field(max_length=2**20)]
    scribe: Small | None

    @classmethod
    def star(cls, chunks: int) -> OwnerTable:
        """The table whose only owner is the coordinator."""
        return cls(members=(COORDINATOR,), owners=(0,) * chunks, scribe=None)

    @property
    def has_peers(self) -> bool:
        """Whether any worker averages."""
        return self.members != (COORDINATOR,)

    def owner(self, number: int) -> str:
        """The owner of a chunk."""
        return self.members[self.owners[number]]

    def owned_by(self, member: str) -> set[int]:
        """The chunks that a member owns."""
        if member not in self.members:
            return set()
        index = self.members.index(member)
        return {number for number, owner in enumerate(self.owners) if owner == index}


_Kind = TypeVar("_Kind", bound=_Document)


def parse(kind: type[_Kind], document: bytes) -> _Kind:
    """A document that came.

    Raises:
        MessageError: It is none of this kind.
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
    """The key of two members.

    Args:
        secret: The run's; it never leaves the coordinator.
        first_name: A name.
        second_name: Another's.
    """
    first, second = sorted((first_name.encode(), second_name.encode()))
    framed = len(first).to_bytes(4, "big") + first + second
    return hmac.digest(secret, b"samestep pair" + framed, "sha256")
