"""Whole clusters, disturbed at random, with the product's own code in every process; a failure
prints the seed that repeats it.

`SAMESTEP_SEEDS=1000000 python -m pytest -n auto tests/simulation/test_simulation.py` tries a
million schedules, CI ten thousand; `SAMESTEP_SEEDS=688-689` repeats one.
"""

import time
from collections import Counter

import pytest

from protocol.spec.sections.exchange import Topology
from tests.simulation.seeds import Seeds

pytestmark = pytest.mark.simulation

_SEEDS = Seeds("SAMESTEP_SEEDS", "50")
_ENOUGH_SEEDS = 300
_WAYS: tuple[Topology, ...] = ("star", "sharded", "star", "auto")
_ALL = {
    "cannot_build", "cut", "cut_and_refuse", "disk", "drain", "flip", "flip_and_die", "join",
    "kill", "kill_coordinator", "nonfinite", "operator_halts", "partition", "power_loss", "save",
    "slow_disk", "slower", "split", "stall", "stall_coordinator", "while_fetching",
    "worker_drains", "cut_peers", "cut_one_way", "slow_owner", "kill_two", "owners",
    "straggler", "speculated", "reassigned", "halted",
    "finished", "drained", "failed",
}  # fmt: skip
"""Disturbances, what is reported of them, and outcomes."""
_OFTEN = ("kill_two+cut_peers+cut_one_way+slow_owner", "drain+cannot_build+nonfinite")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", _SEEDS.firsts)
def test_the_bits_of_the_undisturbed_run_and_an_end(first, play, simulated):
    counts: Counter[str] = Counter()
    since_s = time.process_time()
    for seed in _SEEDS.of(first):
        try:
            played = play(
                seed, way=_WAYS[seed % len(_WAYS)], embeds=seed % 3 == 2, buffers=seed % 2 == 1
            )
        except Exception as error:
            again = f"SAMESTEP_SEEDS={seed}-{seed + 1} python -m pytest tests/simulation"
            raise AssertionError(f"seed {seed}: {error!r}; repeat it with {again}") from error
        counts.update(schedules=1, events=played.events, **played.disturbances)
    simulated(counts + Counter(ms=round((time.process_time() - since_s) * 1000)))


@pytest.mark.slow
def test_every_disturbance_comes_with_what_it_leads_to(play):
    seen: set[str] = set()
    for seed in range(_ENOUGH_SEEDS):
        often = _OFTEN[seed % 2]
        played = play(seed, often=often, way=_WAYS[seed % len(_WAYS)])
        seen |= {*played.disturbances, *played.reports, *played.outcomes}
        if seen >= _ALL:
            return
    pytest.fail(f"not seen in {_ENOUGH_SEEDS} seeds: {_ALL - seen}")


def test_a_seed_repeats_itself_wherever_it_is_played(play, tmp_path):
    """With a file, whose path is told to workers."""
    elsewhere = tmp_path / "a longer path than in memory"
    elsewhere.mkdir()
    assert play(11, files=True) == play(11, elsewhere, files=True)


def test_a_calm_cluster_finishes(play):
    for seed in range(8):
        played = play(seed, calm=True, way=_WAYS[seed % len(_WAYS)], embeds=seed >= 4)
        assert played.outcomes == ["finished"]
        assert played.disturbances == {}


@pytest.mark.parametrize("seed", range(4))
def test_owners_that_die_are_slow_or_cut_off_leave_the_bits(seed, play):
    often = "kill_two+cut_peers+slow_owner+kill"
    for number in range(2 * seed, 2 * seed + 2):
        assert play(number, often=often, way="sharded").outcomes


@pytest.mark.parametrize("seed", range(2))
def test_a_long_run_in_which_leases_and_measured_speeds_act(seed, play):
    assert play(seed, steps=40).outcomes


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 16, 24, 32))]
)
def test_evaluators_change_no_bit_and_nobody_waits_for_them(first, play):
    for seed in range(first, first + 8):
        assert play(seed, evaluators=1 + seed % 2, steps=12).outcomes


def test_metrics_come_beside_training(play):
    """While others go on, in one of a few schedules."""
    played = (play(seed, evaluators=1 + seed % 2, steps=12) for seed in range(16, 64))
    assert any(told.reports["evaluated_late"] for told in played)


def test_a_calm_cluster_with_an_evaluator_finishes(play):
    for seed in range(5):
        assert play(seed, calm=True, evaluators=1).outcomes == ["finished"]


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 16, 24, 32))]
)
def test_a_capture_leaves_the_files_of_the_undisturbed_one(first, play):
    finished = 0
    for seed in range(first, first + 8):
        finished += play(seed, captures=True).outcomes.count("finished")
    assert finished >= 4
