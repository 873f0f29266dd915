"""Feeds one tracker with what it lacks of a run: the process behind `coordinator track`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from coordinator.disk.durable_file import make_below
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.tracking.rows import Rows
from coordinator.tracking.trackers import DIRECTORY, Tracked, Tracker, open_tracker
from protocol.base.errors import SamestepError, UsageError, in_words, lock_failure

NEWS: Final = b"n"
END: Final = b"e"
_READ_BYTES: Final = 65_536


def feed(name: str, run: Path, news: Callable[[], bytes] | None = None) -> tuple[int, int]:
    """Tell a tracker every step of a run that it does not hold yet.

    Args:
        name: The tracker's.
        run: The run's directory.
        news: Waits until there may be more in the journal; what it gives holds `END` when the run
            has ended, and is empty when nobody will say so. None to tell what there is and end.

    Returns:
        How many steps it was told, and up to which it now holds the run.

    Raises:
        UsageError: There is no run.
        SamestepError: The tracker fails, in its own words.
    """
    directory = RunDirectory(run)
    stored = directory.read_run()
    if stored is None:
        raise UsageError(f"expected a run's directory at {str(run)!r}, found no run.json there")
    place = run / DIRECTORY / name
    make_below(run, place)
    with (place / "lock").open("w") as lock:
        # An earlier process that is about to end has it until it has.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise SamestepError(f"cannot lock {str(place)!r}: {lock_failure(error)}") from None
        try:
            tracker = open_tracker(name, Tracked(place, stored.run_id, stored.document))
            return _follow(tracker, Rows(directory.journal), news)
        except SamestepError:
            raise
        except Exception as error:  # noqa: BLE001 -- libraries raise errors of all kinds
            raise SamestepError(f"{name}: {type(error).__name__}: {in_words(error)}") from None


def _follow(tracker: Tracker, rows: Rows, news: Callable[[], bytes] | None) -> tuple[int, int]:
    last, told = tracker.last(), 0
    ending = news is None
    while True:
        before = told
        for row in rows.read():
            if row.step > last:
                tracker.take(row)
                last, told = row.step, told + 1
        if told > before:
            tracker.flush()
        if ending or news is None:
            break
        said = news()
        if not said:
            break  # what it lacks it is told when the run goes on
        ending = END in said
    tracker.close(rows.outcome)
    return told, max(last, 0)


def from_standard_input() -> bytes:
    """What the coordinator has written; empty when it is gone."""
    return os.read(0, _READ_BYTES)
