"""Questions to a member that it answers one by one: about the copies that it keeps."""

from __future__ import annotations

import asyncio
from typing import Final

from protocol.base import limits
from protocol.base.errors import OutOfPlace, Unreachable
from protocol.wire.connection import Received, encode
from protocol.wire.messages import CopyDone, CopyQuestion
from protocol.wire.transport import Channel

_PATIENCE_S: Final = limits.STANDSTILL_TIMEOUT_MS / 1000
"""A disk may take long; nothing but copies waits for it."""


class Questions:
    """To one member; `ask` from one task at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._answer: asyncio.Future[Received] | None = None

    async def ask(self, question: CopyQuestion, body: bytes | None = None) -> Received:
        """Its answer.

        Raises:
            Unreachable: It has left, does not answer, or says why it cannot.
        """
        assert self._answer is None, "one question at a time"
        if self._channel.closed:
            raise Unreachable("the worker has left")
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(encode(question, body))
            received = await asyncio.wait_for(self._answer, _PATIENCE_S)
        except TimeoutError:
            raise Unreachable(f"the worker gave no answer for {_PATIENCE_S:.0f} s") from None
        finally:
            self._answer = None
        if isinstance(received.message, CopyDone) and received.message.error:
            raise Unreachable(f"the worker says: {received.message.error}")
        return received

    def answered(self, received: Received) -> None:
        """The member has answered.

        Raises:
            OutOfPlace: It was not asked.
        """
        if self._answer is None or self._answer.done():
            raise OutOfPlace(f"{type(received.message).__name__} was not asked for")
        self._answer.set_result(received)

    def lost(self) -> None:
        """The connection is over."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Unreachable("the worker has left"))
