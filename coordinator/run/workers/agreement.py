"""Whether all replicas have the same state after a step: the commit barrier.

Pure. The coordinator's own replica arbitrates: a worker whose digest differs from its is the odd
one. The next commit waits until everyone who was active at the last one has answered alike.

After a restart the replica takes logged steps again while workers go on. Until it has caught up,
the workers' answers have to be equal among themselves, for a few steps at most; then it judges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_STEPS_KEPT: Final = 4
_ALIKE: Final[Mapping[str, str]] = {}
MOST_STEPS_AHEAD: Final = 3
"""Of a replica that catches up; answers to as many steps must be kept for it to judge."""


class Agreement:
    """Answers by step, and who is still owed for the newest one.

    Args:
        step: Steps committed so far.
        catching_up: Whether the replica has yet to take some of them.
        known: Digest of the state after those steps, if it is known all the same.
        ahead: By how many steps the others may be ahead of a replica that catches up.
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
        self._differing: dict[int, dict[str, Mapping[str, str]]] = {}
        self._odd_devices: dict[str, str] = {}
        self._owed: set[str] = set()
        self._newest = step
        self._replica_owed = catching_up
        self._behind_since: int | None = step if catching_up else None

    @property
    def catching_up(self) -> bool:
        """Whether the replica still takes steps that were committed before a restart."""
        return self._behind_since is not None

    @property
    def reached(self) -> bool:
        """Whether the next step may be committed."""
        if self._behind_since is None:
            return not self._owed and not self._replica_owed
        answers = self._answers.get(self._newest, {})
        digests = {answers.get(worker) for worker in self._owed}
        ahead = self._newest - self._behind_since
        return None not in digests and len(digests) <= 1 and ahead < self._ahead

    @property
    def waiting_for(self) -> list[str]:
        """Workers whose answer is missing, or not yet judged."""
        return sorted(self._owed)

    @property
    def silent(self) -> list[str]:
        """Workers that have not answered to the newest step at all."""
        return sorted(self._owed.difference(self._answers.get(self._newest, {})))

    def digest(self, step: int) -> str | None:
        """The replica's own digest after so many steps, if it is known still."""
        return self._arbiter.get(step)

    def expect(self, step: int, workers: list[str]) -> None:
        """A commit went out: these and the replica will have taken `step` steps."""
        self._newest = step
        self._owed = set(workers)
        self._replica_owed = True
        for old in [s for s in (*self._arbiter, *self._answers) if s <= step - _STEPS_KEPT]:
            self._arbiter.pop(old, None)
            self._answers.pop(old, None)
            self._differing.pop(old, None)

    def owe(self, worker: str) -> None:
        """The next commit waits for this worker too."""
        self._owed.add(worker)

    def replica_answer(self, step: int, digest: str) -> None:
        """The replica's own answer: it arbitrates."""
        self._arbiter[step] = digest
        if step == self._newest:
            self._replica_owed = False
            self._behind_since = None

    def answer(
        self, worker: str, step: int, digest: str, differing: Mapping[str, str] = _ALIKE
    ) -> None:
        """A worker's answer; `differing`: of its host's devices that have another, by name."""
        self._answers.setdefault(step, {})[worker] = digest
        if differing:
            self._differing.setdefault(step, {})[worker] = differing

    def lose(self, worker: str) -> None:
        """Its answers no longer count."""
        self._owed.discard(worker)
        for answers in self._answers.values():
            answers.pop(worker, None)

    def odd_devices(self, worker: str) -> str:
        """Which devices of a host were found to differ last, in words; empty if it is one."""
        return self._odd_devices.get(worker, "")

    def judge(self, step: int) -> tuple[list[str], list[str]]:
        """Workers that agree with the replica about this step, and those that do not.

        Each answer is judged once, as soon as the replica's is there.
        """
        known = self._arbiter.get(step)
        if known is None:
            return [], []
        answers, differing = self._answers.pop(step, {}), self._differing.pop(step, {})
        alike = {n for n, digest in answers.items() if digest == known and n not in differing}
        agreed, odd = sorted(alike), sorted(answers.keys() - alike)
        for name, others in differing.items():
            wrong = [device for device, digest in others.items() if digest != known]
            told = ", ".join(repr(device) for device in wrong)
            # The first device gave the host's own answer; it is wrong if that is.
            first = "" if answers.get(name) == known else "its first device"
            self._odd_devices[name] = f" (device {told or first})"
        if step == self._newest:
            self._owed.difference_update(agreed)
        return agreed, odd
