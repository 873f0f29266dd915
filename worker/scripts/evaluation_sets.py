"""The evaluation samples of a user's task (`held_out`): one data set or several by name, in parts.

A part has as many samples as a microbatch, all from one data set. With several data sets, each
metric is measured for each of them: `loss` of the set `web` is `web_loss`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from protocol.base.errors import DataError


class EvaluationSet(NamedTuple):
    """One evaluation data set.

    Attributes:
        name: The name in `held_out`; empty if there is only one set.
        data: The data set.
        parts: The numbers of the set's parts.
    """

    name: str
    data: Any
    parts: range

    def metric(self, name: str) -> str:
        """Return the full name of a metric of this set."""
        return f"{self.name}_{name}" if self.name else name

    def label(self) -> str:
        """Return the set's name in the manifest."""
        return f"held_out {self.name}" if self.name else "held_out"


class EvaluationSets:
    """All evaluation samples.

    Attributes:
        sets: The data sets in order.
        parts: Total number of parts.

    Args:
        held_out: A data set, data sets by name, or None.
        part_samples: Number of samples in a part.
    """

    def __init__(self, held_out: Any, part_samples: int) -> None:
        self._part_samples = part_samples
        self.sets: list[EvaluationSet] = []
        self.parts = 0
        for name, data in named_sets(held_out).items():
            count = -(-len(data) // part_samples)
            self.sets.append(EvaluationSet(name, data, range(self.parts, self.parts + count)))
            self.parts += count

    def assigned_parts(self, *, at_once: bool) -> int:
        """Return the number of parts to assign; 1 if one worker evaluates all samples `at_once`."""
        return min(1, self.parts) if at_once else self.parts

    def index_of(self, part: int) -> int:
        """Return the number of the set that a part belongs to."""
        return next(
            number
            for number, evaluation_set in enumerate(self.sets)
            if part in evaluation_set.parts
        )

    def rows(self, part: int) -> range:
        """Return the sample numbers of a part, within its set."""
        evaluation_set = self.sets[self.index_of(part)]
        lo = (part - evaluation_set.parts.start) * self._part_samples
        return range(lo, min(lo + self._part_samples, len(evaluation_set.data)))

    def metrics(self, names: tuple[str, ...]) -> Iterator[str]:
        """Yield the full names of these metrics for all sets."""
        if not self.sets:
            yield from names
        for evaluation_set in self.sets:
            yield from map(evaluation_set.metric, names)


def named_sets(held_out: Any) -> dict[str, Any]:
    """Return evaluation data sets by name; a single one has an empty name.

    Raises:
        DataError: A name is not a non-empty string, or there is no data set.
    """
    if held_out is None:
        return {}
    if not isinstance(held_out, Mapping):
        return {"": held_out}
    for name in held_out:
        if not isinstance(name, str) or not name:
            raise DataError(
                f"held_out: expected names as text, got {name!r}: write {{'web': data}}"
            )
    if not held_out:
        raise DataError("held_out: expected data sets by name, got none: leave it out")
    return dict(held_out)
