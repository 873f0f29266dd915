"""Connections that are as far as they would be after a real handshake, in memory.

The bytes are those of one real handshake, with a join token and proofs; they are fed to every
connection, so that what comes before the broken frame is never a short cut.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.wire.authentication import Exchange, answer, new_key
from protocol.wire.connection import (
    FROM_COORDINATOR,
    FROM_DIALLER,
    FROM_LISTENER,
    FROM_WORKER,
    Connection,
    Encoded,
    Phase,
    Role,
)
from protocol.wire.connection import encode as encoded
from protocol.wire.messages import Hello, PeerHello, PeerWelcome, Welcome
from tests.message_samples import BLOCKS, EXAMPLES, flat, frame

PHASES = tuple(phase for phase in Phase if phase is not Phase.CLOSED)
ROLES: tuple[Role, ...] = ("coordinator", "worker", "listener", "dialler")
_CERTIFICATE = bytes(range(32))


class Handshake(NamedTuple):
    """The four messages of one, in order; who connects sends first."""

    hello: Encoded
    challenge: Encoded
    proof: Encoded
    welcome: Encoded


def handshake(first: type[Hello | PeerHello], last: type[Welcome | PeerWelcome]) -> Handshake:
    """A real one, both of whose proofs are right."""
    secret, hello = new_key(), EXAMPLES[first]
    assert isinstance(hello, Hello | PeerHello)
    exchange = Exchange(hello, bytes(range(32, 64)), _CERTIFICATE)
    challenge = exchange.challenge(secret)
    proof = answer(hello, challenge, _CERTIFICATE, secret)
    exchange.check_worker(secret, proof)
    return Handshake(*(encoded(each) for each in (hello, challenge, proof, EXAMPLES[last])))


_SENT = dict.fromkeys(("coordinator", "worker"), handshake(Hello, Welcome)) | dict.fromkeys(
    ("listener", "dialler"), handshake(PeerHello, PeerWelcome)
)
_HEARS = {
    "coordinator": FROM_WORKER, "worker": FROM_COORDINATOR, "listener": FROM_DIALLER,
    "dialler": FROM_LISTENER,
}  # fmt: skip
PLACES: list[tuple[Role, Phase]] = [
    (role, phase) for role in ROLES for phase in PHASES if _HEARS[role][phase]
]
"""Roles and phases in which there is anything that may be said."""


def connection(role: Role, phase: Phase) -> Connection:
    """This side of a connection whose handshake has come to `phase`."""
    made = Connection(role)
    connects = role in ("worker", "dialler")
    for message, sends in zip(_SENT[role], (connects, not connects) * 2, strict=True):
        if made.phase is phase:
            break
        if sends:
            made.send(message)
        else:
            made.receive_data(flat(message))
    if phase is Phase.OPEN:
        made.blocks = BLOCKS
    assert made.phase is phase
    return made


def legal_frames(role: Role, phase: Phase) -> list[bytes]:
    """What the peer may say in this phase."""
    kinds = sorted(_HEARS[role][phase], key=lambda kind: kind.tag)
    return [frame(EXAMPLES[kind]) for kind in kinds]
