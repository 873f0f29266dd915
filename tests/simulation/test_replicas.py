"""Clusters of runs with replicas, disturbed at random: their bits equal those of naive rounds.

`SAMESTEP_REPLICA_SEEDS=10000 python -m pytest -n auto tests/simulation/test_replicas.py` tries ten
thousand schedules; `SAMESTEP_REPLICA_SEEDS=21-22` repeats one.
"""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from coordinator.storage.states.replica_states import ReplicaStates
from protocol.base import limits
from protocol.exact.inner_phases import InnerPhaseOrder
from protocol.exact.reduction.tree_sum import TreeSum
from protocol.wire.transport import Channel
from tests.simulation.seeds import Seeds
from worker.shell.inner_phases import CarriedState, InnerPhases

pytestmark = pytest.mark.simulation

_SEEDS = Seeds("SAMESTEP_REPLICA_SEEDS", "6")
_MAX_SEEDS = 300
_CHECKS = (
    "other averages", "another loss", "same numerics profile but computed different",
    "expected counts of missed updates", "float division by zero",
)  # fmt: skip
"""Messages of the checks that catch faults: workers that computed the same replica compare its
per-replica state too, and a worker detects impossible counts of missed updates."""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", _SEEDS.first_seeds)
def test_disturbed_run_ends_with_the_undisturbed_bits(first, simulate, record_counts):
    counts: Counter[str] = Counter()
    start_s = time.process_time()
    for seed in _SEEDS.of(first):
        often = ("kill", "kill_coordinator+power_loss", "cut+stall", "")[seed % 4]
        try:
            cluster = simulate(seed, replicas=True, often=often)
        except Exception as error:
            raise AssertionError(f"seed {seed}, often {often!r}: {error!r}") from error
        counts.update(schedules=1, events=cluster.events, **cluster.disturbances)
    record_counts(counts + Counter(ms=round((time.process_time() - start_s) * 1000)))


def test_worker_waits_if_inner_checkpoints_outpace_the_disk(simulate, monkeypatch):
    """The coordinator stops reading from the worker, and does not count it as lost."""
    monkeypatch.setattr(limits, "INNER_CHECKPOINTS_BYTES", 1)
    paused_channels = []
    pause = Channel.pause

    def record_pause(channel):
        paused_channels.append(channel)
        pause(channel)

    monkeypatch.setattr(Channel, "pause", record_pause)
    for seed in range(4):
        cluster = simulate(seed, replicas=True, often="slow_disk", calm=not seed % 2)
        assert cluster.outcomes
    assert paused_channels


DIFFERENCES = InnerPhases._differences
LOAD = InnerPhases.load
BEGIN = InnerPhases._starting_checkpoint


def wrong_sign(self, step, replica, *ends_and_rest):
    start, end, rest = ends_and_rest
    return DIFFERENCES(self, step, replica, end, start, rest)


def no_moments(self, step, replica):
    del self, step, replica
    return CarriedState([], [])


def off_by_one_after_recovery(self, position, replica, inner, content, *, with_carried):
    LOAD(self, position, replica, inner, content, with_carried=with_carried)
    for key, checkpoint in self._checkpoints.items():
        self._checkpoints[key] = (
            replace(checkpoint, inner=checkpoint.inner + 1)
            if inner == checkpoint.inner
            else checkpoint
        )


def counts_twice(self, subtree, value):
    """Add a replica's duplicate difference twice."""
    if subtree in self.__dict__.setdefault("arrivals", set()):
        for pending in [pending for pending in self._pending if pending.covers(subtree)]:
            self._pending[pending] = self._add(self._pending[pending], value)
        return True
    self.arrivals.add(subtree)
    return PUT(self, subtree, value)


def never_covered(self, subtree):
    del self, subtree
    return False


def reuses_earlier_rounds(self, position, replica, start):
    """Use a replica's inner checkpoint from any round."""
    checkpoints = [
        checkpoint
        for (_, replica_key), checkpoint in self._checkpoints.items()
        if replica_key == replica
    ]
    return checkpoints[0] if checkpoints else BEGIN(self, position, replica, start)


def keeps_inner_checkpoints(self, committed=None):
    """Keep the inner checkpoints of a round for the next round."""
    for replica, (step_id, own) in self._uncommitted_states.items():
        if step_id == committed:
            self._carried_states[replica] = (step_id.step + 1, own)


def keeps_per_replica_states(self):
    """Keep the per-replica states of a round that is skipped."""
    for step_id in [step_id for step_id, _ in self._uncommitted_states.values()]:
        self.end_round(step_id)


def uses_state_of_the_previous_round(self, step, replica):
    """Use the newest per-replica state as this round's."""
    previous_state = self._path / f"own-{step - 1}"
    return STATE_OF(self, step - 1 if step > 1 and previous_state.exists() else step, replica)


def global_step_of_the_replica(self, round_, inner):
    """Restart the schedule with every round."""
    del self, round_
    return inner


PUT = TreeSum.put
STATE_OF = ReplicaStates._state_of

PLANTED: dict[str, tuple[list[tuple[Any, str, Any]], str, int]] = {
    "a wrong sign": ([(InnerPhases, "_differences", wrong_sign)], "", 0),
    "moments dropped": ([(InnerPhases, "_carried_state_at", no_moments)], "", 0),
    "a step count off by one after a recovery": (
        [(InnerPhases, "load", off_by_one_after_recovery)], "kill", 18,
    ),
    "a replica counted twice": (
        [(TreeSum, "put", counts_twice), (TreeSum, "covers", never_covered)], "stall+slower", 4,
    ),
    "a stale difference": (
        [
            (InnerPhases, "_starting_checkpoint", reuses_earlier_rounds),
            (InnerPhases, "end_round", keeps_inner_checkpoints),
        ],
        "stall+slower", 9,
    ),
    "per-replica states of a skipped round": (
        [(InnerPhases, "forget", keeps_per_replica_states)], "operator_halts+nonfinite", 0,
    ),
    "a per-replica state of the previous round": (
        [(ReplicaStates, "_state_of", uses_state_of_the_previous_round)], "kill", 1,
    ),
    "inner steps counted from each round's start": (
        [(InnerPhaseOrder, "global_step", global_step_of_the_replica)], "", 0,
    ),
}  # fmt: skip


QUICK = ("a wrong sign", "a replica counted twice")
"""Faults that the default test run plants."""


@pytest.mark.parametrize(
    "fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in PLANTED]
)
def test_planted_fault_is_caught(fault, simulate, monkeypatch, record_property):
    replacements, often, first = PLANTED[fault]
    for owner, name, replacement in replacements:
        monkeypatch.setattr(owner, name, replacement)
    for seed in [first, *range(_MAX_SEEDS)]:
        try:
            simulate(seed, replicas=True, often=often)
        except AssertionError as error:
            if not any(check in str(error) for check in _CHECKS):
                raise
            record_property("planted", (fault, seed, str(error), first))
            return
    pytest.fail(f"not caught within {_MAX_SEEDS} seeds")
