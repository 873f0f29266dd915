"""How far a run is: the step in progress, who computes what of it, and its commit.

Pure. Of a run's life it knows only training steps; joining, halting and the end are in `run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coordinator.run.actions import Action, ApplyStep, Broadcast, Dismiss, Persist, Report, Send
from coordinator.run.agreement import Agreement
from coordinator.run.commit_record import CommitRecord
from coordinator.run.membership import Member, Membership, MemberState
from coordinator.run.planner import Shares, divide, nodes_for, spread
from coordinator.run.reduction import Array
from coordinator.run.resumption import Resumption
from coordinator.run.round import Averaged, NonFinite, Round
from coordinator.run.stragglers import Stragglers
from protocol.base.errors import ExitCode, OutOfPlace
from protocol.exact.samples import SampleOrder
from protocol.exact.tree import Node
from protocol.exact.update import step_scalars
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import (
    Assign,
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    Cancel,
    Commit,
    GradientPayload,
    Message,
    NodeLoss,
    StepApplied,
    StepPlan,
)

_NO_AVERAGES: Final = "0" * 64
_MAX_NODES: Final = 64
"""In one message."""
_COMPUTING: Final = (MemberState.ACTIVE, MemberState.DRAINING)


class Progress:
    """The steps of one run.

    Attributes:
        step: Steps committed, and so the number of the one in progress.
        attempt: Which try at it.
        optimizer_step: Updates committed; skipped steps do not count.
        losses: Mean loss of each step; NaN for a skipped one.
        division: Microbatches by worker in the newest plan.
        round: The attempt in progress; None between the last commit and the next plan.
        agreement: Whether all replicas have the same state after the newest commit.
        signatures: Of all workers that have computed.
        mixed: Whether those are several.

    Args:
        spec: The run's.
        epoch: The coordinator's.
        manifest: What was settled.
        members: Who takes part.
        resumption: Where a restart goes on from; None for a new run.
    """

    def __init__(
        self,
        spec: RunSpec,
        epoch: int,
        manifest: Manifest,
        members: Membership,
        resumption: Resumption | None = None,
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
        self._stragglers = Stragglers(members)
        self._committing: CommitRecord | None = None
        self._redone: Mapping[int, str | None] = {}
        self._spec = spec
        self._epoch = epoch
        self._manifest = manifest
        self._members = members
        self._order = SampleOrder(spec.seed, manifest.train_samples, spec.batch)
        if resumption is not None:
            self._resume(resumption)

    def _resume(self, resumption: Resumption) -> None:
        self.step, self.optimizer_step = resumption.step, resumption.optimizer_step
        self.losses = list(resumption.losses)
        self.agreement = Agreement(self.step, catching_up=True, known=resumption.state_digest)
        self._redone = resumption.redone
        if resumption.terms is not None:
            self.signatures = set(resumption.terms.signatures)
            self.mixed = resumption.terms.mixed

    @property
    def all_committed(self) -> bool:
        """Whether no step is left."""
        return self.step == self._spec.steps

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
        blocks = self._manifest.blocks
        self.round = Round(blocks, microbatches, self._epoch, self.step, self.attempt)
        speeds = self._members.speeds()
        leaving = self.let_go()
        if not speeds or self.was_skipped:
            return leaving
        self._note_signatures()
        self.division = self._divide(microbatches, speeds)
        nodes = nodes_for(self.division)
        return [*leaving, *(self._plan(name, mine) for name, mine in nodes.items())]

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
        if self.round is not None:
            self.round.lose(worker, proven=proven)
        return proven

    def _note_signatures(self) -> None:
        """Also of those that have left since: what they computed stays."""
        self.signatures |= self._members.signatures
        self.mixed = self.mixed or len(self.signatures) > 1

    def take_up(self) -> list[Action]:
        """Give what is nobody's to the active workers, within the step."""
        if self.round is None or self.was_skipped or self.persisting:
            return []
        if self.round.tainted:
            self.attempt += 1
            return [Report("restarted", self.place()), *self.begin()]
        speeds = self._members.speeds()
        orphans = self.round.unassigned()
        if not speeds or not orphans:
            return []
        self._note_signatures()
        told = {"step": self.step, "nodes": [str(n) for n in orphans]}
        reports = [Report("reassigned", told)] if self.round.begun else []
        return [*self._spread(orphans, speeds), *reports]

    def _spread(self, nodes: tuple[Node, ...], speeds: dict[str, float | None]) -> list[Action]:
        assert self.round is not None
        actions: list[Action] = []
        for name, mine in spread(nodes, self.round.microbatches, speeds).items():
            parts = [mine[at : at + _MAX_NODES] for at in range(0, len(mine), _MAX_NODES)]
            actions += [self._plan(name, part) for part in parts]
        return actions

    def tick(self, now_ms: float) -> list[Action]:
        """Time goes on: see who is late, and let nobody wait for them."""
        self._stragglers.tick(now_ms)
        if self.persisting:
            return []
        speculated = self._speculate(self.round) if self.round is not None else []
        return [*self._pass_over(), *speculated]

    def _pass_over(self) -> list[Action]:
        """Go on without those that do not answer; they are back when they have."""
        late = self._stragglers.late_answers(self.agreement)
        actions: list[Action] = list(self._stragglers.reports(late, self.step, "an answer"))
        for name in late:
            member = self._members.get(name)
            assert member is not None
            if member.state is MemberState.DRAINING:
                actions.append(Dismiss(name, "drained", ExitCode.OK))
                continue
            member.late = True
            self.agreement.lose(name)
            self._members.deactivate(name)
            if self.round is not None:
                self.round.release(name, proven=False)
        return actions + (self.take_up() if late else [])

    def _speculate(self, round_: Round) -> list[Action]:
        """Give what late workers owe to idle ones as well; whichever is there first counts.

        Where all are late, nobody goes on without them: nothing is told.
        """
        late = self._stragglers.late_workers(round_)
        others = {name: ms for name, ms in self._members.speeds().items() if name not in late}
        if not late or not others:
            return []
        reports = self._stragglers.reports(late, self.step, "gradients")
        speeds = {
            name: speed
            for name, speed in others.items()
            if name not in round_.shares or not round_.shares[name].pending
        }
        nodes = round_.unassigned(ignoring=late) if speeds else ()
        if not nodes:
            return [*reports]
        self._note_signatures()
        told = {"step": self.step, "nodes": [str(n) for n in nodes], "late": late}
        return [*reports, *self._spread(nodes, speeds), Report("speculated", told)]

    def cancel_surplus(self) -> list[Action]:
        """Tell workers what need not be computed any more, since others were first."""
        assert self.round is not None
        return [
            Send(name, Cancel(**self.place(), nodes=nodes[at : at + _MAX_NODES]))
            for name, nodes in self.round.surplus().items()
            for at in range(0, len(nodes), _MAX_NODES)
        ]

    def is_present(self, message: GradientPayload | NodeLoss) -> bool:
        """Whether it belongs to the attempt in progress; late ones are dropped, as are those that
        come when the step is skipped already.

        Raises:
            OutOfPlace: It belongs to no attempt that there has been.
        """
        theirs = (message.epoch, message.step, message.attempt)
        ours = (self._epoch, self.step, self.attempt)
        if message.epoch != self._epoch or theirs > ours:
            raise OutOfPlace(
                f"{type(message).__name__}: expected (epoch, step, attempt) {ours}, got {theirs}"
            )
        return theirs == ours and self.round is not None and not self.persisting

    def payload(
        self, worker: str, message: GradientPayload, values: Array
    ) -> list[Action] | NonFinite:
        """Take a payload of the attempt in progress; completed chunks go to all."""
        assert self.round is not None
        self._stragglers.delivered(worker)
        outcome = self.round.payload(worker, message, values)
        if isinstance(outcome, NonFinite):
            return outcome
        return [self._averaged(chunk) for chunk in outcome]

    def node_loss(self, member: Member, message: NodeLoss) -> NonFinite | None:
        """Take a node's loss, and how long the node took."""
        assert self.round is not None
        self._stragglers.delivered(member.name)
        outcome = self.round.node_loss(member.name, message)
        member.measured(message.elapsed_ms / message.node.leaves)
        if outcome is True:
            member.microbatches += message.node.leaves
        return outcome if isinstance(outcome, NonFinite) else None

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
        self.agreement.answer(worker, message.step, message.state_digest)

    def persist(self, *, skip: bool) -> list[Action]:
        """The round is complete and everyone agrees on the step before, or it is skipped, and
        nothing is to be applied: make the commit durable before anyone hears of it."""
        assert self.round is not None
        scalars, loss, digest = None, float("nan"), _NO_AVERAGES
        updates = self.optimizer_step
        if not skip:
            updates += 1
            norm = self.round.gradient_norm
            scalars = step_scalars(self._spec.optimizer, updates, self.step, self._spec.steps, norm)
            loss, digest = self.round.loss, self.round.averages_digest()
        commit = Commit(**self.place(), scalars=scalars, loss=loss, averages_digest=digest)
        before = self.agreement.digest(self.step)
        self._committing = CommitRecord(commit=commit, optimizer_step=updates, state_before=before)
        return [*self._compare(digest), Persist(self._committing)]

    def _compare(self, digest: str) -> list[Action]:
        """A step that is done again should have the averages it had."""
        known = self._redone.get(self.step)
        if known is None or known == digest:
            return []
        return [Report("redone_otherwise", {"step": self.step, "before": known, "now": digest})]

    def leave_out(self) -> None:
        """The run is to end before this step, unless its commit is on its way to the disk."""
        if not self.persisting:
            self.round = None

    def abandon_commit(self) -> None:
        """It did not get to the disk: the step is still in progress."""
        self._committing = None

    def commit(self) -> list[Action]:
        """The commit is durable: end the step."""
        assert self.round is not None
        assert self._committing is not None
        round_, self.round = self.round, None
        record, self._committing = self._committing, None
        commit = record.commit
        skipped = commit.scalars is None
        told = {"step": self.step, "loss": commit.loss, "skipped": skipped}
        apply = ApplyStep(self.step, round_.averages, commit.scalars)
        self.optimizer_step = record.optimizer_step
        self.losses.append(commit.loss)
        self.step += 1
        self.attempt = 0
        computing = self._members.names(*_COMPUTING)
        self.agreement.expect(self.step, computing)
        self._stragglers.committed(round_, computing)
        return [Broadcast(commit), apply, Report("committed", told), *self.let_go()]

    def let_go(self) -> list[Action]:
        """Say goodbye to draining workers that have no unfinished nodes of this attempt."""
        leaving = self._members.names(MemberState.DRAINING)
        busy = self.round.unfinished if self.round is not None else lambda _: ()
        return [Dismiss(name, "drained", ExitCode.OK) for name in leaving if not busy(name)]

    def _plan(self, worker: str, nodes: tuple[Node, ...]) -> Send:
        """Give nodes to a worker: its plan of this step, or more of it."""
        assert self.round is not None
        assert len(nodes) <= _MAX_NODES
        known = worker in self.round.shares
        self.round.assign(worker, nodes)
        self._stragglers.given(worker)
        place, view = self.place(), self._members.view
        if known:
            return Send(worker, Assign(**place, view=view, nodes=nodes))
        microbatches = self.round.microbatches
        return Send(worker, StepPlan(**place, view=view, nodes=nodes, microbatches=microbatches))

    def _averaged(self, chunk: Averaged) -> Broadcast:
        """A completed chunk as a broadcast."""
        block = self._manifest.blocks[chunk.block]
        kind = AveragedBlockGradient if block.kind == "block" else AveragedNonBlockGradient
        message: Message = kind(**self.place(), block=chunk.block, chunk=chunk.chunk)
        return Broadcast(message, chunk.values)

    def next_place(self) -> dict[str, int]:
        """Where the next message belongs: to the next step, if this one is being committed."""
        place = self.place()
        return {**place, "step": self.step + 1, "attempt": 0} if self.persisting else place

    def place(self) -> dict[str, int]:
        """Epoch, step and attempt: where a message belongs."""
        return {"epoch": self._epoch, "step": self.step, "attempt": self.attempt}
