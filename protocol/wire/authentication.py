"""Mutual authentication: both sides prove that they know a secret without revealing it.

The coordinator proves itself first, in its Challenge; if that proof is wrong, the worker sends
nothing more. A proof is an HMAC over the role and the exchange, so it cannot be replayed on another
connection (both nonces), in the other direction (the role), for another worker, or at another TLS
endpoint (the certificate's fingerprint).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final, Literal

from protocol import PROTOCOL_VERSION
from protocol.base.errors import NotAuthorized
from protocol.wire.messages import Challenge, Hello, PeerHello, Proof

METHOD: Final = "hmac-sha256"
NONCE_BYTES: Final = 32
KEY_BYTES: Final = 32
NO_CERTIFICATE: Final = bytes(32)
"""The fingerprint if TLS is turned off; no certificate has this fingerprint."""

Role = Literal["coordinator", "worker"]


def local_fingerprint(fingerprint: bytes) -> bytes:
    """Return the value that replaces a certificate's fingerprint in proofs over a Unix socket.

    Without a TLS handshake, the certificate is not proven. The other value makes a proof over a
    Unix socket invalid over TLS.
    """
    return hashlib.sha256(b"samestep on this machine" + fingerprint).digest()


def new_nonce() -> bytes:
    """Return 32 random bytes, unique to a connection."""
    return secrets.token_bytes(NONCE_BYTES)


def new_key() -> bytes:
    """Return a new 256-bit secret."""
    return secrets.token_bytes(KEY_BYTES)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The values that both proofs of a handshake cover.

    Attributes:
        hello: The worker's Hello, with its nonce. Between two workers, the dialing one has the
            worker's role and the other the coordinator's.
        coordinator_nonce: The nonce of the challenge.
        fingerprint: SHA-256 of this connection's certificate, as seen from this side;
            `NO_CERTIFICATE` without TLS; over a Unix socket the result of `local_fingerprint`.
    """

    hello: Hello | PeerHello
    coordinator_nonce: bytes
    fingerprint: bytes

    def prove(self, role: Role, key: bytes) -> bytes:
        """Return the proof of one side, 32 bytes."""
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
        """Return the coordinator's challenge, which includes its own proof."""
        proof = self.prove("coordinator", key)
        return Challenge(method=METHOD, nonce=self.coordinator_nonce, proof=proof)

    def check_worker(self, key: bytes, proof: Proof) -> None:
        """Check the proof of the side that dialed.

        Raises:
            NotAuthorized: The peer does not know the key.
        """
        if hmac.compare_digest(self.prove("worker", key), proof.proof):
            return
        if isinstance(self.hello, PeerHello):
            raise NotAuthorized(
                f"the proof is wrong: worker {self.hello.name!r} does not know the key of this link"
            )
        raise NotAuthorized(
            "the proof is wrong: this worker has another join token or key; get the current one "
            "with: coordinator token show"
        )

    def check_coordinator(self, key: bytes, proof: bytes) -> None:
        """Check the proof of the side that was dialed.

        Raises:
            NotAuthorized: The peer does not know the key.
        """
        if hmac.compare_digest(self.prove("coordinator", key), proof):
            return
        if isinstance(self.hello, PeerHello):
            raise NotAuthorized(
                f"the proof is wrong: worker {self.hello.to!r} does not know the key of this link"
            )
        raise NotAuthorized(
            "the coordinator does not know this worker's join token or key: it is outdated "
            "(changed by token rotate or revoke) or another coordinator's; print the current token "
            "on its machine: coordinator token show"
        )


def answer_challenge(
    hello: Hello | PeerHello, challenge: Challenge, fingerprint: bytes, key: bytes
) -> Proof:
    """Check the proof of the side that was dialed, and return this side's proof.

    Args:
        hello: The message that this worker has sent.
        challenge: The reply to `hello`.
        fingerprint: SHA-256 of the other side's certificate.
        key: The secret that both sides know.

    Raises:
        NotAuthorized: The other side does not know the key, or uses another method.
    """
    if challenge.method != METHOD:
        raise NotAuthorized(
            f"expected authentication method {METHOD!r}, got {challenge.method!r}; install the "
            "same release on both sides"
        )
    exchange = Exchange(hello, challenge.nonce, fingerprint)
    exchange.check_coordinator(key, challenge.proof)
    return Proof(proof=exchange.prove("worker", key))
