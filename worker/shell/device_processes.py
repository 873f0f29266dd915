"""The devices of a host as processes of their own, with shared memory between them.

A device's process holds nothing that outlives it, and ends when the host's does: it reads the end
of its pipe. Shared memory has no name, so it is gone with the last of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from backends.base.interface import Array
from protocol.base.errors import UsageError
from protocol.command.own_command import own_command, own_environment
from protocol.host.memory import killed_for_memory, killed_more
from protocol.host.shared_memory import SharedMemory
from worker.logic import actions as act
from worker.shell.device_pipe import Packed, Pipe, Reports, pack_order
from worker.shell.engine import Taken
from worker.shell.host_engine import Link, Lost, Told

_END_TIMEOUT_S: Final = 10.0


class DeviceProcesses:
    """See `host_engine.Devices`.

    Args:
        devices: Number or part of the name of each device, by the name that people read.
        backend: Of all.
        tell: Takes what a device's process wants a person to know.
        trace: Where the traces go, one file for each device beside this one.
        module: What each process runs.

    Raises:
        UsageError: This system has not what it takes.
    """

    def __init__(
        self,
        devices: dict[str, int | str | None],
        backend: str,
        tell: Callable[[str], None],
        trace: Path | None = None,
        module: str = "worker.device_process",
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise UsageError(
                "several devices in one worker need Linux: start a worker for each, such as "
                "worker --gpus 0"
            )
        self._wanted = devices
        self._backend = backend
        self._tell = tell
        self._trace = trace
        self._module = module
        try:
            self._memory = SharedMemory()
        except OSError as error:
            raise UsageError(
                "several devices of one worker share memory: expected no limit of addresses and "
                f"of a file's length, got {(error.strerror or str(error))!r}; ulimit -v unlimited, "
                "ulimit -f unlimited, or start a worker for each device"
            ) from error
        self._begun: list[_Process] = []

    def allocate(self, elements: int) -> Array:
        """See `host_engine.Devices`.

        Raises:
            SharedMemoryFull: There is no room.
        """
        return self._memory.new_array(elements)

    def shared(self, values: Array, *, once: bool) -> Array:
        """See `host_engine.Devices`; those that lie there already are not copied."""
        if self._memory.place_of(values) is not None:
            return values
        own = self._memory.new_array(len(values), once=once)
        own[:] = values
        return own

    def begin(self, name: str, told: Told, lost: Lost) -> Link:
        """See `host_engine.Devices`."""
        trace = self._trace and str(self._trace.with_stem(f"{self._trace.stem}-{name}"))
        arguments = (self._module, name, self._backend, _argument(self._wanted[name]), trace or "")
        process = _Process(arguments, self._memory, told, lost, self._tell)
        self._begun.append(process)
        return process

    def close(self) -> None:
        """See `host_engine.Devices`."""
        for process in self._begun:
            process.wait()


class _Process:
    """One device's process, and the thread that hears it."""

    def __init__(
        self,
        arguments: Sequence[str],
        memory: SharedMemory,
        told: Told,
        lost: Lost,
        tell: Callable[[str], None],
    ) -> None:
        ours, theirs = socket.socketpair()
        own = SharedMemory()
        self._host_memory = memory
        self._reports = Reports(own)
        self._pipe = Pipe(ours)
        self._told, self._lost, self._tell = told, lost, tell
        self._given: deque[tuple[act.DeviceAction, Taken]] = deque()
        self._ending = False
        self._killed_before = killed_for_memory()
        module, *given = arguments
        with theirs:
            fds = (theirs.fileno(), memory.fd, own.fd)
            self._process = subprocess.Popen(  # noqa: S603 -- our own command
                [*own_command(module), *map(str, fds), *given],
                pass_fds=fds, env=own_environment(), stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        own.close()
        self._thread = threading.Thread(target=self._hear, name="device", daemon=True)
        self._thread.start()

    def give(self, action: act.DeviceAction, done: Taken) -> None:
        if isinstance(action, act.Apply | act.LoadChunk):
            # It takes these in turn; until then their memory is not given to anything else.
            self._given.append((action, done))
        else:
            done()
        self._pipe.send(*self._freed(), pack_order(action, self._host_memory))

    def end(self) -> None:
        self._ending = True
        self._pipe.close()

    def wait(self) -> None:
        """Until it is gone; it is killed if that takes long."""
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hear(self) -> None:
        for packed in self._pipe.received():
            self._read(packed)
            if freed := self._freed():
                self._pipe.send(*freed)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        self._process.kill()
        code = self._process.wait()
        while self._given:
            self._given.popleft()[1]()
        if not self._ending:
            self._lost(_how(code, self._killed_before))

    def _read(self, packed: Packed) -> None:
        match packed:
            case ["say", text]:
                self._tell(text)
            case ["taken"]:
                self._given.popleft()[1]()
            case _:
                self._told(self._reports.unpack(packed))

    def _freed(self) -> list[Packed]:
        unneeded, places = self._reports.unneeded, []
        with contextlib.suppress(IndexError):
            while True:
                places.append(unneeded.popleft())
        return [["free", places]] if places else []


def _argument(device: int | str | None) -> str:
    return "" if device is None else str(device)


def _how(code: int, killed_before: Mapping[str, int]) -> str:
    if code == -signal.SIGKILL and killed_more(killed_before, killed_for_memory()):
        return "was killed by the kernel for memory (oom_kill)"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}"
