from __future__ import annotations

import pytest
from blake3 import blake3

from coordinator.files.blob_index import index_blobs
from protocol.base.errors import DataError
from protocol.spec.files.blob_list import BlobList
from protocol.spec.run_spec import parse_run_spec


def spec(train: object):
    return parse_run_spec({
        "task": "causal-lm", "steps": 1, "model": {"config": {"model_type": "llama"}},
        "data": {"train": str(train)},
    })  # fmt: skip


def test_every_file_is_listed_with_size_and_digest(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"alike")
    (tmp_path / "b.txt").write_bytes(b"alike")
    (tmp_path / "c.txt").write_bytes(b"")
    index = index_blobs(spec(tmp_path))
    assert index is not None
    (source,) = index.listing.sources
    digest = blake3(b"alike").hexdigest()
    assert [(f.name, f.size, f.digest) for f in source.files] == [
        ("a.txt", 5, digest), ("b.txt", 5, digest), ("c.txt", 0, blake3(b"").hexdigest()),
    ]  # fmt: skip
    document = index.blobs[index.digest].content
    assert isinstance(document, bytes)
    assert BlobList.from_bytes(document) == index.listing
    assert blake3(document).hexdigest() == index.digest
    assert set(index.blobs) == {index.digest, digest, blake3(b"").hexdigest()}


def test_list_digest_changes_with_a_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one")
    before = index_blobs(spec(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"two")
    after = index_blobs(spec(tmp_path))
    assert before is not None
    assert after is not None
    assert before.digest != after.digest


def test_a_run_without_files_has_no_list():
    assert index_blobs(parse_run_spec({"task": "scripted", "steps": 1})) is None


def test_a_missing_file_and_too_many_are_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="expected a data file at"):
        index_blobs(spec(tmp_path / "none.txt"))
    monkeypatch.setattr("protocol.base.limits.FILES_PER_RUN", 2)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    with pytest.raises(DataError, match="at most 2 files, got 3"):
        index_blobs(spec(tmp_path))
