"""Send one tracker its missing rows: the process of `coordinator track`."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from coordinator.disk.durable_file import make_below
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.tracking.rows import Rows
from coordinator.tracking.trackers import DIRECTORY, TrackedRun, Tracker, open_tracker
from protocol.base.errors import SamestepError, UsageError, describe_error, lock_failure

NEWS: Final = b"n"
END: Final = b"e"
_READ_BYTES: Final = 65_536


def feed(name: str, run: Path, news: Callable[[], bytes] | None = None) -> tuple[int, int]:
    """Send a tracker every step of a run that the tracker does not have.

    Args:
        name: Name of the tracker.
        run: The run's directory.
        news: Waits until the journal may have more; its result contains `END` when the run has
            ended, and is empty if the coordinator has exited before. None: send the existing rows
            and end.

    Returns:
        The number of sent steps, and the last step that the tracker has.

    Raises:
        UsageError: There is no run.
        SamestepError: The tracker failed, or its directory cannot be locked.
    """
    directory = RunDirectory(run)
    stored_run = directory.read_run()
    if stored_run is None:
        raise UsageError(f"expected a run's directory at {str(run)!r}, found no run.json there")
    tracker_directory = run / DIRECTORY / name
    make_below(run, tracker_directory)
    with (tracker_directory / "lock").open("w") as lock:
        # An earlier process holds the lock until it has ended.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise SamestepError(
                f"cannot lock {str(tracker_directory)!r}: {lock_failure(error)}"
            ) from None
        try:
            tracker = open_tracker(
                name, TrackedRun(tracker_directory, stored_run.run_id, stored_run.document)
            )
            return _follow(tracker, Rows(directory.journal), news)
        except SamestepError:
            raise
        except Exception as error:  # noqa: BLE001 -- libraries raise errors of all kinds
            raise SamestepError(
                f"{name}: {type(error).__name__}: {describe_error(error)}"
            ) from None


def _follow(tracker: Tracker, rows: Rows, news: Callable[[], bytes] | None) -> tuple[int, int]:
    last, count = tracker.last(), 0
    has_ended = news is None
    while True:
        earlier_count = count
        for row in rows.read():
            if row.step > last:
                tracker.take(row)
                last, count = row.step, count + 1
        if count > earlier_count:
            tracker.flush()
        if has_ended or news is None:
            break
        marks = news()
        if not marks:
            break  # the rest is sent when the run continues
        has_ended = END in marks
    tracker.close(rows.outcome)
    return count, max(last, 0)


def from_standard_input() -> bytes:
    """Return the bytes that the coordinator has written; empty once the coordinator has exited."""
    return os.read(0, _READ_BYTES)
