"""Evaluation in a run: the due evaluations, the workers that evaluate, and early stopping.

Pure. Either training waits and the workers that train evaluate (`Evaluations.current`), or workers
that only evaluate do so in parallel with training (`Evaluators`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coordinator.run.outputs.actions import Action, Replay, Report, Send, Unsubscribe
from coordinator.run.outputs.events import Evaluated, EvaluationMissed, RateLowered
from coordinator.run.outputs.restart import MetricsByStep
from coordinator.run.progress import Progress
from coordinator.run.workers.admission import refuse
from coordinator.run.workers.membership import Member, Membership, MemberState
from coordinator.run.workers.stragglers import Leases
from protocol.spec.manifest import Manifest, Metric
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.checkpoint import StopSpec
from protocol.wire.messages import EvalPlan, EvalResult, StepApplied


class Evaluations:
    """All evaluations of one run.

    Attributes:
        current: The evaluation that training waits for, even while the run is halted.
        evaluators: Workers that evaluate while the others train.
        metrics: Metrics of the newest evaluated state.
        stop_reason: Why the run stops early; empty if it does not.
    """

    def __init__(
        self,
        spec: RunSpec,
        members: Membership,
        manifest: Manifest,
        progress: Progress,
        earlier: MetricsByStep,
    ) -> None:
        self.current: Evaluation | None = None
        self.evaluators = Evaluators(members)
        self.metrics: dict[str, float] = {}
        self.stop_reason = ""
        self._stopping = EarlyStopping(spec.stop, earlier)
        self._spec = spec
        self._members = members
        self._manifest = manifest
        self._progress = progress
        self._evaluated_step = -1
        self._measured_step = -1

    @property
    def can_run_in_parallel(self) -> bool:
        """Whether evaluations are due while the run trains."""
        return bool(self._manifest.evaluation_parts and self._spec.evaluate_every)

    @property
    def is_due(self) -> bool:
        """Whether the newest state is to be evaluated."""
        step, every = self._progress.step, self._spec.evaluate_every
        is_scheduled = self._progress.all_committed or bool(step and every and step % every == 0)
        pending = self.evaluators.is_pending and not self.evaluators.can_evaluate
        return bool(self._manifest.evaluation_parts) and (is_scheduled or pending)

    @property
    def stops_training(self) -> bool:
        """Whether training waits for an evaluation that is due now.

        After the last step no worker has other work, and the metrics must not be missing. With
        `stop`, the metrics decide whether there is a next step, and with the schedule plateau,
        its rate.
        """
        needs_metrics = self._spec.stop is not None or self._spec.optimizer.plateau is not None
        must_wait = self._progress.all_committed or needs_metrics
        return must_wait or not self.evaluators.can_evaluate

    @property
    def is_evaluated(self) -> bool:
        """Whether the newest state is evaluated, or the run has nothing to evaluate."""
        return self._evaluated_step == self._progress.step or not self._manifest.evaluation_parts

    # Evaluation by the workers that train.

    def begin(self) -> list[Action]:
        """Evaluate the newest state; restart an evaluation that has begun."""
        self.evaluators.cancel_pending()
        self.current = Evaluation(self._progress.step, self._manifest.evaluation_parts)
        return self.plan()

    @property
    def _current_evaluation(self) -> Evaluation:
        assert self.current is not None, "the phase EVALUATING has an evaluation"
        return self.current

    def plan(self) -> list[Action]:
        """Assign unassigned parts to idle workers, or to all if none is idle."""
        busy_names, active_names = (
            self._current_evaluation.awaited_workers(),
            self._members.names(MemberState.ACTIVE),
        )
        idle_names = [name for name in active_names if name not in busy_names]
        return self._current_evaluation.plan(self._progress.term, idle_names or active_names)

    def tick(self, now_ms: float) -> list[Action]:
        """Pass over workers that are late with results, or with the digest of the evaluated
        state."""
        earlier_names = set(self._members.names(MemberState.ACTIVE))
        actions = self._progress.tick(now_ms)
        late_names = earlier_names.difference(self._members.names(MemberState.ACTIVE))
        for worker in late_names:
            self._current_evaluation.lose(worker, is_proven=False)
        self._current_evaluation.tick(now_ms)
        if self._current_evaluation.disown_late() or late_names:
            actions += self.plan()
        return actions

    @property
    def is_complete(self) -> bool:
        """Whether all parts have results and all workers agree on the evaluated state.

        After a restart, workers may agree with each other before the replica has caught up. The
        metrics wait for the replica's digest: otherwise they could be of a wrong state.
        """
        agreement = self._progress.agreement
        return (
            agreement.is_reached
            and self._current_evaluation.is_complete
            and not agreement.is_catching_up
        )

    def end(self) -> tuple[list[Action], bool]:
        """Report the metrics of the complete evaluation.

        Returns:
            The actions, and whether the state is the best so far.
        """
        step = self._progress.step
        actions = self._publish_metrics(
            self._current_evaluation, self._progress.agreement.digest(step)
        )
        self.current, self._evaluated_step = None, step
        self.stop_reason = self._stopping.add_metrics(step, self.metrics)
        return actions + self._lower_rate(step), self._stopping.is_best(step)

    def _lower_rate(self, step: int) -> list[Action]:
        plateau, spec = self._progress.plateau, self._spec.optimizer
        earlier_factor = plateau.factor_at(step - 1)
        plateau.add_evaluation(step, self.metrics)
        factor = plateau.factor_at(step)
        if factor == earlier_factor or spec.plateau is None:
            return []
        return [Report(RateLowered(step, spec.plateau.metric, spec.lr * factor))]

    def _publish_metrics(self, evaluation: Evaluation, state_digest: str | None) -> list[Action]:
        """Report metrics; those of an older state do not replace those of a newer state."""
        metrics = evaluation.metrics(self._manifest.metrics)
        if evaluation.step > self._measured_step:
            self.metrics, self._measured_step = metrics, evaluation.step
        event = Evaluated(
            term=self._progress.term, step=evaluation.step, metrics=metrics,
            state_digest=state_digest,
        )  # fmt: skip
        return [Report(event)]

    # Evaluation by workers that only evaluate.

    def begin_in_parallel(self) -> list[Action]:
        """Evaluate the newest state while training continues."""
        step, parts = self._progress.step, self._manifest.evaluation_parts
        digest = self._progress.agreement.digest(step)
        return self.evaluators.begin(self._progress.term, step, parts, digest)

    def begin_pending(self) -> list[Action]:
        """Begin a pending evaluation if possible; after the last step all workers evaluate."""
        can_begin = self.evaluators.can_begin_pending and not self._progress.all_committed
        return self.begin_in_parallel() if can_begin else []

    def take_parallel_result(self, member: Member, message: EvalResult) -> list[Action]:
        """Take one part's sums from a worker that only evaluates."""
        return self.evaluators.take_result(member, message) + self.end_in_parallel()

    def end_in_parallel(self) -> list[Action]:
        """Report metrics once all parts have results and the state is known to be the run's."""
        evaluation = self.evaluators.evaluation
        if evaluation is None or not self.evaluators.is_complete:
            return []
        if mismatched := self.evaluators.mismatched_workers:
            return [a for name in mismatched for a in self.refuse_evaluator(name, evaluation.step)]
        self.evaluators.evaluation = None
        return (
            self._publish_metrics(evaluation, self.evaluators.state_digest) + self.begin_pending()
        )

    def refuse_evaluator(self, worker: str, step: int) -> list[Action]:
        """Dismiss a worker whose metrics would be of another state; the run continues."""
        self._members.remove(worker)
        self._progress.agreement.lose(worker)
        reason = f"its state after {step} steps differs from the coordinator's"
        missing = f"the state of worker {worker!r} after {step} steps is not the run's"
        actions = self.evaluators.lose(worker, self._progress.step, missing)
        return [*actions, *refuse(worker, reason)]

    def lose(self, worker: str, *, is_proven: bool) -> list[Action]:
        """Remove a worker that has left; `is_proven`: its state was known to be the run's."""
        if self.current is not None:
            self.current.lose(worker, is_proven=is_proven)
        missing = f"worker {worker!r} left before its results were complete"
        actions = self.evaluators.lose(worker, self._progress.step, missing)
        return actions + self.begin_pending()


class Evaluation:
    """Collects the results of one evaluation of the weights after `step` steps.

    Sums are kept by part and added in the order of the parts: neither the number of workers nor
    the order of their results can change a metric.
    """

    def __init__(self, step: int, parts: int) -> None:
        self.step = step
        self._parts = parts
        self._sums: dict[int, dict[str, float]] = {}
        self._sender: dict[int, str] = {}
        self._assigned: dict[str, set[int]] = {}
        self._workers: set[str] = set()
        self._leases = Leases()
        self._longest_gap_ms: float | None = None

    def assign(self, workers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Divide the unassigned parts into one range [lo, hi) for each worker."""
        assigned_parts = set().union(*self._assigned.values()) if self._assigned else set()
        free = [p for p in range(self._parts) if p not in self._sums and p not in assigned_parts]
        ranges: dict[str, tuple[int, int]] = {}
        # A range may span finished parts; their second results are ignored.
        for index, worker in enumerate(workers):
            parts = free[
                index * len(free) // len(workers) : (index + 1) * len(free) // len(workers)
            ]
            if parts:
                ranges[worker] = (parts[0], parts[-1] + 1)
                self._assigned.setdefault(worker, set()).update(parts)
                self._workers.add(worker)
                self._leases.renew(worker)
        return ranges

    def plan(self, term: int, workers: Sequence[str]) -> list[Action]:
        """Assign the unassigned parts to these workers."""
        return [
            Send(worker, EvalPlan(term=term, step=self.step, lo=lo, hi=hi))
            for worker, (lo, hi) in self.assign(workers).items()
        ]

    def take_result(self, worker: str, message: EvalResult) -> None:
        """Take one part's sums; the first result counts.

        Results of an older evaluation are ignored, and so are results of workers without parts:
        their weights may have differed.
        """
        fits = message.step == self.step and message.part < self._parts
        if fits and worker in self._workers:
            gap_ms = self._leases.renew(worker)
            self._longest_gap_ms = max(self._longest_gap_ms or 0.0, gap_ms)
            self._sums.setdefault(message.part, message.sums)
            self._sender.setdefault(message.part, worker)

    def lose(self, worker: str, *, is_proven: bool) -> None:
        """Unassign the unfinished parts of a worker that has left.

        The worker's results are dropped too, unless its weights are known to be the run's
        (`is_proven`).
        """
        self._assigned.pop(worker, None)
        self._workers.discard(worker)
        if not is_proven:
            for part in [part for part, sender in self._sender.items() if sender == worker]:
                del self._sender[part], self._sums[part]

    def tick(self, now_ms: float) -> None:
        """Advance the time."""
        self._leases.tick(now_ms)

    def disown_late(self) -> list[str]:
        """Unassign the unfinished parts of late workers, if other workers are idle.

        Returns:
            The workers that have been silent for far longer than any part has taken. Their results
            still count.
        """
        waiting_names = self.awaited_workers()
        late_names = [w for w in waiting_names if self._leases.has_expired(w, self._longest_gap_ms)]
        if not self._workers.difference(waiting_names):
            return []
        for worker in late_names:
            del self._assigned[worker]
        return late_names

    def awaited_workers(self) -> list[str]:
        """Return the workers with unfinished parts."""
        return sorted(w for w, parts in self._assigned.items() if parts - self._sums.keys())

    @property
    def is_complete(self) -> bool:
        """Whether every part has a result."""
        return len(self._sums) == self._parts

    def metrics(self, definitions: Sequence[Metric]) -> dict[str, float]:
        """Return the metrics of the complete evaluation, by name."""
        totals: dict[str, float] = {}
        for part in range(self._parts):
            for name, value in self._sums[part].items():
                totals[name] = totals.get(name, 0.0) + value
        return {metric.name: metric.value(totals) for metric in definitions}


class Evaluators:
    """Workers that only evaluate: they measure committed states while the others train.

    An evaluator receives every broadcast, so it has every committed state. When an evaluation is
    due, the evaluator gets parts of it, and no broadcasts until it has sent the sums of its parts;
    then it gets the missed steps from the log. No step, no commit and no end of a run waits for an
    evaluator. An evaluation that becomes due meanwhile is pending until the evaluator has caught
    up, and then measures the newest state. The training workers evaluate before any evaluator has
    had the run's state, and after the last evaluator has left. A due evaluation that does not
    happen is reported once.

    Attributes:
        evaluation: The evaluation in progress, if any.
        state_digest: Digest of the evaluated state, once the coordinator's replica has it.
        is_pending: Whether an evaluation is due that has not begun.
    """

    def __init__(self, members: Membership) -> None:
        self.evaluation: Evaluation | None = None
        self.state_digest: str | None = None
        self.is_pending = False
        self._members = members
        self._pending_step: tuple[int, str] | None = None
        """The step whose evaluation is pending, and the reason; None once a newer step is
        committed."""
        self._states: dict[str, str | None] = {}
        """The digest of the state of each worker with parts; None while unknown."""

    @property
    def can_evaluate(self) -> bool:
        """Whether an evaluator can measure the run's state, now or once it has caught up: then no
        other worker evaluates while the run trains."""
        return any(member.evaluates and member.has_caught_up for member in self._members)

    @property
    def can_begin_pending(self) -> bool:
        """Whether an evaluation is pending and an evaluator is free."""
        free = self._members.names(MemberState.FOLLOWING)
        return self.is_pending and self.evaluation is None and bool(free)

    def begin(self, term: int, step: int, parts: int, state_digest: str | None) -> list[Action]:
        """Assign the parts of an evaluation to free evaluators, or make it pending.

        Args:
            term: Term of the coordinator.
            step: Steps committed.
            parts: Number of parts of the evaluation.
            state_digest: Digest of the replica after `step` steps, if already known.
        """
        free = self._members.names(MemberState.FOLLOWING)
        self.is_pending = self.evaluation is not None or not free
        if self.is_pending:
            self._pending_step = (step, self._reason_for_delay())
            return []
        self._pending_step = None
        self.evaluation, self.state_digest = Evaluation(step, parts), state_digest
        self._states = {}
        actions: list[Action] = []
        for worker, (lo, hi) in self.evaluation.assign(free).items():
            member = self._members.get(worker)
            assert member is not None
            member.state = MemberState.EVALUATING
            self._states[worker] = member.state_digest if member.step == step else None
            plan = EvalPlan(term=term, step=step, lo=lo, hi=hi)
            actions += [Send(worker, plan), Unsubscribe(worker)]
        return actions

    def _reason_for_delay(self) -> str:
        if self.evaluation is None:
            return "the evaluators are receiving the steps that they have missed"
        names = ", ".join(map(repr, self._members.names(MemberState.EVALUATING)))
        return f"worker {names} is still at step {self.evaluation.step}"

    def cancel_pending(self) -> None:
        """Drop the pending evaluation: the training workers evaluate the newest state."""
        self.is_pending, self._pending_step = False, None

    def note_commit(self, step: int) -> list[Action]:
        """Note a commit: report a pending evaluation of an older state as missed."""
        if self._pending_step is None or self._pending_step[0] == step:
            return []
        missed_evaluation, self._pending_step = EvaluationMissed(*self._pending_step), None
        return [Report(missed_evaluation)]

    def end_run(self) -> list[Action]:
        """Report evaluations in progress or pending as missed."""
        actions = self.note_commit(-1)
        if self.evaluation is not None:
            missed_evaluation = EvaluationMissed(self.evaluation.step, "the run ended first")
            actions = [Report(missed_evaluation), *actions]
        self.evaluation, self.is_pending = None, False
        return actions

    def take_result(self, member: Member, message: EvalResult) -> list[Action]:
        """Take one part's sums; an evaluator without unfinished parts catches up."""
        if self.evaluation is None or member.state is not MemberState.EVALUATING:
            return []
        self.evaluation.take_result(member.name, message)
        is_awaited = member.name in self.evaluation.awaited_workers()
        return [] if is_awaited else [_catch_up(member, self.evaluation.step)]

    def take_answer(self, member: Member, message: StepApplied) -> None:
        """Take an evaluator's answer to a commit."""
        member.step, member.state_digest = message.step, message.state_digest
        if self._is_evaluating(message.step) and member.name in self._states:
            self._states[member.name] = message.state_digest

    def take_replica_answer(self, step: int, digest: str) -> None:
        """Take the digest of the coordinator's replica, which proves the evaluated state."""
        if self._is_evaluating(step):
            self.state_digest = digest

    def _is_evaluating(self, step: int) -> bool:
        return self.evaluation is not None and self.evaluation.step == step

    def lose(self, worker: str, newest_step: int, reason: str) -> list[Action]:
        """Remove a worker; the evaluation is dropped unless its results are complete and proven.

        Args:
            worker: The worker's name.
            newest_step: Number of committed steps.
            reason: The reason to report if there are no metrics.
        """
        if self.evaluation is None or worker not in self._states:
            return []
        is_proven = self.state_digest is not None and self._states[worker] == self.state_digest
        if is_proven and worker not in self.evaluation.awaited_workers():
            return []
        return self._drop(newest_step, reason)

    def _drop(self, newest_step: int, reason: str) -> list[Action]:
        """Drop the evaluation and make it pending; its evaluators catch up."""
        assert self.evaluation is not None
        step, self.evaluation, self.is_pending = self.evaluation.step, None, True
        busy_members = [
            member for member in self._members if member.state is MemberState.EVALUATING
        ]
        actions: list[Action] = [_catch_up(member, step) for member in busy_members]
        if step < newest_step:
            return [*actions, Report(EvaluationMissed(step, reason))]
        self._pending_step = (step, reason)
        return actions

    @property
    def is_complete(self) -> bool:
        """Whether all parts have results, and all digests that prove the results are known."""
        return (
            self.evaluation is not None
            and self.evaluation.is_complete
            and self.state_digest is not None
            and None not in self._states.values()
        )

    @property
    def mismatched_workers(self) -> list[str]:
        """The workers whose state was not the run's; valid once `is_complete`."""
        return sorted(w for w, state in self._states.items() if state != self.state_digest)


def _catch_up(member: Member, step: int) -> Replay:
    member.state = MemberState.LOADING
    member.begin_replay()
    return Replay(member.name, step, None)


class EarlyStopping:
    """Decides whether a run stops early because a metric no longer improves.

    The decision depends on the metrics of all evaluations so far, so a restart does not change it.

    Args:
        spec: The metric and its limits; None: never stop.
        earlier: Metrics from before a restart.
    """

    def __init__(self, spec: StopSpec | None, earlier: MetricsByStep) -> None:
        self._spec = spec
        self._values: dict[int, float] = {}
        for step, metrics in earlier.items():
            self._add(step, metrics)

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> str:
        """Take the metrics after `step` steps.

        Returns:
            Why the run stops; empty if it continues.
        """
        if self._spec is None:
            return ""
        self._add(step, metrics)
        best, since = self._best_step()
        if since < self._spec.patience:
            return ""
        value = self._values.get(best, math.nan)
        summary = f"stopped early: {self._spec.figure} was best after {best} steps ({value:.6g})"
        if self._spec.baseline == "best":
            return (
                f"{summary}; no improvement above {self._spec.min_delta:g} in {since} evaluations"
            )
        return f"{summary}, with no improvement in {since} evaluations since"

    def is_best(self, step: int) -> bool:
        """Return whether the state after `step` steps is the best so far."""
        return self._spec is not None and bool(self._values) and self._best_step()[0] == step

    def _add(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._spec is not None and self._spec.figure in metrics:
            self._values[step] = metrics[self._spec.figure]

    def _best_step(self) -> tuple[int, int]:
        """Return the best step, and the number of evaluations since an improvement of at least
        `min_delta`."""
        assert self._spec is not None
        sign = 1.0 if self._spec.better == "higher" else -1.0
        best_step, best_value, since = 0, -math.inf, 0
        for step in sorted(self._values):
            value = sign * self._values[step]
            min_delta = self._spec.min_delta if best_value > -math.inf else 0.0
            is_improvement = value > best_value + min_delta
            since = 0 if is_improvement else since + 1
            if is_improvement or (self._spec.baseline == "best" and value > best_value):
                best_step, best_value = step, value
        return best_step, since
