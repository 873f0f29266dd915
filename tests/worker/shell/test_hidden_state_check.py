"""A replay at the initial weights finds hidden state of a task, and names it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.base.interface import Batch, Trainable
from backends.registry import choose
from protocol.exact.update import step_scalars
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import parse_run_spec
from tests.cluster import PATIENCE_S
from worker.logic import actions as act
from worker.logic import events
from worker.models.blocks import cut_into_blocks
from worker.shell.engine import Engine

STEPS = 6
SPEC = parse_run_spec({
    "task": "my_package:UserTask", "steps": STEPS, "batch": {"samples": 4, "microbatch": 2},
    "optimizer": {"name": "sgd", "lr": 0.1}, "checkpoint": {"every": 4},
})  # fmt: skip
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(12, 2)


class UserTask:
    """A user's task: a linear layer, and the side effects of `loss`."""

    def __init__(self, loss: Callable[[UserTask, torch.Tensor], Any] | None = None) -> None:
        torch.manual_seed(0)
        first = nn.Linear(2, 1)
        self.module = nn.Sequential(first, nn.Linear(1, 1).requires_grad_(False))
        self.mask = torch.ones(0)
        self.side_effect = loss
        self.generator = np.random.default_rng(0)
        self.memory: dict[Any, Any] = {}
        self.teacher = first.weight.detach().clone()
        self.draws_batches = False
        self.scale = 1.0
        self.manifest = Manifest(blocks=cut_into_blocks(self.module), train_samples=len(X))
        self.trainable = Trainable(
            blocks=self.manifest.blocks, module=self.module, loss=self.loss, seed=0
        )
        parameters = dict(self.module.named_parameters())
        self.initial = [
            np.concatenate([parameters[t.name].detach().numpy().ravel() for t in block.tensors])
            for block in self.manifest.blocks
        ]

    def initial_parameters(self):
        return [values.copy() for values in self.initial]

    def batch(self, samples):
        x = X[np.asarray(samples)]
        if self.draws_batches:
            x = x + self.generator.standard_normal(x.shape, np.float32)
        return Batch({"x": x}, float(len(samples)))

    def loss(self, module, arrays):
        out = module(arrays["x"])
        return self.scale * ((out - 1) ** 2).sum() + (
            0 if self.side_effect is None else self.side_effect(self, out)
        )


class Device:
    """An engine on the CPU with this task, and its reports."""

    def __init__(self, task: Any, spec: Any = SPEC) -> None:
        self.task = lambda _: task
        self.backend = lambda: choose("cpu").backend
        self.events: queue.Queue[events.Event] = queue.Queue()
        self.engine = Engine(self, self.events.put)
        self.engine.do(act.Build("run", spec, keep_state=False))
        self.blocks = task.manifest.blocks
        self.built = self.events.get(timeout=PATIENCE_S)
        self.step = 0

    def take_step(self) -> events.Event:
        ones = [np.ones(block.elements, np.float32) for block in self.blocks]
        self.step += 1
        self.engine.do(
            act.Apply(ones, step_scalars(SPEC.optimizer, self.step, self.step - 1, STEPS, 1.0))
        )
        return self.events.get(timeout=PATIENCE_S)

    def wait_until_idle(self) -> None:
        """Wait for the replay, which follows the answer to a step."""
        self.engine.do(act.CopyState())
        assert isinstance(self.events.get(timeout=PATIENCE_S), events.StateCopied)


@pytest.fixture
def device():
    devices = []

    def make(task: Any) -> Device:
        devices.append(Device(task))
        return devices[-1]

    yield make
    for each in devices:
        each.engine.close()


def draw(task, out):
    return float(task.generator.random()) * out.sum()


def draw_and_ignore(task, out):
    task.generator.random()
    return 0 * out.sum()


def follow_weights(task, out):
    task.teacher.lerp_(task.module[0].weight.detach(), 0.1)
    return (out * task.teacher.sum()).sum()


def follow_weights_without_effect(task, out):
    task.teacher.lerp_(task.module[0].weight.detach(), 0.1)
    return 0 * out.sum()


def remember_outputs(task, out):
    """Pull each sample towards its previous output, as a memory bank does."""
    past = [task.memory.get(round(float(row), 1), row.detach()) for row in out.detach()]
    task.memory |= {round(float(row), 1): row for row in out.detach()}
    return (torch.stack(past) * out).sum()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (draw, r"task\.generator"),
        (draw_and_ignore, r"task\.generator"),
        (follow_weights, r"task\.teacher"),
        (follow_weights_without_effect, r"task\.teacher"),
        (
            remember_outputs,
            r"task\.memory\[|state that one call leaves to the next \(a moving average, a memory",
        ),
    ],
)
def test_changed_state_of_a_custom_task_is_named_before_the_first_step(device, loss, message):
    failure = device(UserTask(loss)).built
    assert isinstance(failure, events.BuildFailed)
    assert not failure.is_local
    with pytest.raises(type(failure.error), match=message) as error:
        raise failure.error
    assert "\n" not in str(error.value)


def test_task_with_a_private_batch_generator_is_refused(device):
    task = UserTask()
    task.draws_batches = True
    failure = device(task).built
    assert isinstance(failure, events.BuildFailed)
    assert "task.generator" in str(failure.error)


def move_frozen(task):
    with torch.no_grad():
        task.module[1].weight.mul_(1.0001)


def move_teacher(task):
    task.side_effect = follow_weights


def start_drawing(task):
    task.side_effect = draw


def rescale(task):
    task.scale = 1.001


@pytest.mark.parametrize(
    ("change_task", "message"),
    [
        (move_frozen, r"the frozen tensor '1\.weight' changed during training"),
        (start_drawing, r"task\.generator"),
        (rescale, r"task\.scale"),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_late_changes_are_reported_at_the_next_check(device, change_task, message, after):
    engine_device = device(task := UserTask())
    assert isinstance(engine_device.built, events.Built)
    for _ in range(after):
        assert isinstance(engine_device.take_step(), events.Applied)
    engine_device.wait_until_idle()
    change_task(task)
    checked_step = next(step for step in (1, 2, 4, STEPS) if step > after)
    for step in range(after + 1, checked_step):
        assert isinstance(engine_device.take_step(), events.Applied), step
    change_report = engine_device.take_step()
    assert isinstance(change_report, events.TaskRefused), checked_step
    with pytest.raises(type(change_report.error), match=message):
        raise change_report.error


def test_replay_does_not_change_the_replica(device):
    engine_device, digests = device(UserTask()), []
    for _ in range(STEPS):
        applied_event = engine_device.take_step()
        assert isinstance(applied_event, events.Applied)
        digests.append(applied_event.state_digest)
    assert len(set(digests)) == STEPS
    engine_device.engine.do(act.Build("again", SPEC, keep_state=False))
    built = engine_device.events.get(timeout=PATIENCE_S)
    assert isinstance(built, events.Built)
    assert built.initial_digest == engine_device.built.initial_digest
    assert built.state_digest == engine_device.built.state_digest
    engine_device.step = 0
    assert [engine_device.take_step().state_digest for _ in range(STEPS)] == digests


def test_task_with_changed_state_is_rebuilt_for_the_next_run(device):
    engine_device = device(task := UserTask())
    move_frozen(task)
    assert isinstance(engine_device.take_step(), events.TaskRefused)
    built = []

    def build(spec):
        built.append(spec)
        return UserTask()

    engine_device.engine._factory.task = build
    engine_device.engine.do(act.Build("again", SPEC, keep_state=False))
    assert isinstance(engine_device.events.get(timeout=PATIENCE_S), events.Built)
    assert built == [SPEC]


@lru_cache
def angle(number):
    return torch.tensor(float(number)).cos()


def cache(task, out):
    """Use positions by length, a growing mask, logs and the longest length so far."""
    length = len(out)
    positions = task.memory.setdefault(("positions", length), torch.ones(length))
    if length > len(task.mask):
        task.mask = torch.ones(length)
    task.longest = max(getattr(task, "longest", 0), length)
    task.memory.setdefault("losses", []).append(float(out.detach().sum()))
    task.last = out.detach()
    return (out[:, 0] * positions * task.mask[:length] * angle(1)).sum()


def test_caches_and_logs_train(device):
    engine_device = device(UserTask(cache))
    assert isinstance(engine_device.built, events.Built), engine_device.built
    for _ in range(STEPS):
        assert isinstance(engine_device.take_step(), events.Applied)


class LiveInitialValues(UserTask):
    """A task whose initial values are the module's current values."""

    def initial_parameters(self):
        parameters = dict(self.module.named_parameters())
        return [
            np.concatenate([parameters[t.name].detach().numpy().ravel() for t in block.tensors])
            for block in self.manifest.blocks
        ]


def test_initial_values_that_training_changes_are_named_as_the_cause(device):
    engine_device = device(LiveInitialValues())
    refusal = (
        engine_device.built
        if isinstance(engine_device.built, events.BuildFailed)
        else engine_device.take_step()
    )
    with pytest.raises(
        type(refusal.error),
        match=r"but the values that initial_parameters\(\) returns changed .*; return copies",
    ) as error:
        raise refusal.error
    assert "moving average" not in str(error.value)
