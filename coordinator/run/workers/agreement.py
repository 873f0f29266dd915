"""Whether all replicas have the same state after a step: the commit barrier.

Pure. The coordinator's own replica arbitrates: a worker whose digest differs from the replica's is
wrong. The next commit waits until every worker that was active at the last one has answered.

After a restart the replica takes logged steps again while workers continue. Until it has caught
up, the workers' answers must be equal among themselves, for a few steps at most; then it judges.
"""

from __future__ import annotations

from typing import Final

_STEPS_KEPT: Final = 4
MOST_STEPS_AHEAD: Final = 3
"""How many steps workers may be ahead of a replica that catches up; their answers are kept."""


class Agreement:
    """Answers by step, and the workers whose answer to the newest step is missing.

    Args:
        step: Steps committed so far.
        catching_up: Whether the replica has yet to take some of them.
        known: Digest of the state after those steps, if known regardless.
        ahead: How many steps workers may be ahead of a replica that catches up.
    """

    def __init__(
        self,
        step: int = 0,
        *,
        catching_up: bool = False,
        known: str | None = None,
        ahead: int = MOST_STEPS_AHEAD,
    ) -> None:
        self._ahead = ahead
        self._arbiter: dict[int, str] = {} if known is None else {step: known}
        self._answers: dict[int, dict[str, str]] = {}
        self._missing: set[str] = set()
        self._newest = step
        self._replica_missing = catching_up
        self._behind_since: int | None = step if catching_up else None

    @property
    def catching_up(self) -> bool:
        """Whether the replica still takes steps that were committed before a restart."""
        return self._behind_since is not None

    @property
    def reached(self) -> bool:
        """Whether the next step may be committed."""
        if self._behind_since is None:
            return not self._missing and not self._replica_missing
        answers = self._answers.get(self._newest, {})
        digests = {answers.get(worker) for worker in self._missing}
        steps_ahead = self._newest - self._behind_since
        return None not in digests and len(digests) <= 1 and steps_ahead < self._ahead

    @property
    def waiting_for(self) -> list[str]:
        """Workers whose answer is missing, or not yet judged."""
        return sorted(self._missing)

    @property
    def silent(self) -> list[str]:
        """Workers that have not answered to the newest step at all."""
        return sorted(self._missing.difference(self._answers.get(self._newest, {})))

    def digest(self, step: int) -> str | None:
        """Return the replica's own digest after `step` steps, while it is kept."""
        return self._arbiter.get(step)

    def expect(self, step: int, workers: list[str]) -> None:
        """Note a commit: these workers and the replica will have taken `step` steps."""
        self._newest = step
        self._missing = set(workers)
        self._replica_missing = True
        for old in [s for s in (*self._arbiter, *self._answers) if s <= step - _STEPS_KEPT]:
            self._arbiter.pop(old, None)
            self._answers.pop(old, None)

    def wait_for(self, worker: str) -> None:
        """Wait for this worker too before the next commit."""
        self._missing.add(worker)

    def replica_answer(self, step: int, digest: str) -> None:
        """Take the replica's own answer, which arbitrates."""
        self._arbiter[step] = digest
        if step == self._newest:
            self._replica_missing = False
            self._behind_since = None

    def answer(self, worker: str, step: int, digest: str) -> None:
        """Take a worker's answer."""
        self._answers.setdefault(step, {})[worker] = digest

    def lose(self, worker: str) -> None:
        """Discard a worker's answers."""
        self._missing.discard(worker)
        for answers in self._answers.values():
            answers.pop(worker, None)

    def judge(self, step: int) -> tuple[list[str], list[str]]:
        """Return the workers that agree with the replica about a step, and those that do not.

        Each answer is judged once, as soon as the replica's digest is known.
        """
        arbiter_digest = self._arbiter.get(step)
        if arbiter_digest is None:
            return [], []
        answers = self._answers.pop(step, {})
        agreed = sorted(name for name, digest in answers.items() if digest == arbiter_digest)
        unequal = sorted(answers.keys() - set(agreed))
        if step == self._newest:
            self._missing.difference_update(agreed)
        return agreed, unequal
