"""The constants of user code that workers compare."""

from __future__ import annotations

import argparse
import enum
import functools
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.processes import ROOT
from worker.tasks.checks.script_constants import script_constants

SCALE = 2.0
MODE = "huber"
DATA_DIRECTORY = "/data/a"
RANK = 3
CONFIG: dict[str, Any] = {"alpha": 0.5, "unused": 1, "device": "cuda", "weights": {"first": 1}}
ARGUMENTS = argparse.Namespace(beta=0.25, output="out-1", batch=8)
CLASS_WEIGHTS = torch.tensor([1.0, 3.0])
CRITERION = nn.L1Loss()
FUNCTION = functional.mse_loss
UNUSED = 7
MODULE = __name__


class Reduction(enum.Enum):
    SUM = "sum"


REDUCTION = Reduction.SUM


def global_loss(module, batch):
    assert DATA_DIRECTORY or RANK
    weights = sum(CONFIG["weights"].values())
    factor = SCALE * CONFIG["alpha"] * ARGUMENTS.beta * weights
    if MODE == "huber" and REDUCTION is Reduction.SUM:
        return factor * FUNCTION(module(batch), CLASS_WEIGHTS)
    return CRITERION(module(batch), batch)


def test_globals_are_found_by_name():
    constants = {
        name.removeprefix(f"{MODULE}."): text
        for name, text in script_constants({"loss": global_loss}).items()
    }
    assert constants == {
        "ARGUMENTS.beta": "0.25",
        "CLASS_WEIGHTS": "[1 3]",
        "CONFIG['alpha']": "0.5",
        "CONFIG['weights']['first']": "1",
        "CRITERION": "L1Loss",
        "FUNCTION": "mse_loss",
        "MODE": "huber",
        "REDUCTION": "Reduction.SUM",
        "Reduction": "Reduction",
        "SCALE": "2",
    }


@dataclass
class Settings:
    margin: float
    path: str = "/data/b"
    step: int = 0


class MarginLoss:
    temperature = 0.1

    def __init__(self, margin: float) -> None:
        self.settings = Settings(margin)
        self.unused = margin

    def __call__(self, module, batch):
        return (module(batch) - self.settings.margin).sum() / self.temperature


def make_loss(alpha, *, power=2):
    def loss(module, batch, offset=1.5):
        return alpha * ((module(batch) - offset) ** power).sum()

    return loss


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (make_loss(0.3), {"alpha in loss": "0.3", "power in loss": "2", "offset in loss": "1.5"}),
        (
            functools.partial(lambda *_, alpha: alpha, alpha=math.nan),
            {"loss['alpha']": "nan"},
        ),
        (torch.no_grad()(make_loss(0.3)), {"alpha in loss": "0.3", "power in loss": "2"}),
        (functools.lru_cache(make_loss(0.3)), {"alpha in loss": "0.3", "power in loss": "2"}),
        (MarginLoss(0.7), {"loss.settings.margin": "0.7", "MarginLoss.temperature": "0.1"}),
        (MarginLoss(0.7).__call__, {"loss.settings.margin": "0.7"}),
    ],
)
def test_constants_of_other_callables(loss, expected):
    constants = {
        name.removeprefix(f"{MODULE}."): text
        for name, text in script_constants({"loss": loss}).items()
    }
    assert constants.items() >= expected.items()
    assert not any("unused" in name or "path" in name or "step" in name for name in constants)


class Gate(nn.Module):
    def __init__(self, strength: float, *, is_on: bool) -> None:
        super().__init__()
        self.dropouts = nn.ModuleList([nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.3)])
        self.strength, self.is_on, self.calls = strength, is_on, 0

    def forward(self, x):
        return x * self.strength * SCALE if self.is_on else x


def test_layers_of_a_class_share_a_name():
    constants = script_constants({"module": nn.Sequential(Gate(0.2, is_on=True), nn.LayerNorm(2))})
    assert constants == {
        "Dropout.p": "0.1, 0.3",
        "Gate.is_on": "True",
        "Gate.strength": "0.2",
        "LayerNorm.eps": "1e-05",
        f"{MODULE}.SCALE": "2",
    }


def test_rounding_does_not_make_a_constant_differ():
    mean, nearly = 1 / 3, 1 / 3 + 1e-7
    assert script_constants({"loss": make_loss(mean)}) == script_constants(
        {"loss": make_loss(nearly)}
    )


def test_only_the_digest_of_a_long_text_is_sent():
    (text,) = {
        text
        for name, text in script_constants({"loss": make_loss("sk-0123456789abcdef")}).items()
        if name.startswith("alpha")
    }
    assert text.startswith("text with digest ")


def test_constants_do_not_depend_on_the_hash_seed():
    script = (
        "from tests.worker.tasks.test_script_constants import *\n"
        "from worker.tasks.checks.script_constants import script_constants\n"
        "print(script_constants({'loss': global_loss, 'weight': MarginLoss(0.7), "
        "'metrics': make_loss(MARGINS['l1'])}))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script], cwd=Path(ROOT), check=True, capture_output=True,
            env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        return -SCALE * gradient


class ClassSettings:
    beta = 4.0


@dataclass(slots=True)
class SlottedSettings:
    gamma: float


class Scaled(nn.Linear):
    """A layer with a private attribute, and scaling by adapter as LoRA's layers have it."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self._strength = 0.6
        self.scaling = {"default": 2.0}

    def forward(self, x):
        return super().forward(x) * self._strength


SLOTTED = SlottedSettings(0.7)
BETAS = torch.linspace(0.0, 1.0, 101)
MARGINS = {"l1": lambda x: x.abs() if x.name in {"a", "b", "c", "d"} else x, "l2": lambda x: x**2}


@pytest.mark.parametrize(
    ("loss", "name", "text"),
    [
        (lambda *_: ClassSettings.beta, "ClassSettings.beta", "4"),
        (lambda _, batch: Reversed.apply(batch), "SCALE", "2"),
        (lambda *_: SLOTTED.gamma, "SLOTTED.gamma", "0.7"),
        (lambda *_: BETAS, "BETAS", "array of 101, mean 0.5, deviation 0.2915"),
    ],
)
def test_constants_in_classes_and_arrays(loss, name, text):
    constants = script_constants({"loss": loss})
    assert (constants.get(name) or constants[f"{MODULE}.{name}"]) == text


def test_private_attributes_and_scaling_of_layers():
    constants = script_constants({"module": Scaled()})
    assert constants["Scaled._strength"] == "0.6"
    assert constants["Scaled.scaling['default']"] == "2"


def test_values_of_layers_have_an_order():
    first, second = (
        script_constants({"module": nn.Sequential(*map(nn.Dropout, values))})
        for values in ((0.1, 0.5), (0.5, 0.1))
    )
    assert first != second


def test_lambdas_differ_by_their_code():
    def constants(margin):
        return script_constants({"loss": lambda *_: margin})

    assert constants(MARGINS["l1"]) != constants(MARGINS["l2"])


@pytest.mark.parametrize(
    "name", ["START", "start_time", "RUN_NAME", "local_rank", "output_dir", "USE_GPU", "verbose"]
)
def test_values_of_a_machine_are_not_compared(name):
    scope = {name: 3}
    exec(f"def loss(module, batch):\n    return batch * {name}\n", scope)
    assert script_constants({"loss": scope["loss"]}) == {}


class Unreadable:
    @property
    def __dict__(self):  # type: ignore[override]
        raise RuntimeError("no attributes")

    def __getattr__(self, name):
        raise RuntimeError(name)


class UnreadableMapping(dict[str, int]):
    def __getitem__(self, key):
        raise KeyError(key)


class Node:
    def __init__(self, tail):
        self.tail = tail


def linked(length):
    node = None
    for _ in range(length):
        node = Node(node)
    return node


@pytest.mark.parametrize(
    "value",
    [
        Unreadable(),
        UnreadableMapping(a=1),
        torch.zeros(3, dtype=torch.complex64).conj(),
        nn.Parameter(torch.zeros(3, device="meta")),
        np.timedelta64(1, "D"),
        np.ma.masked,
        complex(0, math.nan),
        linked(30_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_unreadable_value_does_not_hide_others(value):
    def loss(*_, scale=2.5):
        return (value, value.tail, scale)

    assert script_constants({"loss": loss})["scale in loss"] == "2.5"
