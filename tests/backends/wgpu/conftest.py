"""A Vulkan device, or the reason why there is none: then these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backends.wgpu.adapters import adapters


@pytest.fixture(scope="session")
def device() -> Iterator[object]:
    """The first adapter, opened once for all tests of a process."""
    found = adapters()
    if isinstance(found, str):
        pytest.skip(found)
    from backends.wgpu.device import Device

    opened = Device(found[0])
    yield opened
    opened.close()


@pytest.fixture
def own_device() -> Iterator[object]:
    """One that a test may break."""
    found = adapters()
    if isinstance(found, str):
        pytest.skip(found)
    from backends.wgpu.device import Device

    opened = Device(found[0])
    yield opened
    opened.close()
