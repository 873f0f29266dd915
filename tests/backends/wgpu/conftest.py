"""Provide a Vulkan device, or skip the tests with the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backends.wgpu.device.adapters import adapters


@contextmanager
def open_device() -> Iterator[object]:
    """Open the first adapter."""
    available = adapters()
    if isinstance(available, str):
        pytest.skip(available)
    from tests.backends.wgpu.checked_shaders import CheckedDevice

    checked = CheckedDevice(available[0])
    yield checked
    checked.close()


@pytest.fixture(scope="session")
def device() -> Iterator[object]:
    """Opened once for all tests of a process."""
    with open_device() as shared:
        yield shared


@pytest.fixture
def own_device() -> Iterator[object]:
    """A device that a test may break."""
    with open_device() as fresh_device:
        yield fresh_device
