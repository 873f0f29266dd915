"""Who may join: both sides prove that they know one secret, and neither tells it.

The coordinator proves itself first, in its Challenge; a worker that does not find that proof right
says no more. A proof is an HMAC over the role and the exchange, so that none fits another
connection (both nonces), another direction (the role), another worker or another endpoint of TLS
(the certificate's fingerprint).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final, Literal

from protocol import PROTOCOL_VERSION
from protocol.base.errors import NotAuthorised
from protocol.wire.messages import Challenge, Hello, PeerHello, Proof

METHOD: Final = "hmac-sha256"
NONCE_BYTES: Final = 32
KEY_BYTES: Final = 32
NO_CERTIFICATE: Final = bytes(32)
"""Stands for the fingerprint where a flag has turned TLS off: it is no one's."""

Role = Literal["coordinator", "worker"]


def on_this_machine(fingerprint: bytes) -> bytes:
    """Stands for a certificate that was told over a Unix socket and not shown in TLS: no proof that
    was made there fits the other way in."""
    return hashlib.sha256(b"samestep on this machine" + fingerprint).digest()


def new_nonce() -> bytes:
    """32 random bytes that no other connection has."""
    return secrets.token_bytes(NONCE_BYTES)


def new_key() -> bytes:
    """A new secret of 256 bits."""
    return secrets.token_bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What both proofs of one handshake are about.

    Attributes:
        hello: The worker's, with its nonce; between two workers that of the one who dials, which
            has the worker's part, and who is dialled the coordinator's.
        coordinator_nonce: The challenge's.
        fingerprint: SHA-256 of the certificate that this connection has, as seen from this side;
            `NO_CERTIFICATE` without TLS, `on_this_machine` of it over a Unix socket.
    """

    hello: Hello | PeerHello
    coordinator_nonce: bytes
    fingerprint: bytes

    def prove(self, role: Role, key: bytes) -> bytes:
        """The proof of one side; 32 bytes."""
        hello = self.hello
        parts = (
            b"samestep join" if isinstance(hello, Hello) else b"samestep peers",
            role.encode(),
            PROTOCOL_VERSION.to_bytes(2, "big"),
            hello.to_header(),
            self.coordinator_nonce,
            self.fingerprint,
        )
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(key, framed, "sha256")

    def challenge(self, key: bytes) -> Challenge:
        """Coordinator: ask, and prove itself."""
        proof = self.prove("coordinator", key)
        return Challenge(method=METHOD, nonce=self.coordinator_nonce, proof=proof)

    def check_worker(self, key: bytes, proof: Proof) -> None:
        """Check the proof of the side that dialed.

        Raises:
            NotAuthorised: It does not know the key.
        """
        if hmac.compare_digest(self.prove("worker", key), proof.proof):
            return
        if isinstance(self.hello, PeerHello):
            raise NotAuthorised(
                f"the proof is wrong: worker {self.hello.name!r} does not know the key of this link"
            )
        raise NotAuthorised(
            "the proof is wrong: this worker has another join token or key; get the current one "
            "with: coordinator token show"
        )

    def check_coordinator(self, key: bytes, proof: bytes) -> None:
        """Check the proof of the side that was dialed.

        Raises:
            NotAuthorised: It does not know the key.
        """
        if hmac.compare_digest(self.prove("coordinator", key), proof):
            return
        if isinstance(self.hello, PeerHello):
            raise NotAuthorised(
                f"the proof is wrong: worker {self.hello.to!r} does not know the key of this link"
            )
        raise NotAuthorised(
            "the coordinator does not know this worker's join token or key: it is outdated "
            "(changed by token rotate or revoke) or another coordinator's; print the current token "
            "on its machine: coordinator token show"
        )


def answer(hello: Hello | PeerHello, challenge: Challenge, fingerprint: bytes, key: bytes) -> Proof:
    """Check the side that was dialed, then return this side's proof.

    Args:
        hello: What this worker sent.
        challenge: The reply to it.
        fingerprint: SHA-256 of the certificate that the other side has shown.
        key: The secret.

    Raises:
        NotAuthorised: The other side does not know the key, or uses another method.
    """
    if challenge.method != METHOD:
        raise NotAuthorised(
            f"expected authentication method {METHOD!r}, got {challenge.method!r}; install the "
            "same release on both sides"
        )
    exchange = Exchange(hello, challenge.nonce, fingerprint)
    exchange.check_coordinator(key, challenge.proof)
    return Proof(proof=exchange.prove("worker", key))
