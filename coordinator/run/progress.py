"""How far a run is: the step in progress, who computes what of it, and its commit.

Pure. Of a run's life it knows only training steps; joining, halting and the end are in `run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from coordinator.run.exchange.double_check import Differing, chosen_double
from coordinator.run.exchange.mesh import Mesh
from coordinator.run.exchange.round import Allocate, NonFinite, Round, new_array
from coordinator.run.outputs.actions import (
    Action,
    ApplyStep,
    Broadcast,
    Persist,
    Report,
    Send,
    SendAverages,
)
from coordinator.run.outputs.facts import (
    Cause,
    LossScaleHalved,
    NodesPlanned,
    NodesReassigned,
    NodesSpeculated,
    RedoneOtherwise,
    SlicesOwned,
    StepCommitted,
    StepRestarted,
    WorkerPutAside,
)
from coordinator.run.outputs.kept import Kept
from coordinator.run.outputs.own_state import own_state_bytes
from coordinator.run.outputs.restart import CommitRecord, Resumption
from coordinator.run.planner import Shares, divide, nodes_for, spread
from coordinator.run.workers.agreement import MOST_STEPS_AHEAD, Agreement
from coordinator.run.workers.leases import OwnerLease, Stragglers
from coordinator.run.workers.membership import COMPUTING, Member, Membership, MemberState
from protocol.base import limits
from protocol.base.errors import OutOfPlace
from protocol.exact.loss_scale import FLOOR, first_scale, scale_after, scales
from protocol.exact.samples import SampleOrder
from protocol.exact.stretches import order_of_steps
from protocol.exact.tree import Node, leaves_of
from protocol.exact.update import step_scalars
from protocol.spec.idle_keys import TASK_SECTIONS
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import (
    Assign,
    Boundary,
    Cancel,
    CapturedRows,
    Commit,
    Credit,
    GradientPayload,
    NodeLoss,
    NonFiniteNode,
    SliceAverage,
    SliceDigests,
    SliceDone,
    SliceSum,
    SlicesWanted,
    StepApplied,
    StepPlan,
    StretchProgress,
    StretchRequest,
    SumNotFinite,
    SumsArrived,
)

_NO_AVERAGES: Final = "0" * 64
_DEMOTED_STEPS: Final = 16
"""For so many steps an owner that was too slow owns nothing."""
SliceMessage = SliceSum | SliceDone | SliceAverage | SumsArrived | SumNotFinite
_MAX_NODES: Final = 64
"""In one message."""


OfRound = (
    GradientPayload | NodeLoss | NonFiniteNode | CapturedRows | StretchProgress | Boundary
    | StretchRequest
)  # fmt: skip
"""What workers send of one attempt at a step."""


class _Committing(NamedTuple):
    """A commit on its way to the disk, and the round that it ends."""

    record: CommitRecord
    round: Round


class Progress:
    """The steps of one run.

    Attributes:
        step: Steps committed, and so the number of the one in progress.
        attempt: Which try at it.
        optimizer_step: Updates committed; skipped steps do not count.
        losses: Mean loss of each step; NaN for a skipped one.
        division: Microbatches by worker in the newest plan.
        round: The attempt in progress; None between the last commit and the next plan.
        loss_scale: What losses of this attempt are multiplied by; 1 unless in float16.
        agreement: Whether all replicas have the same state after the newest commit.
        signatures: Of all workers that have computed.
        mixed: Whether those are several.
        mesh: The members that reach each other, and who of them owns what.

    Args:
        spec: The run's.
        epoch: The coordinator's.
        manifest: What was settled.
        members: Who takes part.
        resumption: Where a restart goes on from; None for a new run.
        mesh: The members that reach each other; None: all send to the coordinator.
        allocate: Makes arrays for averages, of so many elements.
    """

    def __init__(
        self,
        spec: RunSpec,
        epoch: int,
        manifest: Manifest,
        members: Membership,
        resumption: Resumption | None = None,
        *,
        mesh: Mesh | None = None,
        allocate: Allocate = new_array,
    ) -> None:
        self.step = 0
        self.attempt = 0
        self.optimizer_step = 0
        self.losses: list[float] = []
        self.division: Shares | None = None
        self.round: Round | None = None
        self.agreement = Agreement()
        self.mixed = False
        self.signatures: set[str] = set()
        self.loss_scale = self._scale_at_first = first_scale(spec)
        self._stragglers = Stragglers(members)
        self._committing: _Committing | None = None
        self._redone: Mapping[int, str | None] = {}
        self._spec = spec
        self._epoch = epoch
        self._manifest = manifest
        self._members = members
        self._order = order_of_steps(spec, manifest.train_samples, manifest.row_groups)
        self.mesh = mesh or Mesh("", epoch, spec.exchange, manifest.blocks, b"")
        self._allocate = allocate
        self._owner_lease = OwnerLease()
        self._sent_again: dict[str, int] = {}
        if resumption is not None:
            self._resume(resumption)

    def _resume(self, resumption: Resumption) -> None:
        self.step, self.optimizer_step = resumption.step, resumption.optimizer_step
        self.losses = list(resumption.losses)
        if resumption.loss_scale is not None:
            self.loss_scale = self._scale_at_first = resumption.loss_scale
        # Their averages wait in memory for the replica.
        ahead = limits.REPLAY_BYTES // max(self._manifest.elements * 4, 1)
        self.agreement = Agreement(
            self.step, catching_up=True, known=resumption.state_digest,
            ahead=min(ahead, MOST_STEPS_AHEAD),
        )  # fmt: skip
        self._redone = resumption.redone
        if resumption.terms is not None:
            self.signatures = set(resumption.terms.signatures)
            self.mixed = resumption.terms.mixed

    @property
    def all_committed(self) -> bool:
        """Whether no step is left."""
        return self.step == self.steps

    @property
    def steps(self) -> int:
        """How many there are to be: a capture takes each sample once at most."""
        steps = self._spec.steps_with(self._manifest.train_samples)
        if self._manifest.capture is None or not isinstance(self._order, SampleOrder):
            return steps
        return min(steps, self._order.steps_per_epoch)

    def microbatches(self, step: int) -> int:
        """How many microbatches a step has."""
        return self._order.microbatch_count(step)

    @property
    def persisting(self) -> bool:
        """Whether the commit of the step is on its way to the disk."""
        return self._committing is not None

    @property
    def was_skipped(self) -> bool:
        """Whether this step was committed as skipped before a restart took it back."""
        return self._redone.get(self.step, "") is None

    def begin(self) -> list[Action]:
        """Start an attempt: give every active worker its nodes."""
        microbatches = self._order.microbatch_count(self.step)
        speeds = self._members.speeds()
        number = self.mesh.number
        before, table = self.mesh.table, None
        if self._may_be_sliced:
            table = self.mesh.choose(speeds, self.step)
        round_ = Round(
            self._manifest.blocks,
            microbatches,
            self._epoch,
            self.step,
            self.attempt,
            kept=self._keeps(),
            exchange=self._spec.codecs,
            stretches=self._spec.replicas is not None,
            owners=None if table is None else (self.mesh.number, table),
            allocate=self._allocate,
        )
        self.round = round_
        leaving = self.release()
        if not speeds or self.was_skipped:
            return leaving
        if number != self.mesh.number or before != table:
            leaving.append(Report(self._owned()))
        self.division = self._divide(microbatches, speeds)
        given = self._give(round_, nodes_for(self.division), "step")
        return leaving + given + self._give_twice(round_, list(speeds))

    @property
    def _may_be_sliced(self) -> bool:
        """Whether members may average among themselves: not what a capture or replicas send."""
        plain = self._manifest.capture is None and self._spec.replicas is None
        return plain and not self.was_skipped

    def _keeps(self) -> Kept | None:
        if self._spec.replicas is not None:
            own_bytes = own_state_bytes(self._spec, self._manifest)
            return Kept([own_bytes] * self._spec.replicas.count) if own_bytes else None
        layout = self._manifest.capture
        if layout is None or not isinstance(self._order, SampleOrder):
            return None
        return Kept([n * layout.sample_bytes for n in self._order.microbatch_sizes(self.step)])

    def _give_twice(self, round_: Round, active: list[str]) -> list[Action]:
        """Now and then, have a node computed by a second worker, to compare."""
        nodes = {name: share.nodes for name, share in round_.shares.items()}
        signed = {
            member.name: member.signature for member in self._members if member.name in active
        }
        spec = self._spec
        # After one step workers have unlike pasts: a user's task that remembers shows it.
        surely = self.step == 1 and spec.task not in TASK_SECTIONS
        every = spec.double_check_every
        double = chosen_double(spec.seed, self.step, every, nodes, signed, surely=surely)
        if double is None:
            return []
        round_.doubled = double
        _, other, node = double
        return self._give(round_, {other: (node,)}, "speculative")

    def _divide(self, microbatches: int, speeds: dict[str, float | None]) -> Shares:
        """By speed; a worker that has long had nothing gets one microbatch, to be measured."""
        active = [member for member in self._members if member.name in speeds]
        overdue = [member.name for member in active if member.overdue]
        if len(overdue) >= min(len(active), microbatches):
            overdue = []
        rest = {name: ms for name, ms in speeds.items() if name not in overdue}
        division = divide(microbatches - len(overdue), rest, self.division)
        division |= dict.fromkeys(overdue, 1)
        for member in active:
            member.planned(division[member.name])
        return division

    def lose(self, worker: str) -> bool:
        """The worker has left.

        Returns:
            Whether its weights are known to be the run's. One that breaks may well have had
            others, and left before its digest could tell.
        """
        proven = worker not in self.agreement.waiting_for
        self.agreement.lose(worker)
        self._stragglers.lose(worker)
        self._sent_again.pop(worker, None)
        if self.round is not None:
            self.round.lose(worker, proven=proven)
        return proven

    def reassign(self) -> list[Action]:
        """Give unassigned nodes to the active workers, within the step."""
        round_ = self.round
        if round_ is None or self.was_skipped or self.persisting:
            return []
        owned = None if round_.tainted else self._reown(round_)
        if owned is None:  # a sum cannot be taken apart again, or no owner is left
            self.attempt += 1
            return [Report(StepRestarted(**self.place())), *self.begin()]
        speeds = self._members.speeds()
        orphans = round_.unassigned()
        if not speeds or not orphans:
            return owned
        if not round_.begun:  # nobody was there when the step began
            given = self._spread(round_, orphans, speeds, "step")
            return given + self._give_twice(round_, list(speeds))
        told = NodesReassigned(self.step, [str(node) for node in orphans])
        if round_.stretches:  # as large as a whole share: to whoever has none left, if anyone
            idle = {name: ms for name, ms in speeds.items() if not round_.pending(name)}
            speeds = idle or speeds
        return [*owned, *self._spread(round_, orphans, speeds, "reassigned"), Report(told)]

    def _reown(self, round_: Round) -> list[Action] | None:
        """What lost owners had goes to those that are left; None if none is."""
        if round_.sliced is None:
            return []
        computing = self._members.names(*COMPUTING)
        table, known = round_.sliced.table, self.mesh.number
        gone = [name for name in table.members if name not in computing]
        if self.mesh.without(gone) is None:
            return None
        return self._told_owners(round_) if self.mesh.number != known else []

    def _told_owners(self, round_: Round) -> list[Action]:
        """All go on with the newest table."""
        assert self.mesh.table is not None
        round_.reown(self.mesh.number, self.mesh.table)
        workers = [name for name in round_.shares if name in self._members]
        return [*self.mesh.tell(workers), Report(self._owned())]

    def _owned(self) -> SlicesOwned:
        mesh = self.mesh
        return SlicesOwned(self.step, mesh.number, mesh.reason, mesh.owned())

    def _pass_over_owner(self, round_: Round) -> list[Action]:
        """An owner that alone is waited for, and is silent, owns nothing for a while."""
        late = self._owner_lease.late(round_)
        if late is None:
            return []
        self.mesh.demote(late, self.step + _DEMOTED_STEPS)
        self.mesh.reown(late)
        told = self._stragglers.reports_owner(late, self.step)
        return [*told, *self._told_owners(round_)]

    def _spread(
        self,
        round_: Round,
        nodes: tuple[Node, ...],
        speeds: dict[str, float | None],
        cause: Cause,
    ) -> list[Action]:
        return self._give(round_, spread(nodes, round_.microbatches, speeds), cause)

    def _give(
        self, round_: Round, nodes: Mapping[str, tuple[Node, ...]], cause: Cause
    ) -> list[Action]:
        """Give nodes to workers: their plans of this step, or more of it."""
        self._note_signatures()
        if self._spec.replicas is not None:
            # A difference is encoded by itself: sums of two would need another codec.
            nodes = {name: tuple(leaves_of(mine)) for name, mine in nodes.items()}
        actions = self._may_send(round_, round_.plan(sum(map(len, nodes.values()))))
        for name, mine in nodes.items():
            parts = [mine[at : at + _MAX_NODES] for at in range(0, len(mine), _MAX_NODES)]
            for part in parts or [()]:
                actions += self._plan(round_, name, part)
        view, given = self._members.view, {name: mine for name, mine in nodes.items() if mine}
        planned = NodesPlanned(self.step, self.attempt, view, round_.microbatches, cause, given)
        return [*actions, Report(planned)]

    def _plan(self, round_: Round, worker: str, nodes: tuple[Node, ...]) -> list[Action]:
        known = worker in round_.shares
        member = self._members.get(worker)
        round_.assign(worker, nodes, local=member is not None and not member.host)
        if member is not None:
            round_.double_check.given(worker, member.signature, nodes)
        self._stragglers.given(worker)
        place, view = self.place(), self._members.view
        if known:
            return [Send(worker, Assign(**place, view=view, nodes=nodes))]
        sliced = round_.sliced
        plan = StepPlan(
            **place, view=view, nodes=nodes, microbatches=round_.microbatches,
            uploads=round_.uploads(worker), owners=0 if sliced is None else sliced.number,
            loss_scale=self.loss_scale,
        )  # fmt: skip
        told = self.mesh.tell([worker]) if sliced is not None else []
        return [*told, Send(worker, plan)]

    def halve_loss_scale(self, reason: str) -> list[Action]:
        """Gradients overflowed in float16: do the same step again with half the scale.

        Returns:
            Nothing if nothing is scaled, or not any more.
        """
        if not scales(self._spec) or self.loss_scale <= FLOOR:
            return []
        self.loss_scale /= 2.0
        self.attempt += 1
        told = LossScaleHalved(**self.place(), loss_scale=self.loss_scale, reason=reason)
        return [Report(told), *self.begin()]

    def credit(self, round_: Round) -> list[Action]:
        """Let workers send more, once there is room for its sums."""
        return self._may_send(round_, round_.raise_uploads())

    def _may_send(self, round_: Round, workers: list[str]) -> list[Action]:
        for worker in workers:
            self._stragglers.may_send(worker)
        return [
            Send(worker, Credit(**self.place(), uploads=round_.uploads(worker)))
            for worker in workers
        ]

    def _note_signatures(self) -> None:
        """Also of those that have left since: what they computed stays."""
        self.signatures |= self._members.signatures
        self.mixed = self.mixed or len(self.signatures) > 1

    def tick(self, now_ms: float) -> list[Action]:
        """Time goes on: see who is late, and let nobody wait for them."""
        self._stragglers.tick(now_ms)
        if self.persisting:
            return []
        self._owner_lease.tick(now_ms)
        round_ = self.round
        speculated = self._speculate(round_) if round_ is not None else []
        passed = self._pass_over()
        owners = (
            self._pass_over_owner(round_) if round_ is not None and round_ is self.round else []
        )
        return [*passed, *speculated, *owners]

    def _pass_over(self) -> list[Action]:
        """Go on without those that do not answer; they are back when they have."""
        blocked = self.round is not None and self.round.complete
        late = self._stragglers.late_answers(self.agreement, blocked=blocked)
        if not late:
            return []
        actions: list[Action] = list(self._stragglers.reports(late, self.step, "an answer"))
        for member in late:
            if member.state is MemberState.DRAINING:
                actions.append(member.release())
                continue
            self._stragglers.passed_over(member)
            if member.passed_over(self.step):
                aside = WorkerPutAside(member.name, self.step, member.aside_until)
                actions.append(Report(aside))
            self.agreement.lose(member.name)
            self._members.deactivate(member)
            if self.round is not None:
                self.round.disown(member.name, proven=False)
        names = ", ".join(member.name for member in late)
        actions += self._members.view_begins(self.step, "late", reason=f"no answer of {names}")
        return actions + self.reassign()

    def _speculate(self, round_: Round) -> list[Action]:
        """Give what late workers owe to idle ones as well; whichever is there first counts.

        Where all are late, nobody goes on without them: nothing is told.
        """
        late = self._stragglers.late_workers(round_)
        names = [member.name for member in late]
        cancelled = self.cancel_surplus(round_) if round_.forgo_double(names) else []
        others = {name: ms for name, ms in self._members.speeds().items() if name not in names}
        if not late or not others:
            return [*cancelled]
        reports = [*cancelled, *self._stragglers.reports(late, self.step, "gradients")]
        speeds = {name: speed for name, speed in others.items() if not round_.pending(name)}
        nodes = round_.unassigned(ignoring=names) if speeds else ()
        if not nodes:
            return [*reports]
        told = NodesSpeculated(self.step, [str(node) for node in nodes], names)
        given = self._spread(round_, nodes, speeds, "speculative")
        return [*reports, *given, Report(told)]

    def cancel_surplus(self, round_: Round) -> list[Action]:
        """Tell workers what need not be computed any more, since others were first."""
        return [
            Send(name, Cancel(**self.place(), nodes=nodes[at : at + _MAX_NODES]))
            for name, nodes in round_.surplus().items()
            for at in range(0, len(nodes), _MAX_NODES)
        ]

    def present(self, message: OfRound | SliceMessage) -> Round | None:
        """The round that it belongs to, if that is still open.

        Late ones belong to none: of an earlier attempt, or of a step that is skipped already.

        Raises:
            OutOfPlace: It belongs to no attempt that there has been.
        """
        theirs = (message.epoch, message.step, message.attempt)
        ours = (self._epoch, self.step, self.attempt)
        if message.epoch != self._epoch or theirs > ours:
            raise OutOfPlace(
                f"{type(message).__name__}: expected (epoch, step, attempt) {ours}, got {theirs}"
            )
        return self.round if theirs == ours and not self.persisting else None

    def delivered(self, worker: str) -> None:
        """It has sent a part of what it owes."""
        self._stragglers.delivered(worker)

    def node_loss(
        self, round_: Round, member: Member, message: NodeLoss
    ) -> NonFinite | Differing | None:
        """Take a node's loss, and how long the node took."""
        self.delivered(member.name)
        outcome = round_.node_loss(member.name, message)
        member.measured(message.elapsed_ms / message.node.leaves)
        if outcome is True:
            member.microbatches += message.node.leaves
        return None if isinstance(outcome, bool) else outcome

    def slices_wanted(self, worker: str, message: SlicesWanted) -> list[Action]:
        """Owners were to send it what is committed, and are gone: it gets that here."""
        committed = message.epoch == self._epoch and message.step < self.step
        if not committed or self._sent_again.get(worker, -1) >= message.step:
            return []
        self._sent_again[worker] = message.step
        return [SendAverages(worker, message.step)]

    def applied(self, worker: str, message: StepApplied) -> None:
        """Take a worker's answer to a commit.

        Raises:
            OutOfPlace: No such step was committed.
        """
        if message.epoch != self._epoch or message.step > self.step:
            raise OutOfPlace(
                f"StepApplied: expected epoch {self._epoch} and at most {self.step} steps, "
                f"got {message.epoch} and {message.step}"
            )
        if message.step == self.step:
            self._stragglers.answered(worker)
        self.agreement.answer(worker, message.step, message.state_digest, message.differing)

    def persist(self, round_: Round, *, skip: bool) -> list[Action]:
        """The round is complete and everyone agrees on the step before, or it is skipped, and
        nothing is to be applied: make the commit durable before anyone hears of it."""
        scalars, norm, loss, digest = None, None, float("nan"), _NO_AVERAGES
        updates = self.optimizer_step
        if not skip:
            updates += 1
            norm = round_.gradient_norm
            scalars = step_scalars(
                self._spec.update, updates, self.step, self.steps, norm,
                loss_scale=self.loss_scale if scales(self._spec) else 0.0,
            )  # fmt: skip
            loss, digest = round_.loss, round_.averages_digest()
        commit = Commit(**self.place(), scalars=scalars, loss=loss, averages_digest=digest)
        before = self.agreement.digest(self.step)
        counted = None if skip else round_.counted
        record = CommitRecord(
            commit=commit, optimizer_step=updates, state_before=before, norm=norm, counted=counted
        )
        self._committing = _Committing(record, round_)
        kept = () if skip or round_.kept is None else round_.kept.content
        return [*self._compare(digest), Persist(record, kept)]

    def _compare(self, digest: str) -> list[Action]:
        """A step that is done again should have the averages it had."""
        known = self._redone.get(self.step)
        if known is None or known == digest:
            return []
        return [Report(RedoneOtherwise(self.step, known, digest))]

    def leave_out(self) -> None:
        """The run is to end before this step, unless its commit is on its way to the disk."""
        if not self.persisting:
            self.round = None

    def abandon_commit(self) -> None:
        """It did not get to the disk: the step is still in progress."""
        self._committing = None

    def durable(self, step: int, own_digest: str | None = None) -> list[Action]:
        """The commit of this step is on disk: all may hear of it, and the step is over.

        Args:
            step: The step.
            own_digest: What the commit names of the replicas' own states.

        Returns:
            Nothing if no such commit is on its way.
        """
        if self._committing is None or step != self.step:
            return []
        record, round_ = self._committing
        record = record.model_copy(update={"own_digest": own_digest})
        self._committing = self.round = None
        commit = record.commit
        digests = self._slice_digests(round_, commit)
        apply = ApplyStep(self.step, round_.averages, commit.scalars)
        self.optimizer_step = record.optimizer_step
        self.losses.append(commit.loss)
        self.step += 1
        # A skipped step tells no scale: a restart would know only of the one before it.
        scale = self._scale_at_first if commit.scalars is None else self.loss_scale
        self.loss_scale = self._scale_at_first = scale_after(self._spec, scale, self.step)
        self.attempt = 0
        computing = self._members.names(*COMPUTING)
        self.agreement.expect(self.step, computing)
        self._stragglers.committed(round_, computing)
        told: list[Action] = [*digests, Broadcast(commit), apply, Report(StepCommitted(record))]
        return [*told, *self.release()]

    def _slice_digests(self, round_: Round, commit: Commit) -> list[Send]:
        """To all that have averages from others: what those must be."""
        if round_.sliced is None or commit.scalars is None:
            return []
        body = round_.sliced.digests()
        message = SliceDigests(epoch=commit.epoch, step=commit.step, attempt=commit.attempt)
        return [Send(name, message, body) for name in round_.shares if name in self._members]

    def release(self) -> list[Action]:
        """Say goodbye to draining workers that have no unfinished nodes of this attempt."""
        busy = self.round.unfinished if self.round is not None else lambda _: ()
        return [
            member.release()
            for member in self._members
            if member.state is MemberState.DRAINING and not busy(member.name)
        ]

    def next_place(self) -> dict[str, int]:
        """Where the next message belongs: to the next step, if this one is being committed."""
        place = self.place()
        return {**place, "step": self.step + 1, "attempt": 0} if self.persisting else place

    def place(self) -> dict[str, int]:
        """Epoch, step and attempt: where a message belongs."""
        return {"epoch": self._epoch, "step": self.step, "attempt": self.attempt}
