"""One key for each worker that has joined, so that one can be taken without the others.

The file is read again when it has changed: `coordinator token revoke` writes it while a
coordinator runs. Whoever holds the join token may ask for the key of any name; a name says who
was admitted as whom, not who sits at the machine.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from protocol.base.errors import UsageError
from protocol.host.secret_file import read_secret, write_secret
from protocol.wire.authentication import new_key

MOST_KEYS: Final = 4_096
"""More names than that get no key and show the join token each time."""


def key_mark(key: bytes) -> str:
    """What tells a key from others and gives nothing away of it: keys are random."""
    return hashlib.sha256(b"samestep key mark" + key).hexdigest()[:8]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    since: str


_Entries: Final = TypeAdapter(dict[str, _Entry])


class WorkerKeys:
    """Keys by the name under which a worker has joined first.

    Writing methods are called under the lock of `Credentials`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, _Entry] = {}
        self._seen: tuple[int, int, int] | None = None

    def get(self, name: str) -> bytes | None:
        """The key of that name now.

        Raises:
            UsageError: The file cannot be read, or is damaged.
        """
        self._refresh()
        entry = self._entries.get(name)
        return bytes.fromhex(entry.key) if entry is not None else None

    def marks(self) -> dict[str, str]:
        """What tells each worker's key from others: see `key_mark`."""
        self._refresh()
        return {name: key_mark(bytes.fromhex(e.key)) for name, e in self._entries.items()}

    def names(self) -> dict[str, str]:
        """Who has a key, and since when (UTC)."""
        self._refresh()
        return {name: entry.since for name, entry in sorted(self._entries.items())}

    def add(self, name: str) -> bytes:
        """The key of that name, a new one if it has none; empty if there are too many."""
        if (known := self.get(name)) is not None:
            return known
        if len(self._entries) >= MOST_KEYS:
            return b""
        key = new_key()
        since = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        self._write({**self._entries, name: _Entry(key=key.hex(), since=since)})
        return key

    def remove(self, name: str) -> None:
        """Take a key.

        Raises:
            UsageError: There is none of that name.
        """
        known = self.names()
        if name not in known:
            raise UsageError(
                f"no worker has a key under the name {name!r}; those that have one: "
                f"{', '.join(known) or 'none'}; to keep out one that joined with the join token "
                "alone: coordinator token rotate, then restart the coordinator"
            )
        self._write({other: e for other, e in self._entries.items() if other != name})

    def clear(self) -> None:
        """Take all keys."""
        self._write({})

    def _write(self, entries: dict[str, _Entry]) -> None:
        document = {name: entry.model_dump() for name, entry in entries.items()}
        write_secret(self._path, json.dumps(document, indent=1) + "\n")
        self._refresh()

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._entries, self._seen = {}, None
            return
        except OSError as error:
            # Not as if there were none: members would be sent away for good.
            raise UsageError(f"cannot read {str(self._path)!r}: {error.strerror}") from None
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen == self._seen:
            return
        try:
            self._entries = _Entries.validate_json(read_secret(self._path) or "{}")
        except ValidationError:
            # Not the validation's own text: it would show what the file holds.
            raise UsageError(
                f"{str(self._path)!r} does not hold workers' keys; remove it, and workers join "
                "with the join token again"
            ) from None
        self._seen = seen
