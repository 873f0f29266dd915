"""Provide a Vulkan device, or skip the test and state why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backends.wgpu.device.adapters import adapters


@contextmanager
def open_device() -> Iterator[object]:
    """Open the first adapter, and close it at the end."""
    available = adapters()
    if isinstance(available, str):
        pytest.skip(available)
    from tests.backends.wgpu.checked_shaders import CheckedDevice

    opened_device = CheckedDevice(available[0])
    yield opened_device
    opened_device.close()


@pytest.fixture(scope="session")
def device() -> Iterator[object]:
    """Provide a device that all tests of a process share."""
    with open_device() as shared_device:
        yield shared_device


@pytest.fixture
def separate_device() -> Iterator[object]:
    """Provide a device that only one test uses and may break."""
    with open_device() as new_device:
        yield new_device
