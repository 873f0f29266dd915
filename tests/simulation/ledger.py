"""What is committed of a run, whoever asks: it must be what the undisturbed run makes.

It outlives coordinators. Commits enter when they are first told to anyone, or found on disk by a
coordinator that starts; from then on nothing may say otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coordinator.disk.claim import stored_epoch
from coordinator.run.actions import Finish
from coordinator.service.accepted_run import AcceptedRun
from coordinator.storage.checkpoint import checkpoint_steps
from coordinator.storage.run_directory import RunDirectory
from protocol.exact.replica import Replica
from protocol.wire.messages import Commit
from tests.simulation.job import Job, Taken

_MAY_FAIL: Final = ("scripted to fail", "halted: ", "no space left", "input/output")
"""Nobody can take part, an operator drained a run that was halted, the disk refused before it had
begun."""


class Ledger:
    """One run, from its first coordinator to its last.

    Attributes:
        run_id: The run's, once it is accepted.
        skips: For each committed step, whether it was skipped.
        flavour: Whose initial state it started from.
        outcome: How it ended, once it has.
        excused: Workers that the schedule has spoilt, for a halt to name.
        counts: What was reported, by event.
        evaluated_step: Steps committed at the newest evaluation.
        anew: How often the step in progress was begun anew.
    """

    def __init__(self, job: Job, path: Path) -> None:
        self.run_id = ""
        self.job = job
        self.directory = RunDirectory(path)
        self.skips: tuple[bool, ...] = ()
        self.flavour = 0
        self.outcome: Finish | None = None
        self.excused: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.evaluated_step = -1
        self.anew = 0
        self._started = False
        self._durable: set[tuple[int, int, int]] = set()

    def expected(self, step: int) -> Taken:
        """The undisturbed run after so many steps."""
        return self.job.undisturbed(self.skips[:step], self.flavour)

    def synced(self, commit: Commit) -> None:
        """The log has it, and was still its coordinator's after that."""
        if commit.epoch == stored_epoch(self.directory.path):
            self._durable.add((commit.epoch, commit.step, commit.attempt))

    def told(self, commit: Commit) -> None:
        """A coordinator broadcasts a commit."""
        place = (commit.epoch, commit.step, commit.attempt)
        assert place in self._durable, "a commit is told before it is durable, or by a side cut off"
        assert commit.attempt <= self.anew, "an attempt that nothing has made needful"
        self.anew = 0
        self._note(commit.step, skipped=commit.scalars is None)
        taken = self.expected(commit.step + 1)
        assert commit.scalars == taken.scalars
        assert commit.averages_digest == taken.averages_digest
        assert commit.scalars is None or commit.loss == taken.loss

    def check_terms(self, signatures: set[str], *, mixed: bool) -> None:
        """Whose bits are in it is known to a restart."""
        terms = self.directory.read_terms()
        if not signatures and terms is None:
            return  # steps were skipped before anyone computed
        assert terms is not None, "terms are not remembered"
        assert set(terms.signatures) == signatures
        assert terms.mixed == mixed

    def _note(self, step: int, *, skipped: bool) -> None:
        if step < len(self.skips):
            assert self.skips[step] == skipped, f"step {step} was committed otherwise before"
        else:
            assert step == len(self.skips), "a step was left out"
            self.skips = (*self.skips, skipped)

    def found(self, accepted: AcceptedRun) -> None:
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
        assert len(resumption.losses) == resumption.step
        self.check_losses(resumption.losses)
        applied = resumption.step - sum(self.skips[: resumption.step])
        assert resumption.optimizer_step == applied
        if self.job.spec.log == "full":
            assert resumption.step == len(self.skips)

    def check_losses(self, losses: Sequence[float]) -> None:
        """The losses of the first so many steps."""
        for step, loss in enumerate(losses):
            known = self.expected(step + 1).loss
            assert loss == known or (self.skips[step] and math.isnan(loss))

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
        assert self.outcome is None, "a run ends once"
        self.outcome = outcome
        self.check_losses(losses)
        if outcome.outcome == "failed":
            known = any(cause in outcome.reason.lower() for cause in _MAY_FAIL)
            assert known, f"no cause for the run's failing: {outcome.reason}"
        saved = checkpoint_steps(self.directory.checkpoints)
        if outcome.outcome == "failed" or replica is None or not saved:
            return
        self.replica_is(replica.step, replica.state_digest())
        assert replica.step == len(losses)
        # Steps whose gradients are not kept may have been left to be done again.
        assert replica.step == len(self.skips) or self.job.spec.log == "checkpoint"
        if outcome.outcome == "finished":
            assert replica.step == self.job.spec.steps
            assert self.evaluated_step == replica.step, "the trained state is evaluated"
        if replica.step:
            assert max(saved) == replica.step, "the last state is saved"
        result = self.directory.read_result()
        assert result is not None
        assert result["outcome"] == outcome.outcome
        assert result["weights_digest"] == replica.weights_digest()

    def found_over(self) -> None:
        """A coordinator was killed when all was written, and nobody had heard."""
        result = self.directory.read_result()
        assert result is not None
        replica = self.expected(result["steps"]).replica
        assert result["weights_digest"] == replica.weights_digest()
        self.outcome = Finish(result["outcome"], "found so", 0)

    def check_halt(self, reason: str) -> None:
        """The schedule made a cause for it, and the reason names it."""
        causes = (
            "operator", "non-finite gradient in block", "non-finite loss", "on device",
            "input/output", "no space left",
        )  # fmt: skip
        named = [name for name in self.excused if repr(name) in reason]
        assert named or any(cause in reason.lower() for cause in causes), f"no cause for: {reason}"
