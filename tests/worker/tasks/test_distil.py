"""A student's samples and batches, for any size of the capture; mismatches are named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.base.interface import BlockGradient, Loss
from backends.eager.eager import EagerBackend
from backends.wgpu.backend import VulkanBackend
from backends.wgpu.device.adapters import adapters
from coordinator.files.blob_index import index_blobs
from protocol.base.errors import DataError, SamestepError
from protocol.datasets.data_check import check_data
from protocol.exact.samples import SampleOrder
from protocol.spec.manifest import CaptureLayout
from protocol.spec.run_spec import RunSpec, parse_run_spec
from tests.cluster import ROOT
from tests.sample_capture import STEP_SAMPLES, write_capture
from worker.distillation.captured_samples import CapturedSamples
from worker.tasks.language.distil import Distil
from worker.tasks.registry import build

LAYOUT = CaptureLayout(tokens=12, vocabulary=50, top_k=4)
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def logits(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("capture")
    return write_capture(directory, LAYOUT, 9, steps_per_file=4, samples_per_group=16)


def spec_of(logits: Path, **changes: Any) -> RunSpec:
    document = {
        "task": "distil",
        "seed": 7,
        "steps": 3,
        "model": {"config": LLAMA},
        "data": {"train": str(logits), "holdout": 0.25},
        "batch": {"samples": 8, "microbatch": 4},
    }
    return parse_run_spec(document | changes)


@pytest.fixture(scope="module")
def task(logits) -> Distil:
    task = build(spec_of(logits))
    assert isinstance(task, Distil)
    return task


def test_student_with_too_few_positions_has_a_remedy(logits):
    spec = spec_of(logits, model={"config": LLAMA | {"max_position_embeddings": 8}})
    message = (
        r"at least 12 positions.* got 8: --set model.config.max_position_embeddings=12, or capture "
        "with data.max_tokens=8"
    )
    with pytest.raises(DataError, match=message):
        build(spec)


def test_samples_are_read_from_any_position(logits):
    samples = CapturedSamples(logits)
    assert samples.index.samples == 72
    positions = [70, 3, 33, 31, 4, 71]
    read = samples.read(positions)
    assert read["sample_id"].tolist() == positions


def test_training_and_evaluation_samples_are_disjoint(task):
    assert task.manifest.train_samples == 54
    assert task.manifest.row_groups == ((16, 16), (16, 6))
    assert task.manifest.evaluation_parts == 1
    assert len(task.evaluation_batch(0).arrays["labels"]) == 18


def test_microbatch_is_one_read_and_files_are_sequential(task):
    manifest = task.manifest
    batch = spec_of(Path("x")).batch
    order = SampleOrder(7, manifest.train_samples, batch, manifest.row_groups)
    for epoch in range(3):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        parts = [part for step in steps for part in order.microbatches(step)]
        assert sorted(sample for part in parts for sample in part) == list(range(54))
        files = [sample // 32 for part in parts for sample in part]
        assert np.count_nonzero(np.diff(files)) == 1
        assert sum(len({sample // 16 for sample in part}) > 1 for part in parts) <= 3
    assert order.microbatches(0) != order.microbatches(order.steps_per_epoch)


def test_masked_tokens_are_not_learned(task):
    batch = task.batch([7, 8])
    assert batch.weight == 11 + 12
    assert batch.arrays["labels"][0, -1] == -100
    assert task.blank(2).arrays.keys() == batch.arrays.keys()
    for name, array in task.blank(2).arrays.items():
        assert (array.shape, array.dtype) == (batch.arrays[name].shape, batch.arrays[name].dtype)


def test_student_trains_in_full(task):
    program = EagerBackend("cpu").compile(task.trainable, task.blank(4))
    program.load(task.initial_parameters())
    *blocks, loss = program.gradients([(task.batch([0, 1, 2, 3]), 1)])
    assert isinstance(loss, Loss)
    assert np.isfinite(loss.loss_sum)
    assert all(isinstance(b, BlockGradient) and np.isfinite(b.values).all() for b in blocks)
    figures = program.evaluate(task.evaluation_batch(0))
    assert figures["divergence"] > 0
    program.close()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_student_on_vulkan_equals_torch(tmp_path, temperature):
    if isinstance(reason := adapters(), str):
        pytest.skip(reason)
    layout = LAYOUT.model_copy(update={"temperature": temperature})
    logits = write_capture(tmp_path, layout, 3, steps_per_file=4, samples_per_group=16)
    task = build(spec_of(logits, distil={"alpha": 0.5, "temperature": temperature}))
    outcomes = []
    for backend in (EagerBackend("cpu"), VulkanBackend()):
        program = backend.compile(
            task.trainable, task.batch([0, 1, 2, 3]), (), [task.evaluation_batch(0)]
        )
        program.load(task.initial_parameters())
        *blocks, loss = program.gradients([(task.batch([4, 5, 6, 7]), 1)])
        assert isinstance(loss, Loss)
        gradients = {b.block: b.values.copy() for b in blocks if isinstance(b, BlockGradient)}
        outcomes.append((loss.loss_sum, gradients, program.evaluate(task.evaluation_batch(0))))
        program.close()
    (expected, expected_gradients, figures), (loss_sum, device_gradients, device_metrics) = outcomes
    assert loss_sum == pytest.approx(expected, rel=1e-5)
    assert device_metrics == pytest.approx(figures, rel=1e-5)
    for block, values in expected_gradients.items():
        assert np.abs(device_gradients[block] - values).max() < 1e-5 * np.abs(values).max()


def test_foreign_file_is_named(logits, tmp_path):
    for file in logits.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "00000.parquet").write_bytes((logits / "00002.parquet").read_bytes())
    with pytest.raises(
        DataError, match=r"expected the file that the capture's index lists at .*00000.parquet"
    ):
        CapturedSamples(tmp_path).read([0])


def test_missing_files_are_reported(logits, tmp_path):
    (tmp_path / "capture.json").write_bytes((logits / "capture.json").read_bytes())
    (tmp_path / "00001.parquet").write_bytes((logits / "00001.parquet").read_bytes())
    task = build(spec_of(tmp_path))
    assert isinstance(task, Distil)
    assert task.missing([0, 31, 32]) == ("00000.parquet",)
    assert task.missing([40]) == ()
    assert task.missing_of_part(0) == ("00002.parquet",)


def test_validation_capture_is_evaluated(logits, tmp_path):
    other = write_capture(tmp_path / "other", LAYOUT, 2, steps_per_file=4)
    spec = spec_of(logits, data={"train": str(logits), "validation": str(other)})
    task = build(spec)
    assert isinstance(task, Distil)
    assert task.manifest.train_samples == 72
    assert task.manifest.evaluation_parts == 1
    expected = CapturedSamples(other).read(range(16))["input_ids"]
    assert (task.evaluation_batch(0).arrays["input_ids"] == expected[:, :-1]).all()
    assert task.missing_of_part(0) == ()
    files = index_blobs(spec)
    assert files is not None
    names_by_role = {
        source.role: [file.name for file in source.files] for source in files.listing.sources
    }
    assert names_by_role["validation"] == ["00000.parquet", "capture.json"]
    (other / "00000.parquet").unlink()
    with pytest.raises(DataError, match=r"the capture in '.*other/logits' lacks '00000.parquet'"):
        check_data(spec)


def test_mismatched_evaluation_capture_is_refused(logits, tmp_path):
    shorter = LAYOUT.model_copy(update={"tokens": 11})
    other = write_capture(tmp_path, shorter, 2, steps_per_file=4)
    spec = spec_of(logits, data={"train": str(logits), "validation": str(other)})
    for check in (check_data, build):
        with pytest.raises(DataError, match=r"expected the same layout .* data.validation"):
            check(spec)
    data_section = {"train": str(logits), "validation": str(other), "holdout": 0.5}
    with pytest.raises(SamestepError, match=r"data.holdout: has no effect with validation"):
        spec_of(logits, data=data_section)


def test_a_student_without_the_teacher_s_vocabulary_is_refused(logits):
    with pytest.raises(DataError, match="vocab_size of at least 50"):
        build(spec_of(logits, model={"config": {**LLAMA, "vocab_size": 40}}))


READ_ALL = """
import resource, sys
from pathlib import Path
from worker.distillation.captured_samples import CapturedSamples
samples = CapturedSamples(Path(sys.argv[1]))
samples.read([0])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for first in range(0, samples.index.samples, 8):
    assert samples.read(range(first, first + 8))["sample_id"][0] == first
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_memory_does_not_grow_with_the_capture(tmp_path):
    layout = CaptureLayout(tokens=256, vocabulary=50_000, top_k=64)
    steps = 200
    capture_mib = steps * STEP_SAMPLES * layout.sample_bytes // 2**20
    assert capture_mib > 100
    directory = write_capture(tmp_path, layout, steps, steps_per_file=40, samples_per_group=16)
    completed = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(directory)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(completed.stdout) < 30
