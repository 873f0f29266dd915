"""Whole clusters, disturbed at random, with the product's code in every process. A failure prints
the seed that reproduces it.

`SAMESTEP_SEEDS=1000000 python -m pytest -n auto tests/simulation/test_simulation.py` tries a
million schedules, CI ten thousand; `SAMESTEP_SEEDS=688-689` repeats one.
"""

import time
from collections import Counter

import pytest

from protocol.spec.sections.exchange import Topology
from tests.simulation.seeds import Seeds

pytestmark = pytest.mark.simulation

_SEEDS = Seeds("SAMESTEP_SEEDS", "20")
_MAX_SEEDS = 300
_TOPOLOGIES: tuple[Topology, ...] = ("star", "sharded", "star", "auto")
_ALL_CONSEQUENCES = {
    "cannot_build", "cut", "cut_and_refuse", "disk", "drain", "flip", "flip_and_die", "join",
    "kill", "kill_coordinator", "nonfinite", "operator_halts", "partition", "power_loss", "save",
    "slow_disk", "slower", "split", "stall", "stall_coordinator", "while_fetching",
    "worker_drains", "cut_peers", "cut_one_way", "slow_owner", "kill_two", "owners",
    "straggler", "speculated", "reassigned", "halted",
    "finished", "drained", "failed",
}  # fmt: skip
"""Disturbances, events that report them, and outcomes."""
_FREQUENT = ("kill_two+cut_peers+cut_one_way+slow_owner", "drain+cannot_build+nonfinite")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", _SEEDS.first_seeds)
def test_disturbed_run_ends_with_the_undisturbed_bits(first, simulate, record_counts):
    counts: Counter[str] = Counter()
    start_s = time.process_time()
    for seed in _SEEDS.of(first):
        try:
            cluster = simulate(
                seed,
                topology=_TOPOLOGIES[seed % len(_TOPOLOGIES)],
                embeds=seed % 3 == 2,
                buffers=seed % 2 == 1,
            )
        except Exception as error:
            command = f"SAMESTEP_SEEDS={seed}-{seed + 1} python -m pytest tests/simulation"
            raise AssertionError(f"seed {seed}: {error!r}; reproduce it with {command}") from error
        counts.update(schedules=1, events=cluster.events, **cluster.disturbances)
    record_counts(counts + Counter(ms=round((time.process_time() - start_s) * 1000)))


@pytest.mark.slow
def test_every_disturbance_has_its_consequence(simulate):
    consequences: set[str] = set()
    for seed in range(_MAX_SEEDS):
        often = _FREQUENT[seed % 2]
        cluster = simulate(seed, often=often, topology=_TOPOLOGIES[seed % len(_TOPOLOGIES)])
        consequences |= {*cluster.disturbances, *cluster.reports, *cluster.outcomes}
        if consequences >= _ALL_CONSEQUENCES:
            return
    pytest.fail(f"not seen in {_MAX_SEEDS} seeds: {_ALL_CONSEQUENCES - consequences}")


def test_seed_gives_the_same_events_in_any_directory(simulate, tmp_path):
    """The run has a file, whose path is sent to workers."""
    other_directory = tmp_path / "a longer path than in memory"
    other_directory.mkdir()
    assert simulate(11, files=True) == simulate(11, other_directory, files=True)


def test_undisturbed_cluster_finishes(simulate):
    for seed in range(8):
        cluster = simulate(
            seed, calm=True, topology=_TOPOLOGIES[seed % len(_TOPOLOGIES)], embeds=seed >= 4
        )
        assert cluster.outcomes == ["finished"]
        assert cluster.disturbances == {}


@pytest.mark.parametrize("seed", range(4))
def test_lost_slow_or_disconnected_owners_change_no_bits(seed, simulate):
    often = "kill_two+cut_peers+slow_owner+kill"
    for number in range(2 * seed, 2 * seed + 2):
        assert simulate(number, often=often, topology="sharded").outcomes


@pytest.mark.parametrize("seed", range(2))
def test_long_run_with_leases_and_measured_speeds(seed, simulate):
    assert simulate(seed, steps=40).outcomes


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 16, 24, 32))]
)
def test_evaluators_change_no_bits_and_delay_no_worker(first, simulate):
    for seed in range(first, first + 8):
        assert simulate(seed, evaluators=1 + seed % 2, steps=12).outcomes


def test_evaluator_reports_metrics_during_training(simulate):
    """This happens in at least one of a few schedules."""
    clusters = (simulate(seed, evaluators=1 + seed % 2, steps=12) for seed in range(16, 64))
    assert any(simulation.reports["evaluated_late"] for simulation in clusters)


def test_undisturbed_cluster_with_an_evaluator_finishes(simulate):
    for seed in range(5):
        assert simulate(seed, calm=True, evaluators=1).outcomes == ["finished"]


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 16, 24, 32))]
)
def test_disturbed_capture_writes_the_undisturbed_files(first, simulate):
    finished_runs = 0
    for seed in range(first, first + 8):
        finished_runs += simulate(seed, captures=True).outcomes.count("finished")
    assert finished_runs >= 4
