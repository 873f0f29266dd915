"""Tests of the benchmarks of overhead, startup and scaling, at their smallest size."""

from __future__ import annotations

import importlib
import sys
from datetime import UTC, datetime

import pytest

from benchmarks import overhead, scaling, startup
from benchmarks.jobs import short_job
from benchmarks.step_time import StepTime, step_times
from benchmarks.timeline import Timeline
from protocol.spec.run_spec import parse_run_spec


@pytest.mark.slow
def test_bare_loop_takes_the_same_steps_as_a_worker():
    document = short_job("digits", 3 + overhead.WARMUP_STEPS)
    measurement = overhead.measure(document, turns=2)
    assert [step.step for step in measurement.worker_steps] == [2, 3, 4] * 2
    assert [step.step for step in measurement.bare_steps] == [2, 3, 4] * 2
    for step in (*measurement.worker_steps, *measurement.bare_steps):
        assert 0 < step.compute_ms < step.total_ms
        assert 0 < step.update_ms < step.total_ms
    assert all(ms > 0 for ms in (*measurement.worker_cpu_ms, *measurement.bare_cpu_ms))
    assert measurement.loss_difference < 1e-4
    assert [line[:2] for line in overhead.rows(measurement)] == [
        ["bare loop", "6"],
        ["one worker", "6"],
    ]


@pytest.mark.slow
def test_startup_of_a_worker_is_timed(tmp_path):
    times = startup.measure(short_job("digits", 1), "cpu", tmp_path)
    assert 0 < times.connected_s < times.ready_s <= times.started_s < times.committed_s


@pytest.mark.slow
@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.release), 2])
def test_scaling_measures_every_number_of_workers(turns):
    case = scaling.scripted_case(workers=(1, 2), microbatches=4, microbatch_ms=5.0)
    measurement = scaling.measure(case, rounds=2, turns=turns)
    assert {count: len(step_times_s) for count, step_times_s in measurement.items()} == {
        1: 2 * turns,
        2: 2 * turns,
    }
    assert all(seconds > 0 for step_times_s in measurement.values() for seconds in step_times_s)


def test_efficiency_is_the_throughput_over_n_times_that_of_one_worker():
    case = scaling.scripted_case(workers=(1, 2), microbatches=8)
    first, second = scaling.rows(case, {1: [2.0, 1.6, 4.0], 2: [1.0, 1.25, 1.6]})
    assert first == ["scripted, 50 ms: 1 worker", "3", "4.0", "5.0", "1.000", "1.000"]
    assert second == ["scripted, 50 ms: 2 workers", "3", "6.4", "8.0", "0.800", "0.800"]


def test_ratios_are_relative_to_the_bare_loop():
    def step_samples(*times_ms):
        return [StepTime(step, ms, ms / 2, 1.0) for step, ms in times_ms]

    measurement = overhead.Measurement(
        worker_steps=step_samples((2, 110.0), (3, 210.0), (2, 120.0), (3, 330.0)),
        bare_steps=step_samples((2, 100.0), (3, 200.0), (2, 100.0), (3, 100.0)),
        worker_cpu_ms=[105.0],
        bare_cpu_ms=[100.0],
        loss_difference=0.0,
    )
    assert measurement.ratio == pytest.approx(165 / 100)
    assert measurement.paired_ratio == pytest.approx((1.1 + 1.2) / 2)
    assert measurement.best_ratio == pytest.approx((110 + 210) / (100 + 100))
    assert measurement.cpu_ratio == pytest.approx(1.05)


def test_step_time_is_split_into_compute_update_and_rest():
    def span(name, at_us, duration_us, step):
        return {"name": name, "ts": at_us, "dur": duration_us, "args": {"step": step}}

    timeline = Timeline((
        span("subtree [0, 2)", 0.0, 500.0, 0),  # before the interval: of an earlier run
        span("subtree [0, 2)", 1000.0, 3000.0, 0),
        span("apply step", 5000.0, 100.0, 1),
        span("subtree [0, 1)", 6000.0, 1000.0, 1),
        {"name": "receive block 0", "ts": 7500.0, "args": {"step": 1}},
        span("subtree [1, 2)", 7000.0, 1500.0, 1),
        span("apply step", 9000.0, 200.0, 2),
    ))  # fmt: skip
    (step,) = step_times(timeline, 900.0, 10_000.0)
    assert step == StepTime(1, total_ms=4.0, compute_ms=2.5, update_ms=0.1)
    assert step.rest_ms == pytest.approx(1.4)


def test_startup_times_are_read_from_the_coordinators_log():
    log = "\n".join(
        f'{{"event": "{event}", "timestamp": "2026-01-02T03:04:{second:09.6f}Z"}}'
        for event, second in [
            ("run_accepted", 4.0), ("worker_connected", 5.5), ("worker_ready", 9.0),
            ("started", 9.25), ("committed", 10.5), ("committed", 11.0),
        ]
    )  # fmt: skip
    start = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert startup.read_log(log, start) == startup.Startup(0.5, 4.0, 4.25, 5.5)


@pytest.mark.parametrize("name", ["sms-spam", "digits"])
def test_short_jobs_are_valid_and_hold_out_at_most_one_sample(name):
    spec = parse_run_spec(short_job(name, 3))
    assert spec.steps == 3
    assert spec.evaluate_every == 0
    assert spec.data is None or spec.data.holdout_samples == 1


@pytest.mark.parametrize("name", ["overhead", "scaling"])
def test_each_benchmark_prints_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "--rounds" in capsys.readouterr().out
