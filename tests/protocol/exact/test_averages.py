"""EMA and SWA of the weights: the averages of torch and timm, whatever else happens in a step."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from protocol.base.errors import RunSpecError
from protocol.exact.reduction.absent import absent_gradient
from protocol.exact.replica import Replica
from protocol.exact.update import average_keep, step_scalars
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.run_spec import parse_run_spec, parse_run_spec_bytes
from protocol.spec.sections.optimizer import Adamw, EmaSpec, OptimizerSpec, SwaSpec

STEPS = 50
BLOCK = Block(
    name="b", kind="block",
    tensors=(TensorSpec(name="weight", shape=(7, 5)), TensorSpec(name="bias", shape=(7,))),
)  # fmt: skip
REGRESS = {"task": "regress", "steps": 5}


def gradient(step):
    return np.random.default_rng(step).standard_normal(BLOCK.elements).astype(np.float32)


def replica_of(spec):
    replica = Replica((BLOCK,), spec)
    replica.load_parameters([gradient(99)])
    return replica


def take_step(replica, spec, step, values=None):
    values = gradient(step) if values is None else values
    scalars = step_scalars(spec, replica.optimizer_step + 1, replica.step, STEPS, 1.0)
    replica.apply([values], scalars)


class EmaOfTimm:
    """The loop of timm 1.0's ModelEmaV3 and, with warmup, of diffusers' EMAModel."""

    def __init__(self, model, spec):
        self.module, self.spec, self.count = deepcopy(model), spec, 0

    @torch.no_grad()
    def update_parameters(self, model):
        decay = self.spec.decay
        if self.spec.warmup:
            decay = min(decay, (1 + self.count) / (10 + self.count)) if self.count else 0.0
        self.count += 1
        for average, parameter in zip(self.module.parameters(), model.parameters(), strict=True):
            average.mul_(decay).add_(parameter, alpha=1 - decay)


AVERAGES: dict[str, tuple[EmaSpec | SwaSpec, Any]] = {
    "ema": (EmaSpec(decay=0.9), lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9))),
    "ema-late": (
        EmaSpec(decay=0.99, start_step=20, every=3),
        lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.99)),
    ),
    "timm": (EmaSpec(decay=0.9, count_initial=True), lambda m: EmaOfTimm(m, EmaSpec(decay=0.9))),
    "diffusers": (
        EmaSpec(decay=0.75, warmup=True), lambda m: EmaOfTimm(m, EmaSpec(decay=0.75, warmup=True)),
    ),
    "swa": (SwaSpec(), AveragedModel),
    "swa-late": (SwaSpec(start_step=10, every=7), AveragedModel),
}  # fmt: skip


@pytest.mark.parametrize("name", AVERAGES)
def test_averages_equal_torch_and_timm(name):
    average, averaged_model = AVERAGES[name]
    spec = Adamw(lr=1e-2, **{"ema" if isinstance(average, EmaSpec) else "swa": average})
    replica, model = replica_of(spec), torch.nn.Linear(5, 7)
    for parameter, values in zip(model.parameters(), replica.tensors().values(), strict=True):
        parameter.data.copy_(torch.from_numpy(values))
    reference = averaged_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        take_step(replica, spec, step)
        weight, bias = gradient(step)[:35].reshape(7, 5), gradient(step)[35:]
        model.weight.grad, model.bias.grad = torch.from_numpy(weight), torch.from_numpy(bias)
        optimizer.step()
        update = step + 1
        if update > average.start_step and update % average.every == 0:
            reference.update_parameters(model)
        if update >= (average.start_step // average.every + 1) * average.every:
            for weights, expected in zip(
                replica.trained_tensors().values(), reference.module.parameters(), strict=True
            ):
                np.testing.assert_allclose(weights, expected.detach().numpy(), rtol=2e-6, atol=1e-6)
        else:
            assert replica.weights_digest() == _digest_of_parameters(replica), "no average yet"
    assert replica.weights_digest() != _digest_of_parameters(replica)


def _digest_of_parameters(replica):
    without_average = Replica((BLOCK,), OptimizerSpec(name="sgd"))
    without_average.load_parameters(replica.parameters)
    return without_average.weights_digest()


def test_an_average_continues_while_its_tensor_has_no_gradient():
    spec = OptimizerSpec(name="sgd", lr=0.1, ema=EmaSpec(decay=0.5))
    uninterrupted, replica = replica_of(spec), replica_of(spec)
    for step in range(3):
        take_step(uninterrupted, spec, step)
        take_step(replica, spec, step)
    partial_gradient = gradient(9)
    partial_gradient[35:] = 0.0
    take_step(uninterrupted, spec, 9, partial_gradient)
    partial_gradient[35:] = absent_gradient(7)
    take_step(replica, spec, 9, partial_gradient)
    weights, expected = replica.trained_tensors(), uninterrupted.trained_tensors()
    assert all(weights[name].tobytes() == expected[name].tobytes() for name in weights)


def test_skipped_step_keeps_the_average_and_a_copy_includes_it():
    spec = Adamw(ema=EmaSpec(decay=0.5))
    replica = replica_of(spec)
    for step in range(4):
        take_step(replica, spec, step)
    before = replica.trained_weights()[0].tobytes()
    replica.skip()
    assert replica.trained_weights()[0].tobytes() == before
    replica_copy = replica.copy()
    assert replica_copy.state_digest() == replica.state_digest()
    replica_copy.arrays("average")[0][3] += np.float32(1.0)
    assert replica_copy.state_digest() != replica.state_digest()


def test_non_finite_average_is_located():
    replica = replica_of(Adamw(ema=EmaSpec()))
    replica.arrays("average")[0][36] = np.inf
    assert replica.non_finite_location() == "block 'b', tensor 'bias' (average)"


def test_buffers_are_not_averaged():
    """torch copies them (`use_buffers=False`)."""
    buffers = Block(name="s", kind="buffers", tensors=(TensorSpec(name="mean", shape=(3,)),))
    spec = OptimizerSpec(name="sgd", ema=EmaSpec(decay=0.5))
    replica = Replica((BLOCK, buffers), spec)
    for step in range(3):
        change = np.full(3, 1.0, np.float32)
        replica.apply([gradient(step), change], step_scalars(spec, step + 1, step, 3, 1.0))
    assert replica.trained_tensors()["mean"].tolist() == [3.0, 3.0, 3.0]


def test_averages_keep_the_defined_shares():
    assert [average_keep(SwaSpec(every=2), t) for t in range(1, 7)] == [0, 0, 1, 1 / 2, 1, 2 / 3]
    late_average = EmaSpec(decay=0.5, start_step=2)
    assert [average_keep(late_average, t) for t in range(1, 6)] == [0, 0, 0, 0.5, 0.5]
    assert average_keep(EmaSpec(decay=0.5, count_initial=True), 1) == 0.5


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ({"ema": {}, "swa": {}}, "expected ema or swa, got both"),
        ({"name": "schedule-free", "ema": {}}, "averages its weights itself: remove ema"),
        ({"ema": {"count_initial": True, "start_step": 3}}, "count_initial or start_step"),
        ({"ema": {"decay": 1.0}}, "optimizer.ema.decay"),
    ],
)
def test_invalid_averages_are_refused(optimizer, text):
    with pytest.raises(RunSpecError, match=text):
        parse_run_spec({**REGRESS, "optimizer": optimizer})


def test_run_spec_has_an_average_only_if_set():
    without_average = parse_run_spec(REGRESS)
    assert b"ema" not in without_average.to_bytes()
    spec = parse_run_spec(REGRESS, ["optimizer.ema={decay: 0.9}"])
    assert spec.optimizer.ema == EmaSpec(decay=0.9)
    assert parse_run_spec_bytes(spec.to_bytes()) == spec
