from __future__ import annotations

import pytest

from coordinator.files.blob_index import index_blobs, read_or_build_index, write_index
from protocol.base.errors import DataError, StorageDamaged
from protocol.spec.run_spec import parse_run_spec

SPEC = parse_run_spec({
    "task": "causal-lm", "steps": 1, "model": {"config": {"model_type": "llama"}},
    "data": {"train": "texts"},
})  # fmt: skip


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The files of a run, found from the directory that the coordinator was started in."""
    (tmp_path / "start/texts").mkdir(parents=True)
    (tmp_path / "start/texts/größe.txt").write_text("one")
    monkeypatch.chdir(tmp_path / "start")
    index = index_blobs(SPEC)
    assert index is not None
    return index


def test_it_is_read_as_it_was_kept_from_whichever_directory(tmp_path, found, monkeypatch):
    write_index(tmp_path / "files.json", found)
    monkeypatch.chdir(tmp_path)
    again = read_or_build_index(tmp_path / "files.json", SPEC)
    assert again == found


def test_files_are_not_read_again(tmp_path, found):
    write_index(tmp_path / "files.json", found)
    (tmp_path / "start/texts/größe.txt").unlink()
    assert read_or_build_index(tmp_path / "files.json", SPEC) == found


def test_where_none_was_kept_the_files_are_found_now(tmp_path, found, monkeypatch):
    assert read_or_build_index(tmp_path / "files.json", SPEC) == found
    assert (tmp_path / "files.json").exists()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="expected a data file"):
        read_or_build_index(tmp_path / "other.json", SPEC)
    without = parse_run_spec({"task": "scripted", "steps": 1})
    assert read_or_build_index(tmp_path / "none.json", without) is None
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"gr\\u00f6\\u00dfe", b"../x"),
        (b'"files"', b'"fires"'),
        (b'"files": {', b'"files": 3, "more": {'),
        (b'"list": "', b'"list": 3, "more": "'),
        (b"}", b""),
    ],
)
def test_a_damaged_one_is_named(tmp_path, found, before, after):
    path = tmp_path / "files.json"
    write_index(path, found)
    spoilt = path.read_bytes().replace(before, after)
    assert spoilt != path.read_bytes()
    path.write_bytes(spoilt)
    with pytest.raises(StorageDamaged, match=r"files\.json"):
        read_or_build_index(path, SPEC)
