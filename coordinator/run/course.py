"""The course of a run: steps, evaluations, checkpoints, halts and the end.

Pure: every event is a method call that returns actions, in the order in which they are to be
done. No clock, socket, file or randomness. What workers say comes in through `run.Run`.
"""

from __future__ import annotations

from typing import Final

from coordinator.run.actions import Action, Broadcast, Finish, Outcome, Remember, Report
from coordinator.run.admission import Admission
from coordinator.run.evaluation import Evaluation
from coordinator.run.failures import Failures
from coordinator.run.membership import Member, Membership, MemberState
from coordinator.run.phase import RunPhase
from coordinator.run.progress import Progress
from coordinator.run.resumption import Resumption
from coordinator.run.round import NonFinite
from coordinator.run.saves import Saves
from protocol.base.errors import ExitCode
from protocol.base.fields import cut_text
from protocol.spec.manifest import Manifest
from protocol.spec.run_spec import RunSpec
from protocol.wire.messages import Halt

_BEHIND: Final = 2
"""A joiner whose state was right so many steps ago takes part: it gets every commit since."""


class Course:
    """How far a run is, and what comes next.

    Attributes:
        phase: Where the run is.
        reason: Why, in words; empty while all goes well.
        members: Who takes part.
        manifest: Settled by the first ready worker.
        progress: The steps, once the manifest is settled.
        evaluation: The one in progress.
        metrics: Figures of the newest evaluation.
        admission: Who may take part, once the manifest is settled.
        saves: The checkpoints.
        blobs: Digest of the list of files that workers may ask for, if there are any.
    """

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        epoch: int,
        expect_workers: int,
        resumption: Resumption | None = None,
    ) -> None:
        self.run_id = run_id
        self.spec = spec
        self.epoch = epoch
        self.expect_workers = expect_workers
        self.phase = RunPhase.WAITING
        self.reason = "waiting for workers"
        self.members = Membership()
        self.manifest: Manifest | None = None
        self.progress: Progress | None = None
        self.evaluation: Evaluation | None = None
        self.metrics: dict[str, float] = {}
        self.admission: Admission | None = None
        self.saves = Saves(spec.checkpoint)
        self.blobs: str | None = None
        self.unfit: dict[str, str] = {}
        """Workers whose device cannot take part in this run, and why."""
        self._odd: set[str] = set()
        self._skip_asked = False
        self._drain_asked = False
        self._evaluated_step = -1
        self._next_owed = False
        self._failures = Failures()
        self._remembered: set[str] = set()
        if resumption is not None:
            self._resume(resumption)

    def _resume(self, resumption: Resumption) -> None:
        manifest, terms = resumption.manifest, resumption.terms
        self._settle(manifest, resumption)
        assert self.admission is not None
        self.admission.resume(terms, None if resumption.step else resumption.state_digest)
        self.saves = Saves(self.spec.checkpoint, resumption.saved)
        self._remembered = set(terms.signatures) if terms is not None else set()

    def _settle(self, manifest: Manifest, resumption: Resumption | None = None) -> None:
        self.manifest = manifest
        self.progress = Progress(self.spec, self.epoch, manifest, self.members, resumption)
        self.admission = Admission(self.run_id, self.spec.exactness, self.members, manifest)

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.progress.step if self.progress is not None else 0

    @property
    def losses(self) -> list[float]:
        """Mean loss of each committed step; NaN for a skipped one."""
        return self.progress.losses if self.progress is not None else []

    # Events from the shell.

    def take_up_again(self) -> list[Action]:
        """After a restart: go on with the step that the disk says comes next."""
        assert self.progress is not None
        self.phase, self.reason = RunPhase.TRAINING, ""
        return self._after_commit(self.progress) + self._advance()

    def tick(self, now_ms: float) -> list[Action]:
        """Time goes on: nobody waits for those who are late, if others can do it."""
        if self.progress is None:
            return []
        if self.phase is RunPhase.EVALUATING and self.evaluation is not None:
            return self._tick_evaluation(self.progress, self.evaluation, now_ms) + self._advance()
        if self.phase is not RunPhase.TRAINING:
            return []
        return self.progress.tick(now_ms) + self._advance()

    def _tick_evaluation(
        self, progress: Progress, evaluation: Evaluation, now_ms: float
    ) -> list[Action]:
        """Who does not say that it has the state that is evaluated is passed over here too."""
        before = set(self.members.names(MemberState.ACTIVE))
        actions = progress.tick(now_ms)
        passed = before.difference(self.members.names(MemberState.ACTIVE))
        for worker in passed:
            evaluation.lose(worker, proven=False)
        evaluation.tick(now_ms)
        late = evaluation.release_late()
        return actions + (self._plan_evaluation() if late or passed else [])

    def durable(self, step: int) -> list[Action]:
        """The commit of this step is on disk: now all may hear of it."""
        progress = self.progress
        if progress is None or not progress.persisting or step != progress.step:
            return []
        actions = progress.commit()
        self._failures.clear()
        if self.phase is RunPhase.OVER:
            return []
        actions += self.saves.committed(progress.step)
        if self.phase is RunPhase.TRAINING:
            actions += self._after_commit(progress)
        else:
            self._next_owed = True
        return actions + self._advance()

    def checkpointed(self, step: int) -> list[Action]:
        """The state after so many steps is saved."""
        self.saves.done(step)
        return [] if self.phase is RunPhase.OVER else self._advance()

    def storage_failed(self, reason: str, *, lost_commit: bool = False) -> list[Action]:
        """The disk refuses. Nothing is damaged.

        Args:
            reason: What the disk says.
            lost_commit: Whether it was the commit that did not get there: the step is done again.
                Else one that is on its way may get there all the same.
        """
        self.saves.failed()
        if self.progress is not None and lost_commit:
            self.progress.abandon_commit()
        if self.phase is RunPhase.WAITING:
            return self.give_up(reason)
        return self.halt(reason)

    def result_refused(self, reason: str) -> list[Action]:
        """The run is done, but the disk refuses its result: it waits for room."""
        self.phase = RunPhase.TRAINING
        return self.halt(f"all is committed, but the result is not written: {reason}")

    def replica_applied(self, step: int, digest: str, not_finite: str = "") -> list[Action]:
        """The coordinator's own replica has taken `step` steps; it arbitrates.

        Args:
            step: So many.
            digest: Of its state.
            not_finite: Where that state has a value that is not finite; empty if nowhere.
        """
        assert self.progress is not None
        self.progress.agreement.settle(step, digest)
        halted: list[Action] = []
        if not_finite:
            halted = self.halt(
                f"the update of step {step - 1} left a value that is not finite: {not_finite}; "
                "go on from an earlier checkpoint, with a lower learning rate"
            )
        return halted + self._judge(self.progress, step)

    # An operator's word.

    def halt(self, reason: str, fault: NonFinite | None = None) -> list[Action]:
        """Stop now, apply nothing; `fault` says where a value was not finite.

        A commit that is on its way to the disk gets there: then it is the next step that waits.
        """
        if self.progress is None or self.phase not in (RunPhase.TRAINING, RunPhase.EVALUATING):
            return []
        self.phase, self.reason = RunPhase.HALTED, reason
        place = self.progress.next_place()
        where = fault.place() if fault is not None else {}
        report = Report("halted", {**place, "reason": reason, **where})
        actions: list[Action] = [Broadcast(Halt(**place, reason=cut_text(reason))), report]
        return actions + self.drain() if self._drain_asked else actions

    @property
    def has_state(self) -> bool:
        """Whether the coordinator's replica has a state of this run."""
        return self.admission is not None and self.admission.state_known

    def save(self) -> list[Action]:
        """Save the present state now."""
        return self.saves.save(self.step) if self.has_state else []

    def drain(self) -> list[Action]:
        """Stop after the present step."""
        self._drain_asked = True
        if self.phase is RunPhase.OVER:
            return []
        if self.phase is RunPhase.WAITING:
            return self._finish("drained", "drained before the start", ExitCode.OK)
        if self.phase is RunPhase.HALTED:
            return self._finish("failed", f"halted: {self.reason}", ExitCode.FAILED)
        return [] if self._computing else self._stop()

    @property
    def _computing(self) -> list[str]:
        return self.members.names(MemberState.ACTIVE, MemberState.DRAINING)

    def _stop(self) -> list[Action]:
        """Nobody is left to end the step in progress: end after those that are committed."""
        assert self.progress is not None
        self.phase, self.evaluation = RunPhase.TRAINING, None
        self.progress.leave_out()
        return self._advance()

    def give_up(self, reason: str) -> list[Action]:
        """Nothing more can come: end as failed."""
        if self.phase is RunPhase.OVER:
            return []
        return self._finish("failed", reason, ExitCode.FAILED)

    # Steps.

    def _begin_step(self, progress: Progress) -> list[Action]:
        self.phase, self.reason = RunPhase.TRAINING, ""
        return progress.begin()

    def _take_up(self) -> list[Action]:
        """Give what a lost worker leaves to others."""
        if self.phase is RunPhase.EVALUATING:
            return self._plan_evaluation()
        if self.phase is RunPhase.TRAINING and self.progress is not None:
            return self.progress.take_up()
        return []

    def _advance(self) -> list[Action]:
        """Commit if everything is there and everyone agrees on the step before."""
        progress = self.progress
        if progress is None or not progress.agreement.reached:
            return []
        if self.phase is not RunPhase.TRAINING or progress.round is None:
            return self._conclude(progress)
        if progress.persisting or self.saves.saved is None:
            return []
        skip = self._skip_asked or progress.was_skipped
        if not (skip or progress.round.complete):
            return []
        self._skip_asked = False
        return self._remember(progress) + progress.persist(skip=skip)

    def _remember(self, progress: Progress) -> list[Action]:
        """Whose bits may be in the step that is committed now."""
        if self._remembered == progress.signatures:
            return []
        assert self.admission is not None
        self._remembered = set(progress.signatures)
        return [Remember(self.admission.terms(progress.signatures, mixed=progress.mixed))]

    def _after_commit(self, progress: Progress) -> list[Action]:
        assert self.manifest is not None
        if self._drain_asked and not self._computing:
            return []
        every = self.spec.evaluate_every
        due = progress.all_committed or (progress.step and every and progress.step % every == 0)
        if self.manifest.evaluation_parts and due:
            return self._begin_evaluation()
        if progress.all_committed or self._drain_asked:
            return []
        return self._begin_step(progress)

    # Agreement.

    def _judge(self, progress: Progress, step: int) -> list[Action]:
        """Compare the answers to a step once the replica's own is known."""
        agreed, odd = progress.agreement.judge(step)
        actions: list[Action] = []
        if odd:
            self._odd.update(odd)
            names = ", ".join(repr(name) for name in odd)
            actions += self.halt(
                f"the state of worker {names} after {step} steps differs from the coordinator's"
            )
        for name in agreed:
            actions += self._is_right(self.members.get(name), step)
        return actions + self._advance()

    def _is_right(self, member: Member | None, step: int) -> list[Action]:
        """A worker's state after so many steps is the run's, or is taken for it: it takes part, if
        it had to load it and hears broadcasts."""
        if member is None or member.state is not MemberState.LOADING:
            return []
        if member.replaying:
            member.right_at = step
            return []
        assert self.progress is not None
        agreement, behind = self.progress.agreement, self.step - step
        trusted = agreement.digest(step) is None
        if behind > (0 if trusted else _BEHIND):
            return []
        if behind or trusted:
            agreement.owe(member.name)
        self.members.activate(member)
        return self._joined(member)

    def _joined(self, member: Member) -> list[Action]:
        told = {"worker": member.name, "step": self.step, "view": self.members.view}
        return [Report("worker_joined", told), *self._take_up()]

    # Evaluation and end.

    def _begin_evaluation(self) -> list[Action]:
        assert self.manifest is not None
        self.phase, self.reason = RunPhase.EVALUATING, ""
        self.evaluation = Evaluation(self.step, self.manifest.evaluation_parts)
        return self._plan_evaluation()

    def _plan_evaluation(self) -> list[Action]:
        assert self.evaluation is not None
        busy = self.evaluation.waiting_for()
        idle = [name for name in self.members.names(MemberState.ACTIVE) if name not in busy]
        return self.evaluation.plan(self.epoch, idle or self.members.names(MemberState.ACTIVE))

    def _conclude(self, progress: Progress) -> list[Action]:
        """Everyone agrees: end an evaluation, and the run when nothing is left."""
        actions: list[Action] = []
        if self.phase is RunPhase.EVALUATING and self.evaluation is not None:
            if not self.evaluation.complete:
                return []
            assert self.manifest is not None
            self.metrics = self.evaluation.metrics(self.manifest.metrics)
            self.evaluation, self._evaluated_step = None, self.step
            self.phase = RunPhase.TRAINING
            actions.append(Report("evaluated", {"step": self.step, **self.metrics}))
            if not (progress.all_committed or self._drain_asked):
                return actions + self._begin_step(progress)
        if self.phase is not RunPhase.TRAINING:
            return actions
        if progress.persisting or not (progress.all_committed or self._drain_asked):
            return actions
        if progress.agreement.catching_up or self.saves.saved != progress.step:
            return actions + self.saves.save(progress.step)
        assert self.manifest is not None
        evaluated = self._evaluated_step == progress.step or not self.manifest.evaluation_parts
        if progress.all_committed and evaluated:
            return actions + self._finish("finished", "all steps are committed", ExitCode.OK)
        before = ", before their evaluation" if progress.all_committed else ""
        reason = f"drained after {progress.step} steps{before}"
        return actions + self._finish("drained", reason, ExitCode.OK)

    def _finish(self, outcome: Outcome, reason: str, exit_code: int) -> list[Action]:
        self.phase, self.reason = RunPhase.OVER, reason
        return [Finish(outcome, reason, exit_code)]
