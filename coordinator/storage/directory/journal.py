"""The journal: what happened in a run, as JSON lines, each bound to the one before.

A line is the canonical JSON (`canonical_json`) of

    {"batch": 16, "hash": H, "number": 17, "previous": P, "record": {...}, "time": "..."}

with P the hash of the line before (64 zeros in the first one) and H the BLAKE3 of this line's
canonical JSON without the key "hash". So a changed byte shows in its own line, and a line that
was changed together with its hash shows in the next one. Only the end can be cut off unseen:
`result.json` holds the last line's hash. `time` is UTC of the coordinator's clock.

Lines of one batch (`batch` is the number of its first line) are written and synced together. So
damage in the last batch may be a crash's, and is cut when the journal is opened; damage before it
is not, and the journal is refused. What is left of that batch is written again then: its sync may
have failed (`durable_file.write_again`).

A restart must not wait for all of a long journal: it reads the first line and looks back from the
end (`read_end`). The audit looks at all of it (`verify_journal`).
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from blake3 import blake3
from pydantic import ValidationError

from coordinator.disk.append_file import AppendFile
from coordinator.disk.canonical_json import canonical_json
from coordinator.disk.durable_file import open_to_read, storing, sync_directory, write_again
from coordinator.storage.directory.journal_records import (
    Committed,
    Evaluated,
    Record,
    Resumed,
    kind_of,
    read_record,
)
from protocol.base.errors import StorageDamaged
from protocol.base.regular_file import check_regular, open_regular, read_regular

T = TypeVar("T", bound=Record)

NO_HASH: Final = "0" * 64
_TAIL_BYTES: Final = 1 << 18
_WINDOW_BYTES: Final = 1 << 16
_KEYS: Final = {"batch", "hash", "number", "previous", "record", "time"}


class Entry(NamedTuple):
    """One line that is what was written."""

    number: int
    """Of the line, from 1."""
    time: str
    record: Record
    hash: str


@dataclass(frozen=True, slots=True)
class Verified:
    """How much of a journal is sound.

    Attributes:
        entries: The sound lines before the first bad one.
        head: The hash of the last of them.
        bad_line: Number of the first bad line, from 1; None if there is none.
        reason: What is wrong with it.
    """

    entries: tuple[Entry, ...]
    head: str
    bad_line: int | None
    reason: str


class Journal:
    """The journal of one run, as its coordinator writes it. One thread at a time.

    `append` cannot fail: it keeps lines in memory until `sync`, which can be called again after
    a failure.

    Attributes:
        head: The hash of the newest line.
        cut_bytes: How much of a torn tail was cut off at opening.

    Args:
        path: The file; made if it is not there.
        guard: Called before each write; raises if the directory is not this coordinator's.
        clock: Gives seconds since 1970.

    Raises:
        StorageFailed: The file cannot be opened.
        StorageDamaged: Lines before the last batch are damaged.
    """

    def __init__(
        self,
        path: Path,
        guard: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._guard = guard
        self._clock = clock
        self._waiting: list[bytes] = []
        with storing("open", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                check_regular(os.fstat(fd).st_mode, path)
                size = os.fstat(fd).st_size
                last, begin, end = _last_batch(fd, path, size)
                os.ftruncate(fd, end)
                write_again(fd, begin, end)
                sync_directory(path.parent)
            except BaseException:
                os.close(fd)
                raise
        self.cut_bytes = size - end
        self._file = AppendFile(path, fd, end, lambda: None)
        self.head = last["hash"] if last else NO_HASH
        self._number = last["number"] if last else 0
        self._batch = self._number + 1

    @property
    def lines(self) -> int:
        """How many lines there are, those not synced yet included."""
        return self._number

    def append(self, record: Record) -> str:
        """Add a line; it is durable after the next `sync`.

        Returns:
            Its hash, the journal's head from now on.
        """
        self._number += 1
        moment = datetime.fromtimestamp(self._clock(), UTC)
        document: dict[str, Any] = {
            "batch": self._batch,
            "number": self._number,
            "previous": self.head,
            "record": record.model_dump(mode="json"),
            "time": moment.isoformat(timespec="milliseconds"),
        }
        self.head = document["hash"] = _hash(document)
        self._waiting.append(canonical_json(document) + b"\n")
        return self.head

    def sync(self) -> None:
        """Write and sync what was appended.

        Raises:
            StorageFailed: It is not durable yet; the call can be made again.
            RunFailed: Another coordinator has taken over; nothing is written.
        """
        if not self._waiting:
            return
        if self._guard is not None:
            self._guard()
        with self._file.use("append to"):
            self._file.write([memoryview(b"".join(self._waiting))])
            self._file.sync()
        self._file.confirm()
        self._waiting.clear()
        self._batch = self._number + 1

    def close(self) -> None:
        """Close the file, without what was not synced."""
        self._file.close()


def verify_journal(path: Path) -> Verified:
    """Follow the chain from the first line on, up to the first bad line.

    Raises:
        StorageFailed: It cannot be read.
    """
    with storing("read", path):
        content = read_regular(path)
    entries: list[Entry] = []
    head = NO_HASH
    for number, line in enumerate(io.BytesIO(content), 1):
        document, reason = _checked(line)
        if document is None:
            return Verified(tuple(entries), head, number, reason)
        if document["number"] != number or document["previous"] != head:
            reason = "it does not follow the line before: lines were changed, removed or added"
            return Verified(tuple(entries), head, number, reason)
        try:
            record = read_record(document["record"])
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"])
            reason = f"no record of this release, at {where!r}"
            return Verified(tuple(entries), head, number, reason)
        head = document["hash"]
        entries.append(Entry(number, document["time"], record, head))
    return Verified(tuple(entries), head, None, "")


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """What a restart has to know of its journal.

    Attributes:
        begun: The run's line is there.
        settled: The manifest's line is there.
        commits: How many steps count as committed.
        saved: The checkpoint that was asked about is there.
    """

    begun: bool
    settled: bool
    commits: int
    saved: bool


def read_end(path: Path, checkpoint_step: int) -> JournalEnd:
    """Look back until it is known whether a checkpoint was noted, after so many steps.

    Args:
        path: A journal whose end is sound; it need not be there.
        checkpoint_step: Its line follows the commit before it.

    Raises:
        StorageFailed: It cannot be read.
    """
    begun = settled = saved = False
    commits: int | None = None
    for record in _records_backwards(path):
        kind, step = record.get("kind"), record.get("step")
        begun, settled = begun or kind == "run", settled or kind == "manifest"
        if not isinstance(step, int):
            continue
        saved = saved or (kind == "checkpoint" and step == checkpoint_step)
        if kind not in {"commit", "resumed"}:
            continue
        if commits is None:
            commits = step + 1 if kind == "commit" else step
        if saved or step < checkpoint_step:
            # Steps are committed, so the lines that come before all of them are there.
            return JournalEnd(begun=True, settled=True, commits=commits, saved=saved)
    return JournalEnd(begun, settled, commits or 0, saved)


def _hash(document: dict[str, Any]) -> str:
    return blake3(canonical_json({k: v for k, v in document.items() if k != "hash"})).hexdigest()


def _checked(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """A line as its document if it is what was written, else None and why not."""
    if not line.endswith(b"\n"):
        return None, "it is not ended"
    try:
        document = json.loads(line)
        if not isinstance(document, dict) or document.keys() != _KEYS:
            return None, "it is no line of a journal"
        if canonical_json(document) + b"\n" != line:
            return None, "it is not in canonical form"
        # Only the record may hold the same words, and that comes later in the line.
        rest = line[:-1].replace(b'"hash":"%s",' % str(document["hash"]).encode(), b"", 1)
        whole = document["hash"] == blake3(rest).hexdigest()
    except (ValueError, RecursionError):
        return None, "it is not JSON"
    if not whole:
        return None, "it has not the hash that it names"
    if not (isinstance(document["batch"], int) and isinstance(document["number"], int)):
        return None, "it is no line of a journal"
    return document, ""


class _LastBatch(NamedTuple):
    """The newest line to go on from, and the bytes of its batch up to that line's end."""

    line: dict[str, Any] | None
    begin: int
    end: int


def _last_batch(fd: int, path: Path, size: int) -> _LastBatch:
    """Where a journal is gone on with; the end alone is looked at.

    Raises:
        StorageDamaged: Lines are damaged that a later batch follows.
    """
    window_bytes = _TAIL_BYTES
    while True:
        start = max(0, size - window_bytes)
        content = os.pread(fd, size - start, start)
        # The first line may begin before the window.
        skipped = 0 if start == 0 else content.find(b"\n") + 1
        found = _sound_end(content[skipped:], path, start + skipped)
        if found is not None and (start == 0 or skipped):
            return found
        window_bytes *= 4


def _sound_end(content: bytes, path: Path, start: int) -> _LastBatch | None:
    """None where a longer look back is needed."""
    last: dict[str, Any] | None = None
    begin = end = at = start
    whole = not start  # whether the last batch begins in here
    torn = False
    for line in io.BytesIO(content):
        document, _ = _checked(line)
        if document is None:
            torn = True
        elif not torn:
            if document["batch"] == document["number"]:
                begin, whole = at, True
            last, end = document, at + len(line)
        elif start and last is None:
            return None
        elif document["batch"] > (bad := last["number"] + 1 if last else 1):
            text = "it is not what was written, and lines that were synced later follow"
            raise StorageDamaged(str(path), f"line {bad}", f"{text}; bring it back from a copy")
        at += len(line)
    return _LastBatch(last, begin, end) if whole else None


def first_record(path: Path) -> Record | None:
    """What the first line says; None if there is none that is what was written.

    Raises:
        StorageFailed: It cannot be read.
    """
    with storing("read", path):
        if not path.exists():
            return None
        with open_regular(path) as file:
            return _sound_record(file.readline())


def entries_of(path: Path, kind: type[T]) -> Iterator[T]:
    """Every sound record of a kind, in order; none of a journal that is not there."""
    mark = f'"kind":"{kind_of(kind)}"'.encode()
    try:
        with open_regular(path) as file:
            for line in file:
                record = _sound_record(line) if mark in line else None
                if isinstance(record, kind):
                    yield record
    except OSError:
        return


def newest_record(path: Path, kind: type[T]) -> T | None:
    """The newest line of a kind that is what was written; the file need not be there.

    Raises:
        StorageFailed: It cannot be read.
    """
    mark = f'"kind":"{kind_of(kind)}"'.encode()
    for line in _lines_backwards(path):
        record = _sound_record(line + b"\n") if mark in line else None
        if isinstance(record, kind):
            return record
    return None


def newest_commit(path: Path, step: int) -> Committed | None:
    """The newest sound line that commits a step.

    Raises:
        StorageFailed: It cannot be read.
    """
    marks = (b'"kind":"commit"', f'"step":{step}'.encode())
    for line in _lines_backwards(path):
        record = _sound_record(line + b"\n") if all(mark in line for mark in marks) else None
        if isinstance(record, Committed) and record.step == step:
            return record
    return None


def newest_line(path: Path) -> tuple[int, str]:
    """Number and hash of the newest line that is what was written; 0 and `NO_HASH` without one.

    Raises:
        StorageFailed: It cannot be read.
    """
    for line in _lines_backwards(path):
        document, _ = _checked(line + b"\n")
        if document is not None:
            return document["number"], document["hash"]
    return 0, NO_HASH


def _sound_record(line: bytes) -> Record | None:
    document, _ = _checked(line)
    try:
        return read_record(document["record"]) if document is not None else None
    except ValidationError:
        return None


def newest_epoch(path: Path) -> int:
    """The epoch of the coordinator that wrote the last lines; 0 where none is told.

    Raises:
        StorageFailed: It cannot be read.
    """
    for record in _records_backwards(path):
        epoch = record.get("epoch")
        if isinstance(epoch, int):
            return epoch
    return 0


def was_given_up(path: Path) -> bool:
    """Whether an operator gave the run up, and nobody has gone on with it since.

    Raises:
        StorageFailed: It cannot be read.
    """
    for record in _records_backwards(path):
        if record.get("kind") in {"run", "resumed", "plan"}:
            return False
        if record.get("command") == "give_up":
            return True
    return False


def newest_scale(path: Path, before: int) -> tuple[int, float] | None:
    """The newest commit of a step below this one that tells a scale of losses: step and scale."""
    for line in _lines_backwards(path):
        record = _sound_record(line + b"\n") if b'"loss_scale":' in line else None
        if not isinstance(record, Committed) or record.step >= before:
            continue
        if record.loss_scale is not None:
            return record.step, record.loss_scale
    return None


def evaluations(path: Path, up_to: int) -> dict[int, dict[str, float]]:
    """Figures on held-out data by step, of those steps that still count and are not after `up_to`.

    What is no record is passed over: the audit names it.
    """
    found: dict[int, dict[str, float]] = {}
    with storing("read", path), open_regular(path) as file:
        for line in file:
            if b'"evaluation"' not in line and b'"resumed"' not in line:
                continue
            match _sound_record(line):
                case Evaluated() as record:
                    figures = record.metrics.items()
                    found[record.step] = {k: math.nan if v is None else v for k, v in figures}
                case Resumed() as record:
                    found = {step: each for step, each in found.items() if step <= record.step}
    return {step: each for step, each in found.items() if step <= up_to}


def _records_backwards(path: Path) -> Iterator[dict[str, Any]]:
    for line in _lines_backwards(path):
        try:
            record = json.loads(line)["record"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # the audit names it
        if isinstance(record, dict):
            yield record


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file, the last one first; it may not be there."""
    with storing("read", path):
        try:
            fd = open_to_read(path)
        except FileNotFoundError:
            return
        try:
            start, rest = os.fstat(fd).st_size, b""
            while start:
                length = min(_WINDOW_BYTES, start)
                start -= length
                rest, *lines = (os.pread(fd, length, start) + rest).split(b"\n")
                yield from (line for line in reversed(lines) if line)
            if rest:
                yield rest
        finally:
            os.close(fd)
