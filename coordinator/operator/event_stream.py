"""Server-sent events: what was reported, with the last ones kept for readers that come (back) late.

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
"""Events that a reader can lag behind, or have missed when it comes back."""


class EventStream:
    """Numbers reports and hands them to every reader at its own pace.

    A reader that lags by more than is kept has its stream ended; it can come back.

    Args:
        first_id: Number of the first event. Let it be higher than that of any earlier process, and
            a reader that comes back to a new one misses nothing of that one.
    """

    def __init__(self, first_id: int) -> None:
        self._kept: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._next = first_id
        self._ended = False
        self._readers: set[asyncio.Event] = set()

    def publish(self, event: str, fields: Mapping[str, object]) -> None:
        """Add one event."""
        document = {"event": event, **{key: finite_or_none(value) for key, value in fields.items()}}
        self._kept.append(f"id: {self._next}\ndata: {json.dumps(document, default=str)}\n\n")
        self._next += 1
        self._wake()

    def end(self) -> None:
        """Every reader's stream ends once it has read what there is."""
        self._ended = True
        self._wake()

    def start_after(self, last_id: str | None) -> int:
        """Number of the first event that a new reader gets.

        Args:
            last_id: Its `Last-Event-ID`: it gets all kept ones after that. None: only what is yet
                to come.

        Raises:
            UsageError: That is no number.
        """
        if last_id is None:
            return self._next
        try:
            following = int(last_id) + 1
        except ValueError:
            raise UsageError(
                f"Last-Event-ID: expected an event's number, or 0 for all kept, got {last_id!r}"
            ) from None
        return min(max(following, self._oldest), self._next)

    async def follow(self, start: int, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write events from `start` on until the stream ends or the reader lags too far behind."""
        position = start
        news = asyncio.Event()
        self._readers.add(news)
        try:
            while position >= self._oldest:
                fresh = itertools.islice(self._kept, position - self._oldest, None)
                text = "".join(fresh)
                position = self._next
                if text:
                    await write(text.encode())
                elif self._ended:
                    return
                else:
                    await news.wait()
                    news.clear()
        finally:
            self._readers.discard(news)

    @property
    def _oldest(self) -> int:
        return self._next - len(self._kept)

    def _wake(self) -> None:
        for news in self._readers:
            news.set()
