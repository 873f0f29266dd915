"""The session of one worker: handshake, proof, then membership until the connection ends."""

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
from protocol.wire.authentication import NO_CERTIFICATE, Exchange, new_nonce, on_this_machine
from protocol.wire.connection import Received
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
    """Owner of the sessions: admits workers and tracks members."""

    def admit(self, session: MemberSession) -> Welcome:
        """Admit a worker that has proved itself; return its Welcome with its name."""

    def joined(self, session: MemberSession) -> None:
        """Note that the Welcome was sent."""

    def left(self, session: MemberSession, reason: str) -> None:
        """Note that a connection ended, of a member or not."""


class MembersRun(Protocol):
    """The run that a member takes part in; it receives the member's messages."""

    def receive(self, session: MemberSession, received: Received) -> None:
        """Handle a member's message. A ProtocolError ends the member's connection."""


class MemberSession:
    """Drives the handshake of one connection; the owner is notified once it is a member.

    Attributes:
        name: The worker's name, unique among members; empty before.
        hello: The worker's Hello, once received.
        host: The peer's address.
        check: The check of the worker's proof.
        run: The run that the worker takes part in, if one is in progress.
        preparing: Progress of the worker's preparation of the task; empty if none was reported.
        saying_goodbye: The reason in the worker's Goodbye; empty without one.
        exit_code: The exit code in its Goodbye; not OK if the worker or its device is unusable.
        explained: Whether the reason for the end is known: a Goodbye, or a refusal.
        leaves: Whether the worker left on purpose and will not reconnect.
        stepped: Whether the worker has applied a step of a run.
        is_worker: False if the peer is not a worker: it sent nothing, or no valid frame.
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
        self.saying_goodbye = ""
        self.exit_code: int = ExitCode.OK
        self.explained = self.leaves = self.stepped = False
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

    def on_message(self, channel: Channel, received: Received) -> None:
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
                self.saying_goodbye = message.reason or "goodbye"
                self.exit_code, self.explained = message.exit_code, True
                self.leaves = not message.retry and message.exit_code == ExitCode.OK
                channel.abort(self.saying_goodbye)
            case _:
                if not self.name:
                    raise OutOfOrder(f"{type(message).__name__} before the handshake")
                if self.run is not None:
                    self.run.receive(self, received)
                elif isinstance(message, Drain):
                    channel.goodbye("drained", retry=False, exit_code=ExitCode.OK)

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        del channel
        greeted = hasattr(self, "hello") or isinstance(error, VersionMismatch)
        self.is_worker = greeted or error is None
        self._timer.cancel()
        self._owner.left(self, self.saying_goodbye or reason)

    def _challenge(self, channel: Channel, hello: Hello) -> None:
        self.hello = hello
        try:
            channel.send(self.check.challenge(hello))
        except NotAuthorized as error:
            self.explained = True
            channel.goodbye(str(error), retry=False, exit_code=error.exit_code)
        except UsageError as error:
            # The fault is the coordinator's: let the worker retry.
            reason = f"the coordinator cannot check workers: {error}"
            channel.goodbye(reason, retry=True, exit_code=ExitCode.FAILED)

    def _verify(self, channel: Channel, proof: Proof) -> None:
        try:
            self.check.verify(proof)
        except NotAuthorized as error:
            self.explained = True
            channel.goodbye(str(error), retry=False, exit_code=error.exit_code)
            return
        self._timer.cancel()
        welcome = self._owner.admit(self)
        self.name = welcome.worker
        channel.send(welcome)
        self._owner.joined(self)


class JoinCheck:
    """Checks in one handshake that the worker knows the right secret: its key or the join token.

    Attributes:
        name: The name that the worker asks for; its key is stored under it.

    Args:
        credentials: The coordinator's credentials.
        encrypted: Whether the connection has TLS; without it no key is issued, as it could be read.
        here: Whether the connection is a Unix socket, which no other user can read.
    """

    _exchange: Exchange

    def __init__(
        self, credentials: CoordinatorCredentials, *, encrypted: bool, here: bool = False
    ) -> None:
        self.name = ""
        self._credentials = credentials
        self._here = here
        self._encrypted = encrypted
        self._secret = b""
        self._enrolled = False
        self._key: bytes | None = None

    def challenge(self, hello: Hello) -> Challenge:
        """Return the challenge: the coordinator's proof, and a nonce for the worker's.

        Raises:
            NotAuthorized: The worker refers to a key that does not exist.
            UsageError: The coordinator cannot read its secrets.
        """
        self.name = hello.name or "worker"
        self._enrolled = hello.enrolled
        fingerprint = self._credentials.fingerprint if self._encrypted else NO_CERTIFICATE
        if self._here:
            fingerprint = on_this_machine(fingerprint)
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
        """Return a new key for the worker; empty if it has one, or must not receive one."""
        if self._key is not None or not self._encrypted:
            return b""
        self._key = self._credentials.enrol(self.name) or None
        return self._key or b""

    @property
    def admitted_by(self) -> str:
        """The secret that the worker proved, described so that its owner can look it up."""
        if not self._enrolled:
            return "the join token"
        return f"the key {key_mark(self._secret)} of {self.name!r}"

    @property
    def revoked(self) -> bool:
        """Whether the worker's key was revoked; always False for a worker without a key."""
        if self._key is None:
            return False
        try:
            present = self._credentials.keys.get(self.name)
        except UsageError:
            return False  # the file is unreadable now; the key was valid when the worker joined
        return present is None or not hmac.compare_digest(present, self._key)
