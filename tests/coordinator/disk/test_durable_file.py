"""Durable writes: the order of syncs and renames, short writes, errors with a remedy."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.disk.durable_file import (
    read_if_exists,
    remove_temporaries,
    replace_file,
    storage_errors,
    write_all,
    write_output,
)
from coordinator.storage.states.checkpoint import write_checkpoint
from protocol.base.errors import StorageFailed, UsageError
from tests.durable_run import MANIFEST, RUN_ID, initial_replica


@pytest.fixture
def unsynced_renames(monkeypatch):
    """Check that a path is synced, with all files below it, before it is renamed. Return the
    renames whose directory was not synced afterwards."""
    synced_paths: set[str] = set()
    pending_renames: list[str] = []
    real_sync, real_rename, real_replace = os.fsync, os.rename, os.replace

    def sync(fd):
        real_sync(fd)
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        synced_paths.add(path)
        pending_renames[:] = [name for name in pending_renames if str(Path(name).parent) != path]

    def rename(source, target, real):
        files_inside = [path for path in Path(source).rglob("*") if path.is_file()]
        source_paths = [str(path) for path in files_inside] or [str(source)]
        assert set(source_paths) <= synced_paths, set(source_paths) - synced_paths
        real(source, target)
        pending_renames.append(str(target))
        for path in files_inside:
            synced_paths.add(str(Path(target) / path.relative_to(source)))
        synced_paths.add(str(target))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", lambda a, b: rename(a, b, real_rename))
    monkeypatch.setattr(os, "replace", lambda a, b: rename(a, b, real_replace))
    return pending_renames


def test_file_is_synced_before_its_rename_and_its_directory_after(tmp_path, unsynced_renames):
    replace_file(tmp_path / "a", b"1")
    replace_file(tmp_path / "a", b"22")
    assert (tmp_path / "a").read_bytes() == b"22"
    assert unsynced_renames == []
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_checkpoint_is_synced_before_its_rename(tmp_path, unsynced_renames):
    write_checkpoint(tmp_path / "c", MANIFEST, initial_replica(), run_id=RUN_ID, term=1, losses=[])
    assert [name for name in unsynced_renames if ".part" not in name] == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_write_keeps_the_old_content(tmp_path, monkeypatch, call):
    path = tmp_path / "a"
    replace_file(path, b"old")

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageFailed, match="make room") as error:
        replace_file(path, b"new")
    assert (error.value.operation, error.value.path) == ("write", str(path))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old")]


@given(st.lists(st.binary(max_size=9), max_size=6), st.lists(st.integers(1, 5), max_size=40))
def test_short_writes_are_continued(parts, sizes):
    content = bytearray()

    def writev(_fd, buffers):
        data = b"".join(bytes(buffer) for buffer in buffers)
        chunk = data[: sizes.pop() if sizes else len(data)]
        content.extend(chunk)
        return len(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", writev)
        write_all(0, [memoryview(part) for part in parts])
    assert bytes(content) == b"".join(parts)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EROFS, "mount it writable"), (errno.ENOENT, "restore what is missing"),
     (errno.EIO, "check the disk"), (errno.EMFILE, "Too many open files")],
)  # fmt: skip
def test_system_error_comes_with_a_remedy(tmp_path, number, remedy):
    with pytest.raises(StorageFailed, match=remedy), storage_errors("sync", tmp_path):
        raise OSError(number, os.strerror(number))


def test_only_temporary_files_are_removed(tmp_path):
    (tmp_path / "a.part").write_text("half")
    (tmp_path / "b.part").mkdir()
    (tmp_path / "b.part" / "c").write_text("half")
    (tmp_path / "whole").write_text("whole")
    remove_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    remove_temporaries(tmp_path / "none")


def test_invalid_file_name_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"^expected a name that a file can have, .* too long$"):
        read_if_exists(tmp_path / ("x" * 300) / "run.json")


def test_output_path_is_written_in_place(tmp_path):
    real, link, dangling = tmp_path / "real", tmp_path / "link", tmp_path / "dangling"
    real.write_text("old")
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "later")
    assert write_output(link, b"new")
    assert write_output(dangling, b"first")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert (tmp_path / "later").read_bytes() == b"first"
    assert not write_output(Path("/dev/null"), b"gone")
    assert Path("/dev/null").is_char_device()
    pipe, contents = tmp_path / "pipe", []
    os.mkfifo(pipe)
    with pytest.raises(StorageFailed, match="start the process that reads from the pipe"):
        write_output(pipe, b"alone")
    read_fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(read_fd, True)
    write_fd = os.open(
        pipe, os.O_WRONLY
    )  # without a writer, the reader would see the end of the file at once

    def read() -> None:
        with os.fdopen(read_fd, "rb") as file:
            contents.append(file.read())

    reader = threading.Thread(target=read)
    reader.start()
    content = b"more than a pipe holds" * 10_000
    assert not write_output(pipe, content)
    os.close(write_fd)
    reader.join()
    assert contents == [content]
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_is_appended_to(tmp_path, name):
    program = (
        "import os, sys; from pathlib import Path;"
        "from coordinator.disk.durable_file import write_output;"
        "os.write(1, b'before '); assert not write_output(Path(sys.argv[1]), b'page');"
        "os.write(1, b' after')"
    )
    command = [sys.executable, "-c", program, name]
    with (tmp_path / "out").open("wb") as out:
        subprocess.run(command, stdout=out, check=True)
    assert (tmp_path / "out").read_bytes() == b"before page after"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    completed = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert completed.stdout == b"before page after"
    assert Path(name).exists()
