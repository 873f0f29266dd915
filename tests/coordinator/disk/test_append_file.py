"""An append-only file: which parts are sent to the disk before a sync."""

from __future__ import annotations

import contextlib
import os

import pytest

from coordinator.disk.append_file import AppendFile
from protocol.base import limits

pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="the system has no such call"
)


@pytest.fixture
def advice_ranges(monkeypatch) -> list[tuple[int, int]]:
    """Return start and size of each range that the system was advised about, from 100 bytes on."""
    advised_ranges: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def record_advice(fd: int, start: int, size: int, advice: int) -> None:
        advised_ranges.append((start, size))
        advise(fd, start, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", record_advice)
    monkeypatch.setattr(limits, "WRITEBACK_BYTES", 100)
    return advised_ranges


def test_large_writes_are_flushed_early_and_once(tmp_path, advice_ranges):
    path = tmp_path / "log"
    path.write_bytes(b"header")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    file = AppendFile(path, fd, 6, lambda: file.write([memoryview(b"again" * 30)]))
    for size in (60, 60, 250):
        with file.use("append to"):
            file.write([memoryview(bytes(size))])
    assert advice_ranges == [(6, 120), (126, 250)]
    with file.use("sync"):
        file.sync()
    file.confirm()
    with contextlib.suppress(ZeroDivisionError), file.use("append to"):
        file.write([memoryview(b"lost" * 50)])
        raise ZeroDivisionError
    assert file.is_broken
    with file.use("append to"):  # unconfirmed bytes are written again
        file.write([memoryview(b"more")])
    assert advice_ranges[2:] == [(376, 200), (376, 150)]
    assert path.read_bytes()[376:] == b"again" * 30 + b"more"
    file.close()


def test_only_the_end_stays_in_memory_after_a_sync(tmp_path, monkeypatch, advice_ranges):
    monkeypatch.setattr(limits, "PAGE_CACHE_TAIL_BYTES", 1000)
    path = tmp_path / "log"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    rest = b"again" * 100
    file = AppendFile(path, fd, 0, lambda: file.write([memoryview(rest)]))
    for number in range(3):
        with file.use("append to"):
            file.write([memoryview(bytes([number]) * 600)])
    # Each write is flushed at once. Pages before the last 1000 bytes leave the cache with the
    # next write or at the sync.
    assert advice_ranges == [(0, 600), (600, 600), (0, 200), (1200, 600), (200, 600)]
    with file.use("sync"):
        file.sync()
    file.confirm()
    assert advice_ranges[5:] == [(0, 800)]
    with contextlib.suppress(ZeroDivisionError), file.use("append to"):
        file.write([memoryview(bytes(2000))])
        raise ZeroDivisionError
    with file.use("append to"):  # truncated to 1800 bytes
        file.write([memoryview(b"more" * 100)])
    with file.use("sync"):
        file.sync()
    assert advice_ranges[-1] == (800, 900)
    assert path.read_bytes()[1800:] == rest + b"more" * 100
    file.close()
