"""The device of one process, chosen once from the backend and device options."""

from __future__ import annotations

from collections.abc import Callable

from backends.base.interface import Backend, DeviceInfo
from protocol.base.errors import DeviceError, ExitCode, UsageError
from protocol.cli.systemd import write_error
from protocol.spec.run_spec import ModelRun, RunSpec
from worker.tasks.base.task import Task


class LocalDevice:
    """An `engine.BackendFactory` that chooses the backend once, and builds tasks for it."""

    def __init__(
        self,
        name: str,
        device: int | str | None,
        print_line: Callable[[str], None],
        *,
        shard: bool = False,
    ) -> None:
        self._shard = shard
        self._name = name
        self._device = device
        self._print_line = print_line
        self._backend: Backend | None = None

    def backend(self) -> Backend:
        """See `engine.BackendFactory`."""
        if self._backend is None:
            from backends.registry import choose  # noqa: PLC0415 -- may import torch: seconds

            choice = choose(self._name, self._device)
            info = choice.backend.info
            self._print_line(f"device: {info.name}: {choice.reason}")
            if info.backend == "vulkan":
                _report_abort(info.name)
            if info.backend == "cuda":
                from backends.eager import torch_devices  # noqa: PLC0415 -- already imported

                torch_devices.enable_expandable_segments(
                    torch_devices.torch_device("cuda", info.index)
                )
            self._backend = _sharded_backend(info) if self._shard else choice.backend
        return self._backend

    def task(self, spec: RunSpec) -> Task:
        """See `engine.BackendFactory`."""
        from worker.tasks.registry import build  # noqa: PLC0415 -- may import torch: seconds

        info = self.backend().info
        is_torch_card = info.backend in ("cuda", "xpu", "accelerator")
        if is_torch_card and isinstance(spec, ModelRun) and not spec.is_capture and not self._shard:
            self._report_memory(spec, info)
        return build(spec)

    def _report_memory(self, spec: ModelRun, info: DeviceInfo) -> None:
        """Print the memory that a run needs on a card, and settings that are slow there.

        Raises:
            DeviceOutOfMemory: The run does not fit.
        """
        from worker.models.device_memory import check_device_memory  # noqa: PLC0415 -- torch

        if info.memory_bytes:
            name = f"{info.backend} {info.index}"
            if line := check_device_memory(spec, name, info.memory_bytes):
                self._print_line(line)
        slow_settings = {
            key: faster_value
            for key, value, default, faster_value in (
                ("model.precision", spec.model.precision, "float32", "bfloat16"),
                ("model.attention", spec.model.attention, "eager", "sdpa"),
            )
            if value == default
        }
        if slow_settings:
            faster = " ".join(
                f"--set {key}={faster_value}" for key, faster_value in slow_settings.items()
            )
            self._print_line(f"several times as fast on a card, with different bits: {faster}")


def _sharded_backend(info: DeviceInfo) -> Backend:
    if info.backend in ("vulkan", "mps"):
        raise UsageError(
            f"--shard: expected a cuda, xpu or cpu device, got {info.backend}; choose another "
            "--backend"
        )
    from backends.eager.sharded import ShardedBackend  # noqa: PLC0415 -- imports torch: seconds

    return ShardedBackend(info.backend, info.index)


def _report_abort(device: str) -> None:
    """Have an abort of wgpu's library print one line, and exit with code 1."""
    from backends.wgpu.device.abort_handler import install_abort_handler  # noqa: PLC0415 -- only for Vulkan

    reason = (
        "a library aborted the process; wgpu does so if the driver loses the device or lacks "
        "memory for a submission; its own message is above"
    )
    install_abort_handler(
        lambda: write_error("worker", DeviceError(device, reason)), ExitCode.FAILED
    )
