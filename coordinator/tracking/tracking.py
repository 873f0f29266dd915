"""The coordinator's side: a process for each tracker, which is notified when the journal grows.

The journal is the queue: it is on disk, and each tracker reads it at its own pace. So the
coordinator never waits, and no failure of a tracker affects the run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from coordinator.disk.durable_file import make_below
from coordinator.run.outputs.events import Event
from coordinator.service.events import RunAccepted, RunEnded, RunResumed
from coordinator.tracking.feeding import END, NEWS
from coordinator.tracking.trackers import DIRECTORY
from protocol.cli.command_line import child_environment, command_of

GRACE_S: Final = 20.0
"""How long a tracker may take for the remaining rows after the run's end."""


class Tracking:
    """Passes a service's events on to trackers.

    Args:
        names: Names of the trackers.
        directory: Returns the directory of the run in progress.
        tell: Prints a line about a failed tracker.
        grace_s: See `GRACE_S`.
    """

    def __init__(
        self,
        names: Sequence[str],
        directory: Callable[[], Path | None],
        tell: Callable[[str], None],
        grace_s: float = GRACE_S,
    ) -> None:
        self._names = names
        self._directory = directory
        self._tell = tell
        self._grace_s = grace_s
        self._feeds: list[_Feed] = []

    def emit(self, event: Event, run_id: str = "") -> None:
        """See `EventSink`."""
        del run_id
        if isinstance(event, RunAccepted | RunResumed):
            directory = self._directory()
            if directory is not None:
                self._feeds = [feed for feed in self._feeds if not feed.over()]
                self._feeds += [_Feed(name, directory, self._tell) for name in self._names]
        elif isinstance(event, RunEnded):
            for feed in self._feeds:
                feed.end(self._grace_s)
        else:
            for feed in self._feeds:
                feed.news()

    def stop(self) -> None:
        """Wait for the trackers to end; blocks for at most `grace_s`."""
        for feed in self._feeds:
            feed.stop(self._grace_s)


class _Feed:
    """One tracker's process for one run."""

    def __init__(self, name: str, run: Path, tell: Callable[[str], None]) -> None:
        self._name = name
        self._command = shlex.join(["coordinator", "track", str(run), "--to", name])
        self._tell = tell
        self._log = run / DIRECTORY / name / "log.txt"
        self._timer: threading.Timer | None = None
        self._is_late = False
        self._process: subprocess.Popen[bytes] | None = None
        try:
            make_below(run, self._log.parent)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(  # noqa: S603 -- a command of ours
                    [*command_of("coordinator"), "track", str(run), "--to", name, "--follow"],
                    stdin=subprocess.PIPE, stdout=log, stderr=subprocess.PIPE,
                    env=child_environment(), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._report_failure(str(error.strerror))
            return
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._watch = threading.Thread(target=self._watch_process, daemon=True)
        self._watch.start()

    def news(self) -> None:
        """Notify the process that the journal has grown. A full pipe already has such a byte."""
        self._write(NEWS)

    def end(self, grace_s: float) -> None:
        """Notify the process that the run has ended, and limit the time for the remaining rows."""
        if self._timer is None and self._process is not None:
            self._write(END)
            self._timer = threading.Timer(grace_s, self._kill_late_process)
            self._timer.daemon = True
            self._timer.start()

    def stop(self, grace_s: float) -> None:
        """Wait for the process to end; if the run is unfinished, the remaining rows are sent when
        it continues."""
        if self._process is None:
            return
        if self._timer is None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._watch.join(grace_s)
        if self._watch.is_alive():
            self._kill_late_process()
            self._watch.join()
        self.over()

    def over(self) -> bool:
        """Return whether the process has ended; if so, close its pipe and timer."""
        if self._process is None:
            return True
        if self._watch.is_alive():
            return False
        if self._timer is not None:
            self._timer.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return True

    def _write(self, word: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._process.stdin.fileno(), word)

    def _kill_late_process(self) -> None:
        self._is_late = True
        assert self._process is not None
        self._process.kill()

    def _watch_process(self) -> None:
        """Log the standard error of the process; report its last line if the process fails."""
        assert self._process is not None
        assert self._process.stderr is not None
        last_bytes = b""
        with self._process.stderr as lines:
            for line in lines:
                last_bytes = line.strip() or last_bytes
                with contextlib.suppress(OSError), self._log.open("ab") as log:
                    log.write(line)
        if self._process.wait() == 0:
            return
        last_line = last_bytes.decode(errors="replace").strip().removeprefix("coordinator: ")
        self._report_failure(
            "it did not finish in time" if self._is_late else last_line or "it was ended"
        )

    def _report_failure(self, reason: str) -> None:
        self._tell(
            f"tracker {self._name} stopped: {reason[:300]}; the run continues; send the tracker "
            f"the missing steps later: {self._command}"
        )
