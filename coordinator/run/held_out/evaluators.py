"""Workers whose duty is to evaluate: they measure committed states while the others train on.

Pure. An evaluator hears what all hear, so it has every committed state. When an evaluation is due
it gets held-out parts of the newest one, and hears no more until it has sent their sums; then it
gets what it has missed from the log. Nobody waits for it: no step, no commit, and not the run's
end. What comes due meanwhile is done when it is back, of the state that is the newest then.

Until one has had the run's state, and when the last one has left, those that train evaluate. Each
step that was due and gets no figures is told, once.
"""

from __future__ import annotations

from coordinator.run.held_out.evaluation import Evaluation
from coordinator.run.outputs.actions import Action, Replay, Report, Send, Withhold
from coordinator.run.outputs.facts import EvaluationMissed
from coordinator.run.workers.membership import Member, Membership, MemberState
from protocol.wire.messages import EvalPlan, EvalResult, StepApplied


class Evaluators:
    """The evaluation that goes on beside training, if there is one.

    Attributes:
        evaluation: The one in progress.
        state_digest: Of the state that it is of, once the coordinator's replica has it.
        owed: Whether one was due that has not begun.
    """

    def __init__(self, members: Membership) -> None:
        self.evaluation: Evaluation | None = None
        self.state_digest: str | None = None
        self.owed = False
        self._members = members
        self._due: tuple[int, str] | None = None
        """The step that was due and has not begun, and why not, while it is the newest state."""
        self._states: dict[str, str | None] = {}
        """Of each worker that was given parts: the digest of the state that it has."""

    @property
    def able(self) -> bool:
        """Whether one can measure the run's state, at once or when it is back from an earlier one:
        then nobody else evaluates while the run trains."""
        return any(member.evaluates and member.caught_up for member in self._members)

    @property
    def can_begin_owed(self) -> bool:
        """Whether one is owed, and somebody is there for it."""
        there = self._members.names(MemberState.FOLLOWING)
        return self.owed and self.evaluation is None and bool(there)

    def begin(self, epoch: int, step: int, parts: int, state_digest: str | None) -> list[Action]:
        """An evaluation is due: give its parts to those that are there, or do it later.

        Args:
            epoch: The coordinator's.
            step: Steps committed.
            parts: Held-out parts.
            state_digest: Of the replica after so many steps, if it is known already.
        """
        there = self._members.names(MemberState.FOLLOWING)
        self.owed = self.evaluation is not None or not there
        if self.owed:
            self._due = (step, self._busy_with())
            return []
        self._due = None
        self.evaluation, self.state_digest = Evaluation(step, parts), state_digest
        self._states = {}
        actions: list[Action] = []
        for worker, (lo, hi) in self.evaluation.assign(there).items():
            member = self._members.get(worker)
            assert member is not None
            member.state = MemberState.EVALUATING
            self._states[worker] = member.state_digest if member.step == step else None
            plan = EvalPlan(epoch=epoch, step=step, lo=lo, hi=hi)
            actions += [Send(worker, plan), Withhold(worker)]
        return actions

    def _busy_with(self) -> str:
        if self.evaluation is None:
            return "the workers that evaluate are given the steps that they have missed"
        names = ", ".join(map(repr, self._members.names(MemberState.EVALUATING)))
        return f"worker {names} is still at step {self.evaluation.step}"

    def taken_over(self) -> None:
        """Those that train evaluate the newest state."""
        self.owed, self._due = False, None

    def committed(self, step: int) -> list[Action]:
        """The newest state is another now: what was due before gets no figures any more."""
        if self._due is None or self._due[0] == step:
            return []
        missed, self._due = EvaluationMissed(*self._due), None
        return [Report(missed)]

    def run_ends(self) -> list[Action]:
        """What has begun, or was due, comes too late."""
        actions = self.committed(-1)
        if self.evaluation is not None:
            missed = EvaluationMissed(self.evaluation.step, "the run ended first")
            actions = [Report(missed), *actions]
        self.evaluation, self.owed = None, False
        return actions

    def result(self, member: Member, message: EvalResult) -> list[Action]:
        """Take one part's sums; whoever has sent all of its own is brought up to date."""
        if self.evaluation is None or member.state is not MemberState.EVALUATING:
            return []
        self.evaluation.result(member.name, message)
        waiting = member.name in self.evaluation.waiting_for()
        return [] if waiting else [_bring_back(member, self.evaluation.step)]

    def applied(self, member: Member, message: StepApplied) -> None:
        """Take an evaluator's answer to a commit."""
        member.step, member.state_digest = message.step, message.state_digest
        if self._is_of(message.step) and member.name in self._states:
            self._states[member.name] = message.state_digest

    def replica_answer(self, step: int, digest: str) -> None:
        """The coordinator's own replica arbitrates here too."""
        if self._is_of(step):
            self.state_digest = digest

    def _is_of(self, step: int) -> bool:
        return self.evaluation is not None and self.evaluation.step == step

    def lose(self, worker: str, newest: int, reason: str) -> list[Action]:
        """It has left: unless what it has done is done and proven, the evaluation is dropped.

        Args:
            worker: Who.
            newest: Steps committed.
            reason: Why there are no figures, if that is so.
        """
        if self.evaluation is None or worker not in self._states:
            return []
        proven = self.state_digest is not None and self._states[worker] == self.state_digest
        if proven and worker not in self.evaluation.waiting_for():
            return []
        return self._drop(newest, reason)

    def _drop(self, newest: int, reason: str) -> list[Action]:
        """Nothing comes of it: who is still at it is brought up to date, and it is owed."""
        assert self.evaluation is not None
        step, self.evaluation, self.owed = self.evaluation.step, None, True
        at_it = [member for member in self._members if member.state is MemberState.EVALUATING]
        actions: list[Action] = [_bring_back(member, step) for member in at_it]
        if step < newest:
            return [*actions, Report(EvaluationMissed(step, reason))]
        self._due = (step, reason)
        return actions

    @property
    def complete(self) -> bool:
        """Whether all parts are there, and all is known that proves them."""
        return (
            self.evaluation is not None
            and self.evaluation.complete
            and self.state_digest is not None
            and None not in self._states.values()
        )

    @property
    def odd(self) -> list[str]:
        """Whose state was not the run's; `complete`."""
        return sorted(w for w, state in self._states.items() if state != self.state_digest)


def _bring_back(member: Member, step: int) -> Replay:
    member.state = MemberState.LOADING
    member.gets_state()
    return Replay(member.name, step, None)
