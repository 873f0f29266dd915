"""The part of a device process in which it runs the user's script, before the device's work.

The user's own process runs the script too and prints the same, so the output of the others is held,
and dropped once the task is built. If the task is not built, the whole output is shown.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protocol.base import limits

_TICK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ScriptLimits:
    """Limits of the user's script in device processes.

    Attributes:
        goal: The point that the script must reach, such as "call 1 of fit".
        timeout_s: How long a process may take to reach the goal.
        show: Shows a text on standard error; any thread may call it.
    """

    goal: str
    timeout_s: float
    show: Callable[[str], None]


class ScriptPhase:
    """Holds the output of one device process, and reports that its script does not reach the goal.

    Args:
        name: The device's name.
        script: The goal, and the time for it.
        on_timeout: Called once, from another thread, with the reason, if the script is too late.
    """

    def __init__(self, name: str, script: ScriptLimits, on_timeout: Callable[[str], None]) -> None:
        self.output_fd = os.memfd_create("output")
        self._name, self._script, self._on_timeout = name, script, on_timeout
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._holds_output = True
        threading.Thread(target=self._watch, name="script of a device", daemon=True).start()

    def reached_goal(self) -> None:
        """End the wait for the script."""
        self._over.set()

    def drop_output(self) -> None:
        """Drop the output: the user's process has printed the same."""
        self._end_output(show=False)

    def show_output(self) -> None:
        """Show the output, unless it was dropped or shown before."""
        self._end_output(show=True)

    def _end_output(self, *, show: bool) -> None:
        self._over.set()
        with self._lock:
            if not self._holds_output:
                return
            self._holds_output = False
            size = os.fstat(self.output_fd).st_size
            output = os.pread(self.output_fd, size, 0).decode(errors="replace") if show else ""
            os.close(self.output_fd)
        if output := output.rstrip("\n"):
            self._script.show(f"samestep: output of the script in the process of {self._name}:")
            self._script.show(output)

    def _watch(self) -> None:
        waited_s, reported_s, last_s = 0.0, 0.0, time.monotonic()
        while not self._over.wait(_TICK_S):
            now_s = time.monotonic()
            # Cap the interval: while this machine sleeps, the script does not run either.
            waited_s, last_s = waited_s + min(now_s - last_s, 2 * _TICK_S), now_s
            state = f"has not reached {self._script.goal} after {waited_s:.0f} s"
            if waited_s >= self._script.timeout_s:
                self._on_timeout(
                    f"the script {state} in this device's process, which runs it from its "
                    "beginning: it must not wait there for input, a lock or a file of the first "
                    "process; otherwise name one device"
                )
                return
            if waited_s - reported_s >= limits.SCRIPT_REPORT_INTERVAL_S:
                reported_s = waited_s
                self._script.show(
                    f"samestep: the script {state} in the process of {self._name}, which runs it "
                    "from its beginning; it may wait for input, a lock or a file; the run ends "
                    f"after {self._script.timeout_s:.0f} s"
                )
