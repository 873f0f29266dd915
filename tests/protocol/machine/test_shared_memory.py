"""Memory that processes of one machine share."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from protocol.base import limits
from protocol.base.errors import SharedMemoryFull
from protocol.cli.command_line import child_environment
from protocol.machine import shared_memory
from protocol.machine.memory import Memory
from protocol.machine.shared_memory import SharedMemory


def test_shared_memory_is_read_by_another_process():
    memory = SharedMemory()
    extent = memory.store(np.arange(5000, dtype=np.float32))
    program = (
        "import sys; from protocol.machine.shared_memory import Extent, SharedMemory\n"
        "fd, *extent = map(int, sys.argv[1:])\n"
        "print(SharedMemory(fd, is_writable=False).array(Extent(*extent)).sum())"
    )
    completed = subprocess.run(
        [sys.executable, "-P", "-c", program, str(memory.fd), *map(str, extent)],
        pass_fds=[memory.fd], env=child_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert float(completed.stdout) == np.arange(5000).sum()


def test_part_is_reused_only_without_remaining_views():
    memory = SharedMemory()
    values = memory.new_array(1000)
    first = memory.extent_of(values)
    view = values[10:20].data.cast("B")
    del values
    gc.collect()
    assert memory.extent_of(memory.new_array(1000)) != first
    view.release()
    del view
    assert first in [memory.extent_of(memory.new_array(1000)) for _ in range(2)]


def test_single_use_memory_returns_to_the_system():
    memory = SharedMemory()
    values = memory.new_array(limits.MIB, is_single_use=True)
    values[:] = 1
    blocks = os.fstat(memory.fd).st_blocks
    del values
    memory.new_array(1)
    assert os.fstat(memory.fd).st_blocks < blocks


def test_arrays_are_aligned_for_matrix_products():
    memory = SharedMemory()
    assert all(memory.new_array(size).ctypes.data % 64 == 0 for size in (1, 7, 4097))


def test_foreign_array_has_no_extent():
    memory = SharedMemory()
    assert memory.extent_of(np.zeros(3, np.float32)) is None


@pytest.mark.parametrize("refuse", ["little memory is free", "the kernel refuses"])
def test_lack_of_memory_gives_a_one_line_error_with_a_remedy(monkeypatch, refuse):
    if refuse == "little memory is free":
        memory_state = Memory(limits.MIB, 0, None, None, None)
        monkeypatch.setattr(shared_memory, "read_memory", lambda: memory_state)
    else:

        def no_space(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(SharedMemoryFull) as error_info:
        SharedMemory().allocate(2 * limits.MIB)
    text = str(error_info.value)
    assert "\n" not in text
    assert "close other programs" in text
    assert "--gpus" in text
