"""The cache on disk: resumption, locks, verification and disk errors."""

from __future__ import annotations

import fcntl
import subprocess
import sys

import numpy as np
import pytest
from blake3 import blake3

from protocol.base.errors import StorageFailed
from protocol.spec.files.file_digest import FileDigests
from tests.cluster import ROOT
from tests.durable_run import small_disk
from worker.shell.blob_cache import BlobCache, PartialDownload

CONTENT = np.random.default_rng(1).integers(0, 256, 3_000_000, np.uint8)
DIGEST = blake3(CONTENT.data).hexdigest()
SIZE = len(CONTENT)


@pytest.fixture
def cache(tmp_path) -> BlobCache:
    return BlobCache(tmp_path / "cache", FileDigests())


def open_part(cache: BlobCache) -> PartialDownload:
    part = cache.open_part(DIGEST, SIZE)
    assert part is not None
    return part


def files(cache: BlobCache) -> list[str]:
    return sorted(path.name for path in cache.directory.rglob("*") if path.is_file())


def test_small_file_is_stored_under_its_digest(cache):
    assert cache.find(DIGEST, SIZE) is None
    assert cache.put(DIGEST, CONTENT)
    path = cache.find(DIGEST, SIZE)
    assert path == cache.directory / "blobs" / DIGEST[:2] / DIGEST
    assert path.read_bytes() == CONTENT.tobytes()
    assert path.stat().st_mode & 0o777 == 0o444
    assert cache.put(DIGEST, CONTENT)
    assert files(cache) == [DIGEST]


def test_small_file_of_another_digest_is_not_stored(cache):
    assert not cache.put(DIGEST, CONTENT[1:])
    assert files(cache) == []


@pytest.mark.parametrize("stored_bytes", [0, 1, 2_999_999])
def test_a_part_continues_where_it_ended(cache, stored_bytes):
    part = open_part(cache)
    part.append(CONTENT[:stored_bytes])
    part.close()
    assert files(cache) == [DIGEST + ".part"]
    assert cache.part_bytes(DIGEST) == stored_bytes
    resumed_part = open_part(cache)
    assert (resumed_part.size, resumed_part.was_resumed, resumed_part.is_complete) == (
        stored_bytes,
        stored_bytes > 0,
        False,
    )
    resumed_part.append(CONTENT[stored_bytes:])
    assert resumed_part.is_complete
    assert cache.find(DIGEST, SIZE) is None
    assert resumed_part.finish()
    assert cache.find(DIGEST, SIZE) is not None
    assert files(cache) == [DIGEST]


def test_part_with_wrong_bytes_is_discarded(cache):
    part = open_part(cache)
    part.append(CONTENT[::-1].copy())
    assert not part.finish()
    assert files(cache) == []


def test_a_part_longer_than_the_file_starts_over(cache):
    part = open_part(cache)
    part.append(CONTENT)
    part.append(CONTENT)
    part.close()
    assert open_part(cache).size == 0


def test_a_damaged_file_is_not_found_and_is_written_again(cache):
    assert cache.put(DIGEST, CONTENT)
    path = cache.find(DIGEST, SIZE)
    assert path is not None
    path.chmod(0o644)
    damaged = CONTENT.copy()
    damaged[7] ^= 1
    path.write_bytes(damaged.tobytes())
    assert cache.find(DIGEST, SIZE) is None
    assert cache.put(DIGEST, CONTENT)
    assert cache.find(DIGEST, SIZE) == path


HOLDER = """
import sys
from pathlib import Path
from protocol.spec.files.file_digest import FileDigests
from worker.shell.blob_cache import BlobCache
part = BlobCache(Path(sys.argv[1]), FileDigests()).open_part(sys.argv[2], int(sys.argv[3]))
print("busy" if part is None else "mine", flush=True)
sys.stdin.read()
"""


def test_two_processes_never_write_one_part(cache):
    part = open_part(cache)
    command = [sys.executable, "-c", HOLDER, str(cache.directory), DIGEST, str(SIZE)]
    completed = subprocess.run(
        command, cwd=ROOT, input="", capture_output=True, text=True, check=True
    )
    assert completed.stdout == "busy\n"
    part.append(CONTENT[:10])
    part.close()
    other = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        assert cache.open_part(DIGEST, SIZE) is None
        own_part = cache.open_part(DIGEST, SIZE, exclusive=True)
        assert own_part is not None
        assert own_part.size == 0
        own_part.append(CONTENT)
        assert own_part.finish()
        other.kill()
    # The lock ended with its process; the part is as the killed process left it.
    assert open_part(cache).size == 10
    assert cache.find(DIGEST, SIZE) is not None


def test_lock_acquired_after_the_rename_does_not_permit_writing(cache, monkeypatch):
    """Another worker finishes the part after this one opens it and before it locks it."""
    part = open_part(cache)
    part.append(CONTENT)
    flock = fcntl.flock

    def finish_before_lock(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        assert part.finish()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", finish_before_lock)
    assert cache.open_part(DIGEST, SIZE) is None
    assert cache.find(DIGEST, SIZE) is not None


def test_full_disk_is_one_line_and_its_part_is_reused(tmp_path):
    with small_disk(tmp_path / "small", 1024) as disk:
        cache = BlobCache(disk / "cache", FileDigests())
        with pytest.raises(StorageFailed, match=r"expected 3000000 free bytes, got \d+"):
            cache.reserve(SIZE)
        cache.reserve(1000)
        with pytest.raises(StorageFailed, match="No space left on device; free some space there"):
            cache.put(DIGEST, CONTENT)
        assert files(cache) == []
        part = open_part(cache)
        with pytest.raises(StorageFailed, match="No space left"):
            part.append(CONTENT)
        part.close()
        # The part that fit is reused once there is space.
        assert 500_000 < cache.part_bytes(DIGEST) < SIZE
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        resumed_part = open_part(cache)
        assert resumed_part.was_resumed
        resumed_part.append(CONTENT[resumed_part.size :])
        assert resumed_part.finish()


def test_unusable_cache_directory_is_one_line(tmp_path):
    blocking = tmp_path / "file"
    blocking.touch()
    cache = BlobCache(blocking, FileDigests())
    for use in (
        lambda: cache.reserve(1), lambda: cache.put(DIGEST, CONTENT),
        lambda: cache.open_part(DIGEST, SIZE),
    ):  # fmt: skip
        with pytest.raises(StorageFailed, match="SAMESTEP_CACHE") as error_info:
            use()
        assert "\n" not in str(error_info.value)
    assert cache.find(DIGEST, SIZE) is None
    assert cache.part_bytes(DIGEST) == 0
