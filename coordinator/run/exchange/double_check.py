"""Answers of subtrees that two workers were given: equal to the last bit, or one computes wrongly.

Pure. Digests of states find a replica that is wrong; a frozen base that a memory or a disk has
changed is in no state, and shows in gradients alone. So a subtree is computed twice now and then,
by workers with the same numerics profile; and where a subtree was given out twice for being
late, both answers are compared as far as both come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from numpy.typing import NDArray

from protocol.exact.samples import microbatch_seed
from protocol.exact.tree import Subtree


@dataclass(frozen=True, slots=True)
class Differing:
    """Two workers with one numerics profile gave other bits for one part of a subtree; `what` says
    which."""

    workers: tuple[str, str]
    what: str
    subtree: Subtree

    def __str__(self) -> str:
        one, other = map(repr, sorted(self.workers))
        if one == other:
            return (
                f"worker {one} computed {self.what} of microbatches {self.subtree} with different "
                "bits in the second phase of the step than in the first: check that the model "
                "keeps no state between calls, and run 'worker doctor' on that machine"
            )
        return (
            f"workers {one} and {other} have the same numerics profile but computed different "
            f"{self.what} for microbatches {self.subtree}: one of the two computes incorrectly; "
            "run 'worker doctor' on both, and continue without the faulty one"
        )


class DoubleCheck:
    """Of one attempt at a step: who was given which subtree, and digests of what is there twice."""

    def __init__(self) -> None:
        self._assigned: dict[Subtree, dict[str, str]] = {}
        self._answers: dict[tuple[Subtree, tuple[int, ...], str], tuple[str, str]] = {}

    def given(self, worker: str, profile: str, subtrees: Sequence[Subtree]) -> None:
        """These subtrees are now the worker's to compute, too."""
        for subtree in subtrees:
            self._assigned.setdefault(subtree, {})[worker] = profile

    def profile_of(self, worker: str, subtree: Subtree) -> str:
        """The numerics profile with which a worker computes a subtree that it was given."""
        return self._assigned.get(subtree, {}).get(worker, "")

    def answer(
        self, worker: str, subtree: Subtree, part: tuple[int, ...], values: NDArray[Any], what: str
    ) -> Differing | None:
        """A part of what a subtree gives, before anything is added to it.

        Args:
            worker: Whose.
            subtree: Of what.
            part: Which: gradients by block and chunk, what is kept by three numbers.
            values: Its content.
            what: The same for people.
        """
        givens = self._assigned.get(subtree, {})
        if len(givens) < 2 or worker not in givens:
            return None
        place = (subtree, part, givens[worker])
        digest = blake3(values.tobytes()).hexdigest()
        other, earlier = self._answers.setdefault(place, (worker, digest))
        return Differing((worker, other), what, subtree) if earlier != digest else None


def chosen_double(
    seed: int,
    step: int,
    every: int,
    subtrees: Mapping[str, Sequence[Subtree]],
    profiles: Mapping[str, str],
    *,
    surely: bool = False,
) -> tuple[str, str, Subtree] | None:
    """Whose subtree is to be computed once more in this step, by whom, and which.

    Args:
        seed: The run's.
        step: The step.
        every: One step in so many has such a subtree; 0: none.
        subtrees: What each worker was given.
        profiles: The numerics profiles of the workers that may compute.
        surely: This step is one of them, unless there are none.

    Returns:
        None if the step is not to have one, or no two workers have one numerics profile.
    """
    if not every or not (surely or microbatch_seed(seed, step, 0) % every == 0):
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
