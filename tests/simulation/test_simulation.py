"""Whole clusters in memory, disturbed at random; a failure prints the seed that repeats it.

`SAMESTEP_SEEDS=5000` tries more; `SAMESTEP_SEEDS=688-689` repeats one.
"""

import os
from collections import Counter

import pytest

from protocol import limits
from tests.simulation.cluster import Cluster

pytestmark = pytest.mark.simulation

_PER_TEST = 40


def _seeds() -> range:
    first, dash, last = os.environ.get("SAMESTEP_SEEDS", "400").partition("-")
    return range(int(first), int(last)) if dash else range(int(first))


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    """Blocks of a few elements that still travel in several chunks."""
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 4)


@pytest.mark.parametrize("first", _seeds()[::_PER_TEST])
def test_the_bits_of_the_undisturbed_run_and_an_end(first):
    seeds = _seeds()
    for seed in range(first, min(first + _PER_TEST, seeds.stop)):
        try:
            Cluster(seed).run()
        except Exception as error:
            again = f"SAMESTEP_SEEDS={seed}-{seed + 1} python -m pytest tests/simulation"
            raise AssertionError(f"seed {seed}: {error!r}; repeat it with {again}") from error


def test_every_disturbance_comes_and_runs_end_in_every_way():
    disturbances: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for seed in range(150):
        told = Cluster(seed).run()
        disturbances.update(told.disturbances)
        outcomes.update(told.outcomes)
    expected = {"kill", "cut", "silent", "join", "cannot_build", "worker_drains", "slower", "flip"}
    expected |= {"flip_and_die", "nonfinite", "operator_halts", "drain"}
    assert expected == set(disturbances)
    assert set(outcomes) == {"finished", "drained", "failed"}


def test_a_seed_repeats_itself():
    assert Cluster(11).run() == Cluster(11).run()


def test_a_calm_cluster_finishes():
    for seed in range(20):
        told = Cluster(seed, calm=True).run()
        assert told.outcomes == ["finished"]
        assert told.disturbances == {}
