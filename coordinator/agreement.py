"""Whether all replicas have the same state after a step: the commit barrier.

Pure. The coordinator's own replica arbitrates: a worker whose digest differs from its is the odd
one. The next commit waits until everyone who was active at the last one has answered alike.
"""

from __future__ import annotations

from typing import Final

_STEPS_KEPT: Final = 4


class Agreement:
    """Answers by step, and who is still owed for the newest one."""

    def __init__(self) -> None:
        self._settled: dict[int, str] = {}
        self._answers: dict[int, dict[str, str]] = {}
        self._owed: set[str] = set()
        self._replica_owed: int | None = None

    @property
    def reached(self) -> bool:
        """Whether nobody's answer to the newest commit is missing."""
        return not self._owed and self._replica_owed is None

    @property
    def waiting_for(self) -> list[str]:
        """Workers whose answer is missing."""
        return sorted(self._owed)

    def expect(self, step: int, workers: list[str]) -> None:
        """A commit went out: these and the replica will have taken `step` steps."""
        self._owed = set(workers)
        self._replica_owed = step
        for old in [s for s in (*self._settled, *self._answers) if s <= step - _STEPS_KEPT]:
            self._settled.pop(old, None)
            self._answers.pop(old, None)

    def settle(self, step: int, digest: str) -> None:
        """The replica's own answer."""
        self._settled[step] = digest
        if self._replica_owed == step:
            self._replica_owed = None

    def answer(self, worker: str, step: int, digest: str) -> None:
        """A worker's answer."""
        self._answers.setdefault(step, {})[worker] = digest

    def lose(self, worker: str) -> None:
        """Its answers no longer count."""
        self._owed.discard(worker)
        for answers in self._answers.values():
            answers.pop(worker, None)

    def judge(self, step: int) -> tuple[list[str], list[str]]:
        """Workers that agree with the replica about this step, and those that do not.

        Each answer is judged once, as soon as the replica's is there.
        """
        settled = self._settled.get(step)
        if settled is None:
            return [], []
        answers = self._answers.pop(step, {})
        agreed = sorted(name for name, digest in answers.items() if digest == settled)
        odd = sorted(name for name, digest in answers.items() if digest != settled)
        self._owed.difference_update(agreed)
        return agreed, odd
