from __future__ import annotations

import os

from blake3 import blake3

from protocol.spec.files.file_digest import (
    FileDigests,
    file_digest,
    file_identity,
    lasting_identity,
)


def test_digest_of_a_file_of_several_pieces(tmp_path):
    content = os.urandom(2_500_001)
    path = tmp_path / "file"
    path.write_bytes(content)
    assert file_digest(path) == (len(content), blake3(content).hexdigest())


def test_a_file_is_read_once_until_it_changes(tmp_path):
    path, digests = tmp_path / "file", FileDigests()
    path.write_bytes(b"one")
    one, two = blake3(b"one").hexdigest(), blake3(b"two").hexdigest()
    assert digests.matches(path, 3, one)
    assert not digests.matches(path, 3, two)
    assert not digests.matches(path, 4, one)
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))  # edited within the clock's resolution, or set back by a copy
    assert digests.matches(path, 3, two)
    assert not digests.matches(path, 3, one)
    path.unlink()
    assert not digests.matches(path, 3, two)


def test_recently_written_file_is_not_cached(tmp_path):
    path, digests = tmp_path / "file", FileDigests()
    path.write_bytes(b"one")
    digests.remember(path, "as computed while it was written")
    assert digests.matches(path, 3, "as computed while it was written")
    digests.remember(tmp_path / "none", "x")
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert digests.matches(path, 3, blake3(b"two").hexdigest())


def test_unreadable_files_have_no_digest(tmp_path):
    assert not FileDigests().matches(tmp_path, tmp_path.stat().st_size, blake3(b"").hexdigest())


def test_identity_is_stable_once_the_file_is_old_enough(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    status = path.stat()
    assert lasting_identity(status, status.st_ctime_ns) == ()
    assert lasting_identity(status, status.st_ctime_ns + 10**9) == file_identity(status)
