"""The progress of a run: the step in progress, the assignment of its work, and its commit.

Pure. It handles only training steps; joining, halting and the end are in `run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.run.exchange.double_check import ResultMismatch, choose_double_check
from coordinator.run.exchange.embeddings import JoinedEmbeddings
from coordinator.run.exchange.mesh import Mesh
from coordinator.run.exchange.peer_sums import WrongAverage
from coordinator.run.exchange.round import Allocate, Round, new_array
from coordinator.run.outputs.actions import (
    Action,
    AnswerInnerStateRequest,
    ApplyStep,
    Broadcast,
    Persist,
    Report,
    Send,
    SendAverages,
    WriteInnerCheckpoint,
)
from coordinator.run.outputs.events import (
    Cause,
    Committed,
    LossScaleHalved,
    OwnersChanged,
    Planned,
    StepRedoneDifferently,
    StepRestarted,
    SubtreesReassigned,
    SubtreesSpeculated,
    WorkerSetAside,
)
from coordinator.run.outputs.restart import CommitRecord, EmbeddingsRecord, Resumption
from coordinator.run.outputs.side_outputs import SideOutputs, replica_state_bytes
from coordinator.run.planner import Shares, divide, spread_subtrees, subtrees_for
from coordinator.run.workers.membership import COMPUTING, Member, Membership, MemberState
from coordinator.run.workers.state_agreement import MOST_STEPS_AHEAD, Agreement
from coordinator.run.workers.stragglers import OwnerLease, Stragglers
from protocol.base import limits
from protocol.base.errors import OutOfOrder
from protocol.exact.inner_phases import order_of_steps
from protocol.exact.parameter_groups import ClippedGroups
from protocol.exact.plateau import Plateau
from protocol.exact.reduction.reducer import NonFinite, parse_origin
from protocol.exact.reduction.tree import Subtree, leaves_of
from protocol.exact.samples import SampleOrder
from protocol.exact.schedule import MIN_LOSS_SCALE, initial_loss_scale, next_loss_scale, scales_loss
from protocol.exact.update import step_scalars
from protocol.spec.manifest import Block, Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import (
    Assign,
    AveragedGradient,
    AverageDigests,
    AveragesRequest,
    Cancel,
    CapturedRows,
    ChunkReduced,
    Commit,
    Credit,
    GradientPayload,
    InnerCheckpointChunk,
    InnerPhaseProgress,
    InnerStateRequest,
    Linked,
    LinkTraffic,
    Message,
    NonFiniteSum,
    PeerPort,
    StepApplied,
    StepPlan,
    SubtreeLoss,
    SumsArrived,
)
from protocol.wire.peers import Traffic, parse

_NO_AVERAGES: Final = "0" * 64
"""The digest of averages in the commit of a skipped step."""
_DEMOTED_STEPS: Final = 16
"""Number of steps for which an owner that was too slow owns no chunks."""
PeerMessage = AveragedGradient | ChunkReduced | SumsArrived
"""Messages that members send about the chunks that workers average."""
_MAX_SUBTREES: Final = 64
"""Most subtrees in one message."""


RoundMessage = (
    GradientPayload | SubtreeLoss | NonFiniteSum | CapturedRows
    | InnerPhaseProgress | InnerCheckpointChunk | InnerStateRequest
)  # fmt: skip
"""Messages that workers send within one attempt at a step."""


class _PendingCommit(NamedTuple):
    """A commit that is being written, and the round that it ends."""

    record: CommitRecord
    round: Round


M = TypeVar("M", bound=Message)
M_co = TypeVar("M_co", bound=Message, covariant=True)
Fault = NonFinite | ResultMismatch | WrongAverage
"""Why a step cannot be committed."""


@dataclass(frozen=True, slots=True)
class FromMember(Generic[M_co]):
    """A message of a member of the run, with its body."""

    member: Member
    message: M_co
    body: NDArray[Any] | bytes | None

    @property
    def values(self) -> NDArray[Any]:
        """The body of a message that carries an array: the connection rejects any other."""
        assert isinstance(self.body, np.ndarray)
        return self.body

    @property
    def document(self) -> bytes:
        """The body of a message that carries a document."""
        assert isinstance(self.body, bytes)
        return self.body


@dataclass(frozen=True, slots=True)
class MessageEffect:
    """The effect of a message that belongs to the step.

    Attributes:
        actions: Actions to execute first.
        fault: The fault that then halts the run, if any.
        may_complete: Whether the step may be complete now.
    """

    actions: Sequence[Action] = ()
    fault: Fault | None = None
    may_complete: bool = True


_NO_PROGRESS: Final = MessageEffect(may_complete=False)


class Progress:
    """The steps of one run.

    Attributes:
        term: Term of the coordinator.
        step: Number of committed steps, and so the number of the step in progress.
        attempt: Number of the attempt at the step; where the loss couples all samples, a try takes
            two attempts, for embeddings and for gradients.
        optimizer_step: Number of committed updates; skipped steps do not count.
        losses: Mean loss of each step; NaN for a skipped step.
        division: Microbatches by worker in the newest plan.
        round: The attempt in progress; None between the last commit and the next plan.
        loss_scale: Factor of the losses of this attempt; 1 unless in float16.
        agreement: Whether all replicas have the same state after the newest commit.
        numerics_profiles: Profiles of all workers that have computed.
        is_mixed: Whether the workers had different profiles or initial states.
        mesh: The members that reach each other, and which chunks each of them owns.
        plateau: The factor by which evaluations have lowered the learning rate.

    Args:
        spec: The run spec.
        term: Term of the coordinator.
        manifest: The run's manifest.
        members: The members of the run.
        resumption: The point from which a restart continues; None for a new run.
        mesh: The members that reach each other; None: all send to the coordinator.
        allocate: Returns a flat float32 array for averages, with the given number of elements.
    """

    def __init__(
        self,
        spec: RunSpec,
        term: int,
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
        self.is_mixed = False
        self.numerics_profiles: set[str] = set()
        self.loss_scale = self._initial_scale = initial_loss_scale(spec)
        self._stragglers = Stragglers(members)
        self._pending_commit: _PendingCommit | None = None
        self._redone_digests: Mapping[int, str | None] = {}
        self._spec = spec
        self.term = term
        self._manifest = manifest
        self._members = members
        self._order = order_of_steps(
            spec, manifest.train_samples, manifest.row_groups, manifest.sampling
        )
        self.mesh = mesh or Mesh("", term, spec.exchange, manifest.blocks, b"")
        self._allocate = allocate
        self.plateau = Plateau(
            spec.step_optimizer, {} if resumption is None else resumption.metrics
        )
        self._clipped = ClippedGroups(spec.step_optimizer)
        self._owner_lease = OwnerLease()
        self._resent_steps: dict[str, int] = {}
        self._now_ms = self._began_ms = 0.0
        if resumption is not None:
            self._resume(resumption)

    def _resume(self, resumption: Resumption) -> None:
        self.step, self.optimizer_step = resumption.step, resumption.optimizer_step
        self.losses = list(resumption.losses)
        if resumption.loss_scale is not None:
            self.loss_scale = self._initial_scale = resumption.loss_scale
        # The averages of steps ahead of the replica wait in memory.
        steps_ahead = limits.REPLAY_BYTES // max(self._manifest.elements * 4, 1)
        self.agreement = Agreement(
            self.step, catching_up=True, known_digest=resumption.state_digest,
            most_steps_ahead=min(steps_ahead, MOST_STEPS_AHEAD),
        )  # fmt: skip
        self._redone_digests = resumption.redone
        if resumption.admission is not None:
            self.numerics_profiles = set(resumption.admission.signatures)
            self.is_mixed = resumption.admission.mixed

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self._manifest.blocks

    @property
    def has_replicas(self) -> bool:
        """Whether the run has logical replicas, which exchange differences after inner phases."""
        return self._spec.replicas is not None

    @property
    def _attempts_per_try(self) -> int:
        return 1 if self._manifest.embeddings is None else 2

    @property
    def all_committed(self) -> bool:
        """Whether no step is left."""
        return self.step == self.steps

    @property
    def steps(self) -> int:
        """The number of steps of the run; a capture takes each sample at most once."""
        steps = self._spec.steps_with(self._manifest.epoch_samples)
        if self._manifest.capture is None or not isinstance(self._order, SampleOrder):
            return steps
        return min(steps, self._order.steps_per_epoch)

    def microbatches(self, step: int) -> int:
        """Return the number of microbatches of a step."""
        return self._order.microbatch_count(step)

    @property
    def is_persisting(self) -> bool:
        """Whether the commit of the step is being written."""
        return self._pending_commit is not None

    @property
    def was_skipped(self) -> bool:
        """Whether this step was committed as skipped before a restart rolled it back."""
        return self._redone_digests.get(self.step, "") is None

    def begin(self) -> list[Action]:
        """Start a try at the step: assign subtrees to every active worker."""
        layout = self._manifest.embeddings
        if layout is None:
            return self._begin_gradients(None)
        # No chunks of gradients, so no owners: embeddings always go to the coordinator.
        assert isinstance(self._order, SampleOrder), "a task with replicas has no such loss"
        sizes = self._order.microbatch_sizes(self.step)
        side_outputs = SideOutputs([samples * layout.sample_bytes for samples in sizes])
        self.round = Round(
            (),
            len(sizes),
            self.term,
            self.step,
            self.attempt,
            side_outputs=side_outputs,
            embedding_layout=layout,
        )
        return self._begin_round(self.round, [], "embeddings")

    def continue_with_gradients(self, round_: Round) -> list[Action]:
        """Begin the attempt that computes gradients, now that all embeddings have arrived."""
        embeddings = round_.join_embeddings()
        self.attempt += 1
        return self._begin_gradients(embeddings)

    def _begin_gradients(self, embeddings: JoinedEmbeddings | None) -> list[Action]:
        self._began_ms = self._now_ms
        number = self.mesh.number
        earlier_table, table = self.mesh.table, self.mesh.star
        if self._may_be_sharded:
            table = self.mesh.choose_table(self._members.speeds(), self.step)
        self.round = Round(
            self._manifest.blocks,
            self._order.microbatch_count(self.step),
            self.term,
            self.step,
            self.attempt,
            side_outputs=self._new_side_outputs(),
            exchange=self._spec.codecs,
            has_inner_phases=self._spec.replicas is not None,
            embeddings=embeddings,
            numbered_table=(self.mesh.number if table.has_peers else 0, table),
            allocate=self._allocate,
            clipped=self._clipped,
        )
        has_changed = number != self.mesh.number or earlier_table != table
        owner_reports = [Report(self._ownership_report())] if has_changed else []
        return self._begin_round(self.round, owner_reports, "step")

    def _begin_round(
        self, round_: Round, owner_reports: list[Report], cause: Cause
    ) -> list[Action]:
        speeds = self._members.speeds()
        dismissals = self.release()
        if not speeds or self.was_skipped:
            return dismissals
        self.division = self._divide(round_.microbatches, speeds)
        actions = self._assign(round_, subtrees_for(self.division), cause)
        return [*dismissals, *owner_reports, *actions, *self._assign_double(round_, list(speeds))]

    @property
    def _may_be_sharded(self) -> bool:
        """Whether members may average among themselves: not in a capture or with replicas."""
        is_plain = self._manifest.capture is None and self._spec.replicas is None
        return is_plain and not self.was_skipped

    def _new_side_outputs(self) -> SideOutputs | None:
        if self._spec.replicas is not None:
            own_bytes = replica_state_bytes(self._spec, self._manifest)
            return SideOutputs([own_bytes] * self._spec.replicas.count) if own_bytes else None
        layout = self._manifest.capture
        if layout is None or not isinstance(self._order, SampleOrder):
            return None
        sizes = self._order.microbatch_sizes(self.step)
        return SideOutputs([samples * layout.sample_bytes for samples in sizes])

    def _assign_double(self, round_: Round, active: list[str]) -> list[Action]:
        """Occasionally assign a subtree to a second worker as well, to compare the results."""
        subtrees = {name: share.subtrees for name, share in round_.shares.items()}
        profiles = {
            member.name: member.numerics_profile
            for member in self._members
            if member.name in active
        }
        spec = self._spec
        # After one step workers have different histories: a user's task that keeps state between
        # calls then gives different gradients.
        always = self.step == 1 and spec.is_user_task
        every = spec.double_check_every
        double = choose_double_check(spec.seed, self.step, every, subtrees, profiles, always=always)
        if double is None:
            return []
        round_.double_assignment = double
        _, other, subtree = double
        return self._assign(round_, {other: (subtree,)}, "speculative")

    def _divide(self, microbatches: int, speeds: dict[str, float | None]) -> Shares:
        """Divide by speed; a worker that was idle for long gets one microbatch, to measure its
        speed."""
        active = [member for member in self._members if member.name in speeds]
        overdue = [member.name for member in active if member.is_overdue]
        if len(overdue) >= min(len(active), microbatches):
            overdue = []
        measured_speeds = {name: ms for name, ms in speeds.items() if name not in overdue}
        division = divide(microbatches - len(overdue), measured_speeds, self.division)
        division |= dict.fromkeys(overdue, 1)
        for member in active:
            member.note_share(division[member.name])
        return division

    def lose(self, worker: str) -> bool:
        """Remove a worker that has left.

        Returns:
            Whether the worker's weights are known to be the run's. A faulty worker may have had
            other weights, and left before its digest showed the difference.
        """
        is_proven = worker not in self.agreement.awaited_workers
        self.agreement.lose(worker)
        self._stragglers.lose(worker)
        self._resent_steps.pop(worker, None)
        if self.round is not None:
            self.round.lose(worker, is_proven=is_proven)
        return is_proven

    def reassign(self) -> list[Action]:
        """Assign unassigned subtrees to the active workers, within the step."""
        round_ = self.round
        if round_ is None or self.was_skipped or self.is_persisting:
            return []
        if round_.is_tainted:  # a term that was added to a sum cannot be subtracted again
            self.attempt += 1
            return [Report(StepRestarted(**self.step_id())), *self.begin()]
        owner_actions = self._reassign_chunks(round_)
        speeds = self._members.speeds()
        orphans = round_.unassigned_subtrees()
        if not speeds or not orphans:
            return owner_actions
        if not round_.has_begun:  # no worker was active when the step began
            cause: Cause = "embeddings" if round_.embedding_layout else "step"
            actions = self._spread(round_, orphans, speeds, cause)
            return actions + self._assign_double(round_, list(speeds))
        event = SubtreesReassigned(self.step, [str(subtree) for subtree in orphans])
        if round_.has_inner_phases:  # an inner phase is a whole share: assign it to an idle worker
            idle_speeds = {name: ms for name, ms in speeds.items() if not round_.pending(name)}
            speeds = idle_speeds or speeds
        return [*owner_actions, *self._spread(round_, orphans, speeds, "reassigned"), Report(event)]

    def _reassign_chunks(self, round_: Round) -> list[Action]:
        """Give the chunks of lost owners to the remaining ones, or to the coordinator."""
        table, number = round_.peers.table, self.mesh.number
        if not table.has_peers:
            return []
        computing = self._members.names(*COMPUTING)
        self.mesh.reassign_lost([name for name in table.members if name not in computing])
        return self._send_owners(round_) if self.mesh.number != number else []

    def _send_owners(self, round_: Round) -> list[Action]:
        """Send the newest table of owners to all workers."""
        round_.switch_table(self.mesh.number, self.mesh.table)
        workers = [name for name in round_.shares if name in self._members]
        return [
            *self.mesh.send_table(workers),
            *self.grant_credit(round_),
            Report(self._ownership_report()),
        ]

    def _ownership_report(self) -> OwnersChanged:
        mesh = self.mesh
        return OwnersChanged(
            term=self.term, step=self.step, number=mesh.number, reason=mesh.reason,
            owners=mesh.owned_shares(),
        )  # fmt: skip

    def _demote_late_owner(self, round_: Round) -> list[Action]:
        """Take all chunks from an owner for a while, if the step waits only for it and it is
        silent."""
        late_owner = self._owner_lease.find_late_owner(round_)
        if late_owner is None:
            return []
        self.mesh.demote(late_owner, self.step + _DEMOTED_STEPS)
        self.mesh.reassign_owner(late_owner)
        actions = self._stragglers.report_late_owner(late_owner, self.step)
        return [*actions, *self._send_owners(round_)]

    def _spread(
        self,
        round_: Round,
        subtrees: tuple[Subtree, ...],
        speeds: dict[str, float | None],
        cause: Cause,
    ) -> list[Action]:
        return self._assign(round_, spread_subtrees(subtrees, round_.microbatches, speeds), cause)

    def _assign(
        self, round_: Round, subtrees: Mapping[str, tuple[Subtree, ...]], cause: Cause
    ) -> list[Action]:
        """Send subtrees to workers: in their first plan of this attempt, or in addition to it."""
        self._note_numerics_profiles()
        if self._spec.replicas is not None:
            # Each replica's difference is encoded separately; a sum of two would need another
            # codec.
            subtrees = {
                name: tuple(leaves_of(worker_subtrees))
                for name, worker_subtrees in subtrees.items()
            }
        actions = self._send_credit(
            round_, round_.expect_subtrees(sum(map(len, subtrees.values())))
        )
        for name, worker_subtrees in subtrees.items():
            parts = [
                worker_subtrees[at : at + _MAX_SUBTREES]
                for at in range(0, len(worker_subtrees), _MAX_SUBTREES)
            ]
            for part in parts or [()]:
                actions += self._plan(round_, name, part)
        view, shares = (
            self._members.view,
            {
                name: worker_subtrees
                for name, worker_subtrees in subtrees.items()
                if worker_subtrees
            },
        )
        event = Planned(
            **self.step_id(), view=view, microbatches=round_.microbatches, nodes=shares, cause=cause
        )
        return [*actions, Report(event)]

    def _plan(self, round_: Round, worker: str, subtrees: tuple[Subtree, ...]) -> list[Action]:
        is_member = worker in round_.shares
        member = self._members.get(worker)
        round_.assign(worker, subtrees, is_local=member is not None and not member.host)
        if member is not None:
            round_.double_check.assign(worker, member.numerics_profile, subtrees)
        self._stragglers.note_assignment(worker)
        step_id, view = self.step_id(), self._members.view
        if is_member:
            return [Send(worker, Assign(**step_id, view=view, subtrees=subtrees))]
        number = round_.peers.table_number
        plan = StepPlan(
            **step_id, view=view, subtrees=subtrees, microbatches=round_.microbatches,
            uploads=round_.uploads(worker), owners=number, loss_scale=self.loss_scale,
            phase="embeddings" if round_.embedding_layout else "gradients",
        )  # fmt: skip
        actions = self.mesh.send_table([worker]) if number else []
        messages = () if round_.embeddings is None else round_.embeddings.messages(step_id)
        rows = [Send(worker, message, body) for message, body in messages]
        return [*actions, *rows, Send(worker, plan)]

    def halve_loss_scale(self, reason: str) -> list[Action]:
        """Restart the step with half the loss scale, after gradients overflowed in float16.

        Returns:
            No actions if losses are not scaled, or the scale is already at its minimum.
        """
        if not scales_loss(self._spec) or self.loss_scale <= MIN_LOSS_SCALE:
            return []
        self.loss_scale /= 2.0
        self.attempt += 1
        event = LossScaleHalved(**self.step_id(), loss_scale=self.loss_scale, reason=reason)
        return [Report(event), *self.begin()]

    def grant_credit(self, round_: Round) -> list[Action]:
        """Let workers send more chunks if there is memory for the sums."""
        return self._send_credit(round_, round_.raise_uploads())

    def _send_credit(self, round_: Round, workers: list[str]) -> list[Action]:
        for worker in workers:
            self._stragglers.note_credit(worker)
        return [
            Send(worker, Credit(**self.step_id(), uploads=round_.uploads(worker)))
            for worker in workers
        ]

    def _note_numerics_profiles(self) -> None:
        """Note the profiles of all workers; the sums of workers that leave stay."""
        self.numerics_profiles |= self._members.numerics_profiles
        self.is_mixed = self.is_mixed or len(self.numerics_profiles) > 1

    def tick(self, now_ms: float) -> list[Action]:
        """Advance the time; stop waiting for workers that are late."""
        self._now_ms = now_ms
        self._stragglers.tick(now_ms)
        if self.is_persisting:
            return []
        self._owner_lease.tick(now_ms)
        round_ = self.round
        speculative_actions = [] if round_ is None else self._speculate(round_)
        late_actions = self._pass_over_late_workers()
        owner_actions = (
            self._demote_late_owner(round_) if round_ is not None and round_ is self.round else []
        )
        return [*late_actions, *speculative_actions, *owner_actions]

    def _pass_over_late_workers(self) -> list[Action]:
        """Continue without workers that do not answer; they take part again once they answer."""
        blocked = self.round is not None and self.round.is_complete
        late_members = self._stragglers.find_late_answers(self.agreement, blocked=blocked)
        if not late_members:
            return []
        actions: list[Action] = list(
            self._stragglers.report_late_workers(late_members, self.step, "an answer")
        )
        for member in late_members:
            if member.state is MemberState.DRAINING:
                actions.append(member.release())
                continue
            self._stragglers.stop_waiting_for(member)
            if member.note_passed_over(self.step):
                aside = WorkerSetAside(member.name, self.step, member.aside_until)
                actions.append(Report(aside))
            self.agreement.lose(member.name)
            self._members.deactivate(member)
            if self.round is not None:
                self.round.disown(member.name, is_proven=False)
        names = ", ".join(member.name for member in late_members)
        actions += self._members.report_view_change(
            self.step, "late", reason=f"no answer of {names}"
        )
        return actions + self.reassign()

    def _speculate(self, round_: Round) -> list[Action]:
        """Assign the subtrees of late workers to idle ones as well; the first result counts.

        If all workers are late, nobody can continue without them, so nothing is reported.
        """
        late_members = self._stragglers.find_late_workers(round_)
        names = [member.name for member in late_members]
        cancellations = self.cancel_surplus(round_) if round_.forgo_double(names) else []
        others = {name: ms for name, ms in self._members.speeds().items() if name not in names}
        if not late_members or not others:
            return [*cancellations]
        reports = [
            *cancellations,
            *self._stragglers.report_late_workers(late_members, self.step, "gradients"),
        ]
        speeds = {name: speed for name, speed in others.items() if not round_.pending(name)}
        subtrees = round_.unassigned_subtrees(ignoring=names) if speeds else ()
        if not subtrees:
            return [*reports]
        event = SubtreesSpeculated(self.step, [str(subtree) for subtree in subtrees], names)
        actions = self._spread(round_, subtrees, speeds, "speculative")
        return [*reports, *actions, Report(event)]

    def cancel_surplus(self, round_: Round) -> list[Action]:
        """Cancel subtrees that other workers have finished first."""
        return [
            Send(name, Cancel(**self.step_id(), subtrees=subtrees[at : at + _MAX_SUBTREES]))
            for name, subtrees in round_.take_surplus().items()
            for at in range(0, len(subtrees), _MAX_SUBTREES)
        ]

    def round_of(self, message: RoundMessage | PeerMessage) -> Round | None:
        """Return the round that a message belongs to; None if the message is late.

        A message is late if it belongs to an earlier attempt, to a step that was skipped, or to a
        step whose commit is being made durable.

        Raises:
            OutOfOrder: The message belongs to an attempt that has not begun.
        """
        message_id = (message.term, message.step, message.attempt)
        own_id = (self.term, self.step, self.attempt)
        if message.term != self.term or message_id > own_id:
            raise OutOfOrder(
                f"{type(message).__name__}: expected (term, step, attempt) {own_id}, got "
                f"{message_id}"
            )
        return self.round if message_id == own_id and not self.is_persisting else None

    def note_delivery(self, worker: str) -> None:
        """Note that a worker has sent a part of its results."""
        self._stragglers.note_delivery(worker)

    def take_loss(
        self, round_: Round, member: Member, message: SubtreeLoss
    ) -> NonFinite | ResultMismatch | None:
        """Take a subtree's loss, and the time that the subtree took."""
        outcome = round_.take_loss(member.name, message)
        if round_.embedding_layout is None:  # embeddings alone take less than a microbatch
            member.add_measurement(message.elapsed_ms / message.subtree.leaves)
        if outcome is True and round_.embedding_layout is None:
            member.microbatches += message.subtree.leaves
        return None if isinstance(outcome, bool) else outcome

    def answer_averages_request(self, worker: str, message: AveragesRequest) -> list[Action]:
        """Send a worker committed averages that it did not receive from lost owners."""
        is_committed = message.term == self.term and message.step < self.step
        if not is_committed or self._resent_steps.get(worker, -1) >= message.step:
            return []
        self._resent_steps[worker] = message.step
        return [SendAverages(worker, message.step)]

    def take_answer(self, worker: str, message: StepApplied) -> None:
        """Take a worker's answer to a commit.

        Raises:
            OutOfOrder: No such step was committed.
        """
        if message.term != self.term or message.step > self.step:
            raise OutOfOrder(
                f"StepApplied: expected term {self.term} and at most {self.step} steps, "
                f"got {message.term} and {message.step}"
            )
        if message.step == self.step:
            self._stragglers.note_answer(worker)
        self.agreement.take_answer(worker, message.step, message.state_digest)

    def persist(self, round_: Round, *, skip: bool) -> list[Action]:
        """Make the commit record, and return the action that writes it before any worker receives
        the commit.

        The round must be complete, and all replicas agree on the previous step; with `skip`,
        nothing is applied.
        """
        scalars, norm, loss, digest = None, None, float("nan"), _NO_AVERAGES
        updates = self.optimizer_step
        if not skip:
            updates += 1
            norms = round_.gradient_norms
            norm = norms.whole
            scalars = step_scalars(
                self._spec.step_optimizer, updates, self.step, self.steps, norms,
                loss_scale=self.loss_scale if scales_loss(self._spec) else 0.0,
                rate_factor=self.plateau.factor_at(self.step),
            )  # fmt: skip
            loss, digest = round_.loss, round_.averages_digest()
        commit = Commit(**self.step_id(), scalars=scalars, loss=loss, averages_digest=digest)
        digest_before = self.agreement.digest(self.step)
        combinations = None if skip else round_.counted
        rows = None if skip else round_.embeddings
        embedded = None if rows is None else EmbeddingsRecord.from_origin(rows.digest, rows.origin)
        record = CommitRecord(
            commit=commit, optimizer_step=updates, state_before=digest_before, norm=norm,
            counted=combinations, embedded=embedded,
        )  # fmt: skip
        self._pending_commit = _PendingCommit(record, round_)
        side_outputs = () if skip or round_.side_outputs is None else round_.side_outputs.content
        return [*self._report_changed_averages(digest), Persist(record, side_outputs)]

    def _report_changed_averages(self, digest: str) -> list[Action]:
        """Report a redone step whose averages differ from those before the restart."""
        earlier_digest = self._redone_digests.get(self.step)
        if earlier_digest is None or earlier_digest == digest:
            return []
        return [Report(StepRedoneDifferently(self.step, earlier_digest, digest))]

    def drop_step(self) -> None:
        """Drop the step in progress because the run ends, unless its commit is being written."""
        if not self.is_persisting:
            self.round = None

    def abandon_commit(self) -> None:
        """Note that the commit was not written: the step is still in progress."""
        self._pending_commit = None

    def end_step(self, step: int, own_digest: str | None = None) -> list[Action]:
        """Broadcast the commit of this step, which is now on disk, and end the step.

        Args:
            step: The step.
            own_digest: Digest of the per-replica state, as in the commit.

        Returns:
            No actions if no such commit was being written.
        """
        if self._pending_commit is None or step != self.step:
            return []
        record, round_ = self._pending_commit
        record = record.model_copy(update={"own_digest": own_digest})
        self._pending_commit = self.round = None
        commit = record.commit
        digests = self._send_average_digests(round_, commit)
        if commit.scalars is not None and self.attempt < self._attempts_per_try:
            is_sharded = round_.peers.table_number > 0
            self.mesh.note_duration(self._now_ms - self._began_ms, sharded=is_sharded)
        apply = ApplyStep(self.step, round_.averages, commit.scalars)
        self.optimizer_step = record.optimizer_step
        self.losses.append(commit.loss)
        self.step += 1
        # A skipped step records no scale: a restart would know only that of the previous step.
        scale = self._initial_scale if commit.scalars is None else self.loss_scale
        self.loss_scale = self._initial_scale = next_loss_scale(self._spec, scale, self.step)
        self.attempt = 0
        computing = self._members.names(*COMPUTING)
        self.agreement.expect_answers(self.step, computing)
        self._stragglers.end_step(round_, computing)
        actions: list[Action] = [*digests, Broadcast(commit), apply, Report(Committed.of(record))]
        return [*actions, *self.release()]

    def _send_average_digests(self, round_: Round, commit: Commit) -> list[Send]:
        """Send the digests of all averages to workers that receive averages from other workers."""
        if not round_.peers.table_number or commit.scalars is None:
            return []
        body = round_.peers.digests()
        message = AverageDigests(term=commit.term, step=commit.step, attempt=commit.attempt)
        return [Send(name, message, body) for name in round_.shares if name in self._members]

    def release(self) -> list[Action]:
        """Dismiss draining workers that have no unfinished subtrees of this attempt."""
        unfinished = self.round.unfinished if self.round is not None else lambda _: ()
        return [
            member.release()
            for member in self._members
            if member.state is MemberState.DRAINING and not unfinished(member.name)
        ]

    def next_step_id(self) -> dict[str, int]:
        """Return the StepId of the next message: that of the next step while the commit of this
        step is being written."""
        step_id = self.step_id()
        return {**step_id, "step": self.step + 1, "attempt": 0} if self.is_persisting else step_id

    def step_id(self) -> dict[str, int]:
        """Return term, step and attempt, as messages carry them."""
        return {"term": self.term, "step": self.step, "attempt": self.attempt}

    # Messages of workers about the step in progress, while the run is TRAINING; those about links
    # between members, in any phase. `Run` halts on a fault; otherwise it checks whether the step is
    # complete. A message of an earlier attempt changes nothing.

    def _round_of(
        self, incoming: FromMember[GradientPayload | CapturedRows | SubtreeLoss]
    ) -> Round | None:
        """Return the round of a computing worker's message; None if the message is late."""
        round_ = self.round_of(incoming.message)
        if round_ is None or incoming.member.state not in COMPUTING:
            return None
        self.note_delivery(incoming.member.name)
        return round_

    def on_payload(self, incoming: FromMember[GradientPayload]) -> MessageEffect:
        """Add a chunk of a subtree's gradient sum, or pass it on to the worker that averages it."""
        round_ = self._round_of(incoming)
        if round_ is None:
            return _NO_PROGRESS
        outcome = round_.take_payload(incoming.member.name, incoming.message, incoming.values)
        if isinstance(outcome, NonFinite | ResultMismatch):
            return MessageEffect(fault=outcome)
        if isinstance(outcome, Send):
            return MessageEffect([outcome], may_complete=False)
        # Before the average: the message is short, and workers wait for it.
        credit = self.grant_credit(round_)
        actions: list[Action] = [] if outcome is None else [outcome, *round_.summarize()]
        return MessageEffect(credit + actions + self.release())

    def on_captured_rows(self, incoming: FromMember[CapturedRows]) -> MessageEffect:
        """Store a chunk of a microbatch's side outputs."""
        round_ = self._round_of(incoming)
        if round_ is None:
            return _NO_PROGRESS
        fault = round_.take_side_output(incoming.member.name, incoming.message, incoming.values)
        return MessageEffect(fault=fault, may_complete=False)

    def on_inner_phase(
        self, incoming: FromMember[InnerPhaseProgress | InnerCheckpointChunk | InnerStateRequest]
    ) -> MessageEffect:
        """Handle a worker's progress, checkpoint or state request in an inner phase."""
        message, name = incoming.message, incoming.member.name
        if not self.has_replicas:
            raise OutOfOrder(f"{type(message).__name__} in a run without replicas")
        round_ = self.round_of(message)
        if round_ is None or incoming.member.state is MemberState.LOADING:
            return _NO_PROGRESS
        self.note_delivery(name)
        match message:
            case InnerPhaseProgress():
                round_.note_inner_step(name, message.replica, message.inner)
                return _NO_PROGRESS
            case InnerCheckpointChunk():
                round_.note_inner_checkpoint(name, message.replica)
                return MessageEffect(
                    [WriteInnerCheckpoint(message, incoming.values)], may_complete=False
                )
            case InnerStateRequest():
                round_.note_inner_step(name, message.replica, 0)
                return MessageEffect([AnswerInnerStateRequest(name, message)], may_complete=False)

    def on_subtree_loss(self, incoming: FromMember[SubtreeLoss]) -> MessageEffect:
        """Take the loss of a subtree; cancel subtrees that are complete now at other workers."""
        round_ = self._round_of(incoming)
        if round_ is None:
            return _NO_PROGRESS
        fault = self.take_loss(round_, incoming.member, incoming.message)
        return MessageEffect(self.release() + self.cancel_surplus(round_), fault)

    def on_non_finite(self, incoming: FromMember[NonFiniteSum]) -> MessageEffect:
        """Halt for NaN or infinity that a worker found in its own gradients, or in its sums."""
        round_, name, non_finite = (
            self.round_of(incoming.message),
            incoming.member.name,
            incoming.message.non_finite,
        )
        if round_ is None:
            return _NO_PROGRESS
        if non_finite.worker == name and incoming.member.state is MemberState.LOADING:
            return _NO_PROGRESS
        self.note_delivery(name)
        return MessageEffect(fault=round_.check_non_finite(name, non_finite))

    def on_peer_listens(self, incoming: FromMember[PeerPort]) -> MessageEffect:
        """Note the port at which a worker listens for peers."""
        return MessageEffect(
            self.mesh.add_listener(incoming.member.name, incoming.message), may_complete=False
        )

    def on_peer_linked(self, incoming: FromMember[Linked]) -> MessageEffect:
        """Note that a worker reaches a peer."""
        self.mesh.add_link(incoming.member.name, incoming.message.peer, incoming.message.mbit)
        return _NO_PROGRESS

    def on_link_traffic(self, incoming: FromMember[LinkTraffic]) -> MessageEffect:
        """Note how much a worker has exchanged with its peers."""
        self.mesh.traffic[incoming.member.name] = parse(Traffic, incoming.document).peers
        return _NO_PROGRESS

    def on_sums_arrived(self, incoming: FromMember[SumsArrived]) -> MessageEffect:
        """Note that an owner has received all its chunks of a subtree."""
        message = incoming.message
        round_ = self.round_of(message)
        if round_ is None:
            return _NO_PROGRESS
        self.note_delivery(incoming.member.name)
        round_.note_arrival(incoming.member.name, message)
        if message.worker in round_.shares:
            self.note_delivery(message.worker)
        return MessageEffect(self.release() + self.cancel_surplus(round_), may_complete=False)

    def on_peer_average(
        self, incoming: FromMember[ChunkReduced | AveragedGradient]
    ) -> MessageEffect:
        """Take the values of an average that a worker computed, or the owner's digest of them."""
        message, name = incoming.message, incoming.member.name
        round_ = self.round_of(message)
        if round_ is None:
            return _NO_PROGRESS
        self.note_delivery(name)
        is_reduced = isinstance(message, ChunkReduced)
        body = parse_origin(incoming.document) if is_reduced else incoming.values
        result = round_.take_peer_average(name, message, body)
        if isinstance(result, WrongAverage):
            return MessageEffect(fault=result)
        outcomes = [] if result is None else [result]
        return MessageEffect([*outcomes, *round_.summarize(), *self.release()])

    def on_averages_request(self, incoming: FromMember[AveragesRequest]) -> MessageEffect:
        """Send committed averages to a worker that lacks them because their owners have left."""
        return MessageEffect(
            self.answer_averages_request(incoming.member.name, incoming.message), may_complete=False
        )
