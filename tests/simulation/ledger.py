"""Commits of a run, from all its coordinators: they must equal those of the undisturbed run.

The ledger outlives coordinators. It records a commit when a coordinator first broadcasts it, or
finds it on disk at its start; from then on nothing may contradict the commit.

There is one documented exception: until a restarted coordinator's replica has caught up, at most
three steps are committed on trust in the workers (`TrustedSums`). If a worker with a flipped bit
computed such a step, the ledger accepts the sums as sent; all later steps must follow from them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from blake3 import blake3

from coordinator.disk.directory_lock import stored_term
from coordinator.run.outputs.actions import Finish
from coordinator.run.outputs.restart import CommitRecord
from coordinator.service.run_instance import RunInstance
from coordinator.storage.directory.run_directory import RunDirectory
from coordinator.storage.states.checkpoint import checkpoint_steps
from protocol.exact.reduction.average import Array
from protocol.exact.replica import Replica
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.data import UserTaskData
from protocol.wire.messages import Commit
from tests.simulation.job import ExpectedStep, Job

_FAILURE_CAUSES: Final = ("scripted to fail", "halted: ", "no space left", "input/output")
"""Reasons why a run may fail: no worker can take part; an operator drained a halted run; the disk
failed before the run began."""
_READ_FROM_RESULT: Final = "read from the result file"
_MAX_TRUSTED_STEPS: Final = 3


class TrustedSums(NamedTuple):
    """A step's commit and averages, by a worker with a flipped bit, when no replica could check
    them."""

    commit: Commit
    averages: list[Array]


class Ledger:
    """One run, from its first coordinator to its last.

    Attributes:
        run_id: Id of the run, once it is accepted.
        data: The file that workers fetch, if any.
        skips: For each committed step, whether it was skipped.
        flavor: The flavor of the initial state.
        outcome: The outcome, once the run has ended.
        flipped_workers: Workers whose bits the simulation flipped; a halt may name them.
        counts: Number of events by kind.
        evaluated_step: Steps committed at the newest evaluation.
        restarts: Number of restarts of the step in progress.
        has_rolled_back: Whether a step with trusted sums had to be repeated.
        differing_step: A repeated step whose averages differ from the first time; -1 if none.
    """

    def __init__(self, job: Job, path: Path) -> None:
        self.run_id = ""
        self.job = job
        self.directory = RunDirectory(path)
        self.data: Path | None = None
        self.skips: tuple[bool, ...] = ()
        self.flavor = 0
        self.outcome: Finish | None = None
        self.flipped_workers: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.evaluated_step = -1
        self.restarts = 0
        self.has_rolled_back = False
        self.differing_step = -1
        self._started = False
        self._durable: set[tuple[int, int, int]] = set()
        self._trust_candidates: dict[tuple[int, int, int], TrustedSums] = {}
        self._trusted_sums: dict[int, TrustedSums] = {}
        self._steps_after_trust: dict[int, ExpectedStep] = {}

    @property
    def spec(self) -> RunSpec:
        """Return the run spec as submitted, with the data file."""
        data = None if self.data is None else UserTaskData(train=str(self.data))
        return self.job.spec.model_copy(update={"data": data})

    def expected(self, step: int) -> ExpectedStep:
        """Return the undisturbed run after this many steps, continued from the newest trusted
        step."""
        if all(trusted_step >= step for trusted_step in self._trusted_sums):
            return self.job.undisturbed(self.skips[:step], self.flavor)
        if step not in self._steps_after_trust:
            self._steps_after_trust[step] = self._compute_next(
                self.expected(step - 1).replica, step - 1
            )
        return self._steps_after_trust[step]

    def _compute_next(self, before: Replica, step: int) -> ExpectedStep:
        if step not in self._trusted_sums:
            return self.job.step_from(before, skip=self.skips[step])
        commit, averages = self._trusted_sums[step]
        assert commit.scalars is not None
        replica = before.copy()
        replica.apply(averages, commit.scalars)
        digest = replica.state_digest()
        return ExpectedStep(replica, digest, commit.loss, commit.averages_digest, commit.scalars)

    def record_trusted_commit(
        self, record: CommitRecord, averages: list[Array], *, since: int
    ) -> None:
        """Record that a coordinator commits a step before it can compare the workers' states.

        Args:
            record: The commit, and the workers of its subtrees.
            averages: The step's averages.
            since: The first step that the coordinator commits in this way.
        """
        commit = record.commit
        assert commit.step - since < _MAX_TRUSTED_STEPS, "too many steps are committed on trust"
        computing_workers = {
            worker for contributions in record.counted or () for worker in contributions
        }
        computing_workers |= set(() if record.embedded is None else record.embedded.of)
        if computing_workers & self.flipped_workers:
            step_id = (commit.term, commit.step, commit.attempt)
            self._trust_candidates[step_id] = TrustedSums(
                commit, [values.copy() for values in averages]
            )

    def _settle_trust(self, commit: Commit) -> None:
        """Decide whether a valid commit has the sums of the undisturbed run, or trusted ones."""
        step_id = (commit.term, commit.step, commit.attempt)
        if commit.step in self._trusted_sums or step_id not in self._trust_candidates:
            return
        if commit.averages_digest != self.expected(commit.step + 1).averages_digest:
            self._trusted_sums[commit.step] = self._trust_candidates[step_id]
            self._steps_after_trust.clear()

    def _roll_back(self, step: int) -> None:
        """Forget trusted sums from this step on: the steps are repeated."""
        steps_to_drop = [
            trusted_step for trusted_step in self._trusted_sums if trusted_step >= step
        ]
        self.has_rolled_back = self.has_rolled_back or bool(steps_to_drop)
        for trusted_step in steps_to_drop:
            del self._trusted_sums[trusted_step]
            self._steps_after_trust.clear()

    def record_sync(self, commit: Commit) -> None:
        """Record that the log synced a commit, if its coordinator still owned the directory
        then."""
        if commit.term == stored_term(self.directory.path):
            self._durable.add((commit.term, commit.step, commit.attempt))

    def check_commit(self, commit: Commit) -> None:
        """Check a commit that a coordinator broadcasts, and record it."""
        step_id = (commit.term, commit.step, commit.attempt)
        assert step_id in self._durable, (
            "a commit is broadcast before it is durable, or by a disconnected coordinator"
        )
        phases = 2 if self.job.embeds else 1
        limit = phases * (self.restarts + 1) - 1
        assert commit.attempt <= limit, "an attempt number without a cause"
        self.restarts = 0
        self._record_step(commit.step, is_skipped=commit.scalars is None)
        self._settle_trust(commit)
        may_differ = self.has_rolled_back or commit.step in self._trusted_sums
        assert may_differ or self.differing_step != commit.step, (
            "a step is repeated with another result"
        )
        expected_state = self.expected(commit.step + 1)
        assert commit.averages_digest == expected_state.averages_digest, (
            "a commit has other averages"
        )
        assert commit.scalars == expected_state.scalars, "a commit has other scalars"
        assert commit.scalars is None or commit.loss == expected_state.loss, (
            "a commit has another loss"
        )

    def check_admission_record(self, profiles: set[str], *, mixed: bool) -> None:
        """Check that the admission record has the numerics profiles whose bits the run contains."""
        record = self.directory.read_admission_record()
        if not profiles and record is None:
            return  # steps were skipped before anyone computed
        assert record is not None, "the admission record is missing"
        assert set(record.signatures) == profiles
        assert record.mixed == mixed

    def _record_step(self, step: int, *, is_skipped: bool) -> None:
        if step < len(self.skips):
            assert self.skips[step] == is_skipped, f"step {step}: skipped once, and once applied"
        else:
            assert step == len(self.skips), "a step is missing"
            self.skips = (*self.skips, is_skipped)

    def check_start(self, accepted: RunInstance) -> None:
        """Check the state that a starting coordinator finds."""
        self.restarts = 0
        if accepted.restart is None:
            assert not self.skips, "a run that has commits begins again"
            return
        recovery, resumption = accepted.restart.recovery, accepted.restart.resumption
        if not self.skips and not resumption.step and resumption.state_digest is not None:
            self._record_initial_state(resumption.state_digest)
        found_skips = [math.isnan(loss) for loss in recovery.losses]
        found_skips += [record.commit.scalars is None for record in recovery.redo]
        assert len(found_skips) >= len(self.skips), "a broadcast commit is lost"
        for step, skipped in enumerate(found_skips):
            self._record_step(step, is_skipped=skipped)
        for logged_step in recovery.logged:
            self._settle_trust(logged_step.record.commit)
        self._roll_back(resumption.step)
        assert len(resumption.losses) == resumption.step
        self.check_losses(resumption.losses)
        optimizer_step = resumption.step - sum(self.skips[: resumption.step])
        assert resumption.optimizer_step == optimizer_step
        if self.job.spec.log == "full":
            assert resumption.step == len(self.skips)

    def check_losses(self, losses: Sequence[float]) -> None:
        """Check the losses of the first steps."""
        for step, loss in enumerate(losses):
            expected = self.expected(step + 1).loss
            assert loss == expected or (self.skips[step] and math.isnan(loss))

    def check_worker_state(self, step: int, digest: str) -> None:
        """Check the state that a worker without flipped bits reports after this many steps."""
        assert step <= len(self.skips), "a worker is ahead of what is durable"
        if step:  # before that it may start from other weights
            assert digest == self.expected(step).state_digest, f"a worker is wrong at {step} steps"

    def check_replica_state(self, step: int, digest: str) -> None:
        """Check the state of a coordinator's replica."""
        assert step <= len(self.skips)
        if step or self._started:
            expected = self.expected(step).state_digest
            assert digest == expected, f"the state after {step} steps is not the undisturbed run's"

    def check_checkpoint(self, step: int, digest: str) -> None:
        """Check a checkpoint that a coordinator wrote."""
        if not self.skips and not step:
            self._record_initial_state(digest)
        self.check_replica_state(step, digest)

    def _record_initial_state(self, digest: str) -> None:
        initial = [self.job.undisturbed((), flavor).state_digest for flavor in (0, 1)]
        assert digest in initial, "no worker starts from this state 0"
        self.flavor = initial.index(digest)
        self._started = True

    def check_end(self, outcome: Finish, replica: Replica | None, losses: list[float]) -> None:
        """Check the outcome and the final state of the run."""
        # A successor may have read the result before its writer reported it, or written it too.
        earlier_outcome = self.outcome
        is_result_read = earlier_outcome is not None and (
            earlier_outcome.reason,
            earlier_outcome.outcome,
        ) == (
            _READ_FROM_RESULT,
            outcome.outcome,
        )
        assert earlier_outcome in {None, outcome} or is_result_read
        self.outcome = outcome
        self.check_losses(losses)
        if outcome.outcome == "failed":
            has_cause = any(cause in outcome.reason.lower() for cause in _FAILURE_CAUSES)
            assert has_cause, f"no cause for the run's failing: {outcome.reason}"
        saved_steps = checkpoint_steps(self.directory.checkpoints)
        if outcome.outcome == "failed" or replica is None or not saved_steps:
            return
        self.check_replica_state(replica.step, replica.state_digest())
        assert replica.step == len(losses)
        # Steps without logged gradients may still have to be repeated.
        assert replica.step == len(self.skips) or self.job.spec.log == "checkpoint"
        if outcome.outcome == "finished":
            assert replica.step == self.job.steps
            is_evaluated = self.evaluated_step == replica.step or self.job.captures
            assert is_evaluated, "the trained state is evaluated"
        if replica.step:
            assert max(saved_steps) == replica.step, "the last state is saved"
        result = self.directory.read_result()
        assert result is not None
        assert result["outcome"] == outcome.outcome
        assert result["weights_digest"] == replica.weights_digest()
        self._check_files(result)

    def _check_files(self, result: dict[str, Any]) -> None:
        """Check that a capture has written the files of the undisturbed capture."""
        if not self.job.captures or result["outcome"] != "finished":
            return
        assert result["exported"] == self.job.files(self.skips), "the capture has other files"
        for name, digest in result["exported"].items():
            content = (self.directory.path / name).read_bytes()
            assert blake3(content).hexdigest() == digest, f"{name} is not what the result says"

    def check_unreported_result(self) -> None:
        """Check the result of a run whose coordinator was killed before it could report the end."""
        result = self.directory.read_result()
        assert result is not None
        replica = self.expected(result["steps"]).replica
        assert result["weights_digest"] == replica.weights_digest()
        self._check_files(result)
        self.outcome = Finish(result["outcome"], _READ_FROM_RESULT, 0)

    def check_halt(self, reason: str) -> None:
        """Check that the simulation caused this halt, and that the reason names the cause."""
        causes = (
            "operator", "non-finite gradient in block", "non-finite difference in block",
            "non-finite loss", "non-finite embedding", "on device",
            "input/output", "no space left",
        )  # fmt: skip
        named_workers = [name for name in self.flipped_workers if repr(name) in reason]
        assert named_workers or any(cause in reason.lower() for cause in causes), (
            f"no cause for: {reason}"
        )
