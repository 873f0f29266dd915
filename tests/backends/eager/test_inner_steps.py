"""Inner steps on torch's device: the exact update's rules, to rounding; the same bits each time."""

import numpy as np
import pytest

from backends.base.inner_steps import HostInnerSteps, InnerPlace, InnerState, inner_steps
from backends.base.interface import Batch, Trainable
from backends.eager.eager import EagerBackend
from protocol.exact.update import moment_count
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.run_spec import OptimizerSpec

torch = pytest.importorskip("torch")

BLOCKS = (
    Block(name="first", kind="block", tensors=(
        TensorSpec(name="0.weight", shape=(5, 3)), TensorSpec(name="0.bias", shape=(5,)),
    )),
    Block(name="last", kind="non_block", tensors=(TensorSpec(name="2.weight", shape=(1, 5)),)),
)  # fmt: skip
SPECS = {
    "sgd": OptimizerSpec(name="sgd", lr=0.05, weight_decay=0.1, clip_norm=0.5),
    "momentum": OptimizerSpec(name="momentum", lr=0.02, weight_decay=0.1),
    "nesterov": OptimizerSpec(name="nesterov", lr=0.02, momentum=0.8, clip_norm=1.0),
    "adamw": OptimizerSpec(
        name="adamw", lr=0.02, weight_decay=0.1, clip_norm=0.5, betas=(0.4, 0.9)
    ),
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
    made = EagerBackend("cpu").compile(
        Trainable(BLOCKS, module, lambda m, arrays: ((m(arrays["x"]) - 1) ** 2).sum()),
        batches()[0][0],
    )
    yield made
    made.close()


def start(optimizer):
    rng = np.random.default_rng(2)
    parameters = [rng.standard_normal(b.elements).astype(np.float32) for b in BLOCKS]
    zeros = [[np.zeros(b.elements, np.float32) for b in BLOCKS]] * moment_count(optimizer)
    return InnerState(parameters, zeros)


def taken(steps, optimizer, count=4):
    steps.begin(start(optimizer))
    losses = []
    for number in range(count):
        work = steps.step(batches()[2 * (number % 3) :][:2], InnerPlace(number + 1, number, 9))
        while True:
            try:
                next(work)
            except StopIteration as end:
                losses.append(end.value)
                break
    state = steps.state()
    return [*state.parameters, *(a for moment in state.moments for a in moment)], losses


@pytest.mark.parametrize("name", SPECS)
def test_as_the_exact_update_to_rounding(program, name):
    optimizer = SPECS[name]
    exact, exact_losses = taken(HostInnerSteps(program, BLOCKS, optimizer), optimizer)
    found, losses = taken(inner_steps(program, BLOCKS, optimizer), optimizer)
    again, _ = taken(program.inner_steps(optimizer), optimizer)
    for mine, theirs, same in zip(found, exact, again, strict=True):
        assert np.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
        assert mine.tobytes() == same.tobytes()
    assert not np.allclose(found[0], start(optimizer).parameters[0], atol=1e-3)
    assert [loss.weight for loss in losses] == [8.0] * 4
    assert np.allclose([a.loss_sum for a in losses], [b.loss_sum for b in exact_losses], rtol=1e-5)


def test_an_interrupted_step_leaves_nothing_behind(program):
    optimizer = SPECS["adamw"]
    steps = program.inner_steps(optimizer)
    steps.begin(start(optimizer))
    work = steps.step(batches()[:2], InnerPlace(1, 0, 9))
    next(work)
    work.close()
    found = steps.state()
    assert [a.tobytes() for a in found.parameters] == [
        a.tobytes() for a in start(optimizer).parameters
    ]
    expected, _ = taken(program.inner_steps(optimizer), optimizer, 1)
    again, _ = taken(steps, optimizer, 1)
    assert [a.tobytes() for a in again] == [a.tobytes() for a in expected]


def test_gradients_of_ordinary_nodes_are_as_before(program):
    def node():
        return [
            item.values.tobytes() for item in program.gradients(batches()[:2])
            if hasattr(item, "values")
        ]  # fmt: skip

    program.load(start(SPECS["sgd"]).parameters)
    before = node()
    taken(program.inner_steps(SPECS["sgd"]), SPECS["sgd"])
    program.load(start(SPECS["sgd"]).parameters)
    assert node() == before
