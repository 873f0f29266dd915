"""The vulkan backend: torch models captured once and run as WGSL through wgpu."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from backends.interface import Batch, DeviceInfo, Program, Trainable
from backends.wgpu.adapters import Adapter, adapters, pick
from backends.wgpu.device import Device
from backends.wgpu.matmul import matmul_shader
from backends.wgpu.program import VulkanProgram
from protocol.errors import BackendUnavailable, SamestepError


class VulkanBackend:
    """One adapter."""

    def __init__(self, wanted: int | str = 0) -> None:
        found = adapters()
        if isinstance(found, str):
            raise BackendUnavailable("vulkan", found)
        self._index, self.adapter = pick(found, wanted)

    @property
    def info(self) -> DeviceInfo:
        """The adapter's name."""
        return DeviceInfo("vulkan", self.adapter.name, True, "", self._index)

    def signature(self, threads: int) -> Mapping[str, str]:
        """Card, driver, and the versions that write and compile the shaders."""
        del threads
        return signature(self.adapter)

    def compile(self, trainable: Trainable, example: Batch) -> Program:
        """Capture the step for batches like the example, and upload the weights.

        Raises:
            SamestepError: The precision is not to be had, the step cannot be captured, or an
                operator has no rule.
        """
        if trainable.precision != "float32":
            raise SamestepError(
                f"expected model.precision float32, got {trainable.precision}: the vulkan backend "
                "computes in float32 only"
            )
        cooperative = not self.adapter.software
        program = VulkanProgram(Device(self.adapter), trainable, cooperative, matmul_shader)
        try:
            program.check(example)
        except BaseException:
            program.close()
            raise
        return program


def signature(adapter: Adapter) -> Mapping[str, str]:
    """What decides the bits here, by name."""
    import wgpu  # noqa: PLC0415  (adapters has loaded it)

    return {
        "device": "vulkan",
        "name": adapter.name,
        "adapter": f"{adapter.vendor_id:04x}:{adapter.device_id:04x}",
        "driver": adapter.driver,
        "torch": str(torch.__version__),
        "wgpu": str(wgpu.__version__),
    }
