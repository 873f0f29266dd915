"""`samestep.fit` in a Slurm step of several tasks: task 0 starts the coordinator, the others join.

srun runs the same script once per task, and passes the task's number in environment variables. The
tasks find each other through a file in `state_home()`, which also has the join token: the nodes of
a step must share that directory, as they share a home directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from backends.registry import devices
from coordinator.members.listening import reachable_addresses
from protocol.base.address import format_address
from protocol.base.device_name import AUTO_ORDER
from protocol.base.errors import RunFailed, Unreachable, text_of
from protocol.machine.secret_file import read_secret, state_home, write_secret
from protocol.wire.address_file import PublishedAddress
from worker.join.address import find_in_file
from worker.join.credentials import WorkerCredentials
from worker.scripts.launch import JoinOptions

_ADDRESS_TIMEOUT_S: Final = 600.0
"""Task 0 builds its task first, which may load a large model."""
_POLL_INTERVAL_S: Final = 1.0
_REPORT_INTERVAL_S: Final = 30.0
_RETRY_FOR_S: Final = 300.0
_JOIN_TIMEOUT_S: Final = 600.0
"""How long task 0 waits for the other tasks: a task that failed before `fit` never joins, and a
task that loads a large model takes minutes."""
_FILE_LIFETIME_S: Final = 30 * 86_400.0
"""Files of steps that Slurm killed are removed after this time, which is longer than a step
runs."""


@dataclass(frozen=True, slots=True)
class SrunStep:
    """The step of several tasks that this process belongs to.

    Attributes:
        task: Number of this process among the step's tasks.
        tasks: Number of tasks of the step.
        nodes: Number of nodes on which the tasks run.
        local_task: Number of this process among the tasks of its node.
        name: Job, step and restart number: unique on the cluster.
        call: Number of the call of `fit` within the script, counted from 1. Each call has its own
            files, so that no task takes an earlier call's failure for the current one's.
    """

    task: int
    tasks: int
    nodes: int
    local_task: int
    name: str
    call: int = 1

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> SrunStep | None:
        """Return the step that `environment` describes; None outside srun, or if it has one task.

        A batch script has SLURM_NTASKS and SLURM_PROCID too, although it is a single process.
        """
        numbers = [
            environment.get(f"SLURM_{name}", "")
            for name in ("PROCID", "STEP_NUM_TASKS", "STEP_NUM_NODES", "LOCALID")
        ]
        if not all(text.isdecimal() for text in numbers) or "TORCHELASTIC_RUN_ID" in environment:
            return None
        task, tasks, nodes, local_task = map(int, numbers)
        if tasks < 2:
            return None
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        name = ".".join(environment.get(variable) or "0" for variable in names)
        return SrunStep(task, tasks, nodes, local_task, name)

    @property
    def is_leader(self) -> bool:
        """Whether this is the task that starts the coordinator."""
        return self.task == 0

    @property
    def bind(self) -> str:
        """The address at which the coordinator listens, unless the user chose one."""
        return "127.0.0.1:0" if self.nodes == 1 else "0.0.0.0:0"

    @property
    def address_file(self) -> Path:
        """The file in which task 0 publishes the coordinator's address."""
        return state_home() / "srun" / f"{self.name}.{self.call}.json"

    @property
    def _failure_file(self) -> Path:
        return self.address_file.with_suffix(".failed")

    # Task 0.

    def publish(self, host: str, port: int) -> None:
        """Tell the other tasks that the coordinator listens at this host and port.

        Raises:
            UsageError: The file cannot be written.
        """
        reachable = [
            format_address(reachable_host, port) for reachable_host in reachable_addresses(host)
        ]
        address_document = PublishedAddress(
            data=format_address(host, port), control="", reachable=tuple(reachable[:32])
        )
        write_secret(self.address_file, address_document.to_json())

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Publish the reason if task 0's `fit` fails in this context, for the other tasks."""
        self._failure_file.unlink(missing_ok=True)
        _remove_older(self.address_file.parent, time.time() - _FILE_LIFETIME_S)
        try:
            yield
        except Exception as error:
            write_secret(self._failure_file, text_of(error))
            raise
        except BaseException:
            write_secret(self._failure_file, "it was interrupted")
            raise
        finally:
            self.address_file.unlink(missing_ok=True)

    # The other tasks.

    def join_options(self, backend: str, device: int | str | None) -> JoinOptions:
        """Return the options with which this task joins the run of task 0."""
        host = socket.gethostname().partition(".")[0] or "worker"
        path = self.address_file
        return JoinOptions(
            find_coordinator=lambda: asyncio.run(self._find()),
            name=f"{host}-{self.task}",
            backend=backend,
            device=device,
            retry_for_s=_RETRY_FOR_S,
            credentials=WorkerCredentials(),
            duty="train",
            print_line=_ignore_line,
            search_again=lambda: find_in_file(path, 0.0, _ignore_line),
            failure=self._failure,
        )

    def _failure(self) -> str:
        """Return why task 0 has failed; empty if it has not."""
        reason = read_secret(self._failure_file)
        return f"task 0 of this srun step failed: {reason}" if reason else ""

    async def _find(self) -> tuple[str, int]:
        """Wait for the coordinator's address.

        Raises:
            RunFailed: Task 0 has failed.
            Unreachable: Task 0 has not published an address in time.
        """
        began_s = reported_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s - reported_s >= _REPORT_INTERVAL_S:
                reported_s = now_s
                _print_line(
                    f"task {self.task}: waiting {now_s - began_s:.0f} s for task 0 to call "
                    "samestep.fit; if it has failed, srun's output says why "
                    "(srun --kill-on-bad-exit=1 ends all tasks then)"
                )
            if reason := self._failure():
                raise RunFailed(reason)
            try:
                return await find_in_file(self.address_file, _POLL_INTERVAL_S, _ignore_line)
            except Unreachable:
                if now_s - began_s >= _ADDRESS_TIMEOUT_S:
                    raise Unreachable(
                        "expected the address of task 0's coordinator in "
                        f"{str(self.address_file)!r} within {_ADDRESS_TIMEOUT_S:.0f} s, found "
                        "none: task 0 may have failed before samestep.fit (see its output), or "
                        "the nodes do not share that directory: set SAMESTEP_HOME to one on a "
                        "shared file system"
                    ) from None

    # All tasks.

    def device_of(self, backend: str, device: int | str | None) -> tuple[str, int | str | None]:
        """Choose another card for each task of a node, if all its tasks see all its cards.

        Args:
            backend: As in `--backend`.
            device: The requested device; None for the first.
        """
        cards = _cards(backend) if device is None else 0
        return backend, self.local_task % cards if cards > 1 else device


@dataclass(slots=True)
class TaskDeadline:
    """The deadline until which task 0 waits for the other tasks to join.

    Attributes:
        tasks: Number of tasks of the step; 0: do not wait.
        deadline_s: The end of the wait, on the clock `time.monotonic`; None: no task is missing.
    """

    tasks: int
    deadline_s: float | None = field(default_factory=lambda: time.monotonic() + _JOIN_TIMEOUT_S)
    _worker_count: int = 0

    def update(self, workers: Collection[str], *, has_started: bool) -> None:
        """Update the deadline for these workers; once training has started, there is none."""
        self._worker_count = len(workers)
        if has_started or self._worker_count >= self.tasks:
            self.deadline_s = None
        elif self.deadline_s is None:
            self.deadline_s = time.monotonic() + _JOIN_TIMEOUT_S

    def error(self) -> Unreachable:
        """Return the error for tasks that have not joined in time."""
        return Unreachable(
            f"expected all {self.tasks} tasks of this srun step in samestep.fit within "
            f"{_JOIN_TIMEOUT_S:.0f} s, got {self._worker_count}: the output of the missing tasks "
            "says why they failed (srun --kill-on-bad-exit=1 then ends all tasks); to start with "
            "fewer, set SAMESTEP_EXPECT_WORKERS"
        )


def _remove_older(directory: Path, oldest_s: float) -> None:
    """Remove files that failed or killed steps left behind before a time, in seconds since 1970."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest_s:
                    path.unlink()


@cache
def _cards(backend: str) -> int:
    """Count the usable cards of a backend; of auto: of the first backend that has any."""
    card_backends = [
        device.backend for device in devices() if device.usable and not device.software
    ]
    candidates = AUTO_ORDER if backend == "auto" else (backend,)
    counts = (card_backends.count(name) for name in candidates if name != "cpu")
    return next(filter(None, counts), 0)


def _print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _ignore_line(text: str) -> None:
    """Drop a line: the coordinator reports these workers."""
