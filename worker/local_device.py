"""The device of one process: chosen once, by the words of whoever started it."""

from __future__ import annotations

from collections.abc import Callable

from backends.base.interface import Backend, DeviceInfo
from protocol.base.errors import DeviceError, ExitCode, UsageError
from protocol.cli.systemd import write_error
from protocol.spec.run_spec import ModelRun, RunSpec
from worker.tasks.base.task import Task


class LocalDevice:
    """The engine's toolbox: chooses the backend once, and builds tasks for it."""

    def __init__(
        self,
        name: str,
        device: int | str | None,
        tell: Callable[[str], None],
        *,
        shard: bool = False,
    ) -> None:
        self._shard = shard
        self._name = name
        self._device = device
        self._tell = tell
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        """See `engine.BackendFactory`."""
        if self._backend is None:
            from backends.registry import choose  # noqa: PLC0415 -- may import torch: seconds

            choice = choose(self._name, self._device)
            info = choice.backend.info
            self._tell(f"device: {info.name}: {choice.reason}")
            if info.backend == "vulkan":
                _end_in_order(info.name)
            if info.backend == "cuda":
                from backends.eager import torch_devices  # noqa: PLC0415 -- imported by now

                torch_devices.grow_without_holes(torch_devices.torch_device("cuda", info.index))
            self._backend = _sharded(info) if self._shard else choice.backend
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        """See `engine.BackendFactory`."""
        from worker.tasks.registry import build  # noqa: PLC0415 -- may import torch: seconds

        info = self.backend().info
        is_of_torch = info.backend in ("cuda", "xpu", "accelerator")
        if is_of_torch and isinstance(spec, ModelRun) and not spec.captures and not self._shard:
            self._say_what_it_takes(spec, info)
        return build(spec)

    def _say_what_it_takes(self, run: ModelRun, info: DeviceInfo) -> None:
        """Say what a run takes of a card, and which of its settings are slow there.

        Raises:
            DeviceOutOfMemory: It does not fit.
        """
        from worker.models.device_memory import check_device_memory  # noqa: PLC0415 -- torch

        if info.memory_bytes:
            name = f"{info.backend} {info.index}"
            if line := check_device_memory(run, name, info.memory_bytes):
                self._tell(line)
        slow = {
            key: better
            for key, value, default, better in (
                ("model.precision", run.model.precision, "float32", "bfloat16"),
                ("model.attention", run.model.attention, "eager", "sdpa"),
            )
            if value == default
        }
        if slow:
            faster = " ".join(f"--set {key}={better}" for key, better in slow.items())
            self._tell(f"a card computes several times as fast, with different bits, with {faster}")


def _sharded(info: DeviceInfo) -> Backend:
    if info.backend in ("vulkan", "mps"):
        raise UsageError(
            f"--shard: expected a cuda, xpu or cpu device, got {info.backend}; choose another "
            "--backend"
        )
    from backends.eager.sharded import ShardedBackend  # noqa: PLC0415 -- imports torch: seconds

    return ShardedBackend(info.backend, info.index)


def _end_in_order(device: str) -> None:
    """One line and exit code 1 also where wgpu's library ends the process."""
    from backends.wgpu.device.abort_handler import on_abort  # noqa: PLC0415 -- for Vulkan alone

    reason = (
        "a library ended the process; wgpu does when the driver loses the device or has no memory "
        "left for a submission, and its own message is above"
    )
    on_abort(lambda: write_error("worker", DeviceError(device, reason)), ExitCode.FAILED)
