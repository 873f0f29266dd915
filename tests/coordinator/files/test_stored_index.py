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
def file_index(tmp_path, monkeypatch):
    """The files of a run, found from the directory in which the coordinator was started."""
    (tmp_path / "start/texts").mkdir(parents=True)
    (tmp_path / "start/texts/größe.txt").write_text("one")
    monkeypatch.chdir(tmp_path / "start")
    index = index_blobs(SPEC)
    assert index is not None
    return index


def test_stored_index_is_read_from_any_directory(tmp_path, file_index, monkeypatch):
    write_index(tmp_path / "files.json", file_index)
    monkeypatch.chdir(tmp_path)
    stored = read_or_build_index(tmp_path / "files.json", SPEC)
    assert stored == file_index


def test_files_of_a_stored_index_are_not_read_again(tmp_path, file_index):
    write_index(tmp_path / "files.json", file_index)
    (tmp_path / "start/texts/größe.txt").unlink()
    assert read_or_build_index(tmp_path / "files.json", SPEC) == file_index


def test_the_copy_of_a_script_moves_with_its_run(tmp_path):
    run = tmp_path / "run"
    (run / "script").mkdir(parents=True)
    (run / "script" / "train.py").write_text("fit()\n")
    data = {"train": str(run / "script" / "train.py")}
    spec = parse_run_spec({"task": "samestep.script:FitTask", "steps": 1, "data": data})
    index = read_or_build_index(run / "files.json", spec)
    assert index is not None
    moved = run.rename(tmp_path / "moved")
    moved_index = read_or_build_index(moved / "files.json", spec)
    assert moved_index is not None
    assert moved_index.digest == index.digest
    (digest,) = moved_index.blobs.keys() - {index.digest}
    assert moved_index.blobs[digest].content == moved / "script" / "train.py"


def test_missing_index_is_rebuilt(tmp_path, file_index, monkeypatch):
    assert read_or_build_index(tmp_path / "files.json", SPEC) == file_index
    assert (tmp_path / "files.json").exists()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="expected a data file"):
        read_or_build_index(tmp_path / "other.json", SPEC)
    spec_without_files = parse_run_spec({"task": "scripted", "steps": 1})
    assert read_or_build_index(tmp_path / "none.json", spec_without_files) is None
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
def test_damaged_index_is_named(tmp_path, file_index, before, after):
    path = tmp_path / "files.json"
    write_index(path, file_index)
    damaged = path.read_bytes().replace(before, after)
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(StorageDamaged, match=r"files\.json"):
        read_or_build_index(path, SPEC)
