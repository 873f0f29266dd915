"""The Vulkan backend as the registry knows it: one adapter, opened when it is first needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from backends.base.frozen_base import widen
from backends.base.interface import Batch, DeviceInfo, Trainable
from backends.wgpu.device.adapters import Adapter, adapters
from backends.wgpu.device.additions import differing_additions
from backends.wgpu.device.device import Device
from backends.wgpu.device.matmul_tuning import MatmulTuner
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.parity import Parity
from backends.wgpu.program import VulkanProgram
from protocol.base.errors import BackendUnavailable, SamestepError


class VulkanBackend:
    """One Vulkan device."""

    def __init__(self, index: int = 0) -> None:
        found = adapters()
        if isinstance(found, str):
            raise BackendUnavailable("vulkan", found)
        self._index = index
        self.adapter: Adapter = found[index]
        self._device: Device | None = None
        self._tuner: MatmulTuner | None = None

    @property
    def info(self) -> DeviceInfo:
        """Name and, where known, memory."""
        return self.adapter.info(self._index)

    @property
    def device(self) -> Device:
        """The opened adapter, the same for every program."""
        if self._device is None:
            self._device = Device(self.adapter)
        return self._device

    @property
    def tuner(self) -> MatmulTuner:
        """Which matmul kernel is taken for which shapes, the same for every program."""
        if self._tuner is None:
            self._tuner = MatmulTuner(self.device)
        return self._tuner

    @cached_property
    def exact_additions(self) -> bool:
        """Whether the device may add node sums: see `backends.wgpu.device.additions`."""
        return differing_additions(self.device) == 0

    def signature(self, threads: int) -> Mapping[str, str]:
        """Adapter, driver and compiler: what decides the bits of a shader's results."""
        del threads  # the device has its own
        return {
            "device": "vulkan",
            "name": self.adapter.name,
            "additions": "exact" if self.exact_additions else "not exact",
            **self.device.traits(),
        }

    def compile(
        self,
        trainable: Trainable,
        example: Batch,
        others: Sequence[Batch] = (),
        evaluations: Sequence[Batch] = (),
    ) -> VulkanProgram:
        """Capture the step for batches like the example, and upload the weights.

        Raises:
            SamestepError: The precision is not to be had, the step or an evaluation cannot be
                captured, or an operator has no rule.
        """
        if trainable.precision != "float32":
            raise SamestepError(
                f"expected model.precision float32, got {trainable.precision}: the vulkan backend "
                "computes in float32 only"
            )
        if trainable.module is not None:
            widen(trainable.module)
        template = Templates(not self.adapter.software, self.tuner.shader)
        program = VulkanProgram(self.device, trainable, template, adds=self.exact_additions)
        if trainable.rows is not None:
            for batch in (example, *others):
                program.rows(batch)
            return program
        parity = Parity(program, trainable, [example, *others])
        program.check(example)
        for other in others:
            program.warm_up(other)
        if trainable.evaluate is not None:
            for part in evaluations:
                program.evaluate(part)
        program.parity = parity.check()
        return program
