"""One key for each worker that has joined, so that one can be taken without the others.

The file is read again when it has changed: `coordinator token revoke` writes it while a
coordinator runs. Only a valid file takes a key away: while the file is missing, damaged or cannot
be read, the last keys count. Whoever holds the join token may ask for the key of any name; a name
says who was admitted as whom, not who sits at the machine.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
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

    Attributes:
        trouble: Why the file cannot be used now, though it could before; empty if it can.
    """

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        self._path = path
        self._entries: dict[str, _Entry] = {}
        self._seen: tuple[int, int, int] | None = None

    def get(self, name: str) -> bytes | None:
        """The key of that name now.

        Raises:
            UsageError: The file cannot be read or is damaged, and was never read before.
        """
        self.refresh()
        entry = self._entries.get(name)
        return bytes.fromhex(entry.key) if entry is not None else None

    def marks(self) -> dict[str, str]:
        """What tells each worker's key from others: see `key_mark`."""
        self.refresh()
        return {name: key_mark(bytes.fromhex(e.key)) for name, e in self._entries.items()}

    def names(self) -> dict[str, str]:
        """Who has a key, and since when (UTC)."""
        self.refresh()
        return {name: entry.since for name, entry in sorted(self._entries.items())}

    def add(self, name: str) -> bytes:
        """The key of that name, a new one if it has none; empty if there are too many.

        Raises:
            UsageError: The file is damaged, cannot be read or cannot be written.
        """
        if (known := self.get(name)) is not None:
            return known
        if self.trouble and os.path.lexists(self._path):
            raise UsageError(self.trouble)
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

    def write_again(self) -> bool:
        """Write the last keys if the file is missing; whether it was.

        Raises:
            UsageError: The file cannot be written.
        """
        self.refresh()
        if self._seen is None or os.path.lexists(self._path):
            return False
        self._write(self._entries)
        return True

    def refresh(self) -> None:
        """Read the file again if it has changed.

        Raises:
            UsageError: The file cannot be read or is damaged, and was never read before.
        """
        try:
            self._read()
        except UsageError as error:
            self.trouble = str(error)
            if self._seen is None:
                raise
        else:
            self.trouble = ""

    def _write(self, entries: dict[str, _Entry]) -> None:
        document = {name: entry.model_dump() for name, entry in entries.items()}
        write_secret(self._path, json.dumps(document, indent=1) + "\n")
        self.refresh()

    def _read(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            if self._seen is not None:
                raise UsageError(f"{str(self._path)!r} is gone") from None
            return  # no worker has joined yet
        except OSError as error:
            raise UsageError(f"cannot read {str(self._path)!r}: {error.strerror}") from None
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen == self._seen and not self.trouble:
            return
        text = read_secret(self._path)
        try:
            self._entries = _Entries.validate_json(text or "")
        except ValidationError:
            # Not the validation's own text: it would show what the file holds.
            found = "something else" if text else "an empty file"
            raise UsageError(
                f"expected workers' keys in {str(self._path)!r}, got {found}; restore the file "
                "from a backup, or remove it: a running coordinator writes the keys again that it "
                "has, otherwise each worker needs the join token once more"
            ) from None
        self._seen = seen
