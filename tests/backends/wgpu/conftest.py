"""A Vulkan device, or the reason why there is none: then these tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backends.wgpu.device.adapters import adapters


@contextmanager
def opened() -> Iterator[object]:
    """The first adapter."""
    present = adapters()
    if isinstance(present, str):
        pytest.skip(present)
    from tests.backends.wgpu.checked_shaders import CheckedDevice

    checked = CheckedDevice(present[0])
    yield checked
    checked.close()


@pytest.fixture(scope="session")
def device() -> Iterator[object]:
    """Opened once for all tests of a process."""
    with opened() as shared:
        yield shared


@pytest.fixture
def own_device() -> Iterator[object]:
    """One that a test may break."""
    with opened() as own:
        yield own
