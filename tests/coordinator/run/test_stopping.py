"""Early stopping depends only on metrics, and is the same after a restart."""

from __future__ import annotations

import math

import pytest

from coordinator.run.evaluation import EarlyStopping
from protocol.spec.sections.checkpoint import StopSpec

LOSSES = [3.0, 2.0, 2.5, 1.9, 1.95, math.nan, 1.9, 1.0]


def stop_of(spec: StopSpec, values: list[float], restart: int = 0) -> tuple[int, str]:
    """Return the step after which the run stops, and the reason; each step has an evaluation."""
    metrics = {step: {"loss": value} for step, value in enumerate(values[:restart], start=1)}
    stopping = EarlyStopping(spec, metrics)
    for step, value in enumerate(values, start=1):
        if step >= max(1, restart) and (reason := stopping.add_metrics(step, {"loss": value})):
            return step, reason
    return 0, ""


@pytest.mark.parametrize("restart", range(7))
def test_run_stops_after_evaluations_without_a_better_metric(restart):
    spec = StopSpec(figure="loss", patience=3)
    step, reason = stop_of(spec, LOSSES, restart)
    assert step == 7
    assert reason == (
        "stopped early: loss was best after 4 steps (1.9), with no improvement in 3 evaluations "
        "since"
    )


def test_improvement_must_exceed_the_threshold():
    assert stop_of(StopSpec(figure="loss", patience=2, min_delta=0.5), LOSSES)[0] == 4
    assert stop_of(StopSpec(figure="loss", patience=1), LOSSES)[0] == 3
    assert stop_of(StopSpec(figure="loss", patience=9), LOSSES) == (0, "")


def test_best_value_may_be_the_baseline_as_in_transformers():
    values = [3.0, 2.8, 2.6, 2.4, 1.0, 0.9, 0.8]
    spec = StopSpec(figure="loss", patience=3, min_delta=0.5)
    assert stop_of(spec, values) == (0, "")  # 2.4 is 0.6 better than 3.0
    step, reason = stop_of(spec.model_copy(update={"baseline": "best"}), values)
    assert step == 4
    assert reason.endswith("best after 4 steps (2.4); no improvement above 0.5 in 3 evaluations")


def test_higher_is_better_option():
    stopping = EarlyStopping(StopSpec(figure="f1", better="higher", patience=2), {})
    assert not stopping.add_metrics(5, {"f1": 0.5})
    assert stopping.is_best(5)
    assert not stopping.add_metrics(10, {"f1": 0.4})
    assert not stopping.is_best(10)
    assert stopping.add_metrics(15, {"f1": 0.5})


def test_run_without_a_stop_metric_never_stops():
    assert EarlyStopping(None, {}).add_metrics(5, {"loss": 1.0}) == ""
    assert not EarlyStopping(None, {}).is_best(5)
