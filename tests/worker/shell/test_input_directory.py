from __future__ import annotations

import pytest

from protocol.base.errors import StorageFailed
from protocol.spec.files.blob_list import BlobFile, BlobList, BlobSource
from protocol.spec.files.run_files import source_files
from protocol.spec.run_spec import parse_run_spec
from worker.shell.input_directory import link_files, local_spec

DIGEST = "0" * 64
SPEC = parse_run_spec({
    "task": "causal-lm", "steps": 1, "model": {"source": "models/m"},
    "data": {"train": "package:texts", "pattern": "*.md"}, "tokenizer": {"source": "t.gguf"},
})  # fmt: skip


def source(role, form, *names):
    files = tuple(BlobFile(name=name, size=1, digest=DIGEST) for name in names)
    return BlobSource(role=role, form=form, files=files)


LISTING = BlobList(
    sources=(
        source("data", "directory", "b/x.jsonl", "a.txt"),
        source("model", "directory", "config.json", "model.safetensors"),
        source("tokenizer", "file", "t.gguf"),
    )
)


def source_paths(tmp_path):
    paths = {}
    for each in LISTING.sources:
        for number, file in enumerate(each.files):
            path = tmp_path / f"{each.role}{number}"
            path.write_text(file.name)
            paths[each.role, file.name] = path
    return paths


def test_a_task_sees_the_listed_files_and_no_others(tmp_path):
    inputs = tmp_path / "inputs/one"
    link_files(inputs, LISTING, source_paths(tmp_path))
    file_names = sorted(p.relative_to(inputs).as_posix() for p in inputs.rglob("*") if p.is_file())
    assert file_names == [
        "data/a.txt", "data/b/x.jsonl", "model/config.json", "model/model.safetensors",
        "tokenizer/t.gguf",
    ]  # fmt: skip
    assert (inputs / "data/b/x.jsonl").read_text() == "b/x.jsonl"


def test_links_and_sources_give_the_same_task(tmp_path):
    """Workers with fetched files and workers with local files read the same names."""
    inputs = tmp_path / "inputs/one"
    link_files(inputs, LISTING, source_paths(tmp_path))
    local, notices = local_spec(SPEC, LISTING, inputs)
    for each in LISTING.sources:
        local_files = source_files(local, each.role)
        assert local_files is not None
        assert local_files.form == each.form
        assert {name for name, _ in local_files.files} == {file.name for file in each.files}
    assert local.model is not None
    assert local.model.name == "models/m"
    assert notices == {
        str(inputs / "data"): "package:texts", str(inputs / "model"): "models/m",
        str(inputs / "tokenizer/t.gguf"): "t.gguf",
    }  # fmt: skip
    shared_roles = {"data", "model", "tokenizer"}
    assert local.model_dump(exclude=shared_roles) == SPEC.model_dump(exclude=shared_roles)


def test_explicit_model_name_is_kept(tmp_path):
    assert SPEC.model is not None
    named_spec = SPEC.model_copy(update={"model": SPEC.model.model_copy(update={"name": "org/m"})})
    local, _ = local_spec(named_spec, LISTING, tmp_path)
    assert local.model is not None
    assert local.model.name == "org/m"


def test_correct_links_stay_and_others_are_replaced(tmp_path):
    inputs, paths = tmp_path / "inputs/one", source_paths(tmp_path)
    link_files(inputs, LISTING, paths)
    inode = (inputs / "data/a.txt").lstat().st_ino
    moved_path = tmp_path / "moved"
    moved_path.write_text("elsewhere")
    link_files(inputs, LISTING, {**paths, ("model", "config.json"): moved_path})
    assert (inputs / "data/a.txt").lstat().st_ino == inode
    assert (inputs / "model/config.json").read_text() == "elsewhere"


def test_inputs_of_earlier_runs_are_removed(tmp_path):
    link_files(tmp_path / "inputs/one", LISTING, source_paths(tmp_path))
    link_files(tmp_path / "inputs/two", LISTING, source_paths(tmp_path))
    assert [path.name for path in (tmp_path / "inputs").iterdir()] == ["two"]
    assert (tmp_path / "model0").read_text() == "config.json"


def test_disk_error_is_one_line(tmp_path):
    (tmp_path / "inputs").touch()
    with pytest.raises(StorageFailed, match="link the run's files"):
        link_files(tmp_path / "inputs/one", LISTING, source_paths(tmp_path))
