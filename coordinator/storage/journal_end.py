"""What a journal already says, read from its end: a restart must not wait for all of a long one.

Nothing is verified here: opening the journal looks at the newest lines, and the audit at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coordinator.disk.durable_file import storing

_WINDOW_BYTES: Final = 1 << 16


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
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
