"""What a script's own code does is done: none of it is replaced by a shortcut."""

from __future__ import annotations

import importlib
import random
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from backends.eager.eager import EagerBackend
from samestep.fitted import FittedTask
from samestep.script import Script
from tests.samestep.specs import SPEC

X = torch.linspace(-1, 1, 8)[:, None]


def squares(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()


def fitted(**given: Any):
    task = {"module": nn.Linear(1, 1), "train": TensorDataset(X, 2 * X), "loss": squares, **given}
    return FittedTask(samestep.Task(**task), SPEC, {})


def tensors_of(batch):
    return {name: torch.tensor(values) for name, values in batch.arrays.items()}


class Doubled(TensorDataset):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x, 10 * y


def test_a_tensor_data_set_of_a_subclass_is_read_by_its_own_method():
    task = fitted(train=Doubled(X, 2 * X), held_out=Doubled(X, 2 * X))
    assert torch.equal(tensors_of(task.batch([1, 2]))["1"], 20 * X[1:3])
    assert task.manifest.digests["data"] != fitted().manifest.digests["data"]


def test_a_metric_is_divided_by_samples_where_time_comes_first():
    def time_major(items):
        x = torch.stack([item[0] for item in items], 1)
        return {"x": x, "mask": x > 0, "lengths": torch.full((len(items),), 5)}

    data = [(torch.ones(5, 1), 0)] * 2
    task = fitted(
        module=nn.Linear(1, 1),
        train=data,
        held_out=data,
        collate=time_major,
        loss=lambda module, batch: module(batch["x"]).sum(),
        metrics={"total": lambda _, batch: batch["x"].sum()},
    )
    with torch.no_grad():
        sums = task._evaluate(task.user.module, tensors_of(task.evaluation_batch(0)))
    assert (sums["total"], sums["total of"]) == (10.0, 2.0)


def test_a_loss_is_given_the_structure_of_its_own_batch():
    seen = []

    def collate(items):
        x = torch.stack([item[0] for item in items])
        return (x, x) if x[0] < 0 else {"0": x, "1": x, "positive": True}

    def loss(module, batch):
        seen.append(type(batch))
        assert not isinstance(batch, dict) or batch["positive"] is True
        return (module(batch["0"] if isinstance(batch, dict) else batch[0]) ** 2).sum()

    task = fitted(collate=collate, loss=loss)
    batches = [task.batch([0]), task.batch([7])]
    seen.clear()
    for batch in batches:
        task.trainable.loss(task.user.module, tensors_of(batch))
    assert seen == [tuple, dict]


def in_place(module, batch):
    x, y = batch
    x.add_(1.0)
    y.mul_(0.5)
    return ((module(x) - y) ** 2).sum()


def test_a_loss_that_changes_its_batch_changes_no_other_use_of_it():
    data = TensorDataset(X, 2 * X)
    metrics = {"first": lambda _, batch: batch[0].sum()}
    task = fitted(train=data, held_out=data, loss=in_place, metrics=metrics)
    program = EagerBackend("cpu").compile(task.trainable, task.batch([0, 1]))
    try:
        assert program.evaluate(task.evaluation_batch(3))["first"] == float(X[6:].sum())
    finally:
        program.close()


@pytest.fixture
def _global_generators():
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    random.setstate(before[2])


@pytest.mark.usefixtures("_global_generators")
def test_a_script_draws_after_fit_what_it_would_have_drawn_without():
    def draws():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()  # noqa: NPY002

    def seed():
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        random.seed(5)

    def build():
        torch.manual_seed(1)
        draws()
        raise KeyError("over")

    seed()
    expected = draws()
    seed()
    torch.backends.cudnn.benchmark = True
    try:
        with pytest.raises(samestep.SamestepError, match="over"):
            samestep.fit(build, steps=1, device="cpu")
        assert draws() == expected
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = False


def test_fit_inside_of_inference_mode_is_named():
    with torch.inference_mode(), pytest.raises(samestep.SamestepError, match="inference_mode"):
        samestep.fit(fitted, steps=1)


def test_what_a_script_imports_has_one_digest_however_it_was_started(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name in ("plain.py", "beside_a_script.py"):
        (tmp_path / name).write_text("")
    digests = set()
    for folder in (tmp_path, tmp_path / "sub" / ".."):
        main = types.ModuleType("__main__")
        main.__file__ = str(folder / "plain.py")
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "beside_a_script", raising=False)
        importlib.import_module("beside_a_script")
        digests.add(Script.running().modules_digest())
    assert len(digests) == 1
    assert digests != {""}
