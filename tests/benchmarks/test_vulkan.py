"""The Vulkan benchmark in its smallest size: that it measures and checks, never how much."""

import pytest

from backends.wgpu.adapters import adapters
from benchmarks import vulkan


def test_sides_take_turns_and_the_first_round_is_left_out():
    order = []
    timed = vulkan.by_turns([lambda: order.append("a"), lambda: order.append("b")], 2)
    assert order == ["a", "b"] * 3
    assert [len(side.wall_s) for side in timed] == [2, 2]
    assert vulkan.ratios([2.0, 6.0, 1.0], [1.0, 2.0, 1.0]) == "2.00 (1.00-3.00)"


def test_a_product_is_measured_and_right():
    found = adapters()
    if isinstance(found, str):
        pytest.skip(found)
    from backends.wgpu.backend import VulkanBackend

    backend = VulkanBackend(0)
    row = vulkan.matmul_row(backend, (16, 32, 8), 1)
    backend.device.close()
    assert row[0] == "16 x 32 by 32 x 8"
    assert float(row[-2]) < 1e-5
