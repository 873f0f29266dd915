"""Pages of mapped files leave memory on request; other memory is untouched."""

import mmap

import numpy as np
import pytest

from protocol.machine.mapped_pages import is_mapped_file, release_mapped_pages
from tests.resident_memory import MIB, measured_growth


@pytest.fixture
def mapped_array(tmp_path):
    """Map a 16 MiB file privately, as an array, without reading a page."""
    path = tmp_path / "weights"
    np.arange(2 * MIB, dtype=np.uint64).tofile(path)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint64)


def test_read_pages_leave_memory_and_can_be_read_again(mapped_array):
    expected = 2 * MIB * (2 * MIB - 1) // 2
    with measured_growth() as growth:
        assert int(mapped_array.sum()) == expected
        released = release_mapped_pages(mapped_array.ctypes.data, mapped_array.nbytes)
    assert released == 16 * MIB
    assert growth.remaining_bytes < 2 * MIB < growth.peak_bytes
    assert int(mapped_array.sum()) == expected


def test_changed_and_anonymous_pages_stay(mapped_array):
    mapped_array.sum()
    mapped_array[:: mmap.PAGESIZE // 4] += 1  # every other page
    anonymous = np.ones(MIB, np.uint64)
    assert release_mapped_pages(mapped_array.ctypes.data, mapped_array.nbytes) == 8 * MIB
    assert release_mapped_pages(anonymous.ctypes.data, anonymous.nbytes) == 0
    assert int(anonymous.sum()) == MIB
    assert (mapped_array[:: mmap.PAGESIZE // 4] % (mmap.PAGESIZE // 4) == 1).all()


def test_pages_at_the_edges_of_a_range_stay(mapped_array):
    mapped_array.sum()
    inner = release_mapped_pages(mapped_array.ctypes.data + 1, 3 * mmap.PAGESIZE - 2)
    assert inner == mmap.PAGESIZE


def test_a_mapped_file_is_distinguished_from_other_memory(mapped_array):
    assert is_mapped_file(mapped_array.ctypes.data)
    assert not is_mapped_file(np.ones(MIB).ctypes.data)
