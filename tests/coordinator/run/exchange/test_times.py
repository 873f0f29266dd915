"""What a step's exchange is expected to take: by wires, by processors, and as it was measured."""

import pytest

from coordinator.run.exchange.mesh import _shares
from coordinator.run.exchange.times import MeshMember, StepTimes, Volume, sharded_s, star_s

SMALL = Volume(5_300_000, 5_300_000, 12)
LARGE = Volume(100_000_000, 100_000_000, 48)


def members(speeds, here=0):
    shares = _shares(speeds)
    total = sum(shares)
    return [
        MeshMember(speed, share / total, here=number == here)
        for number, (speed, share) in enumerate(zip(speeds, shares, strict=True))
    ]


def test_a_star_carries_all_payloads_over_one_link_and_owners_their_part():
    """3 payloads against 1.5, 7 against 1.75; more where flows share a link."""
    for hosts in (4, 8):
        hosts_of_run = members([100.0] * hosts)
        ratio = star_s(SMALL, hosts_of_run) / sharded_s(SMALL, hosts_of_run)
        assert ratio >= (hosts - 1) / (2 * (hosts - 1) / hosts)


def test_where_one_link_is_slow_neither_way_is_quicker_than_it():
    hosts = members([60.0, 1000.0, 1000.0, 1000.0], here=1)
    slow_s = 5.3e6 * 8 / 60e6
    assert slow_s < sharded_s(SMALL, hosts) < 1.3 * slow_s
    assert slow_s < star_s(SMALL, hosts) < 1.6 * slow_s


def test_on_quick_links_the_processor_is_what_limits():
    slow, quick = members([10_000.0] * 16), members([1e6] * 16)
    assert star_s(LARGE, slow) == star_s(LARGE, quick)
    assert sharded_s(LARGE, quick, cores=8) < sharded_s(LARGE, quick, cores=2)


def test_half_the_bytes_take_half_the_time():
    hosts = members([100.0] * 4)
    half = Volume(SMALL.up_bytes // 2, SMALL.down_bytes // 2, SMALL.pieces)
    for way in (star_s, sharded_s):
        assert way(half, hosts) == pytest.approx(way(SMALL, hosts) / 2, rel=0.02)


def test_without_a_member_beside_the_coordinator_averages_go_out_once_more():
    here, nowhere = members([100.0] * 4), members([100.0] * 4, here=-1)
    assert sharded_s(SMALL, nowhere) > sharded_s(SMALL, here)
    assert star_s(SMALL, nowhere) > star_s(SMALL, here)


def timed(times, count, step_ms, *, sharded):
    for _ in range(count):
        times.add(step_ms, sharded=sharded)


def test_sharded_stays_while_its_steps_are_no_slower():
    times = StepTimes()
    timed(times, 9, 1000, sharded=False)
    timed(times, 16, 1049, sharded=True)
    assert times.why_star() == ""  # one window: the first step of a topology does not count
    timed(times, 1, 1049, sharded=True)
    assert times.why_star() == ""


def test_a_star_comes_back_where_sharded_steps_prove_slower_in_two_windows():
    times = StepTimes()
    timed(times, 9, 1000, sharded=False)
    timed(times, 9, 1200, sharded=True)
    assert times.why_star() == ""
    timed(times, 8, 1300, sharded=True)
    assert times.why_star() == "a star: its steps took 1000 ms, sharded ones 1200 ms"
    times.clear()
    assert times.why_star() == ""


def test_a_star_that_nobody_has_measured_is_measured_and_then_compared():
    times = StepTimes()
    timed(times, 17, 900, sharded=True)
    assert times.why_star() == "a star, to measure it: a sharded step took 900 ms"
    timed(times, 9, 1000, sharded=False)
    assert times.why_star() == ""


def test_short_steps_are_timed_over_seconds():
    times = StepTimes()
    timed(times, 167, 60, sharded=True)
    assert times.why_star() == ""
    timed(times, 8, 60, sharded=True)
    assert times.why_star()
