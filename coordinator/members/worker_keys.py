"""One key per worker, so that each can be revoked separately.

The file is reread when it changes: `coordinator token revoke` writes it while a coordinator runs.
Only a valid file revokes a key: while the file is missing, damaged or unreadable, the keys read
last stay valid. Anyone with the join token can request the key of any name, so a name identifies a
key, not a person.
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
from protocol.machine.secret_file import read_secret, write_secret
from protocol.wire.authentication import new_key

MOST_KEYS: Final = 4_096
"""Workers beyond this number get no key, and use the join token each time."""


def key_mark(key: bytes) -> str:
    """Return a short hash that identifies a key and reveals nothing about it: keys are random."""
    return hashlib.sha256(b"samestep key mark" + key).hexdigest()[:8]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    since: str


_Entries: Final = TypeAdapter(dict[str, _Entry])


class WorkerKeys:
    """Keys by worker name.

    Callers of methods that write hold the lock of `CoordinatorCredentials`.

    Attributes:
        trouble: Why the file is unusable now; empty while it is usable.
    """

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        self._path = path
        self._entries: dict[str, _Entry] = {}
        self._last_stamp: tuple[int, int, int] | None = None

    def get(self, name: str) -> bytes | None:
        """Return the current key of a name.

        Raises:
            UsageError: The file cannot be read or is damaged, and was never read before.
        """
        self.refresh()
        entry = self._entries.get(name)
        return bytes.fromhex(entry.key) if entry is not None else None

    def marks(self) -> dict[str, str]:
        """Return each worker's `key_mark`."""
        self.refresh()
        return {name: key_mark(bytes.fromhex(e.key)) for name, e in self._entries.items()}

    def names(self) -> dict[str, str]:
        """Return the names that have a key, each with its time of creation (UTC)."""
        self.refresh()
        return {name: entry.since for name, entry in sorted(self._entries.items())}

    def add(self, name: str) -> bytes:
        """Return the key of a name, creating it if missing; empty if there are too many keys.

        Raises:
            UsageError: The file is damaged, cannot be read or cannot be written.
        """
        if (existing := self.get(name)) is not None:
            return existing
        if self.trouble and os.path.lexists(self._path):
            raise UsageError(self.trouble)
        if len(self._entries) >= MOST_KEYS:
            return b""
        key = new_key()
        since = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        self._write({**self._entries, name: _Entry(key=key.hex(), since=since)})
        return key

    def remove(self, name: str) -> None:
        """Revoke a key.

        Raises:
            UsageError: The name has no key.
        """
        names = self.names()
        if name not in names:
            raise UsageError(
                f"no worker has a key under the name {name!r}; workers with a key: "
                f"{', '.join(names) or 'none'}; to keep out a worker that joined with the join "
                "token alone: coordinator token rotate, then restart the coordinator"
            )
        self._write({other: e for other, e in self._entries.items() if other != name})

    def clear(self) -> None:
        """Revoke all keys."""
        self._write({})

    def restore_file(self) -> bool:
        """Restore the file from memory if it is missing; return whether it was missing.

        Raises:
            UsageError: The file cannot be written.
        """
        self.refresh()
        if self._last_stamp is None or os.path.lexists(self._path):
            return False
        self._write(self._entries)
        return True

    def refresh(self) -> None:
        """Reread the file if it has changed.

        Raises:
            UsageError: The file cannot be read or is damaged, and was never read before.
        """
        try:
            self._read()
        except UsageError as error:
            self.trouble = str(error)
            if self._last_stamp is None:
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
            if self._last_stamp is not None:
                raise UsageError(f"{str(self._path)!r} is gone") from None
            return  # no worker has joined yet
        except OSError as error:
            raise UsageError(f"cannot read {str(self._path)!r}: {error.strerror}") from None
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        if stamp == self._last_stamp and not self.trouble:
            return
        text = read_secret(self._path)
        try:
            self._entries = _Entries.validate_json(text or "")
        except ValidationError:
            # Without pydantic's text, which would quote the file's secrets.
            content = "something else" if text else "an empty file"
            raise UsageError(
                f"expected workers' keys in {str(self._path)!r}, got {content}; restore the file "
                "from a backup, or remove it: a running coordinator writes the keys again that it "
                "has, otherwise each worker needs the join token once more"
            ) from None
        self._last_stamp = stamp
