"""The simulation is itself tested: each fault planted here is caught within a few seeds."""

from typing import Any

import pytest

from coordinator import run
from coordinator.agreement import Agreement
from coordinator.evaluation import Evaluation
from coordinator.progress import Progress
from coordinator.reduction import TreeSum
from coordinator.round import Round
from protocol import limits
from protocol.tree import parent, root, sibling
from tests.simulation.cluster import Cluster
from tests.simulation.coordinator import SimulatedExecution

pytestmark = pytest.mark.simulation

_ENOUGH_SEEDS = 400


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(limits, "CHUNK_ELEMENTS", 4)


def counts_what_is_covered(self, node, value):
    """A duplicate is added once more."""
    for held in self._held:
        if held.covers(node):
            self._held[held] = self._add(self._held[held], value)
            return True
    self._held[node] = value
    _merge(self, node)
    return True


def keeps_ancestor_and_descendant(self, node, value):
    """A node is added beside those below it, which are held already."""
    if any(held.covers(node) for held in self._held):
        return False
    for held in [held for held in self._held if node.covers(held)]:
        value = self._add(value, self._held.pop(held))
    self._held[node] = value
    _merge(self, node)
    return True


def drops_what_overlaps(self, node, value):
    """A node is dropped when only a part of it is there."""
    if any(held.lo < node.hi and node.lo < held.hi for held in self._held):
        return False
    self._held[node] = value
    _merge(self, node)
    return True


def sums_as_they_arrive(self, node, value):
    """One running sum, in the order of arrival."""
    come = self.__dict__.setdefault("come", set())
    if come & set(range(node.lo, node.hi)):
        return False
    come |= set(range(node.lo, node.hi))
    self.running = value if len(come) == node.leaves else self._add(self.running, value)
    if len(come) == self._microbatches:
        self._held[root(self._microbatches)] = self.running
    return True


def _merge(self, node):
    while (other := sibling(node, self._microbatches)) is not None and other in self._held:
        left, right = sorted((node, other))
        value = self._add(self._held.pop(left), self._held.pop(right))
        node = parent(node, self._microbatches)
        self._held[node] = value


def never_covered(self, node):
    del self, node
    return False


def nothing(*_arguments, **_options):
    return []


def yes(*_arguments, **_options):
    return True


def no(*_arguments):
    return False


def nobody(*_arguments):
    return [], []


def assumes_proven(self, worker, *, proven):
    """What a lost worker delivered counts, whatever its weights were."""
    del proven
    self.shares.pop(worker, None)


def forgets_nothing(self, worker, *, proven):
    """A lost worker's parts stay its own."""
    del self, worker, proven


PLANTED: dict[str, list[tuple[Any, str, Any]]] = {
    "a duplicate is counted": [
        (TreeSum, "put", counts_what_is_covered),
        (TreeSum, "covers", never_covered),
    ],
    "an ancestor beside its descendants": [(TreeSum, "put", keeps_ancestor_and_descendant)],
    "an ancestor is dropped for its descendants": [(TreeSum, "put", drops_what_overlaps)],
    "sums in arrival order": [(TreeSum, "put", sums_as_they_arrive)],
    "a lost worker's nodes are forgotten": [(Progress, "take_up", nothing)],
    "a stale attempt is accepted": [
        (Progress, "is_present", yes),
        (Round, "_check_place", nothing),
    ],
    "a commit before agreement": [(Agreement, "reached", True)],
    "a joiner misses what was broadcast since": [(SimulatedExecution, "missed", nothing)],
    "a lost worker's parts are forgotten": [(Evaluation, "lose", forgets_nothing)],
    "a draining worker is forgotten": [(Progress, "let_go", nothing)],
    "another run's message is taken for this one's": [(run, "is_stale", no)],
    "an odd worker's last gradients count": [(Round, "lose", assumes_proven)],
    "a replica that nobody compares": [(Agreement, "judge", nobody)],
}
OFTEN = {
    "a stale attempt is accepted": "operator_halts",
    "a draining worker is forgotten": "worker_drains",
    "another run's message is taken for this one's": "cannot_build",
    "an odd worker's last gradients count": "flip_and_die",
    "a replica that nobody compares": "flip",
}
"""The disturbance that brings the fault out; else it is kills."""


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    for owner, name, planted in PLANTED[fault]:
        monkeypatch.setattr(owner, name, planted)
    for seed in range(_ENOUGH_SEEDS):
        try:
            Cluster(seed, often=OFTEN.get(fault, "kill")).run()
        except Exception:  # noqa: BLE001 -- whatever it is, it is noticed
            return
    pytest.fail(f"{fault}: not noticed in {_ENOUGH_SEEDS} seeds")
