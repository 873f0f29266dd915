"""Compare results of subtrees that two workers computed: unequal bits mean that one is faulty.

Pure. State digests detect a wrong replica. But no state digest covers a frozen base: if faulty
memory or a faulty disk changes it, only gradients show that. So now and then two workers with the
same numerics profile compute the same subtree. A subtree of a late worker that was reassigned is
also compared, if both results arrive and the profiles are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from numpy.typing import NDArray

from protocol.exact.reduction.tree import Subtree
from protocol.exact.samples import microbatch_seed


@dataclass(frozen=True, slots=True)
class ResultMismatch:
    """Two workers with one numerics profile computed different bits for a result of a subtree.

    Attributes:
        workers: The two workers.
        result_name: Name of the result in messages, as in "gradients".
        subtree: The subtree.
    """

    workers: tuple[str, str]
    result_name: str
    subtree: Subtree

    def __str__(self) -> str:
        first, second = map(repr, sorted(self.workers))
        if first == second:
            return (
                f"worker {first} computed {self.result_name} of microbatches {self.subtree} with "
                "different bits in the second phase of the step than in the first: check that the "
                "model keeps no state between calls, and run 'worker doctor' on that machine"
            )
        return (
            f"workers {first} and {second} have the same numerics profile but computed different "
            f"{self.result_name} for microbatches {self.subtree}: one of the two computes "
            "incorrectly; run 'worker doctor' on both, and continue without the faulty one"
        )


class DoubleCheck:
    """The assignments of one attempt, and digests of the results that arrived."""

    def __init__(self) -> None:
        self._assigned: dict[Subtree, dict[str, str]] = {}
        self._answers: dict[tuple[Subtree, tuple[int, ...], str], tuple[str, str]] = {}

    def assign(self, worker: str, profile: str, subtrees: Sequence[Subtree]) -> None:
        """Note that subtrees were assigned to a worker; a subtree may have a second worker."""
        for subtree in subtrees:
            self._assigned.setdefault(subtree, {})[worker] = profile

    def profile_of(self, worker: str, subtree: Subtree) -> str:
        """Return the numerics profile with which a worker computes an assigned subtree."""
        return self._assigned.get(subtree, {}).get(worker, "")

    def compare_result(
        self,
        worker: str,
        subtree: Subtree,
        part: tuple[int, ...],
        values: NDArray[Any],
        part_name: str,
    ) -> ResultMismatch | None:
        """Compare a part of a subtree's result with the other worker's, before it is summed.

        Args:
            worker: The sender.
            subtree: The subtree.
            part: Key of the part: (block, chunk) of gradients, (0, microbatch, chunk) of side
                outputs, (-1,) of the sums that a `SubtreeLoss` carries.
            values: The content.
            part_name: Name of the part in messages, as in "gradients".

        Returns:
            The mismatch, if a worker of the same numerics profile sent other bits.
        """
        profiles = self._assigned.get(subtree, {})
        if len(profiles) < 2 or worker not in profiles:
            return None
        key = (subtree, part, profiles[worker])
        digest = blake3(values.tobytes()).hexdigest()
        other, earlier = self._answers.setdefault(key, (worker, digest))
        return ResultMismatch((worker, other), part_name, subtree) if earlier != digest else None


def choose_double_check(
    seed: int,
    step: int,
    every: int,
    subtrees: Mapping[str, Sequence[Subtree]],
    profiles: Mapping[str, str],
    *,
    always: bool = False,
) -> tuple[str, str, Subtree] | None:
    """Choose a subtree to be computed twice in this step.

    Args:
        seed: Seed of the run.
        step: The step.
        every: Average number of steps between two double checks; 0: never.
        subtrees: The subtrees assigned to each worker.
        profiles: The numerics profiles of the workers that may compute.
        always: Choose a subtree in this step in any case, unless `every` is 0.

    Returns:
        The worker to which the subtree is assigned, a second worker, and the subtree. None if this
        step has no double check, or no two workers share a numerics profile.
    """
    if not every or not (always or microbatch_seed(seed, step, 0) % every == 0):
        return None
    pairs = [
        (owner, other)
        for owner in sorted(subtrees)
        for other in sorted(profiles)
        if owner != other and subtrees[owner] and profiles.get(owner) == profiles[other]
    ]
    if not pairs:
        return None
    owner, other = pairs[microbatch_seed(seed, step, 1) % len(pairs)]
    return owner, other, min(subtrees[owner], key=lambda subtree: (subtree.leaves, subtree))
