"""A file that grows at its end, and recovers from failed writes.

After any error, nothing written since the last `confirm` is trusted: after a failed sync the system
may have dropped data, and may report that the next sync succeeded. So the next use reopens the file
if it was replaced, cuts it to the confirmed length, and calls `rewrite`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coordinator.disk.durable_file import is_same_file, storage_errors, write_all
from protocol.base import limits
from protocol.base.errors import StorageFailed


class AppendFile:
    """An open file; one thread at a time.

    Attributes:
        path: The file's name.
        end: The offset of the next write.
        is_broken: Whether the file must be repaired before its next use.

    Args:
        path: The file's name.
        fd: The file, open for writing; closed by `close`.
        end: Length of the durable part; writes begin there.
        rewrite: Called when the file was cut to the confirmed length; writes the lost data again.
    """

    def __init__(self, path: Path, fd: int, end: int, rewrite: Callable[[], None]) -> None:
        self.path = path
        self.end = end
        self.is_broken = False
        self._fd = fd
        self._synced = end
        self._written_back = end
        self._cached_from = self._freed = end
        self._rewrite = rewrite
        os.lseek(fd, end, os.SEEK_SET)

    @contextmanager
    def use(self, doing: str) -> Iterator[None]:
        """Wrap every use: repair the file first if needed; mark it as broken if this use fails.

        Args:
            doing: The use in error messages, as a verb: "append to", "sync".

        Raises:
            StorageFailed: A read or write failed; the use can be repeated.
        """
        try:
            with storage_errors(doing, self.path):
                if self.is_broken:
                    self._repair()
                yield
        except BaseException:
            self.is_broken = True
            raise

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Write at the end, inside `use`. Once enough data is unsynced, the system begins to write
        it to the disk, so that `sync` takes less time."""
        write_all(self._fd, buffers)
        self.end += sum(buffer.nbytes for buffer in buffers)
        if self.end - self._written_back >= limits.WRITEBACK_BYTES:
            self._drop_from_cache(self._written_back, self.end)  # errors come at the sync
            self._written_back = self.end
            self._freed = self._free_from(self._freed)

    def sync(self) -> None:
        """Make the written data durable, inside `use`; the file must still have its name."""
        os.fdatasync(self._fd)
        if not is_same_file(self._fd, self.path):
            raise FileNotFoundError(errno.ENOENT, "the file was removed or moved")
        # Pages that were not yet written could not be freed before.
        self._cached_from = self._freed = self._free_from(self._cached_from)

    def _free_from(self, start: int) -> int:
        """Drop the page cache from `start` on, except the tail; return where the tail begins."""
        start_of_tail = self.end - limits.PAGE_CACHE_TAIL_BYTES
        if start_of_tail - start < limits.WRITEBACK_BYTES:
            return start
        self._drop_from_cache(start, start_of_tail)
        return start_of_tail

    def _drop_from_cache(self, start: int, end: int) -> None:
        """Make Linux write this range, and free the pages already written."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def confirm(self) -> None:
        """Confirm all written data, which must be synced: later repairs keep it."""
        self._synced = self.end

    def close(self) -> None:
        os.close(self._fd)

    def _repair(self) -> None:
        if not is_same_file(self._fd, self.path):
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            os.close(self._fd)
            self._fd = fd
        size = os.fstat(self._fd).st_size
        if size < self._synced:
            reason = f"expected {self._synced} synced bytes, got {size}; resume the run"
            raise StorageFailed("go on with", str(self.path), reason)
        os.ftruncate(self._fd, self._synced)
        os.lseek(self._fd, self._synced, os.SEEK_SET)
        self.end = self._written_back = self._synced
        self._cached_from = self._freed = min(self._cached_from, self.end)
        self._rewrite()
        self.is_broken = False
