"""A Vulkan device, or the reason why there is none: then these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backends.wgpu.device.adapters import adapters


@contextmanager
def opened() -> Iterator[object]:
    """The first adapter."""
    found = adapters()
    if isinstance(found, str):
        pytest.skip(found)
    from tests.backends.wgpu.checked_shaders import CheckedDevice

    made = CheckedDevice(found[0])
    yield made
    made.close()


@pytest.fixture(scope="session")
def device() -> Iterator[object]:
    """Opened once for all tests of a process."""
    with opened() as made:
        yield made


@pytest.fixture
def own_device() -> Iterator[object]:
    """One that a test may break."""
    with opened() as made:
        yield made
