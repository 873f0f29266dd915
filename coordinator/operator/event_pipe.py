"""Events as JSON lines for the process that started this coordinator: `samestep.fit`.

Every document has `event` and `text`, the line that the console would print; events of a run also
have the event's fields. `listening` (`address`) and `ended` (`exit_code`, `reason`, `is_resumable`)
are events of the coordinator itself; `record` (`record`) is a line of the journal, if requested;
`said` is any other line of the console.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import threading
from collections.abc import Mapping
from typing import Final

from coordinator.run.outputs.events import Committed, Evaluated, Event
from protocol.base.fields import finite_or_none
from protocol.cli.systemd import Priority

_FLUSH_TIMEOUT_S: Final = 10.0


class EventPipe:
    """Writes events in a thread: a reader that has stopped does not stop the run.

    Args:
        descriptor: The pipe; closed by `close`.

    Attributes:
        sends_records: Whether the journal's records of commits and evaluations are sent too.
    """

    sends_records = False

    def __init__(self, descriptor: int) -> None:
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._write_all, args=(descriptor,), name="events", daemon=True
        )
        self._thread.start()

    def write(
        self,
        text: str,
        fields: Mapping[str, object] | None = None,
        priority: Priority = Priority.INFO,
    ) -> None:
        """Send an event; see `SystemJournal.write`."""
        del priority
        values = {name: finite_or_none(value) for name, value in (fields or {}).items()}
        document = {"event": "said", **values, "text": text}
        self._waiting.put(json.dumps(document, default=str).encode() + b"\n")

    def emit(self, event: Event) -> None:
        """Send the record of a commit or an evaluation, if records are requested."""
        if self.sends_records and isinstance(event, Committed | Evaluated):
            self.write("", {"event": "record", "record": event.model_dump(mode="json")})

    def close(self) -> None:
        """Wait until everything is written, or until the timeout if the reader does not read."""
        self._waiting.put(None)
        self._thread.join(_FLUSH_TIMEOUT_S)

    def _write_all(self, descriptor: int) -> None:
        with contextlib.suppress(OSError), os.fdopen(descriptor, "wb", buffering=0) as stream:
            while (line := self._waiting.get()) is not None:
                rest = memoryview(line)
                while rest:
                    rest = rest[stream.write(rest) or 0 :]


class ConsoleLines(io.TextIOBase):
    """The file of a console; its lines become events."""

    def __init__(self, events: EventPipe) -> None:
        self._events = events

    def write(self, text: str) -> int:
        """Send each line."""
        for line in text.splitlines():
            self._events.write(line)
        return len(text)
