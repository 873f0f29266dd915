"""The coordinator's part of one handshake: which secret counts, and whether the worker knows it."""

from __future__ import annotations

import hmac

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.worker_keys import key_mark
from protocol.base.errors import NotAuthorised, UsageError
from protocol.wire.authentication import NO_CERTIFICATE, Exchange, new_nonce
from protocol.wire.messages import Challenge, Hello, Proof


class JoinCheck:
    """Of one connection.

    Attributes:
        name: Under which the worker asks to be known, and has a key or is given one.

    Args:
        credentials: The coordinator's.
        encrypted: Whether the connection has TLS; without it no key is given, it could be read.
    """

    def __init__(self, credentials: CoordinatorCredentials, *, encrypted: bool) -> None:
        self.name = ""
        self._credentials = credentials
        self._encrypted = encrypted
        self._secret = b""
        self._key: bytes | None = None
        self._exchange: Exchange | None = None

    def challenge(self, hello: Hello) -> Challenge:
        """Prove the coordinator, and ask the worker.

        Raises:
            NotAuthorised: It names a key that there is not.
            UsageError: The coordinator cannot read its secrets just now.
        """
        self.name = hello.name or "worker"
        fingerprint = self._credentials.fingerprint if self._encrypted else NO_CERTIFICATE
        self._exchange = Exchange(hello, new_nonce(), fingerprint)
        if hello.enrolled:
            self._key = self._credentials.keys.get(self.name)
            self._secret = self._key or b""
        else:
            self._secret = self._credentials.join_token().secret
        if not self._secret:
            raise NotAuthorised(
                f"the key of {self.name!r} does not count (any more): it was revoked; "
                "who may join again needs the present join token"
            )
        return self._exchange.challenge(self._secret)

    def verify(self, proof: Proof) -> None:
        """Check the worker.

        Raises:
            NotAuthorised: It does not know the secret.
        """
        assert self._exchange is not None
        self._exchange.check_worker(self._secret, proof)

    def new_key(self) -> bytes:
        """What the worker is to use the next time; empty if it has a key, or can get none."""
        if self._key is not None or not self._encrypted:
            return b""
        self._key = self._credentials.enrol(self.name) or None
        return self._key or b""

    @property
    def admitted_by(self) -> str:
        """What the worker has proved itself with, in words that a key's owner can look up."""
        if self._exchange is None or not self._exchange.hello.enrolled:
            return "the join token"
        return f"the key {key_mark(self._secret)} of {self.name!r}"

    @property
    def revoked(self) -> bool:
        """Whether its key counts no more. Who has none can only be kept from joining again."""
        if self._key is None:
            return False
        try:
            present = self._credentials.keys.get(self.name)
        except UsageError:
            return False  # what cannot be read now was good when it joined
        return present is None or not hmac.compare_digest(present, self._key)
