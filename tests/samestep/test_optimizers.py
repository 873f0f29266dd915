"""An optimizer of torch's is refused with the section that does the same, every setting of it."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop

from protocol.base.errors import DataError
from protocol.exact.replica import Replica
from protocol.exact.update import global_norm, square_sum, step_scalars
from protocol.spec.manifest import Block, TensorSpec
from protocol.spec.sections.optimizer import OptimizerSpec
from samestep.optimizers import optimizer_of

NESTEROV: dict[str, Any] = {"lr": 0.1, "momentum": 0.8, "weight_decay": 5e-4, "nesterov": True}
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def told_by(given):
    with pytest.raises(DataError) as raised:
        optimizer_of(given)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def section_in(told):
    section, _ = json.JSONDecoder().raw_decode(told.partition("optimizer=")[2])
    return section


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SGD, {"lr": 0.5}),
        (SGD, {"lr": 0.1, "weight_decay": 0.01}),
        (SGD, {"lr": 0.1, "momentum": 0.9}),
        (SGD, NESTEROV),
        (Adam, {"lr": 0.01, "betas": (0.7, 0.9)}),
        (Adam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
        (AdamW, ADAMW),
        (AdamW, {"lr": 0.01}),
        (Adam, {"lr": 0.01, "weight_decay": 0.1}),
        (RMSprop, {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.1}),
        (Adagrad, {"lr": 0.1}),
    ],
)
def test_the_section_does_what_torch_does(kind, settings):
    """The tensor is a bias, which does not decay unless the section says so."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = kind([parameter], **settings)
    section = section_in(told_by(optimizer))
    assert section == section_in(told_by(partial(kind, **settings)))
    spec = OptimizerSpec.model_validate(section)
    replica = Replica(
        (Block(name="b", kind="block", tensors=(TensorSpec(name="bias", shape=(5,)),)),), spec
    )
    replica.parameters[0][:] = parameter.detach().numpy()
    for step in range(4):
        gradient = np.linspace(1, 2, 5, dtype=np.float32) * np.float32(np.cos(step))
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        norm = global_norm([square_sum(gradient)])
        replica.apply([gradient], step_scalars(spec, step + 1, step, 4, norm))
    assert replica.parameters[0] == pytest.approx(parameter.detach().numpy(), rel=1e-5)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (SGD([nn.Parameter(torch.ones(1))], lr=1, momentum=0.9, dampening=0.1), "dampening=0.1"),
        (partial(AdamW, amsgrad=True), "amsgrad=True"),
        (partial(RMSprop, momentum=0.9), "an equivalent: momentum=0.9"),
        (partial(Adagrad, lr_decay=0.1), "an equivalent: lr_decay=0.1"),
        (partial(Adadelta, lr=0.5), r"Adadelta, which has no exact equivalent.*\"lr\": 0\.5"),
        (type("Own", (SGD,), {}), "torch's Own, which has no exact equivalent"),
        (
            AdamW([
                {"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.1},
                {"params": [nn.Parameter(torch.ones(1))], "weight_decay": 0.0, "lr": 0.5},
            ]),
            '"match": ."names of the 1 tensors of group 2".*"weight_decay": 0',
        ),
        (
            AdamW([
                {"params": [nn.Parameter(torch.ones(1))], "betas": (0.9, 0.9)},
                {"params": [nn.Parameter(torch.ones(1))], "betas": (0.5, 0.9)},
            ]),
            "groups of parameters with other betas",
        ),
    ],
)  # fmt: skip
def test_what_has_no_equal_is_named(given, told):
    assert told_by(given)
    with pytest.raises(DataError, match=told):
        optimizer_of(given)
