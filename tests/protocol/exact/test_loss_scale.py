"""The loss scale of float16 follows from commits alone."""

from __future__ import annotations

import pytest

from protocol.base.errors import RunSpecError
from protocol.exact.schedule import initial_loss_scale, next_loss_scale, scales_loss
from protocol.spec.run_spec import RunSpec, parse_run_spec

LANGUAGE = {"task": "causal-lm", "steps": 5, "data": {"train": "a.jsonl"}}


def spec_of(**model: object) -> RunSpec:
    return parse_run_spec({**LANGUAGE, "model": {"source": "m", **model}})


def test_scale_doubles_at_each_interval_up_to_a_bound():
    spec = spec_of(precision="float16", loss_scale=1024, loss_scale_every=3)
    assert scales_loss(spec)
    assert initial_loss_scale(spec) == 1024
    assert [next_loss_scale(spec, 8.0, step) for step in range(1, 7)] == [8, 8, 16, 8, 8, 16]
    assert next_loss_scale(spec, 2.0**24, 3) == 2.0**24


def test_nothing_is_scaled_in_other_precisions():
    for precision in ("float32", "bfloat16"):
        spec = spec_of(precision=precision)
        assert not scales_loss(spec)
        assert (initial_loss_scale(spec), next_loss_scale(spec, 1.0, 1)) == (1.0, 1.0)


def test_loss_scale_must_be_a_power_of_two():
    with pytest.raises(RunSpecError, match="a power of two, got 1000"):
        spec_of(precision="float16", loss_scale=1000)
