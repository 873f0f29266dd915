"""The journal: the events of a run as JSON lines, each chained to the line before.

A line is the canonical JSON (`canonical_json`) of

    {"batch": 16, "hash": H, "number": 17, "previous": P, "record": {...}, "time": "..."}

with P the hash of the previous line (64 zeros in the first line) and H the BLAKE3 of this line's
canonical JSON without the key "hash". So a changed byte shows in its own line, and a line that was
changed together with its hash shows in the next line. The chain does not show a truncated end;
therefore `result.json` has the last line's hash. `time` is UTC of the coordinator's clock.

Lines of one batch (`batch` is the number of its first line) are written and synced together. So
damage in the last batch may come from a crash, and is cut off when the journal is opened. Damage
before that cannot come from a crash, so the journal is refused. The intact lines of the last batch
are then rewritten: their sync may have failed (`durable_file.write_again`).

A journal can be long, so a restart reads its first line, and then backward from its end
(`read_end`). All lines are read for the metrics that steer a run (`read_evaluations`), for the
results (`records_of_type`), and for the audit (`verify_journal`).
"""

from __future__ import annotations

import io
import json
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
from coordinator.disk.durable_file import open_to_read, storage_errors, sync_directory, write_again
from coordinator.disk.older_names import with_term
from coordinator.run.outputs.events import Committed, Evaluated, Record
from coordinator.storage.directory.journal_records import Resumed, read_record, record_name
from protocol.base import limits
from protocol.base.errors import StorageDamaged
from protocol.base.regular_file import check_regular, open_regular, parse_json, read_regular

T = TypeVar("T", bound=Record)

NO_HASH: Final = "0" * 64
_TAIL_BYTES: Final = 1 << 18
_WINDOW_BYTES: Final = 1 << 16
_KEYS: Final = {"batch", "hash", "number", "previous", "record", "time"}


class Entry(NamedTuple):
    """One intact line."""

    number: int
    """Number of the line, from 1."""
    time: str
    record: Record
    hash: str


@dataclass(frozen=True, slots=True)
class VerifiedJournal:
    """The intact part of a journal.

    Attributes:
        entries: The intact lines before the first bad line.
        head: The hash of the last intact line.
        bad_line: Number of the first bad line, from 1; None if there is none.
        reason: What is wrong with the bad line.
    """

    entries: tuple[Entry, ...]
    head: str
    bad_line: int | None
    reason: str


class Journal:
    """Writes the journal of one run, from one thread at a time.

    `append` cannot fail: it keeps lines in memory until `sync`, which can be repeated after an
    error.

    Attributes:
        head: The hash of the newest line.
        cut_bytes: Size of the torn tail that was cut off at opening.

    Args:
        path: The file; created if missing.
        guard: Called before each write; raises if this coordinator does not own the directory.
        clock: Returns seconds since 1970.

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
        with storage_errors("open", path):
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
    def line_count(self) -> int:
        """The number of lines, including unsynced ones."""
        return self._number

    def append(self, record: Record) -> str:
        """Add a line; it is durable after the next `sync`.

        Returns:
            The line's hash, the journal's new head.
        """
        self._number += 1
        now = datetime.fromtimestamp(self._clock(), UTC)
        document: dict[str, Any] = {
            "batch": self._batch,
            "number": self._number,
            "previous": self.head,
            "record": record.model_dump(mode="json"),
            "time": now.isoformat(timespec="milliseconds"),
        }
        self.head = document["hash"] = _hash(document)
        self._waiting.append(canonical_json(document) + b"\n")
        return self.head

    def sync(self) -> None:
        """Write and sync the appended lines.

        Raises:
            StorageFailed: The lines are not durable yet; the call can be repeated.
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
        """Close the file; unsynced lines are lost."""
        self._file.close()


def verify_journal(path: Path) -> VerifiedJournal:
    """Verify the chain from the first line to the first bad line.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    with storage_errors("read", path):
        content = read_regular(path)
    entries: list[Entry] = []
    head = NO_HASH
    for number, line in enumerate(io.BytesIO(content), 1):
        document, reason = _parse_line(line)
        if document is None:
            return VerifiedJournal(tuple(entries), head, number, reason)
        if document["number"] != number or document["previous"] != head:
            reason = "it does not follow the previous line: lines were changed, removed or added"
            return VerifiedJournal(tuple(entries), head, number, reason)
        try:
            record = read_record(document["record"])
        except ValidationError as error:
            location = ".".join(str(part) for part in error.errors()[0]["loc"])
            reason = f"this release does not know its record, at {location!r}"
            return VerifiedJournal(tuple(entries), head, number, reason)
        head = document["hash"]
        entries.append(Entry(number, document["time"], record, head))
    return VerifiedJournal(tuple(entries), head, None, "")


@dataclass(frozen=True, slots=True)
class JournalEnd:
    """The end of a journal, as far as a restart needs it.

    Attributes:
        has_run: Whether the journal has the line of the run.
        has_manifest: Whether the journal has the line of the manifest.
        commits: How many steps count as committed.
        has_checkpoint: Whether the journal has the line of the requested checkpoint.
    """

    has_run: bool
    has_manifest: bool
    commits: int
    has_checkpoint: bool


def read_end(path: Path, checkpoint_step: int) -> JournalEnd:
    """Read backward until it is known whether the checkpoint of this step was recorded.

    Args:
        path: A journal with an intact end; it may be missing.
        checkpoint_step: Step of the checkpoint; its line follows the commit of the previous step.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    has_run = has_manifest = has_checkpoint = False
    commits: int | None = None
    for record in _records_backwards(path):
        kind, step = record.get("kind"), record.get("step")
        has_run, has_manifest = has_run or kind == "run", has_manifest or kind == "manifest"
        if not isinstance(step, int):
            continue
        has_checkpoint = has_checkpoint or (kind == "checkpoint" and step == checkpoint_step)
        if kind not in {"commit", "resumed"}:
            continue
        if commits is None:
            commits = step + 1 if kind == "commit" else step
        if has_checkpoint or step < checkpoint_step:
            # There are commits, so the lines of run and manifest, which precede them, exist.
            return JournalEnd(True, True, commits, has_checkpoint)
    return JournalEnd(has_run, has_manifest, commits or 0, has_checkpoint)


def _hash(document: dict[str, Any]) -> str:
    return blake3(canonical_json({k: v for k, v in document.items() if k != "hash"})).hexdigest()


def _parse_line(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """Parse a line; None and the reason if it is damaged."""
    if not line.endswith(b"\n"):
        return None, "its newline is missing"
    try:
        document = json.loads(line)
        if not isinstance(document, dict) or document.keys() != _KEYS:
            return None, "it is not a line of a journal"
        if canonical_json(document) + b"\n" != line:
            return None, "it is not in canonical form"
        # The same text can occur only in the record, later in the line.
        rest = line[:-1].replace(b'"hash":"%s",' % str(document["hash"]).encode(), b"", 1)
        is_intact = document["hash"] == blake3(rest).hexdigest()
    except (ValueError, RecursionError):
        return None, "it is not JSON"
    if not is_intact:
        return None, "its hash is wrong"
    if not (isinstance(document["batch"], int) and isinstance(document["number"], int)):
        return None, "it is not a line of a journal"
    return document, ""


class _LastBatch(NamedTuple):
    """The newest intact line, and the bytes of its batch up to that line's end."""

    line: dict[str, Any] | None
    begin: int
    end: int


def _last_batch(fd: int, path: Path, size: int) -> _LastBatch:
    """Find where to continue a journal, reading only its end.

    Raises:
        StorageDamaged: A later batch follows damaged lines.
    """
    window_bytes = _TAIL_BYTES
    while True:
        start = max(0, size - window_bytes)
        content = os.pread(fd, size - start, start)
        # The first line may begin before the window.
        skipped = 0 if start == 0 else content.find(b"\n") + 1
        end = _find_last_batch(content[skipped:], path, start + skipped)
        if end is not None and (start == 0 or skipped):
            return end
        window_bytes *= 4


def _find_last_batch(content: bytes, path: Path, start: int) -> _LastBatch | None:
    """Return the last batch in `content`; None if the batch begins before `content`."""
    last: dict[str, Any] | None = None
    begin = end = offset = start
    has_begin = not start  # whether the last batch begins in `content`
    is_torn = False
    for line in io.BytesIO(content):
        document, _ = _parse_line(line)
        if document is None:
            is_torn = True
        elif not is_torn:
            if document["batch"] == document["number"]:
                begin, has_begin = offset, True
            last, end = document, offset + len(line)
        elif start and last is None:
            return None
        elif document["batch"] > (first_number := last["number"] + 1 if last else 1):
            text = "a line does not match its hash, and lines that were synced later follow"
            raise StorageDamaged(
                str(path), f"line {first_number}", f"{text}; restore it from a copy"
            )
        offset += len(line)
    return _LastBatch(last, begin, end) if has_begin else None


def first_record(path: Path) -> Record | None:
    """Return the record of the first line; None if the line is missing or damaged.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    with storage_errors("read", path):
        if not path.exists():
            return None
        with open_regular(path) as file:
            return _intact_record(file.readline())


def records_of_type(path: Path, record_type: type[T]) -> Iterator[T]:
    """Yield every intact record of a type, in order; no records if the journal is missing or cannot
    be read."""
    mark = f'"kind":"{record_name(record_type)}"'.encode()
    try:
        with open_regular(path) as file:
            for line in file:
                record = _intact_record(line) if mark in line else None
                if isinstance(record, record_type):
                    yield record
    except OSError:
        return


def newest_record(path: Path, record_type: type[T]) -> T | None:
    """Return the newest intact record of a type; None if there is none or the file is missing.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    mark = f'"kind":"{record_name(record_type)}"'.encode()
    for line in _lines_backwards(path):
        record = _intact_record(line + b"\n") if mark in line else None
        if isinstance(record, record_type):
            return record
    return None


def newest_commit(path: Path, step: int) -> Committed | None:
    """Return the newest intact record that commits a step; None if there is none.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    marks = (b'"kind":"commit"', f'"step":{step}'.encode())
    for line in _lines_backwards(path):
        record = _intact_record(line + b"\n") if all(mark in line for mark in marks) else None
        if isinstance(record, Committed) and record.step == step:
            return record
    return None


def newest_line(path: Path) -> tuple[int, str]:
    """Return number and hash of the newest intact line; 0 and `NO_HASH` without one.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    for line in _lines_backwards(path):
        document, _ = _parse_line(line + b"\n")
        if document is not None:
            return document["number"], document["hash"]
    return 0, NO_HASH


def _intact_record(line: bytes) -> Record | None:
    document, _ = _parse_line(line)
    try:
        return read_record(document["record"]) if document is not None else None
    except ValidationError:
        return None


def newest_term(path: Path) -> int:
    """Return the term of the coordinator that wrote the last lines; 0 without lines.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    for record in _records_backwards(path):
        term = with_term(record).get("term")
        if isinstance(term, int):
            return term
    return 0


def is_abandoned(path: Path) -> bool:
    """Return whether an operator has given the run up, and no coordinator has continued it since.

    Raises:
        StorageFailed: The journal cannot be read.
    """
    for record in _records_backwards(path):
        if record.get("kind") in {"run", "resumed", "plan"}:
            return False
        if record.get("command") == "give_up":
            return True
    return False


def newest_scale(path: Path, before_step: int) -> tuple[int, float] | None:
    """Return step and loss scale of the newest commit with a loss scale before `before_step`; None
    without one."""
    for line in _lines_backwards(path):
        record = _intact_record(line + b"\n") if b'"loss_scale":' in line else None
        if not isinstance(record, Committed) or record.step >= before_step:
            continue
        if record.loss_scale is not None:
            return record.step, record.loss_scale
    return None


def read_evaluations(path: Path, up_to: int) -> dict[int, dict[str, float]]:
    """Return metrics by step, for steps up to `up_to` that were not rolled back.

    A bad line is skipped: the audit reports it.
    """
    metrics: dict[int, dict[str, float]] = {}
    with storage_errors("read", path), open_regular(path) as file:
        for line in file:
            if b'"evaluation"' not in line and b'"resumed"' not in line:
                continue
            match _intact_record(line):
                case Evaluated() as record:
                    metrics[record.step] = record.metric_values
                case Resumed() as record:
                    metrics = {
                        step: values for step, values in metrics.items() if step <= record.step
                    }
    return {step: values for step, values in metrics.items() if step <= up_to}


def _records_backwards(path: Path) -> Iterator[dict[str, Any]]:
    for line in _lines_backwards(path):
        try:
            record = json.loads(line)["record"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # the audit reports it
        if isinstance(record, dict):
            yield record


def _lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first; the file may be missing."""
    with storage_errors("read", path):
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


_READ_BYTES: Final = 1 * limits.MIB


class JournalTail:
    """Follows a growing journal.

    Args:
        journal: The file; it may not exist yet.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._offset = 0
        self._rest = b""

    def restart_if_cut(self) -> bool:
        """Restart from the first line if a coordinator's restart has cut off lines that were read.

        Returns:
            Whether lines were cut off.
        """
        try:
            is_shorter = self._journal.stat().st_size < self._offset
        except FileNotFoundError:
            return False
        if is_shorter:
            self._offset, self._rest = 0, b""
        return is_shorter

    def read_new_records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield time and record of each new line; blocks while it reads the file.

        A bad line is skipped: the audit reports it.
        """
        for line in self._new_lines():
            try:
                entry = parse_json(line)
                time, record = entry["time"], entry["record"]
            except (ValueError, KeyError, TypeError):
                continue
            if isinstance(time, str) and isinstance(record, dict):
                yield time, record

    def _new_lines(self) -> Iterator[bytes]:
        try:
            with open_regular(self._journal) as file:
                file.seek(self._offset)
                while part := file.read(_READ_BYTES):
                    self._offset += len(part)
                    *lines, self._rest = (self._rest + part).split(b"\n")
                    yield from lines
        except FileNotFoundError:
            return
