"""A file that only grows, and how it gets over a disk that refuses.

After any failure nothing since the last `confirm` is trusted: after a failed sync the system may
have dropped what it could not write, and may say that the next sync went well. So the next use
opens the file anew, cuts it to what was confirmed, and has its owner write the rest again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from coordinator.disk.durable_file import is_same_file, storing, write_all
from protocol.base import limits
from protocol.base.errors import StorageFailed


class AppendFile:
    """An open file; one thread at a time.

    Attributes:
        path: Its name.
        end: Where the next write goes.
        broken: Whether it has to be mended before it is used.

    Args:
        path: Its name.
        fd: The file, open for writing; closed by `close`.
        end: How much of it is durable; what is written goes there.
        rewrite: Called when the file was cut to what was confirmed: writes the rest again.
    """

    def __init__(self, path: Path, fd: int, end: int, rewrite: Callable[[], None]) -> None:
        self.path = path
        self.end = end
        self.broken = False
        self._fd = fd
        self._synced = end
        self._on_its_way = end
        self._cached_from = self._freed = end
        self._rewrite = rewrite
        os.lseek(fd, end, os.SEEK_SET)

    @contextmanager
    def use(self, doing: str) -> Iterator[None]:
        """Around every use: mend the file first if need be; notice if this use fails.

        Raises:
            StorageFailed: The disk refuses; the use can be made again.
        """
        try:
            with storing(doing, self.path):
                if self.broken:
                    self._mend()
                yield
        except BaseException:
            self.broken = True
            raise

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Write at the end; inside `use`. Much at once is on its way to the disk from then on: the
        sync has less to wait for."""
        write_all(self._fd, buffers)
        self.end += sum(buffer.nbytes for buffer in buffers)
        if self.end - self._on_its_way >= limits.WRITTEN_BACK_BYTES:
            self._not_read_soon(self._on_its_way, self.end)  # errors come at the sync
            self._on_its_way = self.end
            self._freed = self._free_from(self._freed)

    def sync(self) -> None:
        """Make what was written durable, under this name; inside `use`."""
        os.fdatasync(self._fd)
        if not is_same_file(self._fd, self.path):
            raise FileNotFoundError(errno.ENOENT, "the file was removed or moved")
        # What was still on its way when it was to be freed has stayed.
        self._cached_from = self._freed = self._free_from(self._cached_from)

    def _free_from(self, start: int) -> int:
        """From there on keep no more than the end in memory; gives from where on that is kept."""
        kept = self.end - limits.CACHED_TAIL_BYTES
        if kept - start < limits.WRITTEN_BACK_BYTES:
            return start
        self._not_read_soon(start, kept)
        return kept

    def _not_read_soon(self, start: int, end: int) -> None:
        """Linux begins to write what it is told this of, and frees what is written already."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, start, end - start, os.POSIX_FADV_DONTNEED)

    def confirm(self) -> None:
        """What was written and synced is final."""
        self._synced = self.end

    def close(self) -> None:
        os.close(self._fd)

    def _mend(self) -> None:
        if not is_same_file(self._fd, self.path):
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            os.close(self._fd)
            self._fd = fd
        size = os.fstat(self._fd).st_size
        if size < self._synced:
            reason = f"it has {size} of the {self._synced} bytes that were synced; resume the run"
            raise StorageFailed("go on with", str(self.path), reason)
        os.ftruncate(self._fd, self._synced)
        os.lseek(self._fd, self._synced, os.SEEK_SET)
        self.end = self._on_its_way = self._synced
        self._cached_from = self._freed = min(self._cached_from, self.end)
        self._rewrite()
        self.broken = False
