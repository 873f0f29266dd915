"""Server-sent events; the newest events are stored for readers that connect late or reconnect.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from protocol.base.errors import UsageError
from protocol.base.fields import finite_or_none

KEPT_EVENTS: Final = 4096
"""How many events a reader may lag by, or miss while disconnected, without losing any."""


class EventStream:
    """Numbers events and passes them to every reader at the reader's pace.

    If a reader lags by more than `KEPT_EVENTS` events, its stream ends; the reader can reconnect.

    Args:
        first_id: Number of the first event. Choose it above all event numbers of earlier
            processes: a reader that reconnects after a restart then misses no event of the new
            process.
    """

    def __init__(self, first_id: int) -> None:
        self._recent_events: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._next_id = first_id
        self._has_ended = False
        self._wakeups: set[asyncio.Event] = set()

    def publish(self, event: str, fields: Mapping[str, object]) -> None:
        """Add one event."""
        document = {"event": event, **{key: finite_or_none(value) for key, value in fields.items()}}
        self._recent_events.append(
            f"id: {self._next_id}\ndata: {json.dumps(document, default=str)}\n\n"
        )
        self._next_id += 1
        self._wake_readers()

    def end(self) -> None:
        """End every reader's stream once it has read all events."""
        self._has_ended = True
        self._wake_readers()

    def start_after(self, last_id: str | None) -> int:
        """Return the number of the first event for a new reader.

        Args:
            last_id: The reader's `Last-Event-ID` header: the reader receives all stored events
                after this number. None: new events only.

        Raises:
            UsageError: `last_id` is not a number.
        """
        if last_id is None:
            return self._next_id
        try:
            next_id = int(last_id) + 1
        except ValueError:
            raise UsageError(
                "Last-Event-ID: expected the number of an event, or 0 for all stored events, got "
                f"{last_id!r}"
            ) from None
        return min(max(next_id, self._oldest_id), self._next_id)

    async def follow(self, start: int, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write events from `start` on until the stream ends or the reader lags too far."""
        position = start
        wakeup = asyncio.Event()
        self._wakeups.add(wakeup)
        try:
            while position >= self._oldest_id:
                unread_events = itertools.islice(
                    self._recent_events, position - self._oldest_id, None
                )
                text = "".join(unread_events)
                position = self._next_id
                if text:
                    await write(text.encode())
                elif self._has_ended:
                    return
                else:
                    await wakeup.wait()
                    wakeup.clear()
        finally:
            self._wakeups.discard(wakeup)

    @property
    def _oldest_id(self) -> int:
        return self._next_id - len(self._recent_events)

    def _wake_readers(self) -> None:
        for wakeup in self._wakeups:
            wakeup.set()
