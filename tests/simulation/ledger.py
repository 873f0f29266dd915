"""What is committed of a run, whoever asks: it must be what the undisturbed run makes.

It outlives coordinators. Commits enter when they are first told to anyone, or found on disk by a
coordinator that starts; from then on nothing may say otherwise.

There is one exception, which is documented: until a restarted coordinator's replica has caught up,
three steps at most rest on the workers (`OnTrust`). If one of those that computed such a step is
spoilt, its sums are taken as they were told; all that follows must follow from them.
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
from protocol.exact.reduction.float32 import Array
from protocol.exact.replica import Replica
from protocol.spec.run_spec import RunSpec
from protocol.spec.sections.data import OwnData
from protocol.wire.messages import Commit
from tests.simulation.job import Job, Taken

_MAY_FAIL: Final = ("scripted to fail", "halted: ", "no space left", "input/output")
"""Nobody can take part, an operator drained a run that was halted, the disk refused before it had
begun."""


_FOUND: Final = "found so"
_MOST_ON_TRUST: Final = 3


class OnTrust(NamedTuple):
    """A step that a spoilt worker has computed while nobody could compare: a commit's sums."""

    commit: Commit
    averages: list[Array]


class Ledger:
    """One run, from its first coordinator to its last.

    Attributes:
        run_id: The run's, once it is accepted.
        data: The file that workers fetch, if there is one.
        skips: For each committed step, whether it was skipped.
        flavour: Whose initial state it started from.
        outcome: How it ended, once it has.
        excused: Workers that the schedule has spoilt, for a halt to name.
        counts: What was reported, by event.
        evaluated_step: Steps committed at the newest evaluation.
        anew: How often the step in progress was begun anew.
        taken_back: Whether a step that rested on a spoilt worker was to be done again.
        redone_otherwise: A step that was done again, and has other averages than it had.
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
        """As it is submitted."""
        data = None if self.data is None else OwnData(train=str(self.data))
        return self.job.spec.model_copy(update={"data": data})

    def expected(self, step: int) -> Taken:
        """The undisturbed run after so many steps, from the newest that was taken on trust."""
        if all(trusted >= step for trusted in self._on_trust):
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
            record: The commit, and whose subtrees are in it.
            averages: What they make.
            since: The first step that it commits so.
        """
        commit = record.commit
        assert commit.step - since < _MOST_ON_TRUST, "too many steps rest on the workers"
        computed = {worker for way in record.counted or () for worker in way}
        computed |= set(() if record.embedded is None else record.embedded.of)
        if computed & self.excused:
            place = (commit.term, commit.step, commit.attempt)
            self._may_count[place] = OnTrust(commit, [values.copy() for values in averages])

    def _settle_trust(self, commit: Commit) -> None:
        """A commit counts: if not with the undisturbed run's sums, with a spoilt worker's."""
        place = (commit.term, commit.step, commit.attempt)
        if commit.step in self._on_trust or place not in self._may_count:
            return
        if commit.averages_digest != self.expected(commit.step + 1).averages_digest:
            self._on_trust[commit.step] = self._may_count[place]
            self._after_trust.clear()

    def _take_back(self, step: int) -> None:
        """Steps from this one on are done again, as their averages were not kept."""
        back = [trusted for trusted in self._on_trust if trusted >= step]
        self.taken_back = self.taken_back or bool(back)
        for trusted in back:
            del self._on_trust[trusted]
            self._after_trust.clear()

    def synced(self, commit: Commit) -> None:
        """The log has it, and was still its coordinator's after that."""
        if commit.term == stored_term(self.directory.path):
            self._durable.add((commit.term, commit.step, commit.attempt))

    def broadcast(self, commit: Commit) -> None:
        """A coordinator broadcasts a commit."""
        place = (commit.term, commit.step, commit.attempt)
        assert place in self._durable, "a commit is told before it is durable, or by a side cut off"
        phases = 2 if self.job.embeds else 1
        most = phases * (self.anew + 1) - 1
        assert commit.attempt <= most, "an attempt that nothing has made needful"
        self.anew = 0
        self._note(commit.step, skipped=commit.scalars is None)
        self._settle_trust(commit)
        rests = self.taken_back or commit.step in self._on_trust
        assert rests or self.redone_otherwise != commit.step, "a step is done again otherwise"
        taken = self.expected(commit.step + 1)
        assert commit.averages_digest == taken.averages_digest, "a commit has other averages"
        assert commit.scalars == taken.scalars, "a commit has other scalars"
        assert commit.scalars is None or commit.loss == taken.loss, "a commit has another loss"

    def check_terms(self, profiles: set[str], *, mixed: bool) -> None:
        """Whose bits are in it is known to a restart."""
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
        """A coordinator starts, and finds this."""
        self.anew = 0
        if accepted.restart is None:
            assert not self.skips, "the run was begun, and begins anew"
            return
        recovery, resumption = accepted.restart.recovery, accepted.restart.resumption
        if not self.skips and not resumption.step and resumption.state_digest is not None:
            self._starts_from(resumption.state_digest)
        committed = [math.isnan(loss) for loss in recovery.losses]
        committed += [record.commit.scalars is None for record in recovery.redo]
        assert len(committed) >= len(self.skips), "a commit that was told is lost"
        for step, skipped in enumerate(committed):
            self._note(step, skipped=skipped)
        for logged in recovery.logged:
            self._settle_trust(logged.record.commit)
        self._take_back(resumption.step)
        assert len(resumption.losses) == resumption.step
        self.check_losses(resumption.losses)
        applied = resumption.step - sum(self.skips[: resumption.step])
        assert resumption.optimizer_step == applied
        if self.job.spec.log == "full":
            assert resumption.step == len(self.skips)

    def check_losses(self, losses: Sequence[float]) -> None:
        """The losses of the first so many steps."""
        for step, loss in enumerate(losses):
            expected = self.expected(step + 1).loss
            assert loss == expected or (self.skips[step] and math.isnan(loss))

    def worker_is(self, step: int, digest: str) -> None:
        """A worker that nobody has spoilt has this state after so many steps."""
        assert step <= len(self.skips), "a worker is ahead of what is durable"
        if step:  # before that it may start from other weights
            assert digest == self.expected(step).state_digest, f"a worker is wrong at {step} steps"

    def replica_is(self, step: int, digest: str) -> None:
        """A coordinator's replica is in this state."""
        assert step <= len(self.skips)
        if step or self._started:
            expected = self.expected(step).state_digest
            assert digest == expected, f"the state after {step} steps is another"

    def saved(self, step: int, digest: str) -> None:
        """A checkpoint is there."""
        if not self.skips and not step:
            self._starts_from(digest)
        self.replica_is(step, digest)

    def _starts_from(self, digest: str) -> None:
        initial = [self.job.undisturbed((), flavour).state_digest for flavour in (0, 1)]
        assert digest in initial, "state 0 is nobody's"
        self.flavour = initial.index(digest)
        self._started = True

    def ended(self, outcome: Finish, replica: Replica | None, losses: list[float]) -> None:
        """The run is over."""
        # A successor may have found the result before its writer told of it, or written it as well.
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
        saved = checkpoint_steps(self.directory.checkpoints)
        if outcome.outcome == "failed" or replica is None or not saved:
            return
        self.replica_is(replica.step, replica.state_digest())
        assert replica.step == len(losses)
        # Steps whose gradients are not kept may have been left to be done again.
        assert replica.step == len(self.skips) or self.job.spec.log == "checkpoint"
        if outcome.outcome == "finished":
            assert replica.step == self.job.steps
            evaluated = self.evaluated_step == replica.step or self.job.captures
            assert evaluated, "the trained state is evaluated"
        if replica.step:
            assert max(saved) == replica.step, "the last state is saved"
        result = self.directory.read_result()
        assert result is not None
        assert result["outcome"] == outcome.outcome
        assert result["weights_digest"] == replica.weights_digest()
        self._check_files(result)

    def _check_files(self, result: dict[str, Any]) -> None:
        """A capture leaves the files of the undisturbed one."""
        if not self.job.captures or result["outcome"] != "finished":
            return
        assert result["exported"] == self.job.files(self.skips), "the capture has other files"
        for name, digest in result["exported"].items():
            content = (self.directory.path / name).read_bytes()
            assert blake3(content).hexdigest() == digest, f"{name} is not what the result says"

    def found_over(self) -> None:
        """A coordinator was killed when all was written, and nobody had heard."""
        result = self.directory.read_result()
        assert result is not None
        replica = self.expected(result["steps"]).replica
        assert result["weights_digest"] == replica.weights_digest()
        self._check_files(result)
        self.outcome = Finish(result["outcome"], _FOUND, 0)

    def check_halt(self, reason: str) -> None:
        """The schedule made a cause for it, and the reason names it."""
        causes = (
            "operator", "non-finite gradient in block", "non-finite difference in block",
            "non-finite loss", "non-finite embedding", "on device",
            "input/output", "no space left",
        )  # fmt: skip
        named = [name for name in self.excused if repr(name) in reason]
        assert named or any(cause in reason.lower() for cause in causes), f"no cause for: {reason}"
