"""The commit barrier: whether all replicas have the same state after a step.

Pure. The coordinator's own replica arbitrates: a worker whose digest differs from the replica's is
wrong. The next commit waits until every worker that was active at the last commit has answered.

After a restart the replica applies logged steps again while workers continue. Until it has caught
up, for a few steps at most, the workers' answers must equal each other; then they are compared with
the replica's.
"""

from __future__ import annotations

from typing import Final

_STEPS_KEPT: Final = 4
"""For how many steps digests and answers are kept."""
MOST_STEPS_AHEAD: Final = 3
"""How many steps workers may be ahead of a replica that catches up; less than `_STEPS_KEPT`, so
that their answers can still be compared with its digests."""


class Agreement:
    """The answers to commits by step, and the workers that the next commit waits for.

    Args:
        step: Number of steps committed so far.
        catching_up: Whether the replica has not yet applied all of these steps.
        known_digest: Digest of the state after these steps, if it is known without the replica.
        most_steps_ahead: How many steps workers may be ahead of a replica that catches up.
    """

    def __init__(
        self,
        step: int = 0,
        *,
        catching_up: bool = False,
        known_digest: str | None = None,
        most_steps_ahead: int = MOST_STEPS_AHEAD,
    ) -> None:
        self._most_steps_ahead = most_steps_ahead
        self._replica_digests: dict[int, str] = {} if known_digest is None else {step: known_digest}
        self._answers: dict[int, dict[str, str]] = {}
        self._awaited: set[str] = set()
        self._newest_step = step
        self._is_replica_awaited = catching_up
        self._behind_since_step: int | None = step if catching_up else None

    @property
    def is_catching_up(self) -> bool:
        """Whether the replica is still applying steps that were committed before a restart."""
        return self._behind_since_step is not None

    @property
    def is_reached(self) -> bool:
        """Whether the next step may be committed."""
        if self._behind_since_step is None:
            return not self._awaited and not self._is_replica_awaited
        answers = self._answers.get(self._newest_step, {})
        digests = {answers.get(worker) for worker in self._awaited}
        steps_ahead = self._newest_step - self._behind_since_step
        return None not in digests and len(digests) <= 1 and steps_ahead < self._most_steps_ahead

    @property
    def awaited_workers(self) -> list[str]:
        """Workers whose answer is missing, not yet compared with the replica's, or different."""
        return sorted(self._awaited)

    @property
    def silent_workers(self) -> list[str]:
        """Awaited workers whose answer to the newest step is missing, or was compared and
        differed."""
        return sorted(self._awaited.difference(self._answers.get(self._newest_step, {})))

    def digest(self, step: int) -> str | None:
        """Return the replica's digest after `step` steps; None if unknown or no longer kept."""
        return self._replica_digests.get(step)

    def expect_answers(self, step: int, workers: list[str]) -> None:
        """Note a commit: expect answers after `step` steps from these workers and the replica."""
        self._newest_step = step
        self._awaited = set(workers)
        self._is_replica_awaited = True
        for old_step in [
            s for s in (*self._replica_digests, *self._answers) if s <= step - _STEPS_KEPT
        ]:
            self._replica_digests.pop(old_step, None)
            self._answers.pop(old_step, None)

    def wait_for(self, worker: str) -> None:
        """Make the next commit wait for this worker too."""
        self._awaited.add(worker)

    def take_replica_answer(self, step: int, digest: str) -> None:
        """Take the replica's own answer, which arbitrates."""
        self._replica_digests[step] = digest
        if step == self._newest_step:
            self._is_replica_awaited = False
            self._behind_since_step = None

    def take_answer(self, worker: str, step: int, digest: str) -> None:
        """Take a worker's answer."""
        self._answers.setdefault(step, {})[worker] = digest

    def lose(self, worker: str) -> None:
        """Discard a worker's answers, and stop waiting for it."""
        self._awaited.discard(worker)
        for answers in self._answers.values():
            answers.pop(worker, None)

    def judge(self, step: int) -> tuple[list[str], list[str]]:
        """Return the workers that agree with the replica about a step, and those that do not.

        Each answer is judged once, as soon as the replica's digest is known.
        """
        replica_digest = self._replica_digests.get(step)
        if replica_digest is None:
            return [], []
        answers = self._answers.pop(step, {})
        agreeing = sorted(name for name, digest in answers.items() if digest == replica_digest)
        differing = sorted(answers.keys() - set(agreeing))
        if step == self._newest_step:
            self._awaited.difference_update(agreeing)
        return agreeing, differing
