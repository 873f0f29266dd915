"""Run each device of a multi-device worker in a separate process, with shared memory.

A device process ends when its pipe is closed, so it ends with the worker. The shared memory has no
name and is freed with the last process.
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
from types import MappingProxyType
from typing import Final

from backends.base.interface import Array
from protocol.base.errors import BackendUnavailable, UsageError
from protocol.cli.command_line import child_environment, command_of
from protocol.exact.replica import PartKind, Replica, part_elements
from protocol.machine.memory import count_oom_kills, has_new_kills
from protocol.machine.shared_memory import Extent, SharedMemory
from protocol.spec.manifest import Block
from protocol.spec.sections.optimizer import OptimizerSpec
from worker.logic import actions as act
from worker.logic import events
from worker.shell.device_pipe import Packed, Pipe, order_codec, report_codec
from worker.shell.group_engine import Link, LossHandler, ReportHandler
from worker.shell.script_phase import ScriptLimits, ScriptPhase

_END_TIMEOUT_S: Final = 10.0


class DeviceProcesses:
    """Implements `group_engine.Devices` with processes.

    Args:
        devices: Number or part of the name of each device, by display name.
        backend: The backend of all devices.
        print_line: Prints a line of a device process.
        trace: Trace file of the worker; each device writes one beside it.
        module: The module that each process runs.
        variables: Additional environment variables of the device processes.
        script: Limits of the user's script in the processes; None if they run none.

    Raises:
        UsageError: This system has no anonymous shared memory, or limits it.
    """

    def __init__(
        self,
        devices: dict[str, int | str | None],
        backend: str,
        print_line: Callable[[str], None],
        trace: Path | None = None,
        module: str = "worker.device_process",
        *,
        variables: Mapping[str, str] = MappingProxyType({}),
        script: ScriptLimits | None = None,
    ) -> None:
        if not hasattr(os, "memfd_create"):
            raise UsageError(
                "expected Linux for several devices in one worker, got another system; start one "
                "worker for each device, such as worker --gpus 0"
            )
        self._devices = devices
        self._backend = backend
        self._print_line = print_line
        self._trace = trace
        self._module = module
        self._script = script
        self._environment = {**child_environment(), **variables}
        try:
            self._memory = SharedMemory()
        except OSError as error:
            raise UsageError(
                "expected no limit on address space and file size, as devices of a worker share "
                f"memory, got {(error.strerror or str(error))!r}; run ulimit -v unlimited "
                "and ulimit -f unlimited, or start one worker for each device"
            ) from error
        self._processes: list[_Process] = []

    def replica(self, blocks: tuple[Block, ...], optimizer: OptimizerSpec) -> Replica:
        """See `group_engine.Devices`."""

        def zeros(kind: PartKind, block: int) -> Array:
            values = self._memory.new_array(part_elements(kind, blocks[block]), is_single_use=True)
            values.fill(0)
            return values

        return Replica(blocks, optimizer, zeros)

    def start(self, name: str, on_report: ReportHandler, on_loss: LossHandler) -> Link:
        """See `group_engine.Devices`."""
        trace = self._trace and str(self._trace.with_stem(f"{self._trace.stem}-{name}"))
        arguments = (
            self._module,
            name,
            self._backend,
            _format_device(self._devices[name]),
            trace or "",
        )
        process = _Process(
            arguments, self._memory, on_report, on_loss, self._print_line,
            environment=self._environment, script=self._script,
        )  # fmt: skip
        self._processes.append(process)
        return process

    @property
    def preparing(self) -> str:
        """See `group_engine.Devices`."""
        return next((p.preparing for p in self._processes if p.preparing), "")

    def close(self) -> None:
        """See `group_engine.Devices`."""
        for process in self._processes:
            process.wait()
        self._memory.close()


class _Process:
    """One device process, and the thread that reads its reports."""

    def __init__(
        self,
        arguments: Sequence[str],
        memory: SharedMemory,
        on_report: ReportHandler,
        on_loss: LossHandler,
        print_line: Callable[[str], None],
        *,
        environment: Mapping[str, str],
        script: ScriptLimits | None,
    ) -> None:
        worker_end, device_end = socket.socketpair()
        device_memory = SharedMemory()
        self._unused_extents: deque[Extent] = deque()
        self._orders = order_codec(memory)
        self._reports = report_codec(device_memory, self._unused_extents)
        self._pipe = Pipe(worker_end)
        self._on_report, self._on_loss, self._print_line = on_report, on_loss, print_line
        self._is_ending = False
        self.preparing = ""
        self._killed_before = count_oom_kills()
        module, *options = arguments
        self._name = options[0]
        self._script_phase: ScriptPhase | None = None
        if script is not None:
            self._script_phase = ScriptPhase(self._name, script, self._fail)
        with device_end:
            fds = [device_end.fileno(), memory.fd, device_memory.fd]
            inherited_fds = list(fds)
            if self._script_phase is not None:
                options.append(str(self._script_phase.output_fd))
                inherited_fds.append(self._script_phase.output_fd)
            self._process = subprocess.Popen(  # noqa: S603 -- our own command
                [*command_of(module), *map(str, fds), *options],
                pass_fds=inherited_fds, env=environment, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        device_memory.close()
        self._thread = threading.Thread(target=self._receive, name="device", daemon=True)
        self._thread.start()

    def send(self, order: act.GroupOrder) -> None:
        self._pipe.send(*self._free_messages(), self._orders.pack(order))

    def end(self) -> None:
        self._is_ending = True
        self._pipe.close()

    def wait(self) -> None:
        """Wait until the process is gone; kill it if that takes too long."""
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self) -> None:
        reason = ""
        for message in self._pipe.receive():
            if message[0] == "gone":
                reason = f"was ended: {message[1]}"
                break
            self._handle(message)
            if free_messages := self._free_messages():
                self._pipe.send(*free_messages)
        if not reason:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)
        self.preparing = ""
        self._process.kill()
        if (phase := self._script_phase) is not None:
            if self._is_ending:
                phase.drop_output()
            else:
                phase.show_output()
        if reason and not self._is_ending:
            self._on_loss(reason)  # before the process ends, which a driver may delay
        code = self._process.wait()
        if not reason and not self._is_ending:
            self._on_loss(_describe_end(code, self._killed_before))

    def _handle(self, message: Packed) -> None:
        match message:
            case ["say", text]:
                self._print_line(text)
            case ["preparing", text]:
                self.preparing = text
            case ["reached fit"]:
                assert self._script_phase is not None, "it runs a script"
                self._script_phase.reached_goal()
            case _:
                failures = (events.BuildFailed.__name__, events.DeviceFailed.__name__)
                self._end_script_phase(is_failure=message[0] in failures)
                self._on_report(self._reports.unpack(message))

    def _end_script_phase(self, *, is_failure: bool) -> None:
        """Show the script's output if it has not led to a task, else drop it."""
        if (phase := self._script_phase) is None:
            return
        if is_failure:
            phase.show_output()
        else:
            phase.drop_output()

    def _fail(self, reason: str) -> None:
        """Report that the device cannot be used; the worker ends, as the user chose the device."""
        assert self._script_phase is not None, "it runs a script"
        self._script_phase.show_output()
        self._on_report(events.DeviceFailed(BackendUnavailable(self._name, reason)))

    def _free_messages(self) -> list[Packed]:
        unused_extents, extents = self._unused_extents, []
        with contextlib.suppress(IndexError):
            while True:
                extents.append(unused_extents.popleft())
        return [["free", extents]] if extents else []


def _format_device(device: int | str | None) -> str:
    return "" if device is None else str(device)


def _describe_end(code: int, killed_before: Mapping[str, int]) -> str:
    if code == -signal.SIGKILL and has_new_kills(killed_before, count_oom_kills()):
        return "was killed by the kernel for memory (oom_kill)"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}"
