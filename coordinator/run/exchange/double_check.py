"""Answers of nodes that two workers were given: equal to the last bit, or one computes wrongly.

Pure. Digests of states find a replica that is wrong; a frozen base that a memory or a disk has
changed is in no state, and shows in gradients alone. So a node is computed twice now and then, by
workers whose signatures say that their bits agree; and where a node was given out twice for being
late, both answers are compared as far as both come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from numpy.typing import NDArray

from protocol.exact.samples import microbatch_seed
from protocol.exact.tree import Node


@dataclass(frozen=True, slots=True)
class Differing:
    """Two workers of one signature gave other bits for the same part of a node; `what` says
    which."""

    workers: tuple[str, str]
    what: str
    node: Node

    def __str__(self) -> str:
        one, other = map(repr, sorted(self.workers))
        return (
            f"workers {one} and {other} have one numeric signature and gave unlike "
            f"{self.what} for microbatches {self.node}: one of the two computes wrongly; "
            "let 'worker doctor' look at both, and go on without the one"
        )


class DoubleCheck:
    """Of one attempt at a step: who was given which node, and digests of what is there twice."""

    def __init__(self) -> None:
        self._given: dict[Node, dict[str, str]] = {}
        self._answers: dict[tuple[Node, tuple[int, ...], str], tuple[str, str]] = {}

    def given(self, worker: str, signature: str, nodes: Sequence[Node]) -> None:
        """These nodes are now the worker's to compute, too."""
        for node in nodes:
            self._given.setdefault(node, {})[worker] = signature

    def answer(
        self, worker: str, node: Node, part: tuple[int, ...], values: NDArray[Any], what: str
    ) -> Differing | None:
        """A part of what a node gives, before anything is added to it.

        Args:
            worker: Whose.
            node: Of what.
            part: Which: gradients by block and chunk, what is kept by three numbers.
            values: Its content.
            what: The same for people.
        """
        givens = self._given.get(node, {})
        if len(givens) < 2 or worker not in givens:
            return None
        place = (node, part, givens[worker])
        digest = blake3(values.tobytes()).hexdigest()
        other, known = self._answers.setdefault(place, (worker, digest))
        return Differing((worker, other), what, node) if known != digest else None


def chosen_double(
    seed: int,
    step: int,
    every: int,
    nodes: Mapping[str, Sequence[Node]],
    signed: Mapping[str, str],
    *,
    surely: bool = False,
) -> tuple[str, str, Node] | None:
    """Whose node is to be computed once more in this step, by whom, and which.

    Args:
        seed: The run's.
        step: The step.
        every: One step in so many has such a node; 0: none.
        nodes: What each worker was given.
        signed: The signatures of the workers that may compute.
        surely: This step is one of them, unless there are none.

    Returns:
        None if the step is not to have one, or no two workers have one signature.
    """
    if not every or not (surely or microbatch_seed(seed, step, 0) % every == 0):
        return None
    pairs = [
        (owner, other)
        for owner in sorted(nodes)
        for other in sorted(signed)
        if owner != other and nodes[owner] and signed.get(owner) == signed[other]
    ]
    if not pairs:
        return None
    owner, other = pairs[microbatch_seed(seed, step, 1) % len(pairs)]
    return owner, other, min(nodes[owner], key=lambda node: (node.leaves, node))
