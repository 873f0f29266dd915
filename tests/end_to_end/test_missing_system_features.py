"""Missing system features (a home, locks, threads) give one line with a remedy."""

from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path

import pytest

from coordinator.disk.directory_lock import DirectoryLock
from coordinator.members.credentials import CoordinatorCredentials
from protocol.base.errors import (
    OUT_OF_THREADS,
    StorageFailed,
    UsageError,
    describe_error,
    lock_failure,
    text_of,
)
from protocol.machine.cache_directory import cache_directory
from protocol.machine.secret_file import state_home
from protocol.spec.files.file_digest import FileDigests
from tests.commands import run_command
from worker.shell.blob_cache import BlobCache

WORKER = ("worker", "--coordinator", "box.example:9000", "--backend", "scripted")
STATUS = ("coordinator", "status", "--control", "localhost:1")
DOCTOR = ("worker", "doctor", "--coordinator", "127.0.0.1:1", "--backend", "scripted")


@pytest.fixture
def no_home(monkeypatch) -> None:
    """Simulate a user without an entry in the passwd file, as in many containers."""

    def refuse(path: Path) -> Path:
        del path
        raise RuntimeError("Could not determine home directory.")

    for name in ("SAMESTEP_HOME", "STATE_DIRECTORY", "XDG_STATE_HOME", "SAMESTEP_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", refuse)


@pytest.mark.usefixtures("no_home")
def test_missing_home_directory_gives_a_remedy():
    with pytest.raises(UsageError, match="this user has none; set SAMESTEP_HOME=DIR"):
        state_home({})
    with pytest.raises(StorageFailed, match="set SAMESTEP_CACHE=DIR"):
        cache_directory({})
    for command in (WORKER, DOCTOR, STATUS, ("coordinator", "doctor")):
        completed = run_command(*command)
        (line,) = completed.stderr.splitlines()
        assert (completed.returncode, "SAMESTEP_HOME=DIR" in line) == (2, True), command


@pytest.mark.parametrize("command", [STATUS, WORKER], ids=["coordinator", "worker"])
def test_lack_of_threads_gives_a_one_line_error(command, monkeypatch, tmp_path):
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    completed = run_command(*command, environment={"SAMESTEP_HOME": str(tmp_path)})
    assert completed.returncode == 1
    assert completed.stderr == f"{command[0]}: {OUT_OF_THREADS}\n"


def test_lack_of_threads_is_recognized_on_other_systems():
    error = RuntimeError("can't start new thread")
    assert text_of(error) == describe_error(error) == OUT_OF_THREADS
    assert text_of(RuntimeError("x")).startswith("internal error")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_system_without_locks_gives_a_remedy(number, monkeypatch, tmp_path):
    def refuse(*_arguments: object) -> None:
        raise OSError(number, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    expected_text = "expected a file system with locks, such as a local disk, got none (No locks"
    with pytest.raises(UsageError) as lock_error:
        DirectoryLock.acquire(tmp_path / "run")
    assert expected_text in str(lock_error.value)
    assert "--out DIR" in str(lock_error.value)
    with pytest.raises(UsageError) as error:
        CoordinatorCredentials.open(tmp_path / "home")
    assert expected_text in str(error.value)
    assert "SAMESTEP_HOME=DIR" in str(error.value)
    cache = BlobCache(tmp_path / "cache", FileDigests())
    with pytest.raises(StorageFailed) as cache_error:
        cache.open_part("0" * 64, 8)
    assert expected_text in str(cache_error.value)
    assert "SAMESTEP_CACHE" in str(cache_error.value)
    assert lock_failure(OSError(errno.EIO, "Input/output error")) == "Input/output error"
