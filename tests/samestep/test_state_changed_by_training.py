"""State outside the replica that training changes is refused by name; caches are accepted."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from protocol.base.errors import SamestepError
from tests.processes import PATIENCE_S, start
from tests.samestep.scripts import HEAD

X = torch.linspace(-1, 1, 24).reshape(12, 2)
DATA = TensorDataset(X, X.sum(1, keepdim=True), torch.arange(12))
FIT_OPTIONS: dict[str, Any] = {
    "batch": 4,
    "microbatch": 2,
    "steps": 4,
    "device": "cpu",
    "optimizer": {"name": "sgd", "lr": 0.1},
}

DOES_NOT_ADD_UP = (
    r"adds? up.* state that one call leaves to the next \(a moving average, a memory bank\)"
)
"""Message of the check that losses add up over samples, which may find such state first."""


@pytest.fixture(autouse=True)
def _temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Student(nn.Module):
    """A linear layer with state: `add_state` creates it, and forward calls `use_state`."""

    def __init__(self, add_state, use_state):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.use_state = nn.Linear(2, 1), use_state
        add_state(self)

    def forward(self, x, numbers):
        return self.line(x) + self.use_state(self, x, numbers)


def squared_error(module, batch):
    return ((module(batch[0], batch[2]) - batch[1]) ** 2).sum()


def add_teacher(module):
    module.teacher = nn.Linear(2, 1).requires_grad_(False)
    module.teacher.load_state_dict(module.line.state_dict())


def follow_by_moving_average(module, x, numbers):
    del numbers
    with torch.no_grad():
        for teacher, student in zip(
            module.teacher.parameters(), module.line.parameters(), strict=True
        ):
            teacher.lerp_(student, 0.1)
    return 0.5 * module.teacher(x)


def add_frozen_tensor(module):
    module.anchor = module.line.weight.detach().clone()


def lerp_frozen_tensor(module, x, numbers):
    del x, numbers
    module.anchor.lerp_(module.line.weight.detach(), 0.1)
    return 0.1 * (module.anchor * module.line.weight).sum()


def add_buffer(module):
    module.register_buffer("center", module.line.bias.detach().clone())


def move_buffer(module, x, numbers):
    del x, numbers
    module.center.data.lerp_(module.line.bias.detach(), 0.5)
    return module.center


def add_bank(module):
    module.bank = {}


def remember_by_sample(module, x, numbers):
    features = module.line(x).detach()
    previous_features = [module.bank.get(int(n), f) for n, f in zip(numbers, features, strict=True)]
    module.bank.update({int(n): f for n, f in zip(numbers, features, strict=True)})
    return 0.5 * torch.stack(previous_features)


def remember_the_first_by_sample(module, x, numbers):
    features = module.line(x).detach()
    first_features = [
        module.bank.setdefault(int(n), f) for n, f in zip(numbers, features, strict=True)
    ]
    return 0.5 * torch.stack(first_features)


def add_queue(module):
    module.queue = deque(maxlen=8)


def compare_with_queue(module, x, numbers):
    del numbers
    past_features = sum(module.queue, torch.zeros(1))
    module.queue.extend(module.line(x).detach())
    return 0.1 * past_features


@pytest.mark.parametrize(
    ("add_state", "use_state", "message"),
    [
        (add_teacher, follow_by_moving_average, r"frozen tensor 'teacher\.weight'"),
        (add_frozen_tensor, lerp_frozen_tensor, r"module\.anchor"),
        (add_buffer, move_buffer, rf"buffer 'center'|{DOES_NOT_ADD_UP}"),
        (add_bank, remember_by_sample, rf"module\.bank\[\d+\]|{DOES_NOT_ADD_UP}"),
        (add_bank, remember_the_first_by_sample, r"module\.bank\[\d+\]"),
        (add_queue, compare_with_queue, "keep no state in the model that forward changes"),
    ],
)
def test_state_changed_by_training_is_refused_by_name(add_state, use_state, message):
    with pytest.raises(SamestepError, match=message) as error:
        samestep.fit(
            lambda: samestep.Task(Student(add_state, use_state), DATA, loss=squared_error),
            **FIT_OPTIONS,
        )
    assert "\n" not in str(error.value)


def test_memory_bank_is_found_if_an_epoch_is_one_step():
    """The trial uses a microbatch with samples of no other microbatch."""
    task = samestep.Task(Student(add_bank, remember_the_first_by_sample), DATA, loss=squared_error)
    with pytest.raises(SamestepError, match=r"module\.bank\[\d+\]"):
        samestep.fit(lambda: task, **{**FIT_OPTIONS, "batch": len(DATA)})


def follow_later(module, x, numbers):
    """Update the teacher once the weights have moved from it, so not before training."""
    del numbers
    with torch.no_grad():
        if (module.teacher.weight - module.line.weight).abs().max() > 0.02:
            module.teacher.weight.lerp_(module.line.weight, 0.1)
    return 0.5 * module.teacher(x)


def test_error_for_state_changed_in_a_step_names_worker_and_tensor(capsys):
    task = samestep.Task(Student(add_teacher, follow_later), DATA, loss=squared_error)
    with pytest.raises(
        SamestepError,
        match=r"worker '.*': .* the frozen tensor 'teacher\.weight' changed during training: .*",
    ) as error_info:
        samestep.fit(lambda: task, **{**FIT_OPTIONS, "steps": 40})
    assert "resume" not in str(error_info.value)
    output = capsys.readouterr().out
    assert "training starts" in output
    assert "exact" not in output


SCRIPT = (
    HEAD
    + """
bank = {}

def loss(module, batch):
    out = module(batch[0])
    rows = zip(batch[0], out)
    past = torch.stack([bank.setdefault(float(row), value.detach()) for row, value in rows])
    return ((out - batch[1]) ** 2).sum() + (out * past).sum()

samestep.fit(
    lambda: samestep.Task(nn.Linear(1, 1), TensorDataset(x, 2 * x), loss=loss),
    steps=4, batch=8, microbatch=4, device="cpu",
)
"""
)


def test_script_with_a_memory_bank_fails_and_names_the_bank(tmp_path):
    (tmp_path / "bank.py").write_text(SCRIPT)
    process = start("tests.plain_script", "bank.py", cwd=tmp_path)
    output, error_text = process.communicate(timeout=PATIENCE_S)
    assert process.returncode not in (0, None), output + error_text
    assert "the global bank[" in output + error_text
    assert "weights digest" not in output


def log_and_cache(module, x, numbers):
    """Store what is allowed: masks by length, a log of sums, the last output."""
    del numbers
    length = len(x)
    if length not in module.bank:
        module.bank[length] = torch.ones(length, 1)
    out = module.line(x).detach()
    module.bank.setdefault("log", []).append(float(out.sum()))
    module.last = out
    return module.bank[length]


def test_cache_and_log_do_not_change_the_digest():
    plain_task = samestep.Task(
        Student(add_bank, lambda *_: torch.ones(1)), DATA, loss=squared_error
    )
    logging_task = samestep.Task(Student(add_bank, log_and_cache), DATA, loss=squared_error)
    digests = {
        samestep.fit(lambda task=task: task, **FIT_OPTIONS).digest
        for task in (plain_task, logging_task)
    }
    assert len(digests) == 1
