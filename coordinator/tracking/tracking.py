"""The coordinator's side: a process for each tracker, told that there is news.

The journal is the queue: it is on disk, and a tracker reads it at its own pace. So nothing here
waits, and nothing that a tracker does, or fails to do, reaches the run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from coordinator.disk.durable_file import make_below
from coordinator.run.outputs.facts import Fact
from coordinator.service.listener import RunAccepted, RunEnded, RunResumed
from coordinator.tracking.feeding import END, NEWS
from coordinator.tracking.trackers import DIRECTORY
from protocol.command.own_command import own_command, own_environment

GRACE_S: Final = 20.0
"""What a tracker has for the rest after the run's end."""


class Tracking:
    """Hears a service's facts.

    Args:
        names: Of the trackers.
        directory: Gives that of the run in progress.
        tell: Says to a person that a tracker has failed.
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

    def reported(self, fact: Fact, run_id: str = "") -> None:
        """See `listener.Listener`."""
        del run_id
        if isinstance(fact, RunAccepted | RunResumed):
            directory = self._directory()
            if directory is not None:
                self._feeds = [feed for feed in self._feeds if not feed.over()]
                self._feeds += [_Feed(name, directory, self._tell) for name in self._names]
        elif isinstance(fact, RunEnded):
            for feed in self._feeds:
                feed.end(self._grace_s)
        else:
            for feed in self._feeds:
                feed.news()

    def stop(self) -> None:
        """Wait for what is left of them; blocks for at most `grace_s`."""
        for feed in self._feeds:
            feed.stop(self._grace_s)


class _Feed:
    """One tracker's process for one run."""

    def __init__(self, name: str, run: Path, tell: Callable[[str], None]) -> None:
        self._name = name
        self._again = f"coordinator track {run} --to {name}"
        self._tell = tell
        self._log = run / DIRECTORY / name / "log.txt"
        self._timer: threading.Timer | None = None
        self._late = False
        self._process: subprocess.Popen[bytes] | None = None
        try:
            make_below(run, self._log.parent)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(  # noqa: S603 -- a command of ours
                    [*own_command("coordinator"), "track", str(run), "--to", name, "--follow"],
                    stdin=subprocess.PIPE, stdout=log, stderr=subprocess.PIPE,
                    env=own_environment(), start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._failed(str(error.strerror))
            return
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._watch = threading.Thread(target=self._watched, daemon=True)
        self._watch.start()

    def news(self) -> None:
        """There is more in the journal. A pipe that is full holds that word already."""
        self._write(NEWS)

    def end(self, grace_s: float) -> None:
        """The run has ended: tell the rest, and end within so long."""
        if self._timer is None and self._process is not None:
            self._write(END)
            self._timer = threading.Timer(grace_s, self._too_late)
            self._timer.daemon = True
            self._timer.start()

    def stop(self, grace_s: float) -> None:
        """Wait for the end; a run that has not ended is told of when it goes on."""
        if self._process is None:
            return
        if self._timer is None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._watch.join(grace_s)
        if self._watch.is_alive():
            self._too_late()
            self._watch.join()
        self.over()

    def over(self) -> bool:
        """Whether the process has ended; then nothing of it is left open."""
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

    def _too_late(self) -> None:
        self._late = True
        assert self._process is not None
        self._process.kill()

    def _watched(self) -> None:
        """Keeps what it says of itself, and says it if it fails."""
        assert self._process is not None
        assert self._process.stderr is not None
        words = b""
        with self._process.stderr as lines:
            for line in lines:
                words = line.strip() or words
                with contextlib.suppress(OSError), self._log.open("ab") as log:
                    log.write(line)
        if self._process.wait() == 0:
            return
        said = words.decode(errors="replace").strip().removeprefix("coordinator: ")
        self._failed("it had not told all in time" if self._late else said or "it was ended")

    def _failed(self, reason: str) -> None:
        self._tell(
            f"tracker {self._name} stopped: {reason[:300]}; the run does not need it, and later it "
            f"can be told the rest: {self._again}"
        )
