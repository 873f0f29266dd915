"""Clusters of runs with replicas, disturbed at random: the bits are those of the naive rounds.

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
_ENOUGH_SEEDS = 300
_CHECKS = (
    "other averages", "another loss", "same numerics profile but computed different",
    "expected counts of missed updates", "float division by zero",
)  # fmt: skip
"""Two that computed the same replica compare what it keeps, too; and a worker sees where a replica
has missed more updates than there were, or has taken none after its first."""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", _SEEDS.firsts)
def test_the_bits_of_the_undisturbed_rounds_and_an_end(first, play, simulated):
    counts: Counter[str] = Counter()
    since_s = time.process_time()
    for seed in _SEEDS.of(first):
        often = ("kill", "kill_coordinator+power_loss", "cut+stall", "")[seed % 4]
        try:
            played = play(seed, replicas=True, often=often)
        except Exception as error:
            raise AssertionError(f"seed {seed}, often {often!r}: {error!r}") from error
        counts.update(schedules=1, events=played.events, **played.disturbances)
    simulated(counts + Counter(ms=round((time.process_time() - since_s) * 1000)))


def test_who_sends_boundaries_faster_than_the_disk_waits(play, monkeypatch):
    """Nothing more is read of it, and it is not taken for lost."""
    monkeypatch.setattr(limits, "INNER_CHECKPOINTS_BYTES", 1)
    paused = []
    pause = Channel.pause

    def noticing(channel):
        paused.append(channel)
        pause(channel)

    monkeypatch.setattr(Channel, "pause", noticing)
    for seed in range(4):
        played = play(seed, replicas=True, often="slow_disk", calm=not seed % 2)
        assert played.outcomes
    assert paused


DIFFERENCES = InnerPhases._differences
LOAD = InnerPhases.load
BEGIN = InnerPhases._begin


def wrong_sign(self, step, replica, *ends_and_rest):
    start, end, rest = ends_and_rest
    return DIFFERENCES(self, step, replica, end, start, rest)


def no_moments(self, step, replica):
    del self, step, replica
    return CarriedState([], [])


def one_off_after_recovery(self, place, replica, inner, content, *, with_carried):
    LOAD(self, place, replica, inner, content, with_carried=with_carried)
    for key, at in self._checkpoints.items():
        self._checkpoints[key] = replace(at, inner=at.inner + 1) if inner == at.inner else at


def counts_twice(self, subtree, value):
    """A replica's difference that arrives twice is added twice."""
    if subtree in self.__dict__.setdefault("come", set()):
        for pending in [pending for pending in self._pending if pending.covers(subtree)]:
            self._pending[pending] = self._add(self._pending[pending], value)
        return True
    self.come.add(subtree)
    return PUT(self, subtree, value)


def never_covered(self, subtree):
    del self, subtree
    return False


def goes_on_from_an_earlier_round(self, place, replica, start):
    """What was begun of a replica counts, in whichever round that was."""
    begun = [at for (_, known), at in self._checkpoints.items() if known == replica]
    return begun[0] if begun else BEGIN(self, place, replica, start)


def forgets_nothing(self, committed=None):
    """What was begun of a round is there in the next."""
    for replica, (place, own) in self._uncommitted_states.items():
        if place == committed:
            self._carried_states[replica] = (place.step + 1, own)


def forgets_what_was_begun(self):
    """States of the replicas' own stay."""
    for place in [place for place, _ in self._uncommitted_states.values()]:
        self.end_round(place)


def own_of_the_round_before(self, step, replica):
    """The newest own state that is there is taken for this round's."""
    earlier = self._path / f"own-{step - 1}"
    return OWN_OF(self, step - 1 if step > 1 and earlier.exists() else step, replica)


def global_step_of_the_replica(self, round_, inner):
    """The schedule begins anew with every round."""
    del self, round_
    return inner


PUT = TreeSum.put
OWN_OF = ReplicaStates._own_of

PLANTED: dict[str, tuple[list[tuple[Any, str, Any]], str, int]] = {
    "a wrong sign": ([(InnerPhases, "_differences", wrong_sign)], "", 0),
    "moments dropped": ([(InnerPhases, "_carried_state_at", no_moments)], "", 0),
    "a step count one off after a recovery": (
        [(InnerPhases, "load", one_off_after_recovery)], "kill", 18,
    ),
    "a replica counted twice": (
        [(TreeSum, "put", counts_twice), (TreeSum, "covers", never_covered)], "stall+slower", 0,
    ),
    "a stale difference": (
        [
            (InnerPhases, "_begin", goes_on_from_an_earlier_round),
            (InnerPhases, "end_round", forgets_nothing),
        ],
        "stall+slower", 9,
    ),
    "what a skipped round would have left": (
        [(InnerPhases, "forget", forgets_what_was_begun)], "operator_halts+nonfinite", 0,
    ),
    "an own state of the round before": (
        [(ReplicaStates, "_own_of", own_of_the_round_before)], "kill", 1,
    ),
    "inner steps counted from each round's start": (
        [(InnerPhaseOrder, "global_step", global_step_of_the_replica)], "", 0,
    ),
}  # fmt: skip


QUICK = ("a wrong sign", "a replica counted twice")
"""What a plain run has."""


@pytest.mark.parametrize(
    "fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in PLANTED]
)
def test_a_planted_fault_is_caught(fault, play, monkeypatch, record_property):
    instead, often, first = PLANTED[fault]
    for owner, name, planted in instead:
        monkeypatch.setattr(owner, name, planted)
    for seed in [first, *range(_ENOUGH_SEEDS)]:
        try:
            play(seed, replicas=True, often=often)
        except AssertionError as error:
            if not any(check in str(error) for check in _CHECKS):
                raise
            record_property("planted", (fault, seed, str(error), first))
            return
    pytest.fail(f"not caught within {_ENOUGH_SEEDS} seeds")
