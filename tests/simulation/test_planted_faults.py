"""Tests of the simulation itself: each fault that is planted in the product's code is caught by its
check within a thousand seeds."""

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
from coordinator.run.workers.state_agreement import Agreement
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
from worker.peers.gradient_exchange import GradientExchange
from worker.shell.blob_cache import PartialDownload
from worker.shell.engine import Engine

pytestmark = pytest.mark.simulation

_MAX_SEEDS = 1000
_ABSENT = np.uint32(0x80000000)


def adds_duplicates(self, subtree, value):
    """Add a duplicate once more."""
    for pending in self._pending:
        if pending.covers(subtree):
            self._pending[pending] = self._add(self._pending[pending], value)
            return True
    self._pending[subtree] = value
    _merge(self, subtree)
    return True


def keeps_ancestor_and_descendant(self, subtree, value):
    """Add a subtree to the sum although its descendants are already in it."""
    if any(pending.covers(subtree) for pending in self._pending):
        return False
    for pending in [pending for pending in self._pending if subtree.covers(pending)]:
        value = self._add(value, self._pending.pop(pending))
    self._pending[subtree] = value
    _merge(self, subtree)
    return True


def drops_overlapping_subtrees(self, subtree, value):
    """Drop a subtree that overlaps a stored one."""
    if any(pending.lo < subtree.hi and subtree.lo < pending.hi for pending in self._pending):
        return False
    self._pending[subtree] = value
    _merge(self, subtree)
    return True


def sums_in_arrival_order(self, subtree, value):
    """Keep one running sum, in the order of arrival."""
    arrived = self.__dict__.setdefault("arrivals", set())
    if arrived & set(range(subtree.lo, subtree.hi)):
        return False
    arrived |= set(range(subtree.lo, subtree.hi))
    self.running = value if len(arrived) == subtree.leaves else self._add(self.running, value)
    if len(arrived) == self._microbatches:
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


def do_nothing(*_arguments, **_options):
    return []


def always_true(*_arguments, **_options):
    return True


def always_false(*_arguments):
    return False


def compares_no_answers(self, step):
    """Accept answers without comparing them."""
    if step not in self._replica_digests:
        return [], []
    answers = self._answers.pop(step, {})
    if step == self._newest_step:
        self._awaited.difference_update(answers)
    return sorted(answers), []


def any_round(self, message):
    """Accept every message for the current attempt."""
    del message
    return None if self.is_persisting else self.round


def any_share(self, worker, subtree):
    """Accept subtrees from any sender."""
    del subtree
    return self.shares.setdefault(worker, Share())


def commits_without_agreement(self, attempt):
    """Commit without waiting for agreement."""
    if not attempt.is_committed:
        return []
    self._attempt = None
    arrays = [
        attempt.averages.part(chunks.start) if len(chunks) == 1 else attempt.averages.arrays[block]
        for block, chunks in enumerate(map(self._grid.of_block, range(len(self._blocks))))
    ]
    return [AveragesReady(StepId(attempt.id["step"], attempt.id["attempt"]), arrays)]


def assumes_proven(self, worker, *, is_proven):
    """Keep the gradients of a lost worker, whatever its weights were."""
    del is_proven
    self.shares.pop(worker, None)


def keeps_lost_shares(self, worker, *, is_proven):
    """Leave a lost worker's parts assigned to it."""
    del self, worker, is_proven


def reached_by_all_or_none(left, right):
    """Mark a sum absent if one of its two subtrees did not reach the tensor."""
    is_absent = (left.view(np.uint32) == _ABSENT) | (right.view(np.uint32) == _ABSENT)
    add_arrays(left, right)[is_absent] = -0.0
    return left


def recomputes_reference(self, skips, flavor=0):
    """Recompute the undisturbed run with the fault: cached results were computed without it."""
    return self._compute_steps(skips, flavor)


async def commits_before_sync(self, action):
    """Broadcast a commit before syncing it."""
    self._step(CommitDurable(action.record.commit.step))
    await PERSIST(self, action)


def forgets_newest_term(self, message, body):
    """Forget the newest term seen."""
    if isinstance(message, StartRun):
        self._terms.clear()
    return RECEIVE(self, message, body)


def ignores_cancel(self, message, body):
    """Compute and sends canceled subtrees."""
    return [] if isinstance(message, Cancel) else RECEIVE(self, message, body)


def admits_by_step_count(self, member, step, agreement):
    """Admit a worker that has applied as many steps, whatever its state."""
    if member.step == step:
        self._members.activate(member)
        return [Subscribe(member.name, step)]
    return ADMIT(self, member, step, agreement)


def replays_on_any_state(self, member, step, agreement):
    """Replay missed steps on any state."""
    member.state_digest = agreement.digest(member.step) or member.state_digest
    actions = ADMIT(self, member, step, agreement)
    member.is_replaying = False
    return actions


def forgets_refused_writes(self):
    """Forget a checkpoint after its second failure."""
    self._must_retry, self._requested = self._requested is not None, None


async def reads_unsynced_commits(self, step):
    """Read commits from the log's files, synced or not."""
    scan = lambda: log_reader.scan_log(self.directory.log, self._run_id, self._log_start.manifest)  # noqa: E731
    return list((await self._do("log", scan)).index.steps_from(step))


def forgets_older_segments(self):
    """Replace the content of all older segments by a new one."""
    self._redo = ()
    return NEW_SEGMENT(self)


def skips_record_checks(fd, head):
    """Accept a record with any content."""
    raw = os.pread(fd, head.payload_bytes, head.offset + HEAD_BYTES)
    return raw if len(raw) == head.payload_bytes else None


def skips_catch_up(self, session, step):
    """Send a joiner only later broadcasts."""
    del step
    self._subscribed_names.add(session.name)


def loses_every_third_assign(self, action):
    """Lose every third Assign on the way to the worker."""
    if isinstance(action.message, Assign):
        self.assigned = self.__dict__.get("assigned", 0) + 1
        if self.assigned % 3 == 0:
            return
    SEND(self, action)


def removes_pending_subtrees(self):
    """Remove pending subtrees from a worker's list together with arrived ones."""
    surplus = SURPLUS(self)
    for worker in surplus:
        self.shares[worker].outstanding_bits.clear()
    return surplus


def forgets_terms_between_connections(self, terms=None):
    """Forget the newest term between two connections."""
    del terms
    NEW_SESSION(self)


def skips_device_reload(self, action):
    """Let a device of a group continue with its old weights."""
    self._emit(WeightsTaken(action.step, keeps_reading=False))


def reuses_attempt_number(self, *step_and_digest):
    """Give the next step's first attempt the number of this step's last."""
    attempt = self.attempt
    actions = DURABLE(self, *step_and_digest)
    self.attempt = attempt
    return actions


def skips_file_digest(self):
    """Rename a fetched file whatever its content."""
    self._path.replace(self._target)
    self._digests.remember(self._target, self._target.name)
    self.close()
    return True


def keeps_first_embeddings(self, task, step_id):
    """Compute gradients from the embeddings of the first step that arrived."""
    actions = LOAD_ROWS(self, task, step_id)
    if not actions:
        return actions
    self.kept_rows = self.__dict__.get("kept_rows", actions[0].rows)
    return [LoadEmbeddings(step_id, self.kept_rows)]


def skips_embedding_comparison(self, worker, profile, message):
    """Accept any recomputed embeddings."""
    del self, worker, profile, message


def ignores_losses_between_phases(self):
    """Continue after the loss of a worker between the phases."""
    return dataclasses.replace(JOIN(self), delivered=frozenset())


def reuses_rows_of_older_attempts(self):
    """Count embeddings of an abandoned attempt in the next one."""
    previous_round = self.round
    actions = BEGIN(self)
    if (
        previous_round is not None
        and previous_round.embedding_layout
        and previous_round.step_id["step"] == self.step
    ):
        self.round.side_outputs = previous_round.side_outputs
    return actions


def joins_reversed(parts, *origin_and_more):
    """Put the rows of the last microbatch first."""
    return JOIN_PIECES(parts[::-1], *origin_and_more)


PERSIST = Execution._persist
LOAD_ROWS = WorkerSession._load_rows
JOIN = Round.join_embeddings
BEGIN = Progress.begin
JOIN_PIECES = JoinedEmbeddings.join
SEND = Execution._send
SURPLUS = Round.take_surplus
NEW_SESSION = WorkerSession.__init__
DURABLE = Progress.end_step
RECEIVE = WorkerSession.receive
ADMIT = Admission.admit
NEW_SEGMENT = GradientLog._new_segment


@dataclass(frozen=True)
class PlantedFault:
    """A fault, and the check that must catch it.

    Attributes:
        replacements: Replacements in the product: owner, name, function.
        check: Part of the failed check's message, or several parts joined with |. Neither other
            checks nor crashes count.
        often: Names of disturbances that provoke the fault.
        seed: Seed to try first: it provoked the fault when it was written here.
        runs: Number of consecutive runs.
        files: Whether workers fetch a file for each run.
        topology: Topology of the exchange.
        embeds: Whether the loss couples all samples of a step.
    """

    replacements: list[tuple[Any, str, Any]]
    check: str
    often: str = "kill"
    seed: int = 0
    runs: int | None = None
    files: bool = False
    topology: Topology = "star"
    embeds: bool = False


PLANTED = {
    "a duplicate is counted": PlantedFault(
        [(TreeSum, "put", adds_duplicates), (TreeSum, "covers", never_covered)],
        "other averages",
        seed=62,
    ),
    "an ancestor is added to its descendants": PlantedFault(
        [(TreeSum, "put", keeps_ancestor_and_descendant)],
        "a microbatch is missing or counted twice",
        often="stall+slower",
        seed=5,
    ),
    "an ancestor is dropped for its descendants": PlantedFault(
        [(TreeSum, "put", drops_overlapping_subtrees)],
        "an arrived subtree is not counted | nothing can happen",
        often="stall+slower",
        seed=43,
    ),
    "sums in arrival order": PlantedFault(
        [(TreeSum, "put", sums_in_arrival_order)],
        "other averages",
        seed=4,
    ),
    "a lost worker's subtrees are forgotten": PlantedFault(
        [(Progress, "reassign", do_nothing)],
        "nothing can happen",
        seed=0,
    ),
    "a stale attempt is accepted": PlantedFault(
        [(Progress, "round_of", any_round), (Round, "_check_assigned", any_share)],
        "a microbatch is missing or counted twice | other averages | another loss",
        often="flip+slower+stall",
        seed=192,
    ),
    "a device of a group keeps its old weights": PlantedFault(
        [(Engine, "_HANDLERS", {**Engine._HANDLERS, TakeWeights: skips_device_reload})],
        "other averages",
        seed=1,
    ),
    "a lost device of a group is waited for": PlantedFault(
        [(DeviceGroup, "_reassign", do_nothing)],
        "nothing can happen",
        seed=682,
    ),
    "a commit before agreement": PlantedFault(
        [(Agreement, "is_reached", True)],
        "the replica has not agreed",
        seed=1,
    ),
    "a commit before sync": PlantedFault(
        [(Execution, "_persist", commits_before_sync)],
        "before it is durable",
    ),
    "a commit by a disconnected coordinator": PlantedFault(
        [(DirectoryLock, "check", do_nothing)],
        "by a disconnected coordinator",
        often="split",
        seed=3,
    ),
    "a stale term is obeyed": PlantedFault(
        [(WorkerSession, "receive", forgets_newest_term)],
        "an older coordinator is obeyed",
        often="split",
        seed=14,
    ),
    "Cancel is lost": PlantedFault(
        [(Progress, "cancel_surplus", do_nothing)],
        "Cancel is lost",
        often="stall",
        seed=27,
    ),
    "Cancel is not obeyed": PlantedFault(
        [(WorkerSession, "receive", ignores_cancel)],
        "a canceled subtree is sent",
        often="stall",
        seed=133,
    ),
    "a joiner misses earlier broadcasts": PlantedFault(
        [(Subscribers, "subscribe", skips_catch_up)],
        "expected all of its averages first",
        seed=27,
    ),
    "a state is trusted without comparison": PlantedFault(
        [(Admission, "admit", admits_by_step_count)],
        "a worker is wrong | other averages | expected step",
        often="cut",
        seed=25,
    ),
    "steps are replayed to a worker with another state": PlantedFault(
        [(Admission, "admit", replays_on_any_state)],
        "a worker is wrong | other averages | expected step",
        often="cut",
        seed=25,
    ),
    "a torn tail is read as committed": PlantedFault(
        [(log_reader, "read_payload", skips_record_checks)],
        "expected the commit",
        often="power_loss",
        seed=36,
    ),
    "a skipped step is taken after a restart": PlantedFault(
        [(Progress, "was_skipped", False)],
        "skipped once, and once applied",
        often="kill_coordinator+operator_halts+nonfinite",
        seed=94,
    ),
    "a skipped step is forgotten after two restarts": PlantedFault(
        [(GradientLog, "_new_segment", forgets_older_segments)],
        "a broadcast commit is lost",
        often="kill_coordinator",
        seed=10,
    ),
    "the admission record is not written": PlantedFault(
        [(RunDirectory, "write_admission_record", do_nothing)],
        "the admission record is missing",
    ),
    "a commit whose sync failed is replayed": PlantedFault(
        [(RunStorage, "read_logged_steps", reads_unsynced_commits)],
        "ahead of what is durable",
        often="cut_and_refuse",
        seed=22,
    ),
    "writes of a killed coordinator are not synced": PlantedFault(
        [(log_reader, "_sync", do_nothing)],
        "that was not synced",
        often="kill_coordinator+power_loss",
        seed=2,
    ),
    "a checkpoint that failed twice is forgotten": PlantedFault(
        [(CheckpointSchedule, "note_failure", forgets_refused_writes)],
        "nothing can happen",
        often="disk",
        seed=8,
    ),
    "a lost worker's parts are forgotten": PlantedFault(
        [(Evaluation, "lose", keeps_lost_shares)],
        "nothing can happen",
        seed=10,
    ),
    "a draining worker is forgotten": PlantedFault(
        [(Progress, "release", do_nothing)],
        "may not leave",
        often="worker_drains",
        seed=4,
    ),
    "another run's message is accepted": PlantedFault(
        [(run, "is_stale", always_false)],
        "refuses",
        often="join+slower+drain",
        seed=21,
        runs=2,
    ),
    "the last gradients of a worker with a wrong state count": PlantedFault(
        [(Round, "lose", assumes_proven)],
        "other averages",
        often="flip_and_die+slow_disk",
        seed=901,
    ),
    "replicas are not compared": PlantedFault(
        [(Agreement, "judge", compares_no_answers)],
        "other averages",
        often="flip",
        seed=2,
    ),
    "every third Assign is lost": PlantedFault(
        [(Execution, "_send", loses_every_third_assign)],
        "nothing can happen",
        often="kill+stall",
        seed=116,
    ),
    "surplus forgets pending subtrees": PlantedFault(
        [(Round, "take_surplus", removes_pending_subtrees)],
        "a missing subtree is forgotten",
        often="stall",
        seed=33,
    ),
    "an older term is accepted": PlantedFault(
        [(WorkerSession, "__init__", forgets_terms_between_connections)],
        "an older coordinator is obeyed",
        often="split",
        seed=14,
    ),
    "the attempt is not reset": PlantedFault(
        [(Progress, "end_step", reuses_attempt_number)],
        "an attempt number without a cause",
        often="operator_halts",
        seed=0,
    ),
    "a sum counts twice at its owner": PlantedFault(
        [(TreeSum, "put", adds_duplicates), (TreeSum, "covers", never_covered)],
        "a microbatch is missing or counted twice | other averages",
        often="slow_owner+stall",
        topology="sharded",
        seed=9,
    ),
    "a committed step is taken before all its averages": PlantedFault(
        [(GradientExchange, "_settle", commits_without_agreement)],
        "a worker is wrong | differs",
        topology="sharded",
        seed=8,
    ),
    "a gradient that another subtree did not reach is lost": PlantedFault(
        [(reducer, "ADDITIONS", dict.fromkeys(ADDITIONS, reached_by_all_or_none))],
        "other averages",
        often="kill",
        seed=2,
    ),
    "a tensor that no microbatch reached is updated": PlantedFault(
        [(replica, "is_absent", always_false), (Job, "undisturbed", recomputes_reference)],
        "that no microbatch reached has changed",
    ),
    "embeddings of an older step": PlantedFault(
        [(WorkerSession, "_load_rows", keeps_first_embeddings)],
        "other averages | another loss | no cause for",
        seed=1,
        embeds=True,
    ),
    "embeddings of a worker that is lost between the phases": PlantedFault(
        [
            (Round, "join_embeddings", ignores_losses_between_phases),
            (JoinedEmbeddings, "compare", skips_embedding_comparison),
        ],
        "other averages | another loss",
        often="flip_and_die+flip",
        seed=31,
        embeds=True,
    ),
    "embeddings of an older attempt": PlantedFault(
        [(Progress, "begin", reuses_rows_of_older_attempts)],
        "other averages | another loss | no cause for",
        often="flip_and_die+flip",
        seed=28,
        embeds=True,
    ),
    "embeddings in another order": PlantedFault(
        [(JoinedEmbeddings, "join", joins_reversed)],
        "other averages | another loss | no cause for",
        seed=2,
        embeds=True,
    ),
    "a fetched file is not verified": PlantedFault(
        [(PartialDownload, "finish", skips_file_digest)],
        "a worker reads other data",
        files=True,
        seed=2,
    ),
}


def caught_by(error: Exception) -> str:
    """Return the message of the check that raised an error; empty if no check did."""
    text = str(error) if isinstance(error, AssertionError | SamestepError) else ""
    # Only messages of our own assertions count, not internal errors of the product.
    return text if "internal error" not in text or "AssertionError('" in text else ""


def is_outdated(error: Exception) -> bool:
    """Return whether a replacement uses a name that the product no longer has.

    No check could ever notice its fault: the product fails before.
    """
    text = str(error)
    return "NoneType" not in text and any(
        part in text
        for part in (
            "has no attribute",
            "is not defined",
            "unexpected keyword",
            "positional argument",
        )
    )


QUICK = (
    "sums in arrival order", "a commit before sync", "the admission record is not written",
    "a commit by a disconnected coordinator", "a lost worker's parts are forgotten",
    "a fetched file is not verified",
)  # fmt: skip
"""Faults that the default test run plants."""


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_function_has_the_signature_that_it_replaces(fault):
    """With another signature the product would crash before a check could notice the fault."""
    for owner, name, replacement in PLANTED[fault].replacements:
        if not callable(replacement):
            continue
        default_values: list[None] = []
        names: dict[str, None] = {}
        for parameter in inspect.signature(getattr(owner, name)).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY:
                names[parameter.name] = None
            else:
                default_values.append(None)
        inspect.signature(replacement).bind(*default_values, **names)


@pytest.mark.parametrize(
    "fault", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in PLANTED]
)
def test_planted_fault_is_caught(fault, simulate, monkeypatch, record_property):
    fault_plan = PLANTED[fault]
    for owner, name, replacement in fault_plan.replacements:
        monkeypatch.setattr(owner, name, replacement)
    for seed in (fault_plan.seed, *range(_MAX_SEEDS)):
        try:
            options = {
                "runs": fault_plan.runs,
                "files": fault_plan.files,
                "topology": fault_plan.topology,
            }
            simulate(seed, often=fault_plan.often, embeds=fault_plan.embeds, **options)
        except Exception as error:
            if is_outdated(error):
                raise
            message = caught_by(error)
            if any(check in message for check in fault_plan.check.split(" | ")):
                record_property("planted", (fault, seed, message[:70], fault_plan.seed))
                return
    pytest.fail(f"{fault}: its check did not catch it in {_MAX_SEEDS} seeds")
