"""The steps of a run, without its life cycle: plans, contributions and commits."""

import math

import numpy as np
import pytest

from coordinator.run.outputs.actions import ApplyStep, Broadcast, Dismiss, Persist, Report, Send
from coordinator.run.outputs.events import StepRestarted
from coordinator.run.outputs.restart import CommitRecord
from coordinator.run.progress import Progress
from coordinator.run.workers.membership import Membership, MemberState
from protocol.base.errors import OutOfOrder
from protocol.spec.manifest import Block, Manifest, TensorSpec
from protocol.spec.run_spec import ScriptedRun
from protocol.spec.sections.optimizer import Sgd
from protocol.spec.sections.tasks import BatchSpec
from protocol.wire.messages import (
    Assign,
    AveragedNonBlockGradient,
    Commit,
    NonBlockGradientPayload,
    StepApplied,
    StepPlan,
    SubtreeLoss,
)

MANIFEST = Manifest(
    blocks=(Block(name="b", kind="non_block", tensors=(TensorSpec(name="w", shape=(2,)),)),),
    train_samples=300,
)


def started_progress(*names, samples=4):
    members = Membership()
    for name in names:
        members.activate(members.add(name))
    spec = ScriptedRun(
        task="scripted", steps=3, batch=BatchSpec(samples=samples, microbatch=1),
        optimizer=Sgd(name="sgd", lr=1.0),
    )  # fmt: skip
    return Progress(spec, 5, MANIFEST, members), members


def payload(lo, hi, **changes):
    step_id = {"term": 5, "step": 0, "attempt": 0, **changes}
    return NonBlockGradientPayload(**step_id, block=0, chunk=0, lo=lo, hi=hi, weight=hi - lo)


def loss(lo, hi, **changes):
    step_id = {"term": 5, "step": 0, "attempt": 0, **changes}
    return SubtreeLoss(
        **step_id, lo=lo, hi=hi, loss_sum=1.0, weight=hi - lo, sums=b"", elapsed_ms=6.0 * (hi - lo)
    )


def deliver_payload(progress, worker, message):
    """Deliver a payload of eights to its round."""
    round_ = progress.round_of(message)
    assert round_ is not None
    return round_.take_payload(worker, message, np.full(2, 8, np.float32))


def skip(progress):
    progress.persist(progress.round, skip=True)
    return visible_actions(progress.end_step(progress.step))


def visible_actions(actions):
    """Drop events that only the journal uses."""
    return [a for a in actions if not (isinstance(a, Report) and not a.event.name)]


def plans(actions):
    return {a.worker: a.message for a in actions if isinstance(a, Send)}


def test_every_active_worker_has_a_plan():
    progress, members = started_progress("ann", "bob")
    members.add("preparing")
    plan_by_worker = plans(progress.begin())
    assert {name: type(message) for name, message in plan_by_worker.items()} == {
        "ann": StepPlan,
        "bob": StepPlan,
    }
    assert progress.division == {"ann": 2, "bob": 2}
    assert {m.view for m in plan_by_worker.values()} == {2}


def test_worker_without_a_share_still_gets_a_plan():
    progress, members = started_progress("ann", "bob")
    ann, bob = members.get("ann"), members.get("bob")
    assert ann is not None
    assert bob is not None
    ann.add_measurement(1.0)
    bob.add_measurement(1000.0)
    assert plans(progress.begin())["bob"].subtrees == ()


def test_without_workers_the_round_waits():
    progress, members = started_progress()
    assert progress.begin() == []
    assert progress.round is not None
    members.activate(members.add("ann"))
    (plan,) = visible_actions(progress.reassign())
    assert plan.message.subtrees == ((0, 4),)
    assert progress.reassign() == []


def test_many_scattered_subtrees_are_sent_in_several_messages():
    """The rest of a lost worker may be many single microbatches; a message holds 64 subtrees."""
    progress, members = started_progress("ann", samples=300)
    progress.begin()
    assert progress.round is not None
    progress.round.shares.clear()
    for leaf in range(0, 300, 2):
        progress.round.assign(
            "gone", (type(progress.round.unassigned_subtrees()[0])(leaf, leaf + 1),)
        )
    actions = progress.reassign()
    kinds = [type(a.message) for a in actions if isinstance(a, Send)]
    assert kinds == [StepPlan, Assign, Assign]
    del members


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, True), ({"attempt": 0, "step": 0}, True)],
)
def test_current_attempt_is_recognized(changes, expected):
    progress, _ = started_progress("ann")
    progress.begin()
    assert (progress.round_of(payload(0, 4, **changes)) is progress.round) is expected


def test_older_attempts_are_late_and_newer_ones_out_of_order():
    progress, _ = started_progress("ann")
    progress.attempt = 1
    progress.begin()
    assert not progress.round_of(payload(0, 4))
    for changes in ({"attempt": 2}, {"step": 1}, {"term": 4, "attempt": 1}, {"term": 6}):
        with pytest.raises(OutOfOrder, match="expected"):
            progress.round_of(payload(0, 4, **changes))
    progress.round = None
    assert not progress.round_of(payload(0, 4, attempt=1))


def test_step_is_planned_averaged_and_committed():
    progress, members = started_progress("ann")
    progress.begin()
    actions = deliver_payload(progress, "ann", payload(0, 4))
    assert isinstance(actions, Broadcast)
    assert isinstance(actions.message, AveragedNonBlockGradient)
    assert actions.body is not None
    assert actions.body.tolist() == [2, 2]
    ann = members.get("ann")
    assert ann is not None
    assert progress.take_loss(progress.round, ann, loss(0, 4)) is None
    assert (ann.microbatches, ann.ms_per_microbatch) == (4, 6.0)
    (persist,) = progress.persist(progress.round, skip=False)
    assert progress.is_persisting
    commit, apply, report = progress.end_step(0)
    contributions = ({"ann": ((0, 4),)},)
    record = CommitRecord(
        commit=commit.message, optimizer_step=1, norm=math.sqrt(8), counted=contributions
    )
    assert persist == Persist(record)
    assert isinstance(commit, Broadcast)
    assert isinstance(commit.message, Commit)
    assert commit.message.loss == 0.25
    assert isinstance(apply, ApplyStep)
    assert apply.scalars == commit.message.scalars is not None
    assert isinstance(report, Report)
    assert (progress.step, progress.optimizer_step, progress.losses) == (1, 1, [0.25])
    assert progress.agreement.awaited_workers == ["ann"]


def test_skipped_step_updates_nothing():
    progress, _ = started_progress("ann")
    progress.begin()
    commit, apply, _ = skip(progress)
    assert commit.message.scalars is None
    assert apply.scalars is None
    assert (progress.step, progress.optimizer_step) == (1, 0)
    assert math.isnan(progress.losses[0])


def test_answer_to_an_uncommitted_step_is_out_of_order():
    progress, _ = started_progress("ann")
    for term, step in ((5, 1), (4, 0)):
        with pytest.raises(OutOfOrder, match="expected term 5 and at most 0 steps"):
            progress.take_answer("ann", StepApplied(term=term, step=step, state_digest="0" * 64))


def test_draining_worker_leaves_after_delivering_its_subtrees():
    progress, members = started_progress("ann", "bob")
    progress.begin()
    ann = members.get("ann")
    assert ann is not None
    ann.state = MemberState.DRAINING
    assert progress.release() == []
    deliver_payload(progress, "ann", payload(0, 2))
    progress.take_loss(progress.round, ann, loss(0, 2))
    (leaving_worker,) = progress.release()
    assert isinstance(leaving_worker, Dismiss)
    assert leaving_worker.worker == "ann"


def test_lost_unproven_worker_restarts_the_step():
    progress, members = started_progress("ann", "bob")
    progress.begin()
    skip(progress)
    progress.begin()
    deliver_payload(progress, "bob", payload(2, 4, step=1))
    members.remove("bob")
    assert not progress.lose("bob")
    report, plan = visible_actions(progress.reassign())
    assert report == Report(StepRestarted(5, 1, 1))
    assert plan.message.subtrees == ((0, 4),)
    members.remove("ann")
    assert not progress.lose("ann")
    assert progress.reassign() == []


def test_unlike_numerics_profiles_make_the_run_mixed():
    progress, members = started_progress("ann", "bob")
    progress.begin()
    assert not progress.is_mixed
    bob = members.get("bob")
    assert bob is not None
    bob.numerics_profile = "another"
    progress.begin()
    assert progress.is_mixed
