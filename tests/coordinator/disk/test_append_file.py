"""A file that only grows: what is on its way to the disk before it is synced."""

from __future__ import annotations

import contextlib
import os

import pytest

from coordinator.disk.append_file import AppendFile
from protocol.base import limits


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no such call")
def test_much_is_on_its_way_at_once_and_no_byte_twice(tmp_path, monkeypatch):
    begun: list[tuple[int, int]] = []
    advise = os.posix_fadvise

    def note(fd: int, start: int, size: int, advice: int) -> None:
        begun.append((start, size))
        advise(fd, start, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", note)
    monkeypatch.setattr(limits, "WRITTEN_BACK_BYTES", 100)
    path = tmp_path / "log"
    path.write_bytes(b"header")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    file = AppendFile(path, fd, 6, lambda: file.write([memoryview(b"again" * 30)]))
    for size in (60, 60, 250):
        with file.use("append to"):
            file.write([memoryview(bytes(size))])
    assert begun == [(6, 120), (126, 250)]
    with file.use("sync"):
        file.sync()
    file.confirm()
    with contextlib.suppress(ZeroDivisionError), file.use("append to"):
        file.write([memoryview(b"lost" * 50)])
        raise ZeroDivisionError
    assert file.broken
    with file.use("append to"):  # what was not confirmed is written again
        file.write([memoryview(b"more")])
    assert begun[2:] == [(376, 200), (376, 150)]
    assert path.read_bytes()[376:] == b"again" * 30 + b"more"
    file.close()
