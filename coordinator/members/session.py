"""One worker's connection, from the first byte to the last: handshake and proof, then member."""

from __future__ import annotations

import asyncio
import hmac
from typing import Protocol

from coordinator.members.credentials import CoordinatorCredentials
from coordinator.members.questions import Questions
from coordinator.members.worker_keys import key_mark
from protocol.base import limits
from protocol.base.errors import (
    ExitCode,
    NotAuthorised,
    OutOfPlace,
    ProtocolError,
    UsageError,
    VersionMismatch,
)
from protocol.wire.authentication import NO_CERTIFICATE, Exchange, new_nonce, on_this_machine
from protocol.wire.connection import Received
from protocol.wire.messages import (
    Challenge,
    CopyAnswer,
    Drain,
    Goodbye,
    Heartbeat,
    Hello,
    Proof,
    Welcome,
)
from protocol.wire.transport import Channel


class SessionOwner(Protocol):
    """Who takes over once a worker is a member."""

    def admit(self, session: MemberSession) -> Welcome:
        """The worker has proved itself: give it its name."""

    def joined(self, session: MemberSession) -> None:
        """It has been welcomed."""

    def left(self, session: MemberSession, reason: str) -> None:
        """The connection is over, member or not."""


class MembersRun(Protocol):
    """The run that a member was taken into: it hears what the member says."""

    def receive(self, session: MemberSession, received: Received) -> None:
        """A member's message. A ProtocolError raised here ends its connection."""


class MemberSession:
    """Drives the handshake of one connection; the owner hears of it once it is a member.

    Attributes:
        name: The worker's name, unique among members; empty before.
        hello: What it said of itself, once it has.
        host: Where it comes from.
        check: What it had to prove.
        run: The run that it was taken into, if one is in progress.
        questions: To it, about copies.
        saying_goodbye: Why it leaves, if it said so.
        exit_code: What it ends with, if it said so: not OK where it or its device is of no use.
        explained: Whether the reason of its end is known: it said so, or was refused.
        leaves: Whether it ends as it should, and does not come back.
        stepped: Whether it has taken a step of a run.
        is_worker: Whether nothing shows that it is none: it said nothing, or no frame.
    """

    channel: Channel
    questions: Questions
    hello: Hello
    _timer: asyncio.TimerHandle

    def __init__(self, owner: SessionOwner, check: JoinCheck, host: str = "") -> None:
        self.name = ""
        self.host = host
        self.check = check
        self.run: MembersRun | None = None
        self.saying_goodbye = ""
        self.exit_code: int = ExitCode.OK
        self.explained = self.leaves = self.stepped = False
        self.is_worker = True
        self._owner = owner

    def start(self, channel: Channel) -> None:
        """The connection is made; it has a few seconds to become a member."""
        self.channel = channel
        self.questions = Questions(channel)
        loop = asyncio.get_running_loop()
        seconds = limits.HANDSHAKE_TIMEOUT_MS / 1000
        self._timer = loop.call_later(
            seconds, channel.abort, f"no member after {seconds:g} s of handshake"
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
            case Goodbye():
                self.saying_goodbye = message.reason or "goodbye"
                self.exit_code, self.explained = message.exit_code, True
                self.leaves = not message.retry and message.exit_code == ExitCode.OK
                channel.abort(self.saying_goodbye)
            case _:
                if not self.name:
                    raise OutOfPlace(f"{type(message).__name__} before the handshake")
                if isinstance(message, CopyAnswer):
                    self.questions.answered(received)
                elif self.run is not None:
                    self.run.receive(self, received)
                elif isinstance(message, Drain):
                    channel.goodbye("drained", retry=False, exit_code=ExitCode.OK)

    def on_lost(self, channel: Channel, reason: str, error: ProtocolError | None) -> None:
        del channel
        greeted = hasattr(self, "hello") or isinstance(error, VersionMismatch)
        self.is_worker = greeted or error is None
        self._timer.cancel()
        self.questions.lost()
        self._owner.left(self, self.saying_goodbye or reason)

    def _challenge(self, channel: Channel, hello: Hello) -> None:
        self.hello = hello
        try:
            channel.send(self.check.challenge(hello))
        except NotAuthorised as error:
            self.explained = True
            channel.goodbye(str(error), retry=False, exit_code=error.exit_code)
        except UsageError as error:
            # The worker may well belong here: it tries again.
            reason = f"the coordinator cannot check workers: {error}"
            channel.goodbye(reason, retry=True, exit_code=ExitCode.FAILED)

    def _verify(self, channel: Channel, proof: Proof) -> None:
        try:
            self.check.verify(proof)
        except NotAuthorised as error:
            self.explained = True
            channel.goodbye(str(error), retry=False, exit_code=error.exit_code)
            return
        self._timer.cancel()
        welcome = self._owner.admit(self)
        self.name = welcome.worker
        channel.send(welcome)
        self._owner.joined(self)


class JoinCheck:
    """Of one handshake: which secret counts, and whether the worker knows it.

    Attributes:
        name: Under which the worker asks to be known, and has a key or is given one.

    Args:
        credentials: The coordinator's.
        encrypted: Whether the connection has TLS; without it no key is given, it could be read.
        here: Whether it is a Unix socket, which nobody else can read.
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
        """Prove the coordinator, and ask the worker.

        Raises:
            NotAuthorised: It names a key that there is not.
            UsageError: The coordinator cannot read its secrets just now.
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
            raise NotAuthorised(
                f"the key of {self.name!r} does not count (any more): it was revoked, or the "
                "coordinator has lost its workers.json; who may join again needs the present join "
                "token"
            )
        return self._exchange.challenge(self._secret)

    def verify(self, proof: Proof) -> None:
        """Check the worker.

        Raises:
            NotAuthorised: It does not know the secret.
        """
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
        if not self._enrolled:
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
