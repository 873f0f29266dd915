"""Memory that two processes of one machine lend each other."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.cli.command_line import child_environment
from protocol.machine.shared_segment import SegmentOwner, SharedSegment, open_segment

HALF_BYTES = 2 << 20
"""Bytes that the listening side may copy there."""


@pytest.fixture
def sides():
    """Return both sides of a connection in one process: listener and client."""
    lender = SegmentOwner()
    listener, descriptors = lender.new_worker_segment()
    client = open_segment([fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0) for fd in descriptors])
    os.close(descriptors[1])
    yield lender, listener, client
    lender.close()


def raw(*values):
    return np.array(values, np.float32).data.cast("B")


def lend_copy(memory: SharedSegment, values) -> int:
    copy = memory.copy(values)
    assert copy is not None
    offset = memory.lend(copy)
    assert offset is not None
    return offset


def test_lent_memory_is_readable_until_returned(sides):
    _, listener, client = sides
    for writer, reader in ((listener, client), (client, listener)):
        offset = lend_copy(writer, raw(1, 2, 3))
        gc.collect()
        second_offset = lend_copy(writer, raw(4, 5, 6))
        assert second_offset != offset, "the first copy is still in use"
        body = reader.borrow(offset, 12)
        assert body.view(np.float32).tolist() == [1, 2, 3]
        assert reader.collect_unneeded() == ()
        del body
        assert reader.collect_unneeded(at_least=2) == ()
        writer.release(reader.collect_unneeded())
        assert lend_copy(writer, raw(7, 8, 9)) == offset, "it was returned"


def test_averages_are_lent_in_place_to_many(sides):
    lender, listener, client = sides
    averages = lender.allocate(1000)
    averages[:] = 7
    part = averages[100:200].view(np.uint8)
    offset = listener.lend(part)
    assert offset == listener.lend(part)
    first, second = client.borrow(offset, 400), client.borrow(offset, 400)
    assert first.view(np.float32).tolist() == [7.0] * 100
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1  # a worker cannot change data that others read
    address = averages.ctypes.data
    del averages, part, first, second
    gc.collect()
    listener.release(client.collect_unneeded()[:1])
    assert lender.allocate(1000).ctypes.data != address, "it was lent twice"
    listener.release((offset,))
    assert lender.allocate(1000).ctypes.data == address


def test_invalid_returns_and_offsets_are_refused(sides):
    _, listener, client = sides
    offset = lend_copy(client, raw(1))
    with pytest.raises(OutOfOrder, match="was not lent"):
        client.release((offset + 4096,))
    client.release((offset,))
    with pytest.raises(OutOfOrder, match="was not lent"):
        client.release((offset,))
    for loan in ((1 << 40, 4), ((1 << 40) - 4, 8), (2, 4)):
        with pytest.raises(OutOfOrder, match="expected an extent of shared memory"):
            listener.borrow(*loan)


def test_without_address_space_there_is_no_segment():
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))\n"
        "from protocol.machine.shared_segment import new_segment_owner; print(new_segment_owner())"
    )
    completed = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=child_environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert completed.stdout.strip() == "None"


def test_segment_cannot_be_truncated():
    lender = SegmentOwner()
    _, descriptors = lender.new_worker_segment()
    for descriptor in descriptors:
        with pytest.raises(OSError, match=r"not permitted|Invalid"):
            os.ftruncate(descriptor, 0)
    os.close(descriptors[1])
    lender.close()


def test_lent_data_survives_a_killed_writer(sides):
    """The writer keeps writing to memory it has not lent; only lent memory is read."""
    lender, _, _ = sides
    listener, descriptors = lender.new_worker_segment()
    source = (
        "import sys, numpy as np; from protocol.machine.shared_segment import open_segment\n"
        "memory = open_segment([int(fd) for fd in sys.argv[1:]])\n"
        "copy = memory.copy(memoryview(np.arange(50_000, dtype=np.float32)).cast('B'))\n"
        "print(memory.lend(copy), flush=True)\n"
        "while True: memory.copy(memoryview(np.ones(50_000, np.float32)).cast('B'))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", source, *map(str, descriptors)],
        pass_fds=descriptors, env=child_environment(), stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        os.close(descriptors[1])
        assert process.stdout is not None
        offset = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    body = listener.borrow(offset, 200_000).view(np.float32)
    assert body.tobytes() == np.arange(50_000, dtype=np.float32).tobytes()


def test_number_of_allocated_averages_is_limited(sides):
    lender, _, _ = sides
    averages = [lender.allocate(1 << 21) for _ in range(5)]
    assert [average is None for average in averages] == [False] * 4 + [True]
    del averages
    gc.collect()
    assert lender.allocate(1 << 23) is not None


def test_waiting_bytes_are_limited(sides):
    """The limit is larger for a worker's sums than for copies of the coordinator."""
    _, listener, client = sides
    raw = memoryview(bytes(HALF_BYTES))
    copies = [lend_copy(listener, raw) for _ in range(2)]
    assert listener.copy(raw) is None
    assert len(copies) == 2
    loans = [lend_copy(client, raw) for _ in range(8)]
    assert client.copy(raw) is None
    body = listener.borrow(loans[0], HALF_BYTES)
    assert not body.any()
    del body
    gc.collect()
    client.release(listener.collect_unneeded())
    assert client.copy(raw) is not None


def mapped_bytes(fd: int) -> list[int]:
    """Return the resident bytes of each mapping of a memory file in this process."""
    inode = str(os.fstat(fd).st_ino)
    sizes: list[int] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *fields = line.split()
        if "-" in key:
            is_segment = len(fields) >= 5 and fields[3] == inode
        elif is_segment and key == "Rss:":
            sizes.append(int(fields[0]) << 10)
    return sizes


def test_mapped_bytes_after_reading_are_limited(sides, monkeypatch):
    monkeypatch.setattr(limits, "SEGMENT_MAPPED_BYTES", HALF_BYTES)
    lender, listener, client = sides
    loans = [listener.lend(listener.copy(memoryview(bytes(HALF_BYTES)))) for _ in range(2)]
    before = sum(mapped_bytes(lender._send_memory.fd))
    for _ in range(2):
        for loan in loans:
            client.borrow(loan, HALF_BYTES).max()
            gc.collect()
    assert sum(mapped_bytes(lender._send_memory.fd)) - before == HALF_BYTES


def test_unused_memory_returns_to_the_system(sides):
    lender, _, _ = sides
    used_part, unused = lender.allocate(300_000), lender.allocate(300_000)
    used_part[:], unused[:] = 1, 1
    del unused
    gc.collect()
    bytes_before = os.fstat(lender._send_memory.fd).st_blocks * 512
    lender.trim()
    assert os.fstat(lender._send_memory.fd).st_blocks * 512 <= bytes_before - 1_200_000
    assert used_part.tobytes() == np.ones(300_000, np.float32).tobytes()
