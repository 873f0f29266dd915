"""Whole clusters in memory, disturbed at random; a failure prints the seed that repeats it.

`SAMESTEP_SEEDS=1000000 python -m pytest -n auto tests/simulation/test_simulation.py` tries a
million schedules, CI ten thousand; `SAMESTEP_SEEDS=688-689` repeats one.
"""

import os
import time
from collections import Counter

import pytest

from tests.simulation.cluster import Cluster
from tests.simulation.real_disk import directories

pytestmark = pytest.mark.simulation

_SEEDS = "600"
_MOST_TESTS = 100
_WITH_FILES = 30


def _seeds() -> range:
    first, dash, last = os.environ.get("SAMESTEP_SEEDS", _SEEDS).partition("-")
    return range(int(first), int(last)) if dash else range(int(first))


def _per_test() -> int:
    return -(-len(_seeds()) // _MOST_TESTS)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", _seeds()[:: _per_test()])
def test_the_bits_of_the_undisturbed_run_and_an_end(first, simulated):
    counts: Counter[str] = Counter()
    since_s = time.perf_counter()
    for seed in range(first, min(first + _per_test(), _seeds().stop)):
        try:
            told = Cluster(seed).run()
        except Exception as error:
            again = f"SAMESTEP_SEEDS={seed}-{seed + 1} python -m pytest tests/simulation"
            raise AssertionError(f"seed {seed}: {error!r}; repeat it with {again}") from error
        counts.update(schedules=1, events=told.events, **told.disturbances)
    simulated(counts + Counter(ms=round((time.perf_counter() - since_s) * 1000)))


@pytest.mark.parametrize("seed", range(_WITH_FILES))
def test_the_same_with_real_files(seed, tmp_path):
    make, made = directories(tmp_path)
    try:
        Cluster(seed, directory=make).run()
    finally:
        for directory in made:
            directory.close()


def test_every_disturbance_comes_with_what_it_leads_to():
    disturbances: Counter[str] = Counter()
    reports: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in range(250):
        told = Cluster(seed).run()
        disturbances += told.disturbances
        reports += told.reports
        outcomes.update(told.outcomes)
    assert set(disturbances) == {
        "cannot_build", "cut", "disk", "drain", "flip", "flip_and_die", "join", "kill",
        "kill_coordinator", "nonfinite", "operator_halts", "partition", "power_loss", "save",
        "slower", "split", "stall", "stall_coordinator", "worker_drains",
    }  # fmt: skip
    assert {"straggler", "speculated", "reassigned", "halted"} <= set(reports)
    assert set(outcomes) == {"finished", "drained", "failed"}


def test_a_seed_repeats_itself():
    assert Cluster(11).run() == Cluster(11).run()


def test_a_calm_cluster_finishes():
    for seed in range(20):
        told = Cluster(seed, calm=True).run()
        assert told.outcomes == ["finished"]
        assert told.disturbances == {}
