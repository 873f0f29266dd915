"""Inner steps with the update on the device equal the exact update up to rounding."""

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.inner_steps import HostInnerSteps, InnerState, SchedulePosition, inner_steps
from backends.base.interface import Batch, BlockGradient, Trainable
from backends.eager.eager import EagerBackend
from protocol.exact.update import counts_updates, moment_count
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.optimizer import (
    Adagrad,
    Adam,
    Adamw,
    Lion,
    Momentum,
    ParameterGroup,
    Rmsprop,
    Sgd,
)
from tests.tested_backend import BACKEND
from tests.torch_optimizers import torch_optimizer

BLOCKS = (
    Block(name="first", kind="block", tensors=(
        TensorSpec(name="0.weight", shape=(5, 3)), TensorSpec(name="0.bias", shape=(5,)),
    )),
    Block(name="last", kind="non_block", tensors=(TensorSpec(name="2.weight", shape=(1, 5)),)),
)  # fmt: skip
SPECS = {
    "sgd": Sgd(name="sgd", lr=0.05, weight_decay=0.1, clip_norm=0.5),
    "momentum": Momentum(name="momentum", lr=0.02, weight_decay=0.1),
    "nesterov": Momentum(name="nesterov", lr=0.02, momentum=0.8, clip_norm=1.0),
    "adamw": Adamw(name="adamw", lr=0.02, weight_decay=0.1, clip_norm=0.5, betas=(0.4, 0.9)),
    "adam": Adam(name="adam", lr=0.02, weight_decay=0.1),
    "rmsprop": Rmsprop(name="rmsprop", lr=0.01, weight_decay=0.1, clip_norm=0.5),
    "amsgrad": Adamw(lr=0.02, amsgrad=True, betas=(0.4, 0.6), clip_value=0.5),
    "rmsprop-centered": Rmsprop(name="rmsprop", lr=0.01, alpha=0.7, centered=True, momentum=0.5),
    "groups": Adam(
        name="adam",
        lr=0.02,
        clip_norm=0.2,
        groups=(ParameterGroup(match=("0.*",), clip_norm=0.1, lr_scale=2.0),),
    ),
    "adagrad": Adagrad(name="adagrad", lr=0.05, weight_decay=0.1),
    "lion": Lion(name="lion", lr=0.01, weight_decay=0.1, betas=(0.9, 0.99)),
}


def batches():
    rng = np.random.default_rng(5)
    return [
        (Batch({"x": rng.standard_normal((4, 3)).astype(np.float32)}, 4.0), seed)
        for seed in range(6)
    ]


@pytest.fixture
def program():
    torch.manual_seed(1)
    module = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1, bias=False)
    )
    compiled = EagerBackend(BACKEND).compile(
        Trainable(BLOCKS, module, lambda m, arrays: ((m(arrays["x"]) - 1) ** 2).sum()),
        batches()[0][0],
    )
    yield compiled
    compiled.close()


def initial_state(optimizer):
    rng = np.random.default_rng(2)
    parameters = [rng.standard_normal(b.elements).astype(np.float32) for b in BLOCKS]
    zeros = [[np.zeros(b.elements, np.float32) for b in BLOCKS]] * moment_count(optimizer)
    return InnerState(parameters, zeros)


def run_steps(steps, optimizer, count=4):
    """Return all arrays of the state after `count` inner steps, and the loss of each step."""
    steps.begin(initial_state(optimizer))
    losses = []
    for number in range(count):
        work = steps.step(
            batches()[2 * (number % 3) :][:2], SchedulePosition(number + 1, number, 9)
        )
        while True:
            try:
                next(work)
            except StopIteration as end:
                losses.append(end.value)
                break
    state = steps.state()
    return [*state.parameters, *(a for moment in state.moments for a in moment)], losses


@pytest.mark.parametrize("name", SPECS)
def test_inner_steps_equal_the_exact_update_up_to_rounding_and_repeat_their_bits(program, name):
    optimizer = SPECS[name]
    exact, exact_losses = run_steps(HostInnerSteps(program, BLOCKS, optimizer), optimizer)
    on_device, losses = run_steps(inner_steps(program, BLOCKS, optimizer), optimizer)
    repeat, _ = run_steps(program.inner_steps(optimizer), optimizer)
    for on_device_values, exact_values, repeat_values in zip(on_device, exact, repeat, strict=True):
        assert np.allclose(on_device_values, exact_values, rtol=1e-4, atol=1e-6)
        assert on_device_values.tobytes() == repeat_values.tobytes()
    assert not np.allclose(on_device[0], initial_state(optimizer).parameters[0], atol=1e-3)
    assert [loss.weight for loss in losses] == [8.0] * 4
    assert np.allclose([a.loss_sum for a in losses], [b.loss_sum for b in exact_losses], rtol=1e-5)


def test_accumulated_gradient_hook_sees_each_microbatch_alone():
    def halve_gradient(parameter):
        parameter.grad.mul_(0.5)

    optimizer, states = SPECS["momentum"], []
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1, bias=False))
        change = halve_gradient if "post" in register else lambda gradient: gradient * 0.5
        getattr(module[0].weight, register)(change)
        program = EagerBackend(BACKEND).compile(
            Trainable(BLOCKS, module, lambda m, arrays: ((m(arrays["x"]) - 1) ** 2).sum()),
            batches()[0][0],
        )
        states.append(run_steps(inner_steps(program, BLOCKS, optimizer), optimizer)[0])
        program.close()
    for with_gradient_hook, with_accumulated_hook in zip(*states, strict=True):
        assert with_gradient_hook.tobytes() == with_accumulated_hook.tobytes()


def test_interrupted_step_changes_neither_the_state_nor_later_steps(program):
    optimizer = SPECS["adamw"]
    steps = program.inner_steps(optimizer)
    steps.begin(initial_state(optimizer))
    work = steps.step(batches()[:2], SchedulePosition(1, 0, 9))
    next(work)
    work.close()
    state = steps.state()
    assert [a.tobytes() for a in state.parameters] == [
        a.tobytes() for a in initial_state(optimizer).parameters
    ]
    expected, _ = run_steps(program.inner_steps(optimizer), optimizer, 1)
    repeat, _ = run_steps(steps, optimizer, 1)
    assert [a.tobytes() for a in repeat] == [a.tobytes() for a in expected]


def test_inner_steps_do_not_change_later_gradients(program):
    def gradient_bytes():
        items = program.gradients(batches()[:2])
        return [item.values.tobytes() for item in items if isinstance(item, BlockGradient)]

    program.load(initial_state(SPECS["sgd"]).parameters)
    before = gradient_bytes()
    run_steps(program.inner_steps(SPECS["sgd"]), SPECS["sgd"])
    program.load(initial_state(SPECS["sgd"]).parameters)
    assert gradient_bytes() == before


EXPERT_THRESHOLD = 1.2
"""Reached by the first value of a microbatch, a normal draw, in some steps but not in most."""


class ModelWithExperts(nn.Module):
    """A model whose `expert` runs if the first value of a microbatch exceeds a threshold; `never`
    does not run."""

    def __init__(self):
        super().__init__()
        self.expert, self.never = (nn.Linear(3, 3) for _ in range(2))
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.expert(x)) if x[0, 0] > EXPERT_THRESHOLD else x)


EXPERT_BLOCKS = tuple(
    Block(name=name, kind="block", tensors=tuple(
        TensorSpec(name=f"{name}.{part}", shape=shape)
        for part, shape in (("weight", (out, 3)), ("bias", (out,)))
    ))
    for name, out in (("expert", 3), ("never", 3), ("last", 1))
)  # fmt: skip


def train_with_torch(module, spec, steps):
    """Return the parameters by name after training with torch's optimizer."""
    decay = {"weight_decay": spec.weight_decay}
    parameters = dict(module.named_parameters())
    groups = [
        {"params": [p for n, p in parameters.items() if "bias" not in n], **decay},
        {"params": [p for n, p in parameters.items() if "bias" in n], "weight_decay": 0.0},
    ]
    optimizer = torch_optimizer(spec, groups)
    for leaves in steps:
        optimizer.zero_grad()
        for batch, _ in leaves:
            (((module(torch.from_numpy(batch.arrays["x"])) - 1) ** 2).sum() / 8).backward()
        if spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), spec.clip_norm)
        if spec.clip_value is not None:
            torch.nn.utils.clip_grad_value_(list(parameters.values()), spec.clip_value)
        optimizer.step()
    return parameters


@pytest.mark.parametrize("updater", ["device", "host"])
@pytest.mark.parametrize("name", [name for name in SPECS if name != "groups"])
def test_unreached_parameters_are_skipped_as_in_torch(name, updater):
    """Also after new inner steps continue from a state with counts of missed updates."""
    spec = SPECS[name]
    torch.manual_seed(3)
    module, torch_module = ModelWithExperts(), ModelWithExperts()
    torch_module.load_state_dict(module.state_dict())
    parameter_by_name = dict(module.named_parameters())
    parameters = [
        np.concatenate(
            [parameter_by_name[t.name].detach().numpy().reshape(-1) for t in block.tensors]
        )
        for block in EXPERT_BLOCKS
    ]
    rng = np.random.default_rng(4)
    steps = [
        [(Batch({"x": rng.standard_normal((4, 3)).astype(np.float32)}, 4.0), 0) for _ in range(2)]
        for _ in range(12)
    ]
    reaches_expert = [
        any(batch.arrays["x"][0, 0] > EXPERT_THRESHOLD for batch, _ in leaves) for leaves in steps
    ]
    assert 2 < sum(reaches_expert) < 9
    loss = lambda m, arrays: ((m(arrays["x"]) - 1) ** 2).sum()  # noqa: E731
    program = EagerBackend(BACKEND).compile(Trainable(EXPERT_BLOCKS, module, loss), steps[0][0][0])

    def make_steps():
        return inner_steps(program, EXPERT_BLOCKS, spec) if updater == "device" else HostInnerSteps(
            program, EXPERT_BLOCKS, spec
        )  # fmt: skip

    zeros = [[np.zeros(b.elements, np.float32) for b in EXPERT_BLOCKS]] * moment_count(spec)
    inner = make_steps()
    inner.begin(InnerState(parameters, zeros))
    for number, leaves in enumerate(steps):
        if number == 7:
            state, inner = inner.state(), make_steps()
            inner.begin(state)
        for _ in inner.step(leaves, SchedulePosition(number + 1, number, len(steps))):
            pass
    state = inner.state()
    program.close()
    expected = train_with_torch(
        torch_module, spec.model_copy(update={"schedule": "constant"}), steps
    )
    for block, values in zip(EXPERT_BLOCKS, state.parameters, strict=True):
        for tensor, part in block.slices():
            values_in_torch = expected[tensor.name].detach().numpy().reshape(-1)
            np.testing.assert_allclose(values[part], values_in_torch, rtol=1e-5, atol=1e-6)
    missed_counts = [count for block in state.missed_updates for count in block]
    assert missed_counts == (
        [reaches_expert.count(False)] * 2 + [12, 12, 0, 0] if counts_updates(spec) else []
    )
