"""How two members prove to each other that they are who they say: with the key of the two.

The proofs are those of joining (`protocol.wire.authentication`): who dials has the worker's part,
who is dialled the coordinator's.
"""

from __future__ import annotations

import hmac

from protocol.base.errors import NotAuthorised
from protocol.wire.authentication import Exchange
from protocol.wire.messages import Challenge, PeerHello, Proof


def challenge(hello: PeerHello, nonce: bytes, fingerprint: bytes, key: bytes) -> Challenge:
    """Who was dialled: prove itself, and ask."""
    return Exchange(hello, nonce, fingerprint).challenge(key)


def answer(hello: PeerHello, asked: Challenge, fingerprint: bytes, key: bytes) -> Proof:
    """Who dials: check who answers, then answer it.

    Raises:
        NotAuthorised: It does not know the key.
    """
    exchange = Exchange(hello, asked.nonce, fingerprint)
    if not hmac.compare_digest(exchange.prove("coordinator", key), asked.proof):
        raise NotAuthorised(f"who answers for {hello.to!r} does not know the key of the two")
    return Proof(proof=exchange.prove("worker", key))


def check(hello: PeerHello, nonce: bytes, fingerprint: bytes, key: bytes, proof: Proof) -> None:
    """Who was dialled: is it whom it says?

    Raises:
        NotAuthorised: It does not know the key.
    """
    expected = Exchange(hello, nonce, fingerprint).prove("worker", key)
    if not hmac.compare_digest(expected, proof.proof):
        raise NotAuthorised(f"who calls itself {hello.name!r} does not know the key of the two")
