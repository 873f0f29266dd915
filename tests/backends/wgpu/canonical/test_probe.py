"""Which convention a device follows, and the error for a run with another one."""

from __future__ import annotations

import pytest

from backends.wgpu.canonical.convention import Convention
from backends.wgpu.canonical.probe import find_conventions, first_difference
from backends.wgpu.device.device import Device
from backends.wgpu.device.matmul_tuning import MatmulTuner
from protocol.base.errors import SamestepError
from protocol.spec.sections.model import ArithmeticSpec
from tests.backends.wgpu.small_models import llama, next_token_loss, text, trainable

pytest.importorskip("ziglang")


@pytest.mark.slow
def test_software_vulkan_rounds_products_and_keeps_subnormals(device: Device) -> None:
    follows, departs = find_conventions(device, MatmulTuner(device).shader)
    assert follows == [Convention(fused=False)]
    assert departs[Convention(fused=True)].operator == "a multiply-add"


def test_error_names_the_convention_to_write() -> None:
    from backends.wgpu.backend import VulkanBackend

    task = trainable(llama(), next_token_loss, arithmetic=ArithmeticSpec(mode="canonical"))
    with pytest.raises(SamestepError, match=r"a multiply-add of 0x.*multiply_add=separate"):
        VulkanBackend().compile(task, text())


@pytest.mark.slow
def test_deviating_kernel_is_named(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.wgpu.canonical import wgsl_text
    from backends.wgpu.canonical.vulkan import CanonicalDevice

    worse = wgsl_text._CORRECTED_FUNCTIONS.replace("q, rest != 0u);", "q + 2u, rest != 0u);")
    monkeypatch.setattr(wgsl_text, "_CORRECTED_FUNCTIONS", worse)
    convention = Convention(fused=False)
    target = CanonicalDevice(device, convention)
    difference = first_difference(target, MatmulTuner(device).shader, convention)
    assert difference is not None
    assert difference.operator == "a quotient"
