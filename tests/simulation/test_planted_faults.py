"""The simulation is itself tested: each fault planted here is caught within a thousand seeds."""

from typing import Any

import pytest

from coordinator.run import run
from coordinator.run.actions import Follow
from coordinator.run.admission import Admission
from coordinator.run.agreement import Agreement
from coordinator.run.evaluation import Evaluation
from coordinator.run.progress import Progress
from coordinator.run.reduction import TreeSum
from coordinator.run.round import Round, Share
from coordinator.run.saves import Saves
from protocol.exact.tree import parent, root, sibling
from tests.simulation import disk
from tests.simulation.cluster import Cluster
from tests.simulation.disk import MemoryDirectory, MemoryLog
from tests.simulation.execution import SimulatedExecution
from worker.logic.session import WorkerSession

pytestmark = pytest.mark.simulation

_ENOUGH_SEEDS = 1000


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


def any_round(self, message):
    """Whatever comes belongs to the present attempt."""
    del message
    return self.round


def no(*_arguments):
    return False


def nobody_is_odd(self, step):
    """Answers are taken, and not compared."""
    if step not in self._arbiter:
        return [], []
    answers = self._answers.pop(step, {})
    if step == self._newest:
        self._owed.difference_update(answers)
    return sorted(answers), []


def any_share(self, worker, node):
    """Nodes are taken from whoever sends them."""
    del node
    return self.shares.setdefault(worker, Share())


def assumes_proven(self, worker, *, proven):
    """What a lost worker delivered counts, whatever its weights were."""
    del proven
    self.shares.pop(worker, None)


def forgets_nothing(self, worker, *, proven):
    """A lost worker's parts stay its own."""
    del self, worker, proven


def tells_first(self, record):
    """A commit is told, then synced."""
    self.do(self.run.durable(record.commit.step))
    PERSIST(self, record)


def obeys_anyone(self, message, body):
    """The newest epoch seen is forgotten."""
    self._epochs.clear()
    return START_RUN(self, message, body)


def hears_no_cancel(*_arguments):
    """What others have done is computed and sent all the same."""
    return []


def trusts(self, member, step, agreement):
    """Who has taken as many steps is let in, whatever its state."""
    if member.step == step:
        self._members.activate(member)
        return [Follow(member.name, step)]
    return ADMIT(self, member, step, agreement)


def trusts_those_behind(self, member, step, agreement):
    """What was missed is replayed on whatever state there is."""
    member.state_digest = agreement.digest(member.step) or member.state_digest
    actions = ADMIT(self, member, step, agreement)
    member.replaying = False
    return actions


def forgets_what_was_refused(self):
    """The disk refuses a second time, and nothing is owed any more."""
    self._owed, self._asked = self._asked is not None, None


def reads_what_failed(self, step, log):
    """Commits are read from the log, synced or not."""
    del log
    return [(logged.record, a) for logged, a in disk._row(self._scan(), step)]


def forgets_what_is_redone(self):
    """A new segment replaces all that older ones held."""
    self._redo = ()
    return NEW_SEGMENT(self)


def leaves_it_unsynced(self, *, repair=False):
    """What was found is not synced before it is built upon."""
    before = [segment.synced for segment in self.segments]
    steps = SCAN(self, repair=repair)
    for segment, synced in zip(self.segments, before, strict=True):
        segment.synced = synced
    return steps


PERSIST = SimulatedExecution._persist
START_RUN = WorkerSession._start_run
ADMIT = Admission.admit
NEW_SEGMENT = MemoryLog._new_segment
SCAN = MemoryDirectory._scan

PLANTED: dict[str, list[tuple[Any, str, Any]]] = {
    "a duplicate is counted": [
        (TreeSum, "put", counts_what_is_covered),
        (TreeSum, "covers", never_covered),
    ],
    "an ancestor beside its descendants": [(TreeSum, "put", keeps_ancestor_and_descendant)],
    "an ancestor is dropped for its descendants": [(TreeSum, "put", drops_what_overlaps)],
    "sums in arrival order": [(TreeSum, "put", sums_as_they_arrive)],
    "a lost worker's nodes are forgotten": [(Progress, "reassign", nothing)],
    "a stale attempt is accepted": [
        (Progress, "present", any_round),
        (Round, "_check_place", any_share),
    ],
    "a commit before agreement": [(Agreement, "reached", True)],
    "a commit before sync": [(SimulatedExecution, "_persist", tells_first)],
    "a commit from a side cut off": [(MemoryDirectory, "check", nothing)],
    "a stale epoch is obeyed": [(WorkerSession, "_start_run", obeys_anyone)],
    "Cancel is lost": [(Progress, "cancel_surplus", nothing)],
    "Cancel is not obeyed": [(WorkerSession, "_cancel", hears_no_cancel)],
    "a joiner misses what was broadcast since": [(SimulatedExecution, "missed", nothing)],
    "a state is trusted without comparison": [(Admission, "admit", trusts)],
    "steps are replayed to one that is not where it says": [
        (Admission, "admit", trusts_those_behind)
    ],
    "a torn tail is read as committed": [(disk, "is_whole", yes)],
    "a skipped step is taken after a restart": [(Progress, "was_skipped", False)],
    "a skipped step is forgotten after two restarts": [
        (MemoryLog, "_new_segment", forgets_what_is_redone)
    ],
    "terms are forgotten": [(MemoryDirectory, "write_terms", nothing)],
    "a commit whose sync failed is replayed": [(MemoryDirectory, "logged", reads_what_failed)],
    "what a killed coordinator wrote is not synced": [
        (MemoryDirectory, "_scan", leaves_it_unsynced)
    ],
    "a checkpoint refused twice is forgotten": [(Saves, "failed", forgets_what_was_refused)],
    "a lost worker's parts are forgotten": [(Evaluation, "lose", forgets_nothing)],
    "a draining worker is forgotten": [(Progress, "release", nothing)],
    "another run's message is taken for this one's": [(run, "is_stale", no)],
    "an odd worker's last gradients count": [(Round, "lose", assumes_proven)],
    "a replica that nobody compares": [(Agreement, "judge", nobody_is_odd)],
}
OFTEN = {
    "a stale attempt is accepted": "operator_halts",
    "a commit from a side cut off": "split",
    "a stale epoch is obeyed": "split",
    "Cancel is lost": "stall",
    "Cancel is not obeyed": "stall",
    "a state is trusted without comparison": "cut",
    "steps are replayed to one that is not where it says": "cut",
    "a torn tail is read as committed": "power_loss",
    "a skipped step is taken after a restart": "kill_coordinator+operator_halts",
    "a skipped step is forgotten after two restarts": "kill_coordinator",
    "a commit whose sync failed is replayed": "disk+cut+kill_coordinator",
    "what a killed coordinator wrote is not synced": "kill_coordinator+power_loss",
    "a checkpoint refused twice is forgotten": "disk",
    "a draining worker is forgotten": "worker_drains",
    "another run's message is taken for this one's": "cannot_build",
    "an odd worker's last gradients count": "flip_and_die",
    "a replica that nobody compares": "flip",
}
"""The disturbance that brings the fault out; else it is kills."""
RUNS = {"another run's message is taken for this one's": 2}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault, monkeypatch, record_property):
    for owner, name, planted in PLANTED[fault]:
        monkeypatch.setattr(owner, name, planted)
    for seed in range(_ENOUGH_SEEDS):
        try:
            Cluster(seed, often=OFTEN.get(fault, "kill"), runs=RUNS.get(fault)).run()
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is noticed
            record_property("planted", (fault, seed, f"{type(error).__name__}: {error}"[:70]))
            return
    pytest.fail(f"{fault}: not noticed in {_ENOUGH_SEEDS} seeds")
