"""The plateau schedule is torch's ReduceLROnPlateau, as a function of all evaluations so far."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.base.errors import RunSpecError
from protocol.exact.plateau import Plateau
from protocol.spec.run_spec import parse_run_spec
from protocol.spec.sections.optimizer import OptimizerSpec, PlateauSpec

VALUES = st.lists(
    st.one_of(st.integers(-3, 3), st.floats(0.9, 1.1), st.just(math.nan)), max_size=30
)


def spec_of(min_lr_ratio=0.0, **keys):
    plateau = PlateauSpec(metric="loss", **keys)
    return OptimizerSpec(
        name="sgd", lr=0.5, schedule="plateau", plateau=plateau, min_lr_ratio=min_lr_ratio
    )


KEYS = st.fixed_dictionaries({
    "better": st.sampled_from(["higher", "lower"]),
    "threshold_mode": st.sampled_from(["rel", "abs"]),
    "patience": st.integers(0, 3),
    "cooldown": st.integers(0, 3),
    "threshold": st.sampled_from([0.0, 0.01]),
})  # fmt: skip


@given(VALUES, KEYS, st.sampled_from([0.0, 0.2]))
def test_rates_equal_torch(values, keys, floor):
    spec = spec_of(floor, factor=0.5, **keys)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    mode: Any = "max" if keys.pop("better") == "higher" else "min"
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, factor=0.5, min_lr=floor * 0.5, **keys
    )
    plateau = Plateau(spec, {})
    for number, value in enumerate(values, 1):
        reference.step(value)
        plateau.add_evaluation(10 * number, {"loss": value, "other": 1.0})
        rate = spec.lr * plateau.factor_at(10 * number + 9)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    repeat = Plateau(spec, {10 * n: {"loss": value} for n, value in enumerate(values, 1)})
    for step in range(10 * len(values) + 20):
        assert repeat.factor_at(step) == plateau.factor_at(step), "earlier steps keep their rates"


def test_plateau_requires_its_keys_and_evaluations():
    document = {"task": "regress", "steps": 9, "evaluate_every": 3}
    plateau = ["optimizer.schedule=plateau", "optimizer.plateau={metric: loss}"]
    assert parse_run_spec(document, plateau).optimizer.plateau == PlateauSpec(metric="loss")
    replicas = "replicas={count: 2, inner_steps: 3}"
    for overrides, text in (
        (plateau[:1], "expected plateau with schedule plateau"),
        (plateau[1:], "has an effect only with schedule plateau"),
        ([*plateau, "evaluate_every=0"], "expected evaluations for schedule plateau"),
        ([*plateau, "evaluate_every=0", replicas], "expected evaluations|no optimizer.schedule"),
        (["optimizer.name=schedule-free", *plateau], "expected no schedule with schedule-free"),
    ):
        with pytest.raises(RunSpecError, match=text):
            parse_run_spec(document, overrides)
