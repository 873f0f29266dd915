"""A submitted student whose capture is invalid gets one line before the run begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.files.blob_index import index_blobs
from protocol.base.errors import DataError
from protocol.datasets.capture_check import digest_of_file, vocabulary_digest
from protocol.spec.manifest import CaptureLayout
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.sample_capture import write_capture

LAYOUT = CaptureLayout(tokens=4, vocabulary=50, top_k=3, temperature=2.0)


@pytest.fixture
def logits(tmp_path) -> Path:
    return write_capture(tmp_path, LAYOUT, 4, steps_per_file=2)


def spec_of(logits: Path, **changes: Any) -> RunSpec:
    document = {
        "task": "distil",
        "steps": 1,
        "model": {"config": {"model_type": "llama"}},
        "data": {"train": str(logits)},
        "batch": {"samples": 4, "microbatch": 2},
    }
    return parse_run_spec(document | changes)


def refusal(spec: RunSpec) -> str:
    with pytest.raises(DataError) as error_info:
        index_blobs(spec)
    assert "\n" not in str(error_info.value)
    return str(error_info.value)


def test_complete_capture_is_listed(logits):
    index = index_blobs(spec_of(logits))
    assert index is not None
    names = [file.name for source in index.listing.sources for file in source.files]
    assert names == ["00000.parquet", "00001.parquet", "capture.json"]


def test_missing_file_is_refused(logits):
    (logits / "00001.parquet").unlink()
    assert "lacks '00001.parquet', one of its 2 files" in refusal(spec_of(logits))


def test_truncated_file_is_refused(logits):
    file = logits / "00001.parquet"
    file.write_bytes(file.read_bytes()[:-7])
    assert "bytes, the capture lists it with" in refusal(spec_of(logits))


def test_changed_file_is_refused(logits):
    file = logits / "00001.parquet"
    content = bytearray(file.read_bytes())
    content[99] ^= 1
    file.write_bytes(content)
    assert "has changed since the capture" in refusal(spec_of(logits))


def test_directory_without_a_capture_is_refused(tmp_path):
    assert "found no capture.json" in refusal(spec_of(tmp_path))


def test_index_that_is_not_of_a_capture_is_refused(logits):
    (logits / "capture.json").write_text(json.dumps({"files": []}))
    assert "is not the index of a capture" in refusal(spec_of(logits))


def test_file_name_outside_the_capture_is_refused(logits):
    index = (logits / "capture.json").read_text()
    (logits / "capture.json").write_text(index.replace("00001.parquet", "../x.parquet"))
    assert "is not a file of logits" in refusal(spec_of(logits))


def test_temperature_that_was_not_captured_is_refused(logits):
    assert "distil.temperature 1 or 2" in refusal(spec_of(logits, distil={"temperature": 4}))


def test_student_with_another_tokenizer_is_refused(logits, tmp_path):
    student = tmp_path / "student"
    student.mkdir()
    (student / "config.json").write_text("{}")
    (student / "model.safetensors").write_bytes(b"")
    tokens = {"a": 0, "b": 1}
    added_tokens = [{"content": "<end>", "id": 2}]
    document = {"model": {"vocab": tokens}, "added_tokens": added_tokens}
    (student / "tokenizer.json").write_text(json.dumps(document))
    digest = digest_of_file(student / "tokenizer.json")
    assert digest == vocabulary_digest({**tokens, "<end>": 2})
    spec = spec_of(logits, model={"source": str(student)})
    assert "differs from that of the capture" in refusal(spec)
    index = (logits / "capture.json").read_text()
    assert digest is not None
    (logits / "capture.json").write_text(index.replace("b" * 64, digest))
    assert index_blobs(spec) is not None
