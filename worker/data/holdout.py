"""Split samples into training and held-out ones: the same on every machine and in any order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.base import draws
from protocol.datasets.data_check import held_out
from protocol.exact.samples import permutation


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedData:
    """What a task makes of its data.

    Attributes:
        tokenizer: The model's own.
        train: Numbers of the training samples, rising, (samples,).
        held_out: Numbers of the samples for evaluation, likewise.
        digests: Of what was read and of its tokens, for the manifest.
        notes: Counts, for the manifest.
    """

    tokenizer: Any
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    digests: Mapping[str, str]
    notes: Mapping[str, int]


def split(keys: Sequence[str], seed: int, fraction: float) -> tuple[list[int], list[int]]:
    """Return the numbers of the training and of the held-out samples, each rising.

    The samples with the smallest keyed hashes are held out, whatever their order. At least one
    sample stays for training.

    Args:
        keys: What identifies each sample; like ones are beside each other in that order.
        seed: The run's seed.
        fraction: How much is held out, in [0, 1).
    """
    count = held_out(len(keys), fraction)
    ranked = sorted(range(len(keys)), key=lambda i: (draws.key_of(seed, "holdout", keys[i]), i))
    return sorted(ranked[count:]), sorted(ranked[:count])


def split_by_class(
    keys: Sequence[str], classes: Sequence[Hashable], seed: int, fraction: float
) -> tuple[list[int], list[int]]:
    """Split each class as `split` does, so that all have the same share held out.

    Args:
        keys: What identifies each sample.
        classes: Of each sample.
        seed: The run's seed.
        fraction: How much of each class is held out; at least one sample of each stays.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for number, name in enumerate(classes):
        members[name].append(number)
    train, held_out = list[int](), list[int]()
    for numbers in members.values():
        kept, measured_on = split([keys[number] for number in numbers], seed, fraction)
        train += (numbers[each] for each in kept)
        held_out += (numbers[each] for each in measured_on)
    return sorted(train), sorted(held_out)


def evaluation_subset(samples: int, limit: int | None, seed: int) -> NDArray[np.int64]:
    """Return the held-out samples to evaluate, in ascending order: all, or `limit` drawn samples.

    Args:
        samples: Number of held-out samples.
        limit: Most samples to evaluate; None for all.
        seed: The run's seed.
    """
    return np.sort(permutation(seed, 0, samples)[:limit])
