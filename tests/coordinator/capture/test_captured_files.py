"""Interruptions do not change the files of a capture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.capture.captured_files import (
    CapturedFiles,
    find_files_from,
    find_first_lost_step,
    steps_of_a_file,
)
from protocol.base import limits
from protocol.base.errors import StorageDamaged, UsageError
from protocol.datasets.capture_index import read_index
from protocol.datasets.logits_file import LogitsFile, record_dtype
from protocol.spec.manifest import Block, CaptureLayout, Export, Manifest, TensorSpec
from protocol.spec.run_spec import RunSpec, parse_run_spec

LAYOUT = CaptureLayout(tokens=4, vocabulary=50, top_k=3)
MANIFEST = Manifest(
    blocks=(Block(name="none", kind="block", tensors=(TensorSpec(name="none", shape=(1,)),)),),
    train_samples=42,
    digests={"base_weights": "a" * 64, "vocabulary": "b" * 64},
    export=Export(directory="logits", files={"tokenizer.json": "{}"}),
    capture=LAYOUT,
)
STEPS = 11


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(limits, "LOGITS_FILE_BYTES", 3 * 4 * LAYOUT.sample_bytes)
    monkeypatch.setattr(limits, "ROW_GROUP_BYTES", 5 * LAYOUT.sample_bytes)


@pytest.fixture
def spec() -> RunSpec:
    return parse_run_spec(
        {
            "task": "teacher-logits",
            "model": {"source": "teacher"},
            "data": {"train": "text"},
            "batch": {"samples": 4, "microbatch": 2},
        }
    )


def rows(step: int) -> list[np.ndarray]:
    """Return the rows of two microbatches; the last step has only two samples."""
    records = np.zeros(4 if step < STEPS - 1 else 2, record_dtype(LAYOUT))
    records["sample_id"] = 4 * step + np.arange(len(records))
    records["rows"] = 3
    records["input_ids"][:, :4] = step
    content = records.view(np.uint8).reshape(-1)
    return [content[: 2 * LAYOUT.sample_bytes], content[2 * LAYOUT.sample_bytes :]]


def open_files(directory: Path, spec: RunSpec, committed: int = 0) -> CapturedFiles:
    directory.mkdir(exist_ok=True)
    return CapturedFiles(directory, MANIFEST, spec, committed, lambda: None)


@pytest.fixture
def reference_files(tmp_path, spec) -> dict[str, str]:
    captured_files = open_files(tmp_path / "undisturbed", spec)
    for step in range(STEPS):
        captured_files.store_step(step, rows(step))
    return captured_files.finish(is_complete=True)


def test_all_rows_are_stored_in_order(tmp_path, spec, reference_files):
    assert steps_of_a_file(spec, LAYOUT) == 3
    directory = tmp_path / "undisturbed" / "logits"
    index = read_index(directory)
    assert index.samples == 42
    assert len(index.files) == 4
    assert index.files[0].row_groups == (4, 4, 4)  # whole microbatches, at most 5 samples
    assert index.files[-1].row_groups == (4, 2)
    sample_ids = []
    for file in index.files:
        logits = LogitsFile(directory / file.name)
        for group in range(len(file.row_groups)):
            sample_ids += logits.records(group)["sample_id"].tolist()
        assert reference_files[f"logits/{file.name}"] == file.digest
    assert sample_ids == list(range(42))
    assert not list((tmp_path / "undisturbed" / "capture").iterdir())


@pytest.mark.parametrize("crash_at", range(STEPS))
@pytest.mark.parametrize("lost_bytes", [0, 1, 100])
def test_crash_at_any_step_leaves_the_same_files(
    tmp_path, spec, reference_files, crash_at, lost_bytes
):
    captured_files = open_files(tmp_path, spec)
    for step in range(crash_at + 1):  # the last step is on disk, but not committed
        captured_files.store_step(step, rows(step))
    captured_files.close()
    spool = tmp_path / "capture" / f"{crash_at // 3:05}.rows"
    if lost_bytes:
        spool.write_bytes(spool.read_bytes()[:-lost_bytes])
    resumed_files = open_files(tmp_path, spec, committed=crash_at)
    for step in range(crash_at, STEPS):
        resumed_files.store_step(step, rows(step))
    assert resumed_files.finish(is_complete=True) == reference_files


def test_crash_during_the_write_of_a_file_leaves_the_same_files(tmp_path, spec, reference_files):
    captured_files = open_files(tmp_path, spec)
    for step in range(4):
        captured_files.store_step(step, rows(step))
    captured_files.close()
    file = tmp_path / "logits" / "00000.parquet"
    content = file.read_bytes()
    file.unlink()
    (tmp_path / "logits" / "00000.parquet.part").write_bytes(content[:100])
    spool = open_files(tmp_path / "other", spec)
    for step in range(3):
        spool.store_step(step, rows(step))
    spool.close()
    (tmp_path / "other/capture/00000.rows").rename(tmp_path / "capture/00000.rows")
    resumed_files = open_files(tmp_path, spec, committed=4)
    for step in range(4, STEPS):
        resumed_files.store_step(step, rows(step))
    assert resumed_files.finish(is_complete=True) == reference_files


def test_repeated_step_is_stored_once(tmp_path, spec, reference_files):
    captured_files = open_files(tmp_path, spec)
    for step in range(STEPS):
        captured_files.store_step(step, rows((step + 1) % STEPS))
        captured_files.store_step(step, rows(step))
    assert captured_files.finish(is_complete=True) == reference_files


def test_capture_that_ended_early_continues(tmp_path, spec, reference_files):
    captured_files = open_files(tmp_path, spec)
    for step in range(5):
        captured_files.store_step(step, rows(step))
    assert list(captured_files.finish(is_complete=False)) == ["logits/00000.parquet"]
    captured_files.close()
    resumed_files = open_files(tmp_path, spec, committed=5)
    for step in range(5, STEPS):
        resumed_files.store_step(step, rows(step))
    assert resumed_files.finish(is_complete=True) == reference_files


def test_file_without_committed_rows_is_not_in_the_index(tmp_path, spec):
    steps_per_file = steps_of_a_file(spec, LAYOUT)
    captured_files = open_files(tmp_path / "run", spec)
    for step in range(3 * steps_per_file):
        captured_files.store_step(
            step, [] if steps_per_file <= step < 2 * steps_per_file else rows(step)
        )
    captured_files.finish(is_complete=True)
    names = [file.name for file in read_index(tmp_path / "run" / "logits").files]
    assert names == ["00000.parquet", "00002.parquet"]


def test_rows_of_a_skipped_step_are_not_stored(tmp_path, spec):
    captured_files = open_files(tmp_path, spec)
    for step in range(STEPS):
        captured_files.store_step(step, rows(step) if step != 4 else [])
    captured_files.finish(is_complete=True)
    assert read_index(tmp_path / "logits").samples == 38


@pytest.mark.parametrize(
    "case",
    [
        (8, 7, []),
        (8, 6, []),
        (8, 3, ["00001.parquet"]),
        (8, 0, ["00000.parquet", "00001.parquet"]),
        (8, 5, None),
        (STEPS, 0, ["00000.parquet", "00001.parquet", "00002.parquet", "00003.parquet"]),
        (STEPS, STEPS, None),
        (STEPS, 9, ["00003.parquet"]),
    ],
)
def test_rollback_is_refused_if_a_finished_file_would_grow(tmp_path, spec, reference_files, case):
    committed, step, removed_names = case
    captured_files = open_files(tmp_path, spec)
    for stored_step in range(committed):
        captured_files.store_step(stored_step, rows(stored_step))
    is_complete = committed == STEPS
    captured_files.finish(is_complete=is_complete)
    captured_files.close()
    assert find_first_lost_step(tmp_path, MANIFEST, spec, committed) == committed
    if removed_names is None:
        with pytest.raises(UsageError, match="nothing was changed"):
            find_files_from(tmp_path, MANIFEST, spec, step)
        return
    others = ["capture.json", "tokenizer.json"] if is_complete else []
    paths = find_files_from(tmp_path, MANIFEST, spec, step)
    assert [path.name for path in paths] == [*removed_names, *others]
    for path in paths:
        path.unlink()
    resumed_files = open_files(tmp_path, spec, committed=step)
    for stored_step in range(step, STEPS):
        resumed_files.store_step(stored_step, rows(stored_step))
    assert resumed_files.finish(is_complete=True) == reference_files


def test_missing_rows_are_detected(tmp_path, spec):
    captured_files = open_files(tmp_path, spec)
    for step in range(8):
        captured_files.store_step(step, rows(step))
    captured_files.close()
    spool = tmp_path / "capture" / "00002.rows"
    spool.write_bytes(spool.read_bytes()[:-1])
    assert find_first_lost_step(tmp_path, MANIFEST, spec, 8) == 7
    (tmp_path / "logits" / "00001.parquet").unlink()
    assert find_first_lost_step(tmp_path, MANIFEST, spec, 8) == 3
    with pytest.raises(UsageError, match="nothing was changed"):
        find_files_from(tmp_path, MANIFEST, spec, 6)


def test_lost_committed_rows_are_named(tmp_path, spec):
    captured_files = open_files(tmp_path, spec)
    for step in range(5):
        captured_files.store_step(step, rows(step))
    captured_files.close()
    (tmp_path / "capture" / "00001.rows").unlink()
    with pytest.raises(StorageDamaged, match="steps 3 to 4, which are committed; those of 2"):
        open_files(tmp_path, spec, committed=5).store_step(5, rows(5))


def test_rows_changed_on_disk_are_not_written(tmp_path, spec):
    captured_files = open_files(tmp_path, spec)
    for step in range(2):
        captured_files.store_step(step, rows(step))
    spool = tmp_path / "capture" / "00000.rows"
    content = bytearray(spool.read_bytes())
    content[100] ^= 1
    spool.write_bytes(content)
    captured_files.store_step(2, rows(2))
    with pytest.raises(StorageDamaged, match="step 0 do not match their digest"):
        captured_files.store_step(3, rows(3))
