"""What is committed of a run, whoever asks: it must be what the undisturbed run makes.

It outlives coordinators. Commits enter when they are first told to anyone, or found on disk by a
coordinator that starts; from then on nothing may say otherwise.
"""

from __future__ import annotations

import math
from collections import Counter

from coordinator.run.actions import Finish
from coordinator.run.restart import CommitRecord, Resumption
from protocol.exact.replica import Replica
from protocol.wire.messages import Commit
from tests.simulation.disk import Found, MemoryDirectory
from tests.simulation.job import Job, Taken


class Ledger:
    """One run, from its first coordinator to its last.

    Attributes:
        skips: For each committed step, whether it was skipped.
        flavour: Whose initial state it started from.
        outcome: How it ended, once it has.
        excused: Workers that the schedule has spoilt, for a halt to name.
        counts: What was reported, by event.
        evaluated_step: Steps committed at the newest evaluation.
    """

    def __init__(self, run_id: str, job: Job, directory: MemoryDirectory) -> None:
        self.run_id = run_id
        self.job = job
        self.directory = directory
        self.skips: tuple[bool, ...] = ()
        self.flavour = 0
        self.outcome: Finish | None = None
        self.excused: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.evaluated_step = -1
        self._durable: set[tuple[int, int, int]] = set()

    def expected(self, step: int) -> Taken:
        """The undisturbed run after so many steps."""
        return self.job.undisturbed(self.skips[:step], self.flavour)

    def synced(self, record: CommitRecord) -> None:
        """The log has it, and was still its coordinator's after that."""
        commit = record.commit
        if commit.epoch == self.directory.epoch:
            self._durable.add((commit.epoch, commit.step, commit.attempt))

    def told(self, commit: Commit) -> None:
        """A coordinator broadcasts a commit."""
        place = (commit.epoch, commit.step, commit.attempt)
        assert place in self._durable, "a commit is told before it is durable, or by a side cut off"
        self._note(commit.step, skipped=commit.scalars is None)
        taken = self.expected(commit.step + 1)
        assert commit.scalars == taken.scalars
        assert commit.averages_digest == taken.averages_digest
        assert commit.scalars is None or commit.loss == taken.loss

    def check_terms(self, signatures: set[str], *, mixed: bool) -> None:
        """Whose bits are in it is known to a restart."""
        terms = self.directory.terms
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

    def found(self, found: Found | None) -> None:
        """A coordinator starts, and finds this."""
        if found is None:
            assert not self.skips, "the run was begun, and begins anew"
            return
        resumption = found.resumption
        assert len(found.committed) >= len(self.skips), "a commit that was told is lost"
        for step, skipped in enumerate(found.committed):
            self._note(step, skipped=skipped)
        self._check_losses(resumption)
        if self.job.spec.log == "full":
            assert resumption.step == len(self.skips)

    def _check_losses(self, resumption: Resumption) -> None:
        assert len(resumption.losses) == resumption.step
        self.check_losses(list(resumption.losses))
        applied = resumption.step - sum(self.skips[: resumption.step])
        assert resumption.optimizer_step == applied

    def check_losses(self, losses: list[float]) -> None:
        """The losses of the first so many steps."""
        for step, loss in enumerate(losses):
            known = self.expected(step + 1).loss
            assert loss == known or (self.skips[step] and math.isnan(loss))

    def worker_is(self, step: int, digest: str) -> None:
        """A worker that nobody has spoilt has this state after so many steps."""
        assert step <= len(self.skips), "a worker is ahead of what is durable"
        if step:  # before that it may start from other weights
            assert digest == self.expected(step).state_digest, f"a worker is wrong at {step} steps"

    def replica_is(self, replica: Replica) -> str:
        """A coordinator's replica is in this state; gives its digest."""
        digest = replica.state_digest()
        assert replica.step <= len(self.skips)
        expected = self.expected(replica.step).state_digest
        assert digest == expected, f"the state after {replica.step} steps is another"
        return digest

    def begins_with(self, replica: Replica) -> str:
        """State 0 has come from a worker; it is the run's once it is saved."""
        digest = replica.state_digest()
        assert digest in self._initial_digests()
        return digest

    def saved(self, replica: Replica) -> None:
        """A checkpoint is there."""
        if not self.skips and not replica.step:
            self.flavour = self._initial_digests().index(replica.state_digest())
        self.replica_is(replica)

    def _initial_digests(self) -> list[str]:
        return [self.job.undisturbed((), flavour).state_digest for flavour in (0, 1)]

    def ended(self, outcome: Finish, replica: Replica | None, losses: list[float]) -> None:
        """The run is over."""
        assert self.outcome is None, "a run ends once"
        self.outcome = outcome
        self.check_losses(losses)
        if outcome.outcome == "failed" or replica is None or not self.directory.saved:
            return
        self.replica_is(replica)
        assert replica.step == len(losses)
        # Steps whose gradients are not kept may have been left to be done again.
        assert replica.step == len(self.skips) or self.job.spec.log == "checkpoint"
        if outcome.outcome == "finished":
            assert replica.step == self.job.spec.steps
            assert self.evaluated_step == replica.step, "the trained state is evaluated"
        if replica.step:
            assert max(self.directory.saved) == replica.step, "the last state is saved"

    def check_halt(self, reason: str) -> None:
        """The schedule made a cause for it, and the reason names it."""
        causes = (
            "operator", "non-finite gradient in block", "non-finite loss", "on device",
            "input/output",
        )  # fmt: skip
        named = [name for name in self.excused if repr(name) in reason]
        assert named or any(cause in reason.lower() for cause in causes), f"no cause for: {reason}"
