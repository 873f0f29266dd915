"""A script's data set, loss and modules are used as written; what breaks a run is refused."""

from __future__ import annotations

import copy
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
import worker.scripts.data_digest
from backends.base.interface import BlockGradient
from backends.eager.eager import EagerBackend
from samestep import fitting
from samestep.script import Script
from tests.samestep.specs import SPEC
from worker.scripts.checks import check_task
from worker.scripts.script_task import ScriptTask

X = torch.linspace(-1, 1, 8)[:, None]


def squares(module, batch):
    return ((module(batch[0]) - batch[1]) ** 2).sum()


def fit_task(**changes: Any):
    task = {"module": nn.Linear(1, 1), "train": TensorDataset(X, 2 * X), "loss": squares, **changes}
    return ScriptTask(samestep.Task(**task), SPEC, {})


def tensors_of(batch):
    return {name: torch.tensor(values) for name, values in batch.arrays.items()}


class DataWithScaledLabels(TensorDataset):
    def __getitem__(self, number):
        x, y = super().__getitem__(number)
        return x, 10 * y


def test_subclass_of_tensor_data_set_is_read_by_its_method():
    task = fit_task(train=DataWithScaledLabels(X, 2 * X), held_out=DataWithScaledLabels(X, 2 * X))
    assert torch.equal(tensors_of(task.batch([1, 2]))["1"], 20 * X[1:3])
    assert task.manifest.digests["data"] != fit_task().manifest.digests["data"]


def test_metric_of_time_major_data_is_divided_by_samples():
    def time_major(items):
        x = torch.stack([item[0] for item in items], 1)
        return {"x": x, "mask": x > 0, "lengths": torch.full((len(items),), 5)}

    data = [(torch.ones(5, 1), 0)] * 2
    task = fit_task(
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


def test_loss_receives_the_structure_that_collate_returned():
    batch_types = []

    def collate(items):
        x = torch.stack([item[0] for item in items])
        return (x, x) if x[0] < 0 else {"0": x, "1": x, "positive": True}

    def loss(module, batch):
        batch_types.append(type(batch))
        assert not isinstance(batch, dict) or batch["positive"] is True
        return (module(batch["0"] if isinstance(batch, dict) else batch[0]) ** 2).sum()

    task = fit_task(collate=collate, loss=loss)
    batches = [task.batch([0]), task.batch([7])]
    batch_types.clear()
    for batch in batches:
        task.trainable.loss(task.user.module, tensors_of(batch))
    assert batch_types == [tuple, dict]


def loss_in_place(module, batch):
    x, y = batch
    x.add_(1.0)
    y.mul_(0.5)
    return ((module(x) - y) ** 2).sum()


def test_loss_that_changes_its_batch_affects_no_other_use():
    data = TensorDataset(X, 2 * X)
    metrics = {"first": lambda _, batch: batch[0].sum()}
    task = fit_task(train=data, held_out=data, loss=loss_in_place, metrics=metrics)
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
def test_fit_does_not_advance_the_global_generators():
    def draws():
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()  # noqa: NPY002

    def seed():
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        random.seed(5)

    def build():
        torch.manual_seed(1)
        draws()
        raise KeyError("stop")

    seed()
    expected = draws()
    seed()
    torch.backends.cudnn.benchmark = True
    try:
        with pytest.raises(samestep.SamestepError, match="stop"):
            samestep.fit(build, steps=1, device="cpu")
        assert draws() == expected
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = False


def test_fit_inside_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(samestep.SamestepError, match="inference_mode"):
        samestep.fit(fit_task, steps=1)


def test_fit_inside_autocast_is_refused():
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            samestep.SamestepError, match=r"outside torch.autocast, .*precision=\"bfloat16\""
        ),
    ):
        samestep.fit(fit_task, steps=1)


def test_digest_of_imported_modules_does_not_depend_on_the_path_of_the_script(
    tmp_path, monkeypatch
):
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
        digests.add(Script.of_process().modules_digest())
    assert len(digests) == 1
    assert digests != {""}


class Pretrained(nn.Linear):
    """A layer that `from_pretrained` returns in evaluation mode, as transformers does."""

    @classmethod
    def from_pretrained(cls):
        return cls(1, 1).eval()


def sequential(body, *, frozen=True, head=None):
    """Return a model of a body, frozen or trained, and a trained head."""
    return nn.Sequential(body.requires_grad_(not frozen), head or nn.Linear(1, 1))


def dropout_layer():
    return nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))


def apply(module, change):
    """Change a module, and return it."""
    change(module)
    return module


@pytest.mark.parametrize(
    ("module", "expected_modes"),
    [
        (sequential(dropout_layer()), {"0.1": True, "1": True}),
        (sequential(dropout_layer().eval()), {"0": False, "0.1": False, "1": True}),
        (sequential(dropout_layer().eval(), frozen=False), {"0.1": False, "1": True}),
        (sequential(dropout_layer()).eval(), {"0": True, "0.1": True, "1": True}),
        (apply(sequential(dropout_layer()).eval(), lambda m: m[1].train()), {"": False, "1": True}),
        (sequential(Pretrained.from_pretrained()), {"0": False, "1": True}),
        (apply(Pretrained.from_pretrained(), lambda m: m.add_module("new", dropout_layer())),
         {"": True, "new": True}),
    ],
)  # fmt: skip
def test_training_uses_the_mode_that_each_part_has_after_build(module, expected_modes):
    modes = {}

    def loss(module, batch):
        modes.update({name: part.training for name, part in module.named_modules()})
        return squares(module, batch)

    task = fit_task(module=module, loss=loss, held_out=TensorDataset(X, X))
    program = EagerBackend("cpu").compile(task.trainable, task.batch([0, 1]))
    try:
        program.evaluate(task.evaluation_batch(0))
        assert not any(modes.values())
        list(program.gradients([(task.batch([0, 1]), 7)]))
    finally:
        program.close()
    assert {name: modes[name] for name in expected_modes} == expected_modes


def norm_layers(norm):
    body = nn.Sequential(nn.Linear(1, 4), nn.Unflatten(1, (4, 1)), norm, nn.Flatten())
    with torch.no_grad():
        norm.running_mean.copy_(torch.arange(4.0) / 4)
        norm.running_var.copy_(torch.arange(1.0, 5.0))
    return body


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d, lambda n: nn.InstanceNorm1d(n, affine=True, track_running_stats=True)]
)
def test_norm_in_evaluation_mode_has_the_gradients_of_torch(norm, frozen):
    module = sequential(norm_layers(norm(4)).eval(), frozen=frozen, head=nn.Linear(4, 1))
    torch_module = copy.deepcopy(module)
    buffers = [buffer.clone() for buffer in module.buffers()]
    task = fit_task(module=module)
    program = EagerBackend("cpu").compile(task.trainable, task.batch([0, 1]))
    try:
        items = list(program.gradients([(task.batch([2, 3]), 7)]))
    finally:
        program.close()
    gradients = [item.values for item in items if isinstance(item, BlockGradient)]
    squares(torch_module, [tensor[[2, 3]] for tensor in task.user.train.tensors]).backward()
    expected = [p.grad.flatten() for p in torch_module.parameters() if p.requires_grad]
    assert np.concatenate(gradients[::-1]).tobytes() == torch.cat(expected).numpy().tobytes()
    assert all(map(torch.equal, buffers, module.buffers()))


def test_norm_in_training_mode_is_refused_with_a_remedy():
    for module in (sequential(norm_layers(nn.BatchNorm1d(4)), head=nn.Linear(4, 1)).eval(),
                   apply(sequential(norm_layers(nn.BatchNorm1d(4)).eval(), head=nn.Linear(4, 1)),
                         lambda m: m[0][2].train())):  # fmt: skip
        with pytest.raises(
            samestep.SamestepError, match=r"'0\.2' .*keep the layer in evaluation mode"
        ):
            check_task(samestep.Task(module=module, train=TensorDataset(X, X), loss=squares))


def test_trained_part_in_evaluation_mode_needs_an_explicit_mode():
    module = sequential(Pretrained.from_pretrained(), frozen=False)
    with pytest.raises(samestep.SamestepError, match=r"'0', which is trained.*module\.train\(\)"):
        fit_task(module=module)
    fit_task(module=module.train())


def test_parameter_that_is_unfrozen_during_training_is_refused_by_name():
    def loss(module, batch):
        module[0].requires_grad_(bool(batch[0][0] > 0.5))
        return squares(module, batch)

    task = fit_task(module=sequential(nn.Linear(1, 1)), loss=loss)
    program = EagerBackend("cpu").compile(task.trainable, task.batch([0, 1]))
    try:
        with pytest.raises(samestep.SamestepError, match=r"'0\.weight' unfrozen during training"):
            list(program.gradients([(task.batch([7]), 7)]))
    finally:
        program.close()


def layers_tied_by_data():
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    module[1].weight.data = module[0].weight.data
    return module


def layer_with_buffer_view():
    module = nn.Linear(1, 1)
    module.register_buffer("was", module.weight.data)
    return module


def layer_with_list_view():
    module = nn.Linear(1, 1)
    module.seen = [module.weight.data]  # type: ignore[assignment]
    return module


def layers_with_overlapping_rows():
    full_tensor = torch.ones(3, 1)
    module = nn.Sequential(nn.Linear(1, 2), nn.Linear(1, 2))
    module[0].weight, module[1].weight = (
        nn.Parameter(full_tensor[:2]),
        nn.Parameter(full_tensor[1:]),
    )
    return module


def layer_with_expanded_bias():
    module = nn.Linear(1, 2)
    module.bias = nn.Parameter(torch.ones(1).expand(2))
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            layers_tied_by_data(),
            r"'1\.weight' and '0\.weight' to be one parameter.*b\.weight = a\.weight",
        ),
        (
            layer_with_buffer_view(),
            "'weight', which is trained, to share memory with no other .*got 'was'",
        ),
        (layer_with_list_view(), r"'weight', which is trained, to share .* got 'module.seen\[0\]'"),
        (layers_with_overlapping_rows(), "to be one parameter, got two that share memory"),
        (layer_with_expanded_bias(), r"each element of 'bias'.*write \.clone\(\)"),
    ],
)
def test_memory_shared_with_trained_parameters_is_refused_by_name(module, message):
    with pytest.raises(samestep.SamestepError, match=message) as error:
        fit_task(module=module)
    assert "\n" not in str(error.value)


def test_disjoint_or_tied_parameters_are_accepted():
    full_tensor = torch.ones(2, 2)
    module = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1), nn.Linear(1, 1))
    module[0].weight, module[1].weight = (
        nn.Parameter(full_tensor[:, :1]),
        nn.Parameter(full_tensor[1:2, 1:]),
    )
    module[1].weight = nn.Parameter(full_tensor[:1].clone())
    module[2].bias = module[1].bias
    assert fit_task(module=module).manifest.train_samples == 8


def task_with_digest(data, parts_read):
    """Return a task whose data digest reads these numbers of parts; none: as time allows."""
    spec = SPEC.model_copy(update={"options": {"read": parts_read}})
    user = samestep.Task(module=nn.Linear(1, 1), train=data, held_out=data, loss=squares)
    return ScriptTask(user, spec, {})


def test_data_digest_contains_the_label_of_every_sample():
    data = [(x, 2 * x) for x in torch.linspace(-1, 1, 301)[:, None]]
    task = task_with_digest(data, {})
    assert (task.sampled_digests["data"].samples_read, task.sampled_digests["data"].parts) == (
        301,
        151,
    )
    for number in (1, 150, 300):
        other = [*data]
        other[number] = data[number][0], data[number][1] + 1
        assert task_with_digest(other, {}).manifest.digests["data"] != task.manifest.digests["data"]
    assert task_with_digest(data, {"data": 151}).manifest.digests == task.manifest.digests


class SlowData(list[Any]):
    """A data set that takes a second to read a sample."""

    def __getitem__(self, number):
        clock_s[0] += 1
        return super().__getitem__(number)


clock_s = [0.0]


def test_data_digest_covers_the_samples_read_in_ten_seconds_and_fit_reports_their_number(
    monkeypatch, capsys
):
    monkeypatch.setattr(
        worker.scripts.data_digest, "time", types.SimpleNamespace(monotonic=lambda: clock_s[0])
    )
    data = SlowData((x, 2 * x) for x in torch.linspace(-1, 1, 100)[:, None])
    task = task_with_digest(data, {})
    parts_read = {name: digest.parts for name, digest in task.sampled_digests.items()}
    # A part has two samples, and the sixth begins at 10 s, which is still in time.
    assert parts_read == {"data": 6, "held_out": 6}
    assert task_with_digest([*data], parts_read).manifest.digests == task.manifest.digests
    assert task_with_digest([*data, data[0]], parts_read).manifest.digests != task.manifest.digests
    fitting._report_sampled_digests(task)
    assert "workers compare only 12 of 100 samples of data" in capsys.readouterr().out


EARLIER_DIGEST = "30a58b4cb088cb2ecf308928d2c8df685811c772d785ddd7f4a2fdf004d7a1cf"
"""The digest of earlier releases, which read 64 samples."""


def test_run_of_an_earlier_release_has_its_old_data_digest():
    data = [(x, 2 * x) for x in torch.linspace(-1, 1, 301)[:, None]]
    other = [*data]
    other[1] = data[1][0], data[1][1] + 1
    assert fit_task(train=data).manifest.digests["data"] == EARLIER_DIGEST
    assert fit_task(train=other).manifest.digests["data"] == EARLIER_DIGEST
