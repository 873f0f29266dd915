"""The simulation is itself tested: each fault planted here, in the product's own code, is caught
within a thousand seeds, by the check that it is for."""

import dataclasses
import inspect
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from coordinator.disk.directory_lock import DirectoryLock
from coordinator.run import run
from coordinator.run.checkpoint_schedule import CheckpointSchedule
from coordinator.run.evaluation import Evaluation
from coordinator.run.exchange.embeddings import JoinedEmbeddings
from coordinator.run.exchange.round import Round, Share
from coordinator.run.inputs import CommitDurable
from coordinator.run.outputs.actions import Subscribe
from coordinator.run.progress import Progress
from coordinator.run.workers.admission import Admission
from coordinator.run.workers.agreement import Agreement
from coordinator.service.execution import Execution
from coordinator.service.subscribers import Subscribers
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.log import log_reader
from coordinator.storage.log.gradient_log import GradientLog
from coordinator.storage.log.log_records import HEAD_BYTES
from coordinator.storage.run_storage import RunStorage
from protocol.base.errors import SamestepError
from protocol.exact import replica
from protocol.exact.reduction import reducer
from protocol.exact.reduction.tree import parent, root, sibling
from protocol.exact.reduction.tree_sum import ADDITIONS, TreeSum, add_arrays
from protocol.spec.sections.exchange import Topology
from protocol.wire.messages import Assign, Cancel, StartRun
from tests.simulation.job import Job
from worker.logic.actions import LoadEmbeddings, TakeWeights
from worker.logic.device_group import DeviceGroup
from worker.logic.events import AveragesReady, StepId, WeightsTaken
from worker.logic.session import WorkerSession
from worker.peers.share import GradientExchange
from worker.shell.blob_cache import Part
from worker.shell.engine import Engine

pytestmark = pytest.mark.simulation

_ENOUGH_SEEDS = 1000
_ABSENT = np.uint32(0x80000000)


def counts_what_is_covered(self, subtree, value):
    """A duplicate is added once more."""
    for pending in self._pending:
        if pending.covers(subtree):
            self._pending[pending] = self._add(self._pending[pending], value)
            return True
    self._pending[subtree] = value
    _merge(self, subtree)
    return True


def keeps_ancestor_and_descendant(self, subtree, value):
    """A subtree is added beside those below it, which are held already."""
    if any(pending.covers(subtree) for pending in self._pending):
        return False
    for pending in [pending for pending in self._pending if subtree.covers(pending)]:
        value = self._add(value, self._pending.pop(pending))
    self._pending[subtree] = value
    _merge(self, subtree)
    return True


def drops_what_overlaps(self, subtree, value):
    """A subtree is dropped when only a part of it is there."""
    if any(pending.lo < subtree.hi and subtree.lo < pending.hi for pending in self._pending):
        return False
    self._pending[subtree] = value
    _merge(self, subtree)
    return True


def sums_as_they_arrive(self, subtree, value):
    """One running sum, in the order of arrival."""
    come = self.__dict__.setdefault("come", set())
    if come & set(range(subtree.lo, subtree.hi)):
        return False
    come |= set(range(subtree.lo, subtree.hi))
    self.running = value if len(come) == subtree.leaves else self._add(self.running, value)
    if len(come) == self._microbatches:
        self._pending[root(self._microbatches)] = self.running
    return True


def _merge(self, subtree):
    while (other := sibling(subtree, self._microbatches)) is not None and other in self._pending:
        left, right = sorted((subtree, other))
        value = self._add(self._pending.pop(left), self._pending.pop(right))
        subtree = parent(subtree, self._microbatches)
        self._pending[subtree] = value


def never_covered(self, subtree):
    del self, subtree
    return False


def nothing(*_arguments, **_options):
    return []


def yes(*_arguments, **_options):
    return True


def no(*_arguments):
    return False


def nobody_is_odd(self, step):
    """Answers are taken, and not compared."""
    if step not in self._arbiter:
        return [], []
    answers = self._answers.pop(step, {})
    if step == self._newest:
        self._missing.difference_update(answers)
    return sorted(answers), []


def any_round(self, message):
    """Whatever comes belongs to the present attempt."""
    del message
    return None if self.persisting else self.round


def any_share(self, worker, subtree):
    """Subtrees are taken from whoever sends them."""
    del subtree
    return self.shares.setdefault(worker, Share())


def takes_what_is_there(self, attempt):
    """A commit is enough."""
    if not attempt.is_committed:
        return []
    self._attempt = None
    arrays = [
        attempt.averages.part(each.start) if len(each) == 1 else attempt.averages.arrays[block]
        for block, each in enumerate(map(self._grid.of_block, range(len(self._blocks))))
    ]
    return [AveragesReady(StepId(attempt.id["step"], attempt.id["attempt"]), arrays)]


def assumes_proven(self, worker, *, is_proven):
    """What a lost worker delivered counts, whatever its weights were."""
    del is_proven
    self.shares.pop(worker, None)


def forgets_nothing(self, worker, *, is_proven):
    """A lost worker's parts stay its own."""
    del self, worker, is_proven


def reached_by_all_or_none(left, right):
    """A tensor that one of two subtrees has not reached is taken for one that neither has."""
    lost = (left.view(np.uint32) == _ABSENT) | (right.view(np.uint32) == _ABSENT)
    add_arrays(left, right)[lost] = -0.0
    return left


def takes_anew(self, skips, flavour=0):
    """The undisturbed run has the fault, too, whatever was computed before it was planted."""
    return self._take(skips, flavour)


async def tells_first(self, action):
    """A commit is told, then synced."""
    self._step(CommitDurable(action.record.commit.step))
    await PERSIST(self, action)


def obeys_anyone(self, message, body):
    """The newest term seen is forgotten."""
    if isinstance(message, StartRun):
        self._terms.clear()
    return RECEIVE(self, message, body)


def hears_no_cancel(self, message, body):
    """What others have done is computed and sent all the same."""
    return [] if isinstance(message, Cancel) else RECEIVE(self, message, body)


def trusts(self, member, step, agreement):
    """Who has taken as many steps is let in, whatever its state."""
    if member.step == step:
        self._members.activate(member)
        return [Subscribe(member.name, step)]
    return ADMIT(self, member, step, agreement)


def trusts_those_behind(self, member, step, agreement):
    """What was missed is replayed on whatever state there is."""
    member.state_digest = agreement.digest(member.step) or member.state_digest
    actions = ADMIT(self, member, step, agreement)
    member.replaying = False
    return actions


def forgets_what_was_refused(self):
    """The disk refuses a second time, and nothing is owed any more."""
    self._must_retry, self._requested = self._requested is not None, None


async def reads_what_failed(self, step):
    """Commits are read from the log's files, synced or not."""
    scan = lambda: log_reader.scan_log(self.directory.log, self._run_id, self._begun.manifest)  # noqa: E731
    return list((await self._do("log", scan)).index.following(step))


def forgets_what_is_redone(self):
    """A new segment replaces all that older ones held."""
    self._redo = ()
    return NEW_SEGMENT(self)


def reads_anything(fd, head):
    """A record counts whatever it holds."""
    raw = os.pread(fd, head.payload_bytes, head.offset + HEAD_BYTES)
    return raw if len(raw) == head.payload_bytes else None


def sends_nothing_of_before(self, session, step):
    """A joiner hears what is broadcast from now on."""
    del step
    self._names.add(session.name)


def loses_every_third_assign(self, action):
    """On its way to the worker."""
    if isinstance(action.message, Assign):
        self.assigned = self.__dict__.get("assigned", 0) + 1
        if self.assigned % 3 == 0:
            return
    SEND(self, action)


def forgets_what_is_pending(self):
    """With what is there already, what is still to come is taken off a worker's list."""
    surplus = SURPLUS(self)
    for worker in surplus:
        self.shares[worker].owed.clear()
    return surplus


def knows_no_terms(self, terms=None):
    """The newest term is not kept from one connection to the next."""
    del terms
    NEW_SESSION(self)


def tells_without_taking(self, action):
    """A device of a group goes on with the weights that it has."""
    self._emit(WeightsTaken(action.step, reads_on=False))


def goes_on_counting(self, *step_and_digest):
    """The next step's first attempt has the number of this one's last."""
    attempt = self.attempt
    actions = DURABLE(self, *step_and_digest)
    self.attempt = attempt
    return actions


def keeps_anything(self):
    """What was fetched gets its name, whatever it holds."""
    self._path.replace(self._target)
    self._digests.remember(self._target, self._target.name)
    self.close()
    return True


def keeps_the_rows_of_before(self, task, step_id):
    """Gradients rest on the embeddings of the first step that has come here."""
    actions = LOAD_ROWS(self, task, step_id)
    if not actions:
        return actions
    self.kept_rows = self.__dict__.get("kept_rows", actions[0].rows)
    return [LoadEmbeddings(step_id, self.kept_rows)]


def nobody_compares(self, worker, profile, message):
    """Embeddings that are computed again may be any."""
    del self, worker, profile, message


def knows_nobody_who_delivered(self):
    """Who is lost between the phases was not needed."""
    return dataclasses.replace(JOIN(self), delivered=frozenset())


def takes_rows_of_an_older_attempt(self):
    """Embeddings that came in an attempt that was given up count in the next."""
    before = self.round
    actions = BEGIN(self)
    if before is not None and before.embeds and before.step_id["step"] == self.step:
        self.round.side_outputs = before.side_outputs
    return actions


def joins_backward(pieces, *origin_and_more):
    """The last microbatch's rows stand first."""
    return JOIN_PIECES(pieces[::-1], *origin_and_more)


PERSIST = Execution._persist
LOAD_ROWS = WorkerSession._load_rows
JOIN = Round.join_embeddings
BEGIN = Progress.begin
JOIN_PIECES = JoinedEmbeddings.of
SEND = Execution._send
SURPLUS = Round.surplus
NEW_SESSION = WorkerSession.__init__
DURABLE = Progress.durable
RECEIVE = WorkerSession.receive
ADMIT = Admission.admit
NEW_SEGMENT = GradientLog._new_segment


@dataclass(frozen=True)
class Planted:
    """A fault, and what is to catch it.

    Attributes:
        instead: What the product has in each place instead.
        check: What the check says that has to notice it, or one of several with | between them:
            others do not count, nor does it that something merely breaks.
        often: The disturbances that bring it out.
        seed: Tried first: only to be quick, as long as the seed leads there.
        runs: How many one after the other.
        files: Whether workers fetch a file for each.
        way: How gradients travel.
        embeds: Whether the loss couples all samples of a step.
    """

    instead: list[tuple[Any, str, Any]]
    check: str
    often: str = "kill"
    seed: int = 0
    runs: int | None = None
    files: bool = False
    way: Topology = "star"
    embeds: bool = False


PLANTED = {
    "a duplicate is counted": Planted(
        [(TreeSum, "put", counts_what_is_covered), (TreeSum, "covers", never_covered)],
        "other averages",
        seed=62,
    ),
    "an ancestor beside its descendants": Planted(
        [(TreeSum, "put", keeps_ancestor_and_descendant)],
        "a microbatch lost or doubled",
        often="stall+slower",
        seed=5,
    ),
    "an ancestor is dropped for its descendants": Planted(
        [(TreeSum, "put", drops_what_overlaps)],
        "what has come is not counted | nothing can happen",
        often="stall+slower",
        seed=43,
    ),
    "sums in arrival order": Planted(
        [(TreeSum, "put", sums_as_they_arrive)],
        "other averages",
        seed=4,
    ),
    "a lost worker's subtrees are forgotten": Planted(
        [(Progress, "reassign", nothing)],
        "nothing can happen",
        seed=0,
    ),
    "a stale attempt is accepted": Planted(
        [(Progress, "present", any_round), (Round, "_check_assigned", any_share)],
        "a microbatch lost or doubled | other averages | another loss",
        often="flip+slower+stall",
        seed=192,
    ),
    "a device of several keeps its old weights": Planted(
        [(Engine, "_HANDLERS", {**Engine._HANDLERS, TakeWeights: tells_without_taking})],
        "other averages",
        seed=1,
    ),
    "a device of several is waited for when it is lost": Planted(
        [(DeviceGroup, "_reassign", nothing)],
        "nothing can happen",
        seed=359,
    ),
    "a commit before agreement": Planted(
        [(Agreement, "reached", True)],
        "the replica has not agreed",
        seed=1,
    ),
    "a commit before sync": Planted(
        [(Execution, "_persist", tells_first)],
        "before it is durable",
    ),
    "a commit from a side cut off": Planted(
        [(DirectoryLock, "check", nothing)],
        "by a side cut off",
        often="split",
        seed=3,
    ),
    "a stale term is obeyed": Planted(
        [(WorkerSession, "receive", obeys_anyone)],
        "an older coordinator is obeyed",
        often="split",
        seed=14,
    ),
    "Cancel is lost": Planted(
        [(Progress, "cancel_surplus", nothing)],
        "Cancel is lost",
        often="stall",
        seed=27,
    ),
    "Cancel is not obeyed": Planted(
        [(WorkerSession, "receive", hears_no_cancel)],
        "a cancelled subtree is sent",
        often="stall",
        seed=133,
    ),
    "a joiner misses what was broadcast since": Planted(
        [(Subscribers, "join", sends_nothing_of_before)],
        "expected all of its averages first",
        seed=27,
    ),
    "a state is trusted without comparison": Planted(
        [(Admission, "admit", trusts)],
        "a worker is wrong | other averages | expected step",
        often="cut",
        seed=25,
    ),
    "steps are replayed to one that is not where it says": Planted(
        [(Admission, "admit", trusts_those_behind)],
        "a worker is wrong | other averages | expected step",
        often="cut",
        seed=3,
    ),
    "a torn tail is read as committed": Planted(
        [(log_reader, "read_payload", reads_anything)],
        "expected the commit",
        often="power_loss",
        seed=36,
    ),
    "a skipped step is taken after a restart": Planted(
        [(Progress, "was_skipped", False)],
        "was committed otherwise before",
        often="kill_coordinator+operator_halts+nonfinite",
        seed=94,
    ),
    "a skipped step is forgotten after two restarts": Planted(
        [(GradientLog, "_new_segment", forgets_what_is_redone)],
        "a commit that was told is lost",
        often="kill_coordinator",
        seed=3,
    ),
    "terms are forgotten": Planted(
        [(RunDirectory, "write_admission_record", nothing)],
        "terms are not remembered",
    ),
    "a commit whose sync failed is replayed": Planted(
        [(RunStorage, "logged", reads_what_failed)],
        "ahead of what is durable",
        often="cut_and_refuse",
        seed=22,
    ),
    "what a killed coordinator wrote is not synced": Planted(
        [(log_reader, "_sync", nothing)],
        "built upon, and not synced",
        often="kill_coordinator+power_loss",
        seed=2,
    ),
    "a checkpoint refused twice is forgotten": Planted(
        [(CheckpointSchedule, "failed", forgets_what_was_refused)],
        "nothing can happen",
        often="disk",
        seed=8,
    ),
    "a lost worker's parts are forgotten": Planted(
        [(Evaluation, "lose", forgets_nothing)],
        "nothing can happen",
        seed=15,
    ),
    "a draining worker is forgotten": Planted(
        [(Progress, "release", nothing)],
        "may not leave",
        often="worker_drains",
        seed=3,
    ),
    "another run's message is taken for this one's": Planted(
        [(run, "is_stale", no)],
        "refuses",
        often="join+slower+drain",
        seed=21,
        runs=2,
    ),
    "an odd worker's last gradients count": Planted(
        [(Round, "lose", assumes_proven)],
        "other averages",
        often="flip_and_die+slow_disk",
        seed=901,
    ),
    "a replica that nobody compares": Planted(
        [(Agreement, "judge", nobody_is_odd)],
        "other averages",
        often="flip",
        seed=2,
    ),
    "every third Assign lost": Planted(
        [(Execution, "_send", loses_every_third_assign)],
        "nothing can happen",
        often="kill+stall",
        seed=116,
    ),
    "surplus forgets pending subtrees": Planted(
        [(Round, "surplus", forgets_what_is_pending)],
        "what is missing is forgotten",
        often="stall",
        seed=33,
    ),
    "an older term accepted": Planted(
        [(WorkerSession, "__init__", knows_no_terms)],
        "an older coordinator is obeyed",
        often="split",
        seed=14,
    ),
    "attempt not reset": Planted(
        [(Progress, "durable", goes_on_counting)],
        "an attempt that nothing has made needful",
        often="operator_halts",
        seed=0,
    ),
    "a sum counts twice at its owner": Planted(
        [(TreeSum, "put", counts_what_is_covered), (TreeSum, "covers", never_covered)],
        "a microbatch lost or doubled | other averages",
        often="slow_owner+stall",
        way="sharded",
        seed=9,
    ),
    "a committed step is taken before all its averages": Planted(
        [(GradientExchange, "_settle", takes_what_is_there)],
        "a worker is wrong | differs",
        way="sharded",
        seed=8,
    ),
    "what another microbatch has reached is lost": Planted(
        [(reducer, "ADDITIONS", dict.fromkeys(ADDITIONS, reached_by_all_or_none))],
        "other averages",
        often="kill",
        seed=2,
    ),
    "what no microbatch has reached is updated": Planted(
        [(replica, "is_absent", no), (Job, "undisturbed", takes_anew)],
        "that nothing reached has moved",
    ),
    "embeddings of an older step": Planted(
        [(WorkerSession, "_load_rows", keeps_the_rows_of_before)],
        "other averages | another loss | no cause for",
        seed=1,
        embeds=True,
    ),
    "embeddings of a worker that is lost between the phases": Planted(
        [
            (Round, "join_embeddings", knows_nobody_who_delivered),
            (JoinedEmbeddings, "compare", nobody_compares),
        ],
        "other averages | another loss",
        often="flip_and_die+flip",
        seed=31,
        embeds=True,
    ),
    "embeddings of an older attempt": Planted(
        [(Progress, "begin", takes_rows_of_an_older_attempt)],
        "other averages | another loss | no cause for",
        often="flip_and_die+flip",
        seed=28,
        embeds=True,
    ),
    "embeddings in another order": Planted(
        [(JoinedEmbeddings, "of", joins_backward)],
        "other averages | another loss | no cause for",
        seed=2,
        embeds=True,
    ),
    "what was fetched is not compared": Planted(
        [(Part, "finish", keeps_anything)],
        "a worker reads other data",
        files=True,
        seed=2,
    ),
}


def caught_by(error: Exception) -> str:
    """What the check says that an error is of; empty if it is of none."""
    text = str(error) if isinstance(error, AssertionError | SamestepError) else ""
    # Our own assertions count, with what they say, and nothing else that the product trips over.
    return text if "internal error" not in text or "AssertionError('" in text else ""


QUICK = (
    "sums in arrival order", "a commit before sync", "terms are forgotten",
    "a commit from a side cut off", "a lost worker's parts are forgotten",
    "what was fetched is not compared",
)  # fmt: skip
"""What a plain run has."""


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_planted_is_called_like_what_it_replaces(fault):
    """Or the product trips over it, and no check has noticed anything."""
    for owner, name, instead in PLANTED[fault].instead:
        if not callable(instead):
            continue
        places: list[None] = []
        names: dict[str, None] = {}
        for parameter in inspect.signature(getattr(owner, name)).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                names[parameter.name] = None
            else:
                places.append(None)
        inspect.signature(instead).bind(*places, **names)


@pytest.mark.parametrize(
    "fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in PLANTED]
)
def test_a_planted_fault_is_caught(fault, play, monkeypatch, record_property):
    planted = PLANTED[fault]
    for owner, name, instead in planted.instead:
        monkeypatch.setattr(owner, name, instead)
    for seed in (planted.seed, *range(_ENOUGH_SEEDS)):
        try:
            options = {"runs": planted.runs, "files": planted.files, "way": planted.way}
            play(seed, often=planted.often, embeds=planted.embeds, **options)
        except Exception as error:  # noqa: BLE001 -- whether it counts is seen then
            checks = caught_by(error)
            if any(check in checks for check in planted.check.split(" | ")):
                record_property("planted", (fault, seed, checks[:70], planted.seed))
                return
    pytest.fail(f"{fault}: not noticed by its check in {_ENOUGH_SEEDS} seeds")
