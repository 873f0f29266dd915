"""Scripts that call `fit`, started as people start them, and the workers that join them."""

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


class RunningScript:
    """A script that was started, and has told where workers join it."""

    def __init__(self, script: Path, environment: Mapping[str, str] | None = None) -> None:
        self.script = script
        self.process = start(
            "tests.plain_script", str(script), cwd=script.parent, environment=environment
        )
        self.lines: list[str] = []
        self._told = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = self.wait_for("listening for workers")
        self.address = line.partition("--coordinator ")[2].split()[0]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._told:
                self.lines.append(line)
                self._told.notify_all()
        with self._told:
            self.lines.append("")
            self._told.notify_all()

    def wait_for(self, words: str) -> str:
        """The first line with these words."""

        def found() -> str | None:
            return next((line for line in self.lines if words in line), None)

        with self._told:
            self._told.wait_for(lambda: found() or (self.lines and not self.lines[-1]), 300)
        line = found()
        assert line is not None, (self.lines, said(self.process))
        return line

    def worker(self, name: str, *arguments: str) -> Process:
        """A worker of its own."""
        return start(
            "worker", "--coordinator", self.address, "--name", name, *arguments,
            cwd=self.script.parent,
        )  # fmt: skip

    def joined(self, name: str) -> Process:
        """One that was started with the script."""
        return self.worker(name, str(self.script))

    def held(self, name: str, step: int) -> tuple[Hold, Process]:
        """Likewise, and it waits in this step."""
        hold = Hold()
        process = start(
            "tests.paused_worker", str(step), str(hold.port), "--coordinator", self.address,
            "--name", name, str(self.script),
            cwd=self.script.parent,
        )  # fmt: skip
        return hold, process

    def ended(self) -> str:
        """All that it has said, once it has ended well."""
        code = self.process.wait(300)
        self._reader.join()
        output = "".join(self.lines)
        assert code == 0, output + said(self.process)
        close(self.process)
        return output


def close(*processes: Process) -> None:
    for each in processes:
        for stream in (each.stdout, each.stderr):
            assert stream is not None
            stream.close()


def said(process: Process) -> str:
    """On its standard error, to the end."""
    assert process.stderr is not None
    return process.stderr.read()
