"""Kernels of fused attention, whose invocations cooperate: on the CPU and on a device."""

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
from backends.wgpu.lowering.lowering import Templates
from backends.wgpu.program import CompiledProgram
from backends.wgpu.shaders.attention.problem import AttentionSizes
from tests.backends.wgpu.on_device import Function
from tests.backends.wgpu.products import small_tiles

pytest.importorskip("ziglang")

_SEPARATE = Convention(fused=False)


@dataclass(frozen=True, slots=True)
class _Fused(Templates):
    """AttentionPolicy attention of any size."""

    def fuses(self, sizes: AttentionSizes) -> bool:
        del sizes
        return True


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tangent: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        q, k, v = leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        result = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return result.detach(), *torch.autograd.grad((result * tangent).sum(), leaves)


def _on(target: ComputeTarget, template: Templates) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    operands = [torch.randn((1, 2, 45, 20), generator=draw) for _ in range(4)]
    task = Trainable((), Function(_attention), lambda m, a: m(a))
    program = CompiledProgram(target, task, template, adds_on_device=False)
    try:
        results: list[torch.Tensor] = [*program.forward(tuple(operands), {})]
    finally:
        program.close()
    expected = _attention(*operands)
    for one, other in zip(results, expected, strict=True):
        assert float((one - other).norm()) < 1e-5 * float(other.norm())
    return results


@pytest.mark.slow
def test_a_device_and_the_cpu_give_the_same_bits(device: object) -> None:
    from backends.wgpu.canonical.vulkan import CanonicalDevice
    from backends.wgpu.device.device import Device

    assert isinstance(device, Device)
    cpu = CpuTarget(_SEPARATE, threads=2)
    cpu_bits = _on(cpu, _Fused(cooperative=True, matmul=product_shader, canonical=True))
    cpu.close()
    card = CanonicalDevice(device, _SEPARATE)
    card_bits = _on(card, _Fused(cooperative=True, matmul=small_tiles, canonical=True))
    for one, other in zip(cpu_bits, card_bits, strict=True):
        assert np.array_equal(one.numpy().view(np.uint32), other.numpy().view(np.uint32))
