"""Who may join: the place in the handshake where both sides prove that they belong together.

Today there is one method, "none": both ports are bound to loopback only, so whoever can connect
is already on this machine. A method that uses a secret implements the same two calls.
"""

from __future__ import annotations

import secrets
from typing import Protocol

from protocol.errors import NotAuthorised
from protocol.messages import Challenge, Hello, Proof


class Authenticator(Protocol):
    """One method of proving membership, used by both sides."""

    def challenge(self, hello: Hello) -> Challenge:
        """Coordinator: what to ask of this worker."""

    def prove(self, challenge: Challenge) -> Proof:
        """Worker: the answer.

        Raises:
            NotAuthorised: The coordinator asks for a method that is not set up here.
        """

    def verify(self, challenge: Challenge, proof: Proof) -> None:
        """Coordinator: check the answer.

        Raises:
            NotAuthorised: It is not what a member would answer.
        """


class LoopbackOnly:
    """The method "none": nothing to prove beyond reaching a loopback address."""

    def challenge(self, hello: Hello) -> Challenge:
        del hello
        return Challenge(method="none", nonce=secrets.token_bytes(32))

    def prove(self, challenge: Challenge) -> Proof:
        if challenge.method != "none":
            raise NotAuthorised(
                f"the coordinator asks for the method {challenge.method!r}, "
                "which this worker does not have"
            )
        return Proof(proof=b"")

    def verify(self, challenge: Challenge, proof: Proof) -> None:
        if challenge.method != "none" or proof.proof:
            raise NotAuthorised("expected an empty proof for the method 'none'")
