"""How far a run is: the step in progress, who computes what of it, and its commit.

Pure. Of a run's life it knows only training steps; joining, halting and the end are in `run`.
"""

from __future__ import annotations

from typing import Final

from coordinator.actions import Action, ApplyStep, Broadcast, Dismiss, Report, Send
from coordinator.agreement import Agreement
from coordinator.membership import Member, Membership, MemberState
from coordinator.planner import Shares, divide, nodes_for, spread
from coordinator.reduction import Array
from coordinator.round import Averaged, NonFinite, Round
from protocol.errors import ExitCode, OutOfPlace
from protocol.manifest import Manifest
from protocol.messages import (
    Assign,
    AveragedBlockGradient,
    AveragedNonBlockGradient,
    Commit,
    GradientPayload,
    Message,
    NodeLoss,
    StepApplied,
    StepPlan,
)
from protocol.run_spec import RunSpec
from protocol.samples import SampleOrder
from protocol.tree import Node
from protocol.update import step_scalars

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
        mixed: Whether workers of unlike numeric signatures have computed.
    """

    def __init__(self, spec: RunSpec, epoch: int, manifest: Manifest, members: Membership) -> None:
        self.step = 0
        self.attempt = 0
        self.optimizer_step = 0
        self.losses: list[float] = []
        self.division: Shares | None = None
        self.round: Round | None = None
        self.agreement = Agreement()
        self.mixed = False
        self._signatures: set[str] = set()
        self._spec = spec
        self._epoch = epoch
        self._manifest = manifest
        self._members = members
        self._order = SampleOrder(spec.seed, manifest.train_samples, spec.batch)

    @property
    def all_committed(self) -> bool:
        """Whether no step is left."""
        return self.step == self._spec.steps

    def begin(self) -> list[Action]:
        """Start an attempt: give every active worker its nodes."""
        microbatches = self._order.microbatch_count(self.step)
        blocks = self._manifest.blocks
        self.round = Round(blocks, microbatches, self._epoch, self.step, self.attempt)
        speeds = self._members.speeds()
        leaving = self.let_go()
        if not speeds:
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
        if self.round is not None:
            self.round.lose(worker, proven=proven)
        return proven

    def _note_signatures(self) -> None:
        """Also of those that have left since: what they computed stays."""
        self._signatures |= self._members.signatures
        self.mixed = self.mixed or len(self._signatures) > 1

    def take_up(self) -> list[Action]:
        """Give what is nobody's to the active workers, within the step."""
        if self.round is None:
            return []
        if self.round.tainted:
            self.attempt += 1
            return [Report("restarted", self.place()), *self.begin()]
        speeds = self._members.speeds()
        orphans = self.round.unassigned()
        if not speeds or not orphans:
            return []
        self._note_signatures()
        actions: list[Action] = []
        for name, nodes in spread(orphans, self.round.microbatches, speeds).items():
            parts = [nodes[at : at + _MAX_NODES] for at in range(0, len(nodes), _MAX_NODES)]
            actions += [self._plan(name, part) for part in parts]
        report = Report("reassigned", {"step": self.step, "nodes": [str(n) for n in orphans]})
        return [*actions, report]

    def is_present(self, message: GradientPayload | NodeLoss) -> bool:
        """Whether it belongs to the attempt in progress; late ones are dropped.

        Raises:
            OutOfPlace: It belongs to no attempt that there has been.
        """
        theirs = (message.epoch, message.step, message.attempt)
        ours = (self._epoch, self.step, self.attempt)
        if message.epoch != self._epoch or theirs > ours:
            raise OutOfPlace(
                f"{type(message).__name__}: expected (epoch, step, attempt) {ours}, got {theirs}"
            )
        return theirs == ours and self.round is not None

    def payload(
        self, worker: str, message: GradientPayload, values: Array
    ) -> list[Action] | NonFinite:
        """Take a payload of the attempt in progress; completed chunks go to all."""
        assert self.round is not None
        outcome = self.round.payload(worker, message, values)
        if isinstance(outcome, NonFinite):
            return outcome
        return [self._averaged(chunk) for chunk in outcome]

    def node_loss(self, member: Member, message: NodeLoss) -> NonFinite | None:
        """Take a node's loss, and how long the node took."""
        assert self.round is not None
        outcome = self.round.node_loss(member.name, message)
        if outcome is True:
            member.measured(message.elapsed_ms / message.node.leaves)
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
        self.agreement.answer(worker, message.step, message.state_digest)

    def commit(self, *, skip: bool) -> list[Action]:
        """End the step: the round is complete and everyone agrees on the step before, or it is
        skipped, and nothing is applied."""
        assert self.round is not None
        round_, self.round = self.round, None
        scalars, loss, digest = None, float("nan"), _NO_AVERAGES
        if not skip:
            self.optimizer_step += 1
            scalars = step_scalars(
                self._spec.optimizer,
                self.optimizer_step,
                self.step,
                self._spec.steps,
                round_.gradient_norm,
            )
            loss, digest = round_.loss, round_.averages_digest()
        commit = Commit(**self.place(), scalars=scalars, loss=loss, averages_digest=digest)
        report = Report("committed", {"step": self.step, "loss": loss, "skipped": skip})
        apply = ApplyStep(self.step, round_.averages, scalars)
        self.losses.append(loss)
        self.step += 1
        self.attempt = 0
        self.agreement.expect(self.step, self._members.names(*_COMPUTING))
        return [Broadcast(commit), apply, report, *self.let_go()]

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

    def place(self) -> dict[str, int]:
        """Epoch, step and attempt: where a message belongs."""
        return {"epoch": self._epoch, "step": self.step, "attempt": self.attempt}
