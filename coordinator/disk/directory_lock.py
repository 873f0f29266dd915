"""One coordinator for each directory: a lock that its process holds, and the term of its start.

The lock (flock on DIR/lock) ends with the process, however the process ends. The term in
DIR/term.json is raised and synced before anything is read. A coordinator can still lose its
directory: someone may replace the lock file, or move another directory there. `check` detects that;
it is called after each sync and before any worker receives the result. So either the record was
durable before the successor read the directory, or this coordinator notices its successor and
reports nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Final

from coordinator.disk.durable_file import is_same_file, make_directory, replace_file, storage_errors
from coordinator.disk.older_names import OLDER_TERM, OLDER_TERM_FILE
from protocol.base.errors import (
    SamestepError,
    StorageDamaged,
    StorageFailed,
    Superseded,
    UsageError,
    lock_failure,
)
from protocol.base.option_names import option
from protocol.base.regular_file import open_regular, parse_json, read_regular

LOCK_FILE: Final = "lock"
TERM_FILE: Final = "term.json"


class DirectoryLock:
    """The lock on a directory that this process holds; `acquire` returns one.

    Attributes:
        directory: The locked directory.
        term: Term of this coordinator; greater than that of every earlier coordinator of the
            directory.
    """

    def __init__(self, directory: Path, lock: int, term: int) -> None:
        self.directory = directory
        self.term = term
        self._lock: int | None = lock
        self._lock_file = directory / LOCK_FILE
        self._term_file = directory / TERM_FILE

    @classmethod
    def acquire(cls, directory: Path, above_term: int = 0) -> DirectoryLock:
        """Lock the directory, created if missing, and raise its term.

        Args:
            directory: The directory to lock.
            above_term: A term known from elsewhere; the new term is greater.

        Raises:
            UsageError: Another coordinator holds the directory, or the directory cannot be written.
            StorageDamaged: The directory's term file does not hold a term.
            StorageFailed: The term file cannot be read.
        """
        try:
            make_directory(directory)
            lock = _lock(directory)
        except IsADirectoryError as error:
            reason = "expected a file, got a directory; remove it"
            raise StorageDamaged(str(error.filename), "", reason) from None
        except OSError as error:
            raise _unusable_error(directory, error) from None
        try:
            term = max(stored_term(directory), above_term) + 1
            try:
                replace_file(directory / TERM_FILE, json.dumps({"term": term}).encode())
                # A running coordinator of an older release then notices that it was replaced.
                (directory / OLDER_TERM_FILE).unlink(missing_ok=True)
            except (OSError, StorageFailed) as error:
                raise _unusable_error(directory, error) from None
        except SamestepError:
            os.close(lock)
            raise
        return cls(directory, lock, term)

    def check(self) -> None:
        """Check that this coordinator still owns the directory.

        Raises:
            StorageFailed: The directory is missing or cannot be read.
            Superseded: Another coordinator owns the directory now; this one must end.
        """
        has_lock = self._holds_lock()  # first: without the directory there is no term either
        try:
            newest = _term_in(self._term_file)
        except StorageDamaged as error:
            raise StorageFailed("use", str(self._term_file), error.reason) from None
        if newest == 0:
            reason = f"{TERM_FILE} is gone; restore what is missing, then continue"
            raise StorageFailed("use", str(self.directory), reason)
        if newest != self.term:
            raise Superseded(
                f"{str(self.directory)!r} has another coordinator now, of term {newest}; "
                f"this one, of term {self.term}, ends"
            )
        if not has_lock and not self._holds_lock():
            raise Superseded(
                f"the lock file of {str(self.directory)!r} was removed or replaced, so another "
                "coordinator may start there; this one ends"
            )

    def _holds_lock(self) -> bool:
        return self._lock is not None and is_same_file(self._lock, self._lock_file)

    def raise_term_to(self, term: int) -> None:
        """Raise the term to at least `term`, which was found below this directory.

        Raises:
            UsageError: The term file cannot be written.
        """
        if term <= self.term:
            return
        try:
            replace_file(self.directory / TERM_FILE, json.dumps({"term": term}).encode())
        except StorageFailed as error:
            raise _unusable_error(self.directory, error) from None
        self.term = term

    def release(self) -> None:
        """Unlock the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def reacquire(self) -> None:
        """Lock a released directory again, with the same term.

        Raises:
            Superseded: Another coordinator has owned the directory since.
            UsageError: Another coordinator holds the directory.
            StorageFailed: The directory is missing, cannot be read, or cannot be locked now.
        """
        if self._lock is not None:
            return
        try:
            self._lock = _lock(self.directory)
            self.check()
        except OSError as error:
            self.release()
            reason = error.strerror or str(error)
            raise StorageFailed("use", str(self.directory), reason) from None
        except SamestepError:
            self.release()
            raise


def remove_unused_directory(directory: Path) -> None:
    """Remove a directory that contains only lock and term."""
    with contextlib.suppress(OSError):
        if {path.name for path in directory.iterdir()} <= {LOCK_FILE, TERM_FILE, OLDER_TERM_FILE}:
            for path in directory.iterdir():
                path.unlink()
            directory.rmdir()


def is_locked(directory: Path) -> bool:
    """Return whether a coordinator holds the directory now."""
    try:
        with open_regular(directory / LOCK_FILE) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def term_file_name(directory: Path) -> str:
    """Return the name of the file with the term; older releases used another name."""
    is_older = (directory / OLDER_TERM_FILE).exists() and not (directory / TERM_FILE).exists()
    return OLDER_TERM_FILE if is_older else TERM_FILE


def stored_term(directory: Path) -> int:
    """Return the term of the last start in this directory; 0 before the first.

    Raises:
        StorageFailed: The term file cannot be read.
        StorageDamaged: The term file does not hold a term.
    """
    return max(_term_in(directory / TERM_FILE), _term_in(directory / OLDER_TERM_FILE, OLDER_TERM))


def _term_in(file: Path, key: str = "term") -> int:
    with storage_errors("read", file):
        content = read_regular(file) if file.exists() else None
    if content is None:
        return 0
    try:
        term = parse_json(content)[key]
    except (ValueError, KeyError, TypeError, IndexError):
        term = None
    if not isinstance(term, int) or term < 1:
        reason = f"expected a term, got {content[:40]!r}; remove it: journal and log have it too"
        raise StorageDamaged(str(file), "", reason)
    return term


def _lock(directory: Path) -> int:
    """Lock DIR/lock, and write the process ID to it.

    Raises:
        UsageError: Another process holds the lock.
    """
    path = directory / LOCK_FILE
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            if not isinstance(error, BlockingIOError):
                raise OSError(lock_failure(error)) from None
            raise UsageError(
                f"{str(directory)!r} is in use by another coordinator (process {holder or '?'}); "
                "stop it, or choose another directory"
            ) from None
        if is_same_file(fd, path):
            break
        os.close(fd)
    # For people only: a full disk must not prevent locking.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _unusable_error(directory: Path, error: Exception) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    if isinstance(error, OSError) and error.errno in {errno.EMFILE, errno.ENFILE}:
        return UsageError(
            f"the run directory {str(directory)!r} cannot be locked: too many files are open "
            f"({reason}); close connections, or raise the limit (ulimit -n, LimitNOFILE in its "
            "unit)"
        )
    if isinstance(error, FileExistsError | NotADirectoryError):
        reason = "a file is in its place"
    if isinstance(error, PermissionError) and str(error.filename) == str(directory / LOCK_FILE):
        reason = f"{str(error.filename)!r}: {reason}; give this user read and write permission"
    text = str(reason).removesuffix(", then continue")  # no coordinator runs that could continue
    remedy = f"choose one that this user can write to: {option('--out DIR')}"
    with contextlib.suppress(OSError):
        if (directory / "run.json").exists():
            remedy = "the run in it resumes with the same command once this user can write there"
    return UsageError(f"the run directory {str(directory)!r} cannot be used: {text}; {remedy}")
