"""Probe which conventions a device follows, and refuse a run with another convention."""

from __future__ import annotations

import pytest

from backends.wgpu.canonical.convention import Convention
from backends.wgpu.canonical.probe import find_conventions, first_difference
from backends.wgpu.device.device import Device
from backends.wgpu.device.matmul_tuning import MatmulTuner
from protocol.base.errors import SamestepError
from protocol.spec.sections.model import ArithmeticSpec
from tests.backends.wgpu.small_models import llama, next_token_loss, token_batch, trainable

pytest.importorskip("ziglang")


@pytest.mark.slow
def test_software_vulkan_follows_the_separate_convention(device: Device) -> None:
    followed, differences = find_conventions(device, MatmulTuner(device).shader)
    assert followed == [Convention(fused=False)]
    assert differences[Convention(fused=True)].operator == "a multiply-add"


def test_refusal_names_the_convention_of_the_device() -> None:
    from backends.wgpu.backend import VulkanBackend

    task = trainable(llama(), next_token_loss, arithmetic=ArithmeticSpec(mode="canonical"))
    with pytest.raises(SamestepError, match=r"a multiply-add of 0x.*multiply_add=separate"):
        VulkanBackend().compile(task, token_batch())


@pytest.mark.slow
def test_a_wrong_operator_is_named(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.wgpu.canonical import wgsl_text
    from backends.wgpu.canonical.vulkan import CanonicalDevice

    faulty = wgsl_text._CORRECTED_FUNCTIONS.replace("q, rest != 0u);", "q + 2u, rest != 0u);")
    monkeypatch.setattr(wgsl_text, "_CORRECTED_FUNCTIONS", faulty)
    convention = Convention(fused=False)
    target = CanonicalDevice(device, convention)
    difference = first_difference(target, MatmulTuner(device).shader, convention)
    assert difference is not None
    assert difference.operator == "a quotient"
