"""Commits of a run, whichever coordinator makes them: they must equal the undisturbed run.

It survives coordinators. A commit is recorded when it is first sent, or found on disk by a starting
coordinator; from then on nothing may contradict it.

There is one documented exception: until a restarted coordinator's replica has caught up, at most
three steps rest on the workers (`OnTrust`). If a worker that computed such a step is spoilt, the
ledger accepts its sums as sent; everything later must follow from them.
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
from protocol.spec.sections.data import OwnData
from protocol.wire.messages import Commit
from tests.simulation.job import Job, Taken

_MAY_FAIL: Final = ("scripted to fail", "halted: ", "no space left", "input/output")
"""Reasons: nobody can take part; an operator drained a halted run; the disk refused before the run
began."""


_FOUND: Final = "found so"
_MOST_ON_TRUST: Final = 3


class OnTrust(NamedTuple):
    """The sums of a step that a spoilt worker computed while no replica could compare."""

    commit: Commit
    averages: list[Array]


class Ledger:
    """One run, from its first coordinator to its last.

    Attributes:
        run_id: Id of the run, once it is accepted.
        data: The file that workers fetch, if there is one.
        skips: For each committed step, whether it was skipped.
        flavour: The flavour whose initial state it started from.
        outcome: The outcome, once it has ended.
        excused: Workers that the schedule has spoilt, which a halt may name.
        counts: Number of events by kind.
        evaluated_step: Steps committed at the newest evaluation.
        anew: Number of restarts of the step in progress.
        taken_back: Whether a step that rested on a spoilt worker had to be repeated.
        redone_otherwise: A repeated step whose averages differ from the first time.
    """

    def __init__(self, job: Job, path: Path) -> None:
        self.run_id = ""
        self.job = job
        self.directory = RunDirectory(path)
        self.data: Path | None = None
        self.skips: tuple[bool, ...] = ()
        self.flavour = 0
        self.outcome: Finish | None = None
        self.excused: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.evaluated_step = -1
        self.anew = 0
        self.taken_back = False
        self.redone_otherwise = -1
        self._started = False
        self._durable: set[tuple[int, int, int]] = set()
        self._may_count: dict[tuple[int, int, int], OnTrust] = {}
        self._on_trust: dict[int, OnTrust] = {}
        self._after_trust: dict[int, Taken] = {}

    @property
    def spec(self) -> RunSpec:
        """Return the spec as submitted."""
        data = None if self.data is None else OwnData(train=str(self.data))
        return self.job.spec.model_copy(update={"data": data})

    def expected(self, step: int) -> Taken:
        """Return the undisturbed run after this many steps, from the newest step taken on trust."""
        if all(trusted_step >= step for trusted_step in self._on_trust):
            return self.job.undisturbed(self.skips[:step], self.flavour)
        if step not in self._after_trust:
            self._after_trust[step] = self._follow(self.expected(step - 1).replica, step - 1)
        return self._after_trust[step]

    def _follow(self, before: Replica, step: int) -> Taken:
        if step not in self._on_trust:
            return self.job.step_from(before, skip=self.skips[step])
        commit, averages = self._on_trust[step]
        assert commit.scalars is not None
        replica = before.copy()
        replica.apply(averages, commit.scalars)
        digest = replica.state_digest()
        return Taken(replica, digest, commit.loss, commit.averages_digest, commit.scalars)

    def trusts(self, record: CommitRecord, averages: list[Array], *, since: int) -> None:
        """A coordinator commits a step without having compared the workers' states.

        Args:
            record: The commit, and the workers of its subtrees.
            averages: Its averages.
            since: The first step that it commits in this way.
        """
        commit = record.commit
        assert commit.step - since < _MOST_ON_TRUST, "too many steps rest on the workers"
        computed = {worker for contributions in record.counted or () for worker in contributions}
        computed |= set(() if record.embedded is None else record.embedded.of)
        if computed & self.excused:
            step_id = (commit.term, commit.step, commit.attempt)
            self._may_count[step_id] = OnTrust(commit, [values.copy() for values in averages])

    def _settle_trust(self, commit: Commit) -> None:
        """A commit counts: with the sums of the undisturbed run, or of a spoilt worker."""
        step_id = (commit.term, commit.step, commit.attempt)
        if commit.step in self._on_trust or step_id not in self._may_count:
            return
        if commit.averages_digest != self.expected(commit.step + 1).averages_digest:
            self._on_trust[commit.step] = self._may_count[step_id]
            self._after_trust.clear()

    def _take_back(self, step: int) -> None:
        """Steps from this one on are repeated, because their averages were not kept."""
        steps_to_drop = [trusted_step for trusted_step in self._on_trust if trusted_step >= step]
        self.taken_back = self.taken_back or bool(steps_to_drop)
        for trusted_step in steps_to_drop:
            del self._on_trust[trusted_step]
            self._after_trust.clear()

    def synced(self, commit: Commit) -> None:
        """The log has synced a commit, and its coordinator still owned the directory then."""
        if commit.term == stored_term(self.directory.path):
            self._durable.add((commit.term, commit.step, commit.attempt))

    def broadcast(self, commit: Commit) -> None:
        """A coordinator broadcasts a commit."""
        step_id = (commit.term, commit.step, commit.attempt)
        assert step_id in self._durable, (
            "a commit is told before it is durable, or by a side cut off"
        )
        phases = 2 if self.job.embeds else 1
        limit = phases * (self.anew + 1) - 1
        assert commit.attempt <= limit, "an attempt that nothing has made needful"
        self.anew = 0
        self._note(commit.step, skipped=commit.scalars is None)
        self._settle_trust(commit)
        rests = self.taken_back or commit.step in self._on_trust
        assert rests or self.redone_otherwise != commit.step, "a step is done again otherwise"
        expected_state = self.expected(commit.step + 1)
        assert commit.averages_digest == expected_state.averages_digest, (
            "a commit has other averages"
        )
        assert commit.scalars == expected_state.scalars, "a commit has other scalars"
        assert commit.scalars is None or commit.loss == expected_state.loss, (
            "a commit has another loss"
        )

    def check_terms(self, profiles: set[str], *, mixed: bool) -> None:
        """A restart must know whose bits a run contains."""
        terms = self.directory.read_admission_record()
        if not profiles and terms is None:
            return  # steps were skipped before anyone computed
        assert terms is not None, "terms are not remembered"
        assert set(terms.signatures) == profiles
        assert terms.mixed == mixed

    def _note(self, step: int, *, skipped: bool) -> None:
        if step < len(self.skips):
            assert self.skips[step] == skipped, f"step {step} was committed otherwise before"
        else:
            assert step == len(self.skips), "a step was left out"
            self.skips = (*self.skips, skipped)

    def found(self, accepted: RunInstance) -> None:
        """A coordinator starts, and finds this state."""
        self.anew = 0
        if accepted.restart is None:
            assert not self.skips, "the run was begun, and begins anew"
            return
        recovery, resumption = accepted.restart.recovery, accepted.restart.resumption
        if not self.skips and not resumption.step and resumption.state_digest is not None:
            self._starts_from(resumption.state_digest)
        is_skipped = [math.isnan(loss) for loss in recovery.losses]
        is_skipped += [record.commit.scalars is None for record in recovery.redo]
        assert len(is_skipped) >= len(self.skips), "a commit that was told is lost"
        for step, skipped in enumerate(is_skipped):
            self._note(step, skipped=skipped)
        for logged_step in recovery.logged:
            self._settle_trust(logged_step.record.commit)
        self._take_back(resumption.step)
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

    def worker_is(self, step: int, digest: str) -> None:
        """A worker that is not spoilt has this state after this many steps."""
        assert step <= len(self.skips), "a worker is ahead of what is durable"
        if step:  # before that it may start from other weights
            assert digest == self.expected(step).state_digest, f"a worker is wrong at {step} steps"

    def replica_is(self, step: int, digest: str) -> None:
        """A coordinator's replica has this state."""
        assert step <= len(self.skips)
        if step or self._started:
            expected = self.expected(step).state_digest
            assert digest == expected, f"the state after {step} steps is another"

    def saved(self, step: int, digest: str) -> None:
        """A checkpoint exists."""
        if not self.skips and not step:
            self._starts_from(digest)
        self.replica_is(step, digest)

    def _starts_from(self, digest: str) -> None:
        initial = [self.job.undisturbed((), flavour).state_digest for flavour in (0, 1)]
        assert digest in initial, "state 0 is nobody's"
        self.flavour = initial.index(digest)
        self._started = True

    def ended(self, outcome: Finish, replica: Replica | None, losses: list[float]) -> None:
        """The run has ended."""
        # A successor may have found the result before its writer reported it, or written it as
        # well.
        before = self.outcome
        is_result_read = before is not None and (before.reason, before.outcome) == (
            _FOUND,
            outcome.outcome,
        )
        assert before in {None, outcome} or is_result_read
        self.outcome = outcome
        self.check_losses(losses)
        if outcome.outcome == "failed":
            has_cause = any(cause in outcome.reason.lower() for cause in _MAY_FAIL)
            assert has_cause, f"no cause for the run's failing: {outcome.reason}"
        saved_steps = checkpoint_steps(self.directory.checkpoints)
        if outcome.outcome == "failed" or replica is None or not saved_steps:
            return
        self.replica_is(replica.step, replica.state_digest())
        assert replica.step == len(losses)
        # Steps whose gradients are not kept may remain to be repeated.
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
        """A capture must leave the files of the undisturbed one."""
        if not self.job.captures or result["outcome"] != "finished":
            return
        assert result["exported"] == self.job.files(self.skips), "the capture has other files"
        for name, digest in result["exported"].items():
            content = (self.directory.path / name).read_bytes()
            assert blake3(content).hexdigest() == digest, f"{name} is not what the result says"

    def found_over(self) -> None:
        """A coordinator was killed when everything was written, and nobody knew yet."""
        result = self.directory.read_result()
        assert result is not None
        replica = self.expected(result["steps"]).replica
        assert result["weights_digest"] == replica.weights_digest()
        self._check_files(result)
        self.outcome = Finish(result["outcome"], _FOUND, 0)

    def check_halt(self, reason: str) -> None:
        """The schedule must contain a cause for this halt, and the reason must name it."""
        causes = (
            "operator", "non-finite gradient in block", "non-finite difference in block",
            "non-finite loss", "non-finite embedding", "on device",
            "input/output", "no space left",
        )  # fmt: skip
        named_workers = [name for name in self.excused if repr(name) in reason]
        assert named_workers or any(cause in reason.lower() for cause in causes), (
            f"no cause for: {reason}"
        )
