"""`worker logits`: captured logits as readable lines."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from protocol.base.errors import DataError
from protocol.spec.manifest import CaptureLayout
from tests.sample_capture import write_capture
from worker.cli import app


def test_a_sample_is_shown_with_its_tokens(tmp_path):
    layout = CaptureLayout(tokens=6, vocabulary=50, top_k=4)
    logits = write_capture(tmp_path, layout, 2, steps_per_file=2)
    vocabulary = {f"word{number}": number for number in range(50)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "word0"}
    document = {"version": "1.0", "added_tokens": [], "model": model}
    (logits / "tokenizer.json").write_text(json.dumps(document))
    arguments = ["logits", "show", str(logits / "00000.parquet"), "--samples", "2", "--rows", "3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "16 samples in 2 row groups; of each token the 4 largest of 50 logits" in lines[0]
    assert [line for line in lines if line.startswith("sample")] == [
        "sample 0: 6 rows", "sample 1: 6 rows",
    ]  # fmt: skip
    row = lines[3]
    assert "word" in row
    assert "the teacher: " in row
    assert "; all others 0.1" in row


def test_a_file_that_has_changed_is_not_shown(tmp_path):
    layout = CaptureLayout(tokens=6, vocabulary=50, top_k=4)
    logits = write_capture(tmp_path, layout, 1, steps_per_file=1)
    file = logits / "00000.parquet"
    # Replace the file with one of another capture.
    other_capture = write_capture(tmp_path / "other", layout, 2, steps_per_file=2)
    file.write_bytes((other_capture / "00000.parquet").read_bytes())
    result = CliRunner().invoke(app, ["logits", "show", str(file)])
    assert isinstance(result.exception, DataError)
    assert "'00000.parquet'" in str(result.exception)
    assert "has changed since the capture" in str(result.exception)
    assert not result.output
    (logits / "capture.json").unlink()
    assert CliRunner().invoke(app, ["logits", "show", str(file)]).exit_code == 0


def test_missing_files_are_described(tmp_path):
    missing = str(tmp_path / "none")
    error = CliRunner().invoke(app, ["logits", "show", missing]).exception
    assert isinstance(error, DataError)
    assert repr(missing) in str(error)
    assert "Errno" not in str(error)
    assert "\n" not in str(error)


def test_without_a_tokenizer_tokens_are_numbers(tmp_path):
    layout = CaptureLayout(tokens=6, vocabulary=50, top_k=4)
    logits = write_capture(tmp_path, layout, 1, steps_per_file=1)
    result = CliRunner().invoke(app, ["logits", "show", str(logits / "00000.parquet")])
    assert "token " in result.output.splitlines()[3]
