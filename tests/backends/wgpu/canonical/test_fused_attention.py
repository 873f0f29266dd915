"""Canonical fused attention has the same bits on the CPU and on a Vulkan device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional

from backends.base.interface import Trainable
from backends.wgpu.canonical.convention import Convention
from backends.wgpu.canonical.host import CpuTarget, product_shader
from backends.wgpu.device.target import ComputeTarget
from backends.wgpu.lowering.lowering import KernelOptions
from backends.wgpu.program import CompiledProgram
from backends.wgpu.shaders.attention.problem import AttentionSizes
from tests.backends.wgpu.on_device import Function
from tests.backends.wgpu.products import small_tiles

pytest.importorskip("ziglang")

_CONVENTION = Convention(fused=False)  # of multiply-adds, not of attention


@dataclass(frozen=True, slots=True)
class _AlwaysFusing(KernelOptions):
    """Options that fuse attention of any size."""

    def fuses(self, sizes: AttentionSizes) -> bool:
        del sizes
        return True


def _attention_and_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        q, k, v = leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        result = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return result.detach(), *torch.autograd.grad((result * grad_output).sum(), leaves)


def _run_attention(target: ComputeTarget, kernel_options: KernelOptions) -> list[torch.Tensor]:
    """Return the output and the gradients, after a comparison with torch's."""
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn((1, 2, 45, 20), generator=generator) for _ in range(4)]
    task = Trainable((), Function(_attention_and_gradients), lambda m, a: m(a))
    program = CompiledProgram(target, task, kernel_options, adds_on_device=False)
    try:
        results: list[torch.Tensor] = [*program.forward(tuple(operands), {})]
    finally:
        program.close()
    for actual, expected in zip(results, _attention_and_gradients(*operands), strict=True):
        assert float((actual - expected).norm()) < 1e-5 * float(expected.norm())
    return results


@pytest.mark.slow
def test_a_device_and_the_cpu_give_the_same_bits(device: object) -> None:
    from backends.wgpu.canonical.vulkan import CanonicalDevice
    from backends.wgpu.device.device import Device

    assert isinstance(device, Device)
    cpu = CpuTarget(_CONVENTION, threads=2)
    cpu_options = _AlwaysFusing(cooperative=True, matmul=product_shader, canonical=True)
    cpu_results = _run_attention(cpu, cpu_options)
    cpu.close()
    vulkan = CanonicalDevice(device, _CONVENTION)
    vulkan_options = _AlwaysFusing(cooperative=True, matmul=small_tiles, canonical=True)
    vulkan_results = _run_attention(vulkan, vulkan_options)
    for on_cpu, on_vulkan in zip(cpu_results, vulkan_results, strict=True):
        assert np.array_equal(on_cpu.numpy().view(np.uint32), on_vulkan.numpy().view(np.uint32))
