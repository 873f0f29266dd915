"""The Vulkan backend: one adapter, opened on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

from backends.base.interface import Batch, DeviceInfo, Trainable
from backends.wgpu.canonical_programs import compile_canonical_for_device
from backends.wgpu.compiled import compile_program
from backends.wgpu.device.adapters import Adapter, adapters
from backends.wgpu.device.arithmetic import count_changed_float16, count_wrong_additions
from backends.wgpu.device.device import Device
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from protocol.base.errors import BackendUnavailable
from protocol.base.limits import MICROBATCHES_PER_DISPATCH

_BINDINGS: Final = 16
"""Limit on storage buffers per shader: merging more kernels gains nothing, since one merged
kernel already occupies the whole device."""


class VulkanBackend:
    """One Vulkan device."""

    def __init__(self, index: int = 0) -> None:
        available = adapters()
        if isinstance(available, str):
            raise BackendUnavailable("vulkan", available)
        self._index = index
        self.adapter: Adapter = available[index]
        self._device: Device | None = None
        self._tuner: MatmulTuner | None = None

    @property
    def info(self) -> DeviceInfo:
        """The device's name and, if known, the size of its memory."""
        return self.adapter.info(self._index)

    @property
    def device(self) -> Device:
        """The opened device, shared by all programs."""
        if self._device is None:
            self._device = Device(self.adapter)
        return self._device

    @property
    def tuner(self) -> MatmulTuner:
        """The tuner that chooses the matmul kernel for each shape; shared by all programs."""
        if self._tuner is None:
            self._tuner = MatmulTuner(self.device)
        return self._tuner

    @cached_property
    def has_exact_additions(self) -> bool:
        """Whether the device's additions are exact, so that it may add subtree sums.

        See `backends.wgpu.device.arithmetic`.
        """
        return count_wrong_additions(self.device) == 0

    @cached_property
    def float16_refusal(self) -> str:
        """Why the device cannot compute in float16; empty if it can."""
        if "shader-f16" not in self.device.features:
            return f"{self.adapter.name!r} has no float16 (Vulkan's shaderFloat16)"
        if count := count_changed_float16(self.device):
            return f"{self.adapter.name!r} does not preserve {count} of the 65,536 float16 values"
        return ""

    def numerics_profile(self, threads: int) -> Mapping[str, str]:
        """Return the properties that determine the bits of a shader's results: adapter, driver,
        wgpu's version, and whether additions are exact."""
        del threads  # the device schedules its threads
        return {
            "device": "vulkan",
            "name": self.adapter.name,
            "additions": "exact" if self.has_exact_additions else "not exact",
            **self.device.traits(),
        }

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        other_batches: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> CompiledProgram:
        """Capture the step for batches like the example, and upload the weights.

        Raises:
            SamestepError: The precision is not supported, the step or an evaluation cannot be
                captured, or an operator has no rule.
        """
        batches = (example, *other_batches)
        if trainable.arithmetic.is_canonical:
            return compile_canonical_for_device(
                self.device,
                self.tuner,
                trainable,
                batches,
                evaluations,
                adds_on_device=self.has_exact_additions,
            )
        device_bindings = self.device.limits["max-storage-buffers-per-shader-stage"]
        bindings = min(device_bindings, _BINDINGS)
        options = KernelOptions(
            not self.adapter.software,
            self.tuner.shader,
            bindings=bindings,
            workgroup_bytes=self.tuner.traits.workgroup_bytes,
            microbatches=MICROBATCHES_PER_DISPATCH,
        )
        adds_on_device = self.has_exact_additions
        float16_refusal = self.float16_refusal if trainable.precision == "float16" else ""
        return compile_program(
            self.device,
            trainable,
            options,
            batches,
            evaluations,
            adds_on_device=adds_on_device,
            float16_refusal=float16_refusal,
        )
