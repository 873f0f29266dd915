"""The session of one worker: handshake, authentication, then membership until the connection
ends."""

from __future__ import annotations

import asyncio
import hmac
from typing import Protocol

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.worker_keys import key_mark
from protocol.base import limits
from protocol.base.errors import (
    ExitCode,
    NotAuthorized,
    OutOfOrder,
    ProtocolError,
    UsageError,
    VersionMismatch,
)
from protocol.wire.authentication import NO_CERTIFICATE, Exchange, local_fingerprint, new_nonce
from protocol.wire.connection import ReceivedMessage
from protocol.wire.messages import (
    Challenge,
    Drain,
    Goodbye,
    Heartbeat,
    Hello,
    Preparing,
    Proof,
    Welcome,
)
from protocol.wire.transport import Channel


class SessionOwner(Protocol):
    """Owner of the sessions: names workers and tracks members."""

    def name_worker(self, session: MemberSession) -> Welcome:
        """Give an authenticated worker its name; return the Welcome that carries it."""

    def add_member(self, session: MemberSession) -> None:
        """Add a member, to which the Welcome was sent."""

    def remove_session(self, session: MemberSession, reason: str) -> None:
        """Remove a session whose connection has ended, whether or not it was a member's."""


class MembersRun(Protocol):
    """The run that a member takes part in; it receives the member's messages."""

    def receive(self, session: MemberSession, received: ReceivedMessage) -> None:
        """Handle a member's message. A ProtocolError ends the member's connection."""


class MemberSession:
    """Drives the handshake of one connection; notifies the owner once the worker is a member.

    Attributes:
        name: The worker's name, unique among members; empty until it is a member.
        hello: The worker's Hello, once received.
        host: The peer's address.
        check: The check of the worker's proof.
        run: The run that the worker takes part in, if one is in progress.
        preparing: Progress of the worker's preparation of the task; empty before and after it.
        goodbye_reason: The reason in the worker's Goodbye; empty without a Goodbye.
        exit_code: The exit code in the worker's Goodbye; not OK if the worker or its device is
            unusable.
        is_explained: Whether the reason for the end is known: a Goodbye, or a refusal.
        has_left: Whether the worker left on purpose and will not reconnect.
        has_stepped: Whether the worker has applied a step of a run.
        is_worker: False if the connection ended with a protocol error before a Hello: after bytes
            that are no frame, or a port check that sent none over TLS. A Hello of another version
            counts; so does a peer that was silent until the timeout.
    """

    channel: Channel
    hello: Hello
    _timer: asyncio.TimerHandle

    def __init__(self, owner: SessionOwner, check: JoinCheck, host: str = "") -> None:
        self.name = ""
        self.host = host
        self.check = check
        self.run: MembersRun | None = None
        self.preparing = ""
        self.goodbye_reason = ""
        self.exit_code: int = ExitCode.OK
        self.is_explained = self.has_left = self.has_stepped = False
        self.is_worker = True
        self._owner = owner

    def start(self, channel: Channel) -> None:
        """Start the handshake timeout of a new connection."""
        self.channel = channel
        loop = asyncio.get_running_loop()
        seconds = limits.HANDSHAKE_TIMEOUT_MS / 1000
        self._timer = loop.call_later(
            seconds, channel.abort, f"the handshake took longer than {seconds:g} s"
        )

    def on_message(self, channel: Channel, received: ReceivedMessage) -> None:
        # `Connection` has checked the order of handshake messages: no Proof precedes the Hello.
        message = received.message
        match message:
            case Hello():
                self._challenge(channel, message)
            case Proof():
                self._verify(channel, message)
            case Heartbeat():
                pass
            case Preparing():
                self.preparing = message.progress
            case Goodbye():
                self.goodbye_reason = message.reason or "goodbye"
                self.exit_code, self.is_explained = message.exit_code, True
                self.has_left = not message.retry and message.exit_code == ExitCode.OK
                channel.abort(self.goodbye_reason)
            case _:
                if not self.name:
                    raise OutOfOrder(f"{type(message).__name__} before the handshake")
                if self.run is not None:
                    self.run.receive(self, received)
                elif isinstance(message, Drain):
                    channel.goodbye("drained", retry=False, exit_code=ExitCode.OK)

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        del channel
        has_greeted = hasattr(self, "hello") or isinstance(error, VersionMismatch)
        self.is_worker = has_greeted or error is None
        self._timer.cancel()
        self._owner.remove_session(self, self.goodbye_reason or reason)

    def _challenge(self, channel: Channel, hello: Hello) -> None:
        self.hello = hello
        try:
            channel.send(self.check.challenge(hello))
        except NotAuthorized as error:
            self.is_explained = True
            channel.goodbye(str(error), retry=False, exit_code=error.exit_code)
        except UsageError as error:
            # The fault is the coordinator's: let the worker retry.
            reason = f"the coordinator cannot check workers: {error}"
            channel.goodbye(reason, retry=True, exit_code=ExitCode.FAILED)

    def _verify(self, channel: Channel, proof: Proof) -> None:
        try:
            self.check.verify(proof)
        except NotAuthorized as error:
            self.is_explained = True
            channel.goodbye(str(error), retry=False, exit_code=error.exit_code)
            return
        self._timer.cancel()
        welcome = self._owner.name_worker(self)
        self.name = welcome.worker
        channel.send(welcome)
        self._owner.add_member(self)


class JoinCheck:
    """Checks in one handshake that the worker knows the right secret: its key or the join token.

    A worker that says that it is enrolled proves its key, any other the join token.

    Attributes:
        name: The name that the worker asks for, under which its key is stored.

    Args:
        credentials: The coordinator's credentials.
        encrypted: Whether the connection has TLS; without TLS no key is issued, since others could
            read it.
        is_local: Whether the connection is a Unix socket, which no other user can read.
    """

    _exchange: Exchange

    def __init__(
        self, credentials: CoordinatorCredentials, *, encrypted: bool, is_local: bool = False
    ) -> None:
        self.name = ""
        self._credentials = credentials
        self._is_local = is_local
        self._encrypted = encrypted
        self._secret = b""
        self._is_enrolled = False
        self._key: bytes | None = None

    def challenge(self, hello: Hello) -> Challenge:
        """Return the challenge: the coordinator's proof, and a nonce for the worker's.

        Raises:
            NotAuthorized: The worker refers to a key that does not exist.
            UsageError: The coordinator cannot read its secrets.
        """
        self.name = hello.name or "worker"
        self._is_enrolled = hello.enrolled
        fingerprint = self._credentials.fingerprint if self._encrypted else NO_CERTIFICATE
        if self._is_local:
            fingerprint = local_fingerprint(fingerprint)
        self._exchange = Exchange(hello, new_nonce(), fingerprint)
        if hello.enrolled:
            self._key = self._credentials.keys.get(self.name)
            self._secret = self._key or b""
        else:
            self._secret = self._credentials.join_token().secret
        if not self._secret:
            raise NotAuthorized(
                f"the key of {self.name!r} is not valid (any more): it was revoked, or the "
                "coordinator has lost its workers.json; to rejoin, use the current join token"
            )
        return self._exchange.challenge(self._secret)

    def verify(self, proof: Proof) -> None:
        """Check the worker's proof.

        Raises:
            NotAuthorized: The worker does not know the secret.
        """
        self._exchange.check_worker(self._secret, proof)

    def new_key(self) -> bytes:
        """Return a new key for the worker; empty if the worker has a key, or must not receive
        one."""
        if self._key is not None or not self._encrypted:
            return b""
        self._key = self._credentials.issue_key(self.name) or None
        return self._key or b""

    @property
    def admitted_by(self) -> str:
        """Text that names the secret of the worker, so that the user can look it up."""
        if not self._is_enrolled:
            return "the join token"
        return f"the key {key_mark(self._secret)} of {self.name!r}"

    @property
    def is_revoked(self) -> bool:
        """Whether the worker's key was revoked; always False for a worker without a key."""
        if self._key is None:
            return False
        try:
            current_key = self._credentials.keys.get(self.name)
        except UsageError:
            return False  # the file is unreadable now; the key was valid when the worker joined
        return current_key is None or not hmac.compare_digest(current_key, self._key)
