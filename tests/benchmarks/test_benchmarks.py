"""Tests of benchmarks at their smallest size: that they measure, not how fast anything is."""

from __future__ import annotations

import importlib
import math
import re
import sys

import pytest

from benchmarks import (
    diloco,
    durability,
    full_llama,
    hostile,
    hosts,
    overlap,
    page,
    reconnect,
    recovery,
    replicas,
    shaped,
    sync,
    uneven,
)
from benchmarks.timeline import StepTimes, Timeline, intervals_us, step_times


@pytest.mark.slow
@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.release), 2])
def test_sync_measures_every_round_of_samestep_and_gloo(turns):
    case = sync.Case(workers=2, blocks=2, block_bytes=4096, quiet_ms=200)
    measurement = sync.measure(case, rounds=2, turns=turns)
    assert len(measurement.averaged_ms) + measurement.uneven_rounds == 2 * turns
    assert len(measurement.committed_ms) == len(measurement.averaged_ms)
    assert len(measurement.gloo_ms) == 2 * turns
    for averaged_ms, committed_ms in zip(
        measurement.averaged_ms, measurement.committed_ms, strict=True
    ):
        assert 0 < averaged_ms <= committed_ms
    assert all(ms > 0 for ms in measurement.gloo_ms)
    lines = sync.rows(case, measurement)
    assert [line[0].partition(": ")[0] for line in lines] == ["0.0 MB over 2"] * 3
    assert lines[0][-1] == "1.00"


@pytest.mark.slow
@pytest.mark.skipif(
    bool(hosts.why_unavailable()), reason=hosts.why_unavailable() or "hosts can be made"
)
def test_shaped_measures_both_topologies_and_counts_bytes():
    row = shaped.Row((1000, 100), (0, 0, 1), sync.Case(3, 2, 4096, 200))
    # Two blocks of 4,096 bytes, over a link of 100 Mbit/s, which is 1e5 bits per millisecond.
    assert row.star_limit_ms() == pytest.approx(8192 * 8 / 1e5)
    measurements = shaped.measure(row, ["star", "sharded"], rounds=2, turns=1)
    for measurement in measurements.values():
        assert len(measurement.ms) <= 2
        assert all(ms > 0 for ms in measurement.ms)
        # The gradients of one worker pass the link at least once in each direction.
        assert min(measurement.out_mb, measurement.in_mb) >= 8192 / 1e6
    assert [line[0] for line in shaped.table_rows("x", row, measurements)] == [
        "x, 0.0 MB: gloo", "x, 0.0 MB: star", "x, 0.0 MB: sharded",
    ]  # fmt: skip


def test_reconnect_measures_short_and_long_logs():
    measurements = [reconnect.measure(logged_steps, rounds=2) for logged_steps in (6, 12)]
    for measurement in measurements:
        assert all(ms > 0 for ms in (*measurement.reconnect_ms, measurement.open_ms))
    assert [line[0] for line in reconnect.rows(measurements)] == [
        "6 logged steps",
        "12 logged steps",
    ]


@pytest.mark.slow
def test_overlap_measures_samestep_and_ddp():
    case = overlap.Case(workers=2, blocks=2, block_bytes=4096, block_ms=2)
    exposed_ms = overlap.measure(case, rounds=2, turns=1)
    assert [*exposed_ms][:2] == ["samestep", "DDP, default buckets"]
    assert len(exposed_ms) == 1 + len(overlap.BUCKETS_MB)
    for round_ms in exposed_ms.values():
        assert len(round_ms) == 2
        # Exposed time is a step's time minus its computing time, so it may be negative.
        assert all(ms + case.compute_ms > 0 for ms in round_ms)
    assert len(overlap.rows(case, exposed_ms)) == len(exposed_ms)


@pytest.mark.slow
def test_uneven_measures_samestep_and_equal_shares():
    speeds_ms = (5.0, 10.0)
    for rate in (
        uneven.measure(speeds_ms, 3, steps=2),
        uneven.measure_equal_shares(speeds_ms, steps=2),
        *uneven.measure_alone(speeds_ms, 3, steps=2),
    ):
        assert math.isfinite(rate.median)
        assert 0 < rate.median <= rate.fastest
    row = uneven.row("both", uneven.Rate(240.0, 250.0), alone_sum=250.0, nominal_sum=300.0)
    assert row == ["both", "240.00", "250.00", "96.0 %", "80.0 %"]


@pytest.mark.slow
def test_recovery_measures_killed_coordinators_and_killed_or_stopped_workers():
    case = recovery.Case(blocks=2, block_bytes=4096, microbatch_ms=5)
    measurement = recovery.measure(case, kills=1)
    (restart,) = measurement.coordinator
    assert 0 < restart.resumed_s < restart.connected_s < restart.ready_s < restart.committed_s
    assert all(s > 0 for s in (*measurement.worker_s, *measurement.stopped_s, measurement.step_s))
    assert recovery.rows(case, measurement)[0][:2] == ["state 0 MB: a step", ""]


@pytest.mark.slow
def test_durability_measures_both_log_modes_and_a_run_without_storage():
    job = durability.full_training(steps=6, block_bytes=4096, microbatch_ms=5)
    measurement = durability.measure(job, turns=2)
    assert list(measurement) == ["off", "full", "checkpoint"]
    for mode in measurement.values():
        assert len(mode.turns_ms) == len(mode.coordinator_ms) == len(mode.workers_ms) == 2
        assert min(mode.steps_ms) > 0
        assert mode.ratio(mode) == 1
        assert mode.turn_ratios(mode) == [1, 1]
    assert [bool(mode.waits_ms) for mode in measurement.values()] == [False, True, True]
    assert all(ms > 0 for ms in measurement["full"].waits_ms)
    assert [line[0].partition(": ")[2] for line in durability.rows(job, measurement)] == [
        "off", "log: full", "log: checkpoint",
    ]  # fmt: skip


@pytest.mark.slow
def test_hostile_measures_turns_without_and_with_the_attack():
    seconds = 2
    baseline, attacked, connections = hostile.measure(turns=1, seconds=seconds, connections=50)
    for measurement in (baseline, attacked):
        assert len(measurement.joins_ms) == seconds * hostile.JOINS_A_SECOND
        assert min(measurement.joins_ms) > 0
        assert min(measurement.steps_ms) > 0
        assert measurement.processor_s > 0
        assert measurement.row("name")[0] == "name"
    assert connections.total() > 50


@pytest.mark.parametrize(
    ("join_ms", "step_ms", "memory_mib", "missed_limits"),
    [
        (250.0, 105.0, 24, []),
        (251.0, 105.0, 24, ["p99 of joins 251, at most 250 ms"]),
        (1.0, 106.0, 1, ["ratio to an undisturbed step 1.06, at most 1.05"]),
        (1.0, 1.0, 25, ["memory 25, at most 24 MiB"]),
        (math.nan, 1.0, 25, ["p99 of joins nan, at most 250 ms", "memory 25, at most 24 MiB"]),
    ],
)
def test_hostile_names_missed_limits(join_ms, step_ms, memory_mib, missed_limits):
    baseline = hostile.Measurement(joins_ms=[900.0] * 9, steps_ms=[100.0], memory_bytes=[99 << 20])
    attacked = hostile.Measurement([join_ms] * 9, [step_ms], [1 << 20, memory_mib << 20])
    assert hostile.missed_limits(baseline, attacked) == missed_limits


@pytest.mark.parametrize("name", ["sync", "uneven", "overlap", "recovery", "durability", "hostile"])
def test_each_benchmark_prints_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"benchmarks.{name}").main()
    assert "--rounds" in capsys.readouterr().out


def test_step_times_combine_the_traces_of_all_workers_within_an_interval():
    def event(name, at_us, **details):
        return {"name": name, "ts": at_us, "args": details}

    def payload(at_us, step):
        return event("send block 0", at_us, step=step, lo=0)

    def average(at_us, step):
        return event("receive block 0", at_us, step=step, attempt=0)

    def apply(at_us, step):
        return event("apply step", at_us, step=step + 1)

    state_chunk = event("receive block 0", 109.0, step=0, kind="parameters")
    earlier_run = [payload(1.0, 0), average(2.0, 0), apply(3.0, 0)]
    first = [payload(100.0, 0), payload(101.0, 0), average(105.0, 0), apply(107.0, 0)]
    second = [payload(102.0, 0), average(106.0, 0), state_chunk, apply(108.0, 0), payload(110.0, 1)]
    last = [average(111.0, 1), apply(113.0, 1)]
    timelines = [Timeline((*earlier_run, *first, *last)), Timeline(tuple(second))]

    steps = step_times(timelines, 50.0, 200.0)

    assert steps == [StepTimes(0, 2, 100.0, 106.0, 108.0), StepTimes(1, 1, 110.0, 111.0, 113.0)]
    assert intervals_us(steps) == [5.0]


@pytest.mark.slow
def test_page_measures_steps_with_and_without_tabs():
    without_tabs, with_tabs = page.measure(1, steps=2, tabs=2)
    assert all(ms > 0 for measurement in (without_tabs, with_tabs) for ms in measurement.steps_ms)
    assert with_tabs.row("name")[0] == "name"


def test_replicas_are_compared_on_the_same_number_of_tokens():
    for total in (60, 600, 2000):
        for case in replicas.cases(total):
            settings = dict(setting.split("=", 1) for setting in case.settings(total))
            steps, samples = int(settings["steps"]), int(settings["batch.samples"])
            if case.inner_steps:  # `batch.samples` is the batch of one replica
                computed_samples = steps * case.inner_steps * samples * case.replicas
            else:
                computed_samples = steps * samples
            rounded_total = total - total % (case.inner_steps or 1)
            assert computed_samples == rounded_total * case.replicas * replicas._BATCH
    assert len(replicas.cases(2000)) == 35, "every case has two rounds in 2,000 inner steps"
    assert "K=2 H=30 carry float32" in {case.name for case in replicas.cases(60)}


def test_replicas_are_trained_once_and_shown_as_a_table_and_a_plot(tmp_path, capsys, monkeypatch):
    def train(case, total, directory):
        del directory
        return {"curve": [[0, 5.0], [total, 4.0 + case.inner_steps / 100]], "tokens": total}

    monkeypatch.setattr(replicas, "train_case", train)
    replicas.measure_loss(60, tmp_path)
    monkeypatch.setattr(replicas, "train_case", None)  # existing results are not trained again
    replicas.measure_loss(60, tmp_path)
    output = capsys.readouterr().out
    assert "K=2 H=30 carry int8" in output
    assert "+7.50 %" in output
    assert (tmp_path / "loss.svg").read_text().count("<polyline") == len(replicas.cases(60))


@pytest.mark.slow
@pytest.mark.release
def test_diloco_with_a_killed_worker_has_the_digest_of_an_undisturbed_run(tmp_path):
    case = diloco.Case(blocks=2, block_elements=64, inner_steps=20, inner_ms=80, rounds=3)
    baseline, with_kill = (
        diloco.run_samestep(case, kill=kill, directory=tmp_path / str(kill))
        for kill in (False, True)
    )
    assert with_kill.digest == baseline.digest
    assert with_kill.round_ms > baseline.round_ms  # two workers compute three replicas
    (row,) = diloco.rows(case, {"samestep": (baseline, with_kill)})
    assert row[-2:] == ["3 of 3", "the same"]


@pytest.mark.slow
@pytest.mark.release
def test_replicas_send_a_fraction_of_the_synchronous_traffic(capsys):
    replicas.measure_traffic(share=1000, rounds=2)
    divisors = dict(re.findall(r"^(.*) 1/(\d+)$", capsys.readouterr().out, re.MULTILINE))
    float32_divisor, int8_divisor = (
        int(divisors[f"H=500 {codec} up, {codec} down"]) for codec in ("float32", "int8")
    )
    assert 400 < float32_divisor < int8_divisor


@pytest.mark.slow
@pytest.mark.release
def test_full_llama_measures_samestep_and_ddp_and_their_memory():
    small = {"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    measurement = full_llama.measure(2, 1, {**full_llama.CONFIG, **small})
    assert len(measurement.samestep_ms) == len(measurement.ddp_ms) > 0
    # Every process imports torch or numpy, which takes more than 10 MB.
    assert (
        min(measurement.coordinator_bytes, measurement.worker_bytes, measurement.rank_bytes) > 1e7
    )
    assert len(full_llama.rows(measurement)) == 5
