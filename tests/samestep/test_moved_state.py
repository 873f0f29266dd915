"""State beside the replica that training changes: `fit` fails and names it; a cache trains."""

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
FEW: dict[str, Any] = {
    "batch": 4,
    "microbatch": 2,
    "steps": 4,
    "device": "cpu",
    "optimizer": {"name": "sgd", "lr": 0.1},
}

UNEVEN = r"adds? up.* state that one call leaves to the next \(a moving average, a memory bank\)"
"""Where the trials of samples together and alone show it first."""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Student(nn.Module):
    """A linear layer, with state that `keep` adds and `forward` uses."""

    def __init__(self, add_state, does):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.does = nn.Linear(2, 1), does
        add_state(self)

    def forward(self, x, numbers):
        return self.line(x) + self.does(self, x, numbers)


def squares(module, batch):
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
    before = [module.bank.get(int(n), f) for n, f in zip(numbers, features, strict=True)]
    module.bank.update({int(n): f for n, f in zip(numbers, features, strict=True)})
    return 0.5 * torch.stack(before)


def remember_the_first_by_sample(module, x, numbers):
    features = module.line(x).detach()
    first = [module.bank.setdefault(int(n), f) for n, f in zip(numbers, features, strict=True)]
    return 0.5 * torch.stack(first)


def add_queue(module):
    module.queue = deque(maxlen=8)


def compare_with_queue(module, x, numbers):
    del numbers
    past = sum(module.queue, torch.zeros(1))
    module.queue.extend(module.line(x).detach())
    return 0.1 * past


@pytest.mark.parametrize(
    ("add_state", "does", "message"),
    [
        (add_teacher, follow_by_moving_average, r"frozen tensor 'teacher\.weight'"),
        (add_frozen_tensor, lerp_frozen_tensor, r"module\.anchor"),
        (add_buffer, move_buffer, rf"buffer 'center'|{UNEVEN}"),
        (add_bank, remember_by_sample, rf"module\.bank\[\d+\]|{UNEVEN}"),
        (add_bank, remember_the_first_by_sample, r"module\.bank\[\d+\]"),
        (add_queue, compare_with_queue, "keep no state in the model that forward changes"),
    ],
)
def test_state_changed_by_training_is_named_and_the_run_is_not_exact(add_state, does, message):
    with pytest.raises(SamestepError, match=message) as error:
        samestep.fit(lambda: samestep.Task(Student(add_state, does), DATA, loss=squares), **FEW)
    assert "\n" not in str(error.value)


def test_a_memory_is_named_where_an_epoch_is_one_step():
    """The trial uses a microbatch whose samples no other has computed."""
    task = samestep.Task(Student(add_bank, remember_the_first_by_sample), DATA, loss=squares)
    with pytest.raises(SamestepError, match=r"module\.bank\[\d+\]"):
        samestep.fit(lambda: task, **{**FEW, "batch": len(DATA)})


def follow_later(module, x, numbers):
    """Updates the teacher only far from its weights: not before training."""
    del numbers
    with torch.no_grad():
        if (module.teacher.weight - module.line.weight).abs().max() > 0.02:
            module.teacher.weight.lerp_(module.line.weight, 0.1)
    return 0.5 * module.teacher(x)


def test_state_changed_in_a_step_names_worker_and_tensor(capsys):
    task = samestep.Task(Student(add_teacher, follow_later), DATA, loss=squares)
    with pytest.raises(
        SamestepError,
        match=r"worker '.*': .* the frozen tensor 'teacher\.weight' changed during training: .*",
    ) as error_info:
        samestep.fit(lambda: task, **{**FEW, "steps": 40})
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
    past = torch.stack([bank.setdefault(float(row), one.detach()) for row, one in rows])
    return ((out - batch[1]) ** 2).sum() + (out * past).sum()

samestep.fit(
    lambda: samestep.Task(nn.Linear(1, 1), TensorDataset(x, 2 * x), loss=loss),
    steps=4, batch=8, microbatch=4, device="cpu",
)
"""
)


def test_a_script_whose_loss_has_a_memory_bank_fails_and_names_it(tmp_path):
    (tmp_path / "bank.py").write_text(SCRIPT)
    process = start("tests.plain_script", "bank.py", cwd=tmp_path)
    output, error_text = process.communicate(timeout=PATIENCE_S)
    assert process.returncode not in (0, None), output + error_text
    assert "the global bank[" in output + error_text
    assert "weights digest" not in output


def logs_and_caches(module, x, numbers):
    """State that may be kept: positions by length, a log of losses, the last batch."""
    del numbers
    length = len(x)
    if length not in module.bank:
        module.bank[length] = torch.ones(length, 1)
    out = module.line(x).detach()
    module.bank.setdefault("log", []).append(float(out.sum()))
    module.last = out
    return module.bank[length]


def test_cache_and_log_train_and_change_no_bit():
    plain_task = samestep.Task(Student(add_bank, lambda *_: torch.ones(1)), DATA, loss=squares)
    logging = samestep.Task(Student(add_bank, logs_and_caches), DATA, loss=squares)
    digests = {samestep.fit(lambda task=task: task, **FEW).digest for task in (plain_task, logging)}
    assert len(digests) == 1
