"""The device of one process: chosen once, by the words of whoever started it."""

from __future__ import annotations

from collections.abc import Callable

from backends.base.interface import Backend, DeviceInfo
from protocol.base.errors import DeviceError, ExitCode, UsageError
from protocol.command.system_journal import write_error
from protocol.spec.run_spec import RunSpec
from worker.tasks.base import Task


class LocalDevice:
    """The engine's toolbox: chooses the backend once, and builds tasks for it."""

    def __init__(
        self,
        name: str,
        wanted: int | str | None,
        tell: Callable[[str], None],
        *,
        shard: bool = False,
    ) -> None:
        self._shard = shard
        self._name = name
        self._wanted = wanted
        self._tell = tell
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        """See `engine.Toolbox`."""
        if self._backend is None:
            from backends.registry import choose  # noqa: PLC0415 -- may import torch: seconds

            choice = choose(self._name, self._wanted)
            info = choice.backend.info
            self._tell(f"device: {info.name}: {choice.reason}")
            if info.backend == "vulkan":
                _end_in_order(info.name)
            self._backend = _sharded(info) if self._shard else choice.backend
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        """See `engine.Toolbox`."""
        from worker.tasks.registry import build  # noqa: PLC0415 -- may import torch: seconds

        return build(spec)


def _sharded(info: DeviceInfo) -> Backend:
    if info.backend not in ("cpu", "cuda"):
        raise UsageError(f"--shard is for CUDA cards and the CPU, not for {info.backend}")
    from backends.eager.sharded import ShardedBackend  # noqa: PLC0415 -- imports torch: seconds

    return ShardedBackend("cuda" if info.backend == "cuda" else "cpu", info.index)


def _end_in_order(device: str) -> None:
    """One line and exit code 1 also where wgpu's library ends the process."""
    from backends.wgpu.device.last_words import on_abort  # noqa: PLC0415 -- for Vulkan alone

    reason = (
        "a library ended the process; wgpu does when the driver loses the device or has no memory "
        "left for a submission, and its own words stand above"
    )
    on_abort(lambda: write_error("worker", DeviceError(device, reason)), ExitCode.FAILED)
