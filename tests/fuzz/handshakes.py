"""Connections in memory, advanced to a given phase by a real handshake.

Every connection receives the bytes of one real handshake, with a join token and valid proofs, so
that tests with broken frames start from a state that real peers reach.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.wire.authentication import Exchange, answer_challenge, new_key
from protocol.wire.connection import (
    FROM_CLIENT,
    FROM_COORDINATOR,
    FROM_LISTENER,
    FROM_WORKER,
    Connection,
    EncodedMessage,
    Phase,
    Role,
    encode,
)
from protocol.wire.messages import Hello, PeerHello, PeerWelcome, Welcome
from tests.message_samples import BLOCKS, EXAMPLES, frame, join_buffers

PHASES = tuple(phase for phase in Phase if phase is not Phase.CLOSED)
ROLES: tuple[Role, ...] = ("coordinator", "worker", "listener", "client")
_CERTIFICATE = bytes(range(32))


class Handshake(NamedTuple):
    """The four messages of a handshake, in order; the connecting side sends the first."""

    hello: EncodedMessage
    challenge: EncodedMessage
    proof: EncodedMessage
    welcome: EncodedMessage


def make_handshake(first: type[Hello | PeerHello], last: type[Welcome | PeerWelcome]) -> Handshake:
    """Return a handshake with valid proofs from both sides."""
    secret, hello = new_key(), EXAMPLES[first]
    assert isinstance(hello, Hello | PeerHello)
    exchange = Exchange(hello, bytes(range(32, 64)), _CERTIFICATE)
    challenge = exchange.challenge(secret)
    proof = answer_challenge(hello, challenge, _CERTIFICATE, secret)
    exchange.check_worker(secret, proof)
    return Handshake(*(encode(message) for message in (hello, challenge, proof, EXAMPLES[last])))


_HANDSHAKES = dict.fromkeys(
    ("coordinator", "worker"), make_handshake(Hello, Welcome)
) | dict.fromkeys(("listener", "client"), make_handshake(PeerHello, PeerWelcome))
_LEGAL_MESSAGES = {
    "coordinator": FROM_WORKER, "worker": FROM_COORDINATOR, "listener": FROM_CLIENT,
    "client": FROM_LISTENER,
}  # fmt: skip
STATES: list[tuple[Role, Phase]] = [
    (role, phase) for role in ROLES for phase in PHASES if _LEGAL_MESSAGES[role][phase]
]
"""Roles and phases in which a peer may send at least one message."""


def connect_until(role: Role, phase: Phase) -> Connection:
    """Return one side of a connection whose handshake has reached `phase`."""
    reader = Connection(role)
    is_client = role in ("worker", "client")
    for message, is_sender in zip(_HANDSHAKES[role], (is_client, not is_client) * 2, strict=True):
        if reader.phase is phase:
            break
        if is_sender:
            reader.send(message)
        else:
            reader.receive_data(join_buffers(message))
    if phase is Phase.OPEN:
        reader.blocks = BLOCKS
    assert reader.phase is phase
    return reader


def legal_frames(role: Role, phase: Phase) -> list[bytes]:
    """Return one frame of each message that the peer may send in this phase."""
    message_types = sorted(_LEGAL_MESSAGES[role][phase], key=lambda message_type: message_type.tag)
    return [frame(EXAMPLES[message_type]) for message_type in message_types]
