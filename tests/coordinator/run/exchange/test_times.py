"""Predicted time of a step's exchange, from links, processors and measurements."""

import pytest

from coordinator.run.exchange.mesh import _equal_time_shares
from coordinator.run.exchange.times import (
    MeshMember,
    StepTimes,
    Volume,
    predict_sharded_s,
    predict_star_s,
)

SMALL = Volume(5_300_000, 5_300_000, 12)
LARGE = Volume(100_000_000, 100_000_000, 48)


def members(speeds, local_index=0):
    shares = _equal_time_shares(speeds)
    total = sum(shares)
    return [
        MeshMember(speed, share / total, has_coordinator=number == local_index)
        for number, (speed, share) in enumerate(zip(speeds, shares, strict=True))
    ]


def test_sharded_exchange_is_faster_than_a_star():
    """Payloads on the busiest link: 3 against 1.5 with 4 hosts, 7 against 1.75 with 8 hosts."""
    for hosts in (4, 8):
        mesh_members = members([100.0] * hosts)
        ratio = predict_star_s(SMALL, mesh_members) / predict_sharded_s(SMALL, mesh_members)
        assert ratio >= (hosts - 1) / (2 * (hosts - 1) / hosts)


def test_slow_link_bounds_both_topologies():
    mesh_members = members([60.0, 1000.0, 1000.0, 1000.0], local_index=1)
    slow_s = 5.3e6 * 8 / 60e6
    assert slow_s < predict_sharded_s(SMALL, mesh_members) < 1.3 * slow_s
    assert slow_s < predict_star_s(SMALL, mesh_members) < 1.6 * slow_s


def test_processor_limits_fast_links():
    slow_members, fast_members = members([10_000.0] * 16), members([1e6] * 16)
    assert predict_star_s(LARGE, slow_members) == predict_star_s(LARGE, fast_members)
    assert predict_sharded_s(LARGE, fast_members, cores=8) < predict_sharded_s(
        LARGE, fast_members, cores=2
    )


def test_half_the_bytes_take_half_the_time():
    mesh_members = members([100.0] * 4)
    half = Volume(SMALL.up_bytes // 2, SMALL.down_bytes // 2, SMALL.chunks)
    for predicted_s in (predict_star_s, predict_sharded_s):
        assert predicted_s(half, mesh_members) == pytest.approx(
            predicted_s(SMALL, mesh_members) / 2, rel=0.02
        )


def test_averages_are_sent_once_more_without_a_local_member():
    with_local, without_local = members([100.0] * 4), members([100.0] * 4, local_index=-1)
    assert predict_sharded_s(SMALL, without_local) > predict_sharded_s(SMALL, with_local)
    assert predict_star_s(SMALL, without_local) > predict_star_s(SMALL, with_local)


def feed_step_times(times, count, step_ms, *, sharded):
    for _ in range(count):
        times.add(step_ms, sharded=sharded)


def test_sharded_topology_stays_while_its_steps_are_not_slower():
    times = StepTimes()
    feed_step_times(times, 9, 1000, sharded=False)
    feed_step_times(times, 16, 1049, sharded=True)
    assert times.reason_for_star() == ""  # one window: the first step of a topology does not count
    feed_step_times(times, 1, 1049, sharded=True)
    assert times.reason_for_star() == ""


def test_star_follows_two_slower_sharded_windows():
    times = StepTimes()
    feed_step_times(times, 9, 1000, sharded=False)
    feed_step_times(times, 9, 1200, sharded=True)
    assert times.reason_for_star() == ""
    feed_step_times(times, 8, 1300, sharded=True)
    assert times.reason_for_star() == "a star: its steps took 1000 ms, sharded ones 1200 ms"
    times.clear()
    assert times.reason_for_star() == ""


def test_unmeasured_star_is_measured_and_compared():
    times = StepTimes()
    feed_step_times(times, 17, 900, sharded=True)
    assert times.reason_for_star() == "a star, to measure it: a sharded step took 900 ms"
    feed_step_times(times, 9, 1000, sharded=False)
    assert times.reason_for_star() == ""


def test_short_steps_are_timed_over_seconds():
    times = StepTimes()
    feed_step_times(times, 167, 60, sharded=True)
    assert times.reason_for_star() == ""
    feed_step_times(times, 8, 60, sharded=True)
    assert times.reason_for_star()
