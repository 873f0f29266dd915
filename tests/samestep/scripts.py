"""Scripts that call `fit`, started as users start them, and the workers that join them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from tests.cluster import Hold
from tests.processes import Process, start

HEAD = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import samestep

x = torch.linspace(-1, 1, 32)[:, None]

def task(module=None):
    return samestep.Task(
        module=module or nn.Linear(1, 1),
        train=TensorDataset(x, 2 * x),
        loss=lambda module, batch: ((module(batch[0]) - batch[1]) ** 2).sum(),
    )
"""
"""The beginning of a script: imports, data and the function that builds the task."""


class RunningScript:
    """A process that runs a script. The constructor waits until workers can join."""

    def __init__(self, script: Path, environment: Mapping[str, str] | None = None) -> None:
        self.script = script
        self.process = start(
            "tests.plain_script", str(script), cwd=script.parent, environment=environment
        )
        self.lines: list[str] = []
        self._lines_changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = self.wait_for("listening for workers")
        self.address = line.partition("--coordinator ")[2].split()[0]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._lines_changed:
                self.lines.append(line)
                self._lines_changed.notify_all()
        with self._lines_changed:
            self.lines.append("")
            self._lines_changed.notify_all()

    def wait_for(self, text: str) -> str:
        """Wait for the first line with this text."""

        def find_line() -> str | None:
            return next((line for line in self.lines if text in line), None)

        with self._lines_changed:
            self._lines_changed.wait_for(
                lambda: find_line() or (self.lines and not self.lines[-1]), 300
            )
        line = find_line()
        assert line is not None, (self.lines, standard_error_of(self.process))
        return line

    def start_worker(
        self, name: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start a separate worker."""
        return start(
            "worker", "--coordinator", self.address, "--name", name, *arguments,
            cwd=self.script.parent, environment=environment,
        )  # fmt: skip

    def start_script_worker(
        self, name: str, environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start a worker with the script."""
        return self.start_worker(name, str(self.script), environment=environment)

    def start_paused_worker(self, name: str, step: int) -> tuple[Hold, Process]:
        """Start a worker with the script that pauses in a step.

        Returns:
            The hold, which resumes the worker, and the process.
        """
        hold = Hold()
        process = start(
            "tests.paused_worker", str(step), str(hold.port), "--coordinator", self.address,
            "--name", name, str(self.script),
            cwd=self.script.parent,
        )  # fmt: skip
        return hold, process

    def wait_for_success(self) -> str:
        """Wait for a successful end; return the whole output."""
        code = self.process.wait(300)
        self._reader.join()
        output = "".join(self.lines)
        assert code == 0, output + standard_error_of(self.process)
        close(self.process)
        return output


def close(*processes: Process) -> None:
    """Close the pipes of ended processes."""
    for process in processes:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def standard_error_of(process: Process) -> str:
    """Return the standard error of a process, once the process has ended."""
    assert process.stderr is not None
    return process.stderr.read()
