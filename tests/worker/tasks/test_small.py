"""regress, digits and scripted: data, start values, and learning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backends.base.interface import Array, BlockGradient, Program
from backends.registry import choose
from protocol.base.errors import DataError
from protocol.spec.run_spec import DigitsRun, RegressRun, RunSpec, ScriptedRun
from protocol.spec.sections.tasks import DigitsSpec, RegressSpec, ScriptedSpec
from worker.tasks import registry
from worker.tasks.base.task import Task
from worker.tasks.registry import build
from worker.tasks.small.regress import generate


def regress(**changes: Any) -> RunSpec:
    return RegressRun(task="regress", seed=3, steps=1, regress=RegressSpec(**changes))


def digits(**changes: Any) -> RunSpec:
    return DigitsRun(task="digits", seed=3, steps=1, digits=DigitsSpec(**changes))


def train_plainly(task: Task, program: Program, rate: float, steps: int, samples: int) -> None:
    """Train by plain gradient descent on batches like those of a run."""
    values = task.initial_parameters()
    for step in range(steps):
        program.load(values)
        first = step * samples
        rows = [(first + n) % task.manifest.train_samples for n in range(samples)]
        for item in program.gradients([(task.batch(rows), step)]):
            if isinstance(item, BlockGradient):
                values[item.block] -= np.float32(rate / samples) * item.values
    program.load(values)


def metric_of(task: Task, program: Program) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in range(task.manifest.evaluation_parts):
        for name, value in program.evaluate(task.evaluation_batch(part)).items():
            sums[name] = sums.get(name, 0.0) + value
    return {metric.name: metric.value(sums) for metric in task.manifest.metrics}


def test_regress_reaches_nearly_zero_error_without_noise():
    task = build(regress(samples=300, features=4))
    program = choose("cpu").backend.compile(task.trainable, task.batch(range(8)))
    train_plainly(task, program, rate=0.5, steps=80, samples=32)
    assert metric_of(task, program)["mse"] <= 1e-10
    program.close()


@pytest.mark.parametrize("features", [1, 8, 100, 1000])
def test_regress_targets_are_exact(features):
    """Integer arithmetic makes the linear law hold without rounding."""
    x, y = generate(5, 50, features, 0.0)
    assert x.dtype == y.dtype == np.float32
    assert x.shape == (50, features)
    assert np.abs(x).max() <= 1.0
    if features <= 49:
        table = np.hstack([x, np.ones((50, 1), np.float32)]).astype(np.float64)
        law, *_ = np.linalg.lstsq(table, y.astype(np.float64), rcond=None)
        rounded = np.round(law * 256) / 256
        assert np.array_equal((table @ rounded).astype(np.float32), y)


def test_regress_noise_has_the_requested_deviation():
    _, exact = generate(5, 20_000, 3, 0.0)
    _, noisy = generate(5, 20_000, 3, 0.25)
    assert (noisy - exact).std() == pytest.approx(0.25, rel=0.03)


def test_regress_starts_from_zeros_and_measures_all_samples():
    task = build(regress(samples=300, features=4))
    assert [a.tolist() for a in task.initial_parameters()] == [[0.0] * 5]
    assert [t.name for t in task.manifest.blocks[0].tensors] == ["weight", "bias"]
    weights = [task.evaluation_batch(part).weight for part in range(2)]
    assert task.manifest.evaluation_parts == 2
    assert weights == [256.0, 44.0]


def test_digits_has_one_block_per_hidden_layer_and_a_head():
    manifest = build(digits(hidden=(32, 16, 8))).manifest
    assert [b.name for b in manifest.blocks] == ["layer.0", "layer.1", "layer.2", "head"]
    assert [b.elements for b in manifest.blocks] == [64 * 32 + 32, 32 * 16 + 16, 136, 90]


def test_digits_data_equals_scikit_learn():
    from sklearn.datasets import load_digits

    task, dataset = build(digits()), load_digits()
    assert task.manifest.train_samples == 1438
    batch = task.batch(range(1438))
    parts = [task.evaluation_batch(n) for n in range(task.manifest.evaluation_parts)]
    images = np.vstack([batch.arrays["x"], *(part.arrays["x"] for part in parts)])
    labels = np.concatenate([batch.arrays["labels"], *(p.arrays["labels"] for p in parts)])
    image_rows = sorted(zip(map(bytes, images), labels, strict=True))
    rows = (dataset.data / 16).astype(np.float32)
    assert image_rows == sorted(zip(map(bytes, rows), dataset.target, strict=True))


def test_digits_start_values_stay_within_their_bound():
    def largest(values: Array) -> float:
        return float(np.abs(values).max())

    first, second, head = build(digits(hidden=(16, 25))).initial_parameters()
    assert 0.12 < largest(first) <= 1 / 8
    assert 0.24 < largest(second) <= 1 / 4
    assert 0.19 < largest(head) <= 1 / 5


def test_digits_learns():
    task = build(digits(hidden=(32,)))
    program = choose("cpu").backend.compile(task.trainable, task.batch(range(8)))
    train_plainly(task, program, rate=0.5, steps=120, samples=48)
    assert metric_of(task, program)["accuracy"] > 0.9
    program.close()


@pytest.mark.parametrize(
    "spec", [regress(noise=0.1), digits(), ScriptedRun(task="scripted", steps=1)]
)
def test_a_spec_builds_the_same_task_twice_and_a_seed_changes_it(spec):
    one, two = build(spec), build(spec)
    other = build(spec.model_copy(update={"seed": 4}))
    assert one.manifest.digest() == two.manifest.digest()
    for a, b in zip(one.initial_parameters(), two.initial_parameters(), strict=True):
        assert a.tobytes() == b.tobytes()
        assert a.dtype == np.float32
    if spec.task != "scripted":
        arrays, other_arrays = one.batch([0, 1]).arrays, other.batch([0, 1]).arrays
        assert any(not np.array_equal(arrays[name], other_arrays[name]) for name in arrays)


def test_scripted_has_the_requested_blocks():
    spec = ScriptedSpec(blocks=3, block_bytes=40, samples=9)
    task = build(ScriptedRun(task="scripted", steps=1, scripted=spec))
    assert [b.elements for b in task.manifest.blocks] == [10, 10, 10]
    program = choose("scripted").backend.compile(task.trainable, task.batch([0]))
    assert len(list(program.gradients([(task.batch([1, 2]), 0)]))) == 4
    assert metric_of(task, program) == {"samples_held_out": 4.0}


def test_a_missing_library_is_one_clear_line(monkeypatch):
    def raise_missing_module(_: RunSpec) -> Task:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(registry, "_build", raise_missing_module)
    with pytest.raises(DataError, match=r"needs 'torch'; pip install 'samestep\[digits\]'"):
        build(digits())


def test_a_missing_distribution_is_one_clear_line(monkeypatch):
    monkeypatch.setattr("worker.tasks.small.digits.sources.package_files", lambda _: [])
    with pytest.raises(DataError, match="lacks digits"):
        build(digits())
