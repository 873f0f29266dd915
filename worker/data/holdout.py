"""Split samples into training and evaluation, independent of machine and order of samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.base import draws
from protocol.datasets.data_check import held_out_count
from protocol.exact.samples import permutation


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedData:
    """A task's data, tokenized and split.

    Attributes:
        tokenizer: The model's tokenizer.
        train: Indices of the training samples, ascending, (samples,).
        held_out: Indices of the evaluation samples, ascending, (samples,).
        digests: Digests of the data and of its tokens, for the manifest.
        notes: Counts for the manifest.
    """

    tokenizer: Any
    train: NDArray[np.int64]
    held_out: NDArray[np.int64]
    digests: Mapping[str, str]
    notes: Mapping[str, int]


def split(keys: Sequence[str], seed: int, fraction: float) -> tuple[list[int], list[int]]:
    """Return the indices of the training and of the held-out samples, both ascending.

    The samples with the smallest keyed hashes are held out, regardless of their order. At least one
    sample remains for training.

    Args:
        keys: The key of each sample; samples with equal keys are ranked by index.
        seed: The run's seed.
        fraction: Share of the samples to hold out, in [0, 1).
    """
    count = held_out_count(len(keys), fraction)
    ranked = sorted(range(len(keys)), key=lambda i: (draws.key_of(seed, "holdout", keys[i]), i))
    return sorted(ranked[count:]), sorted(ranked[:count])


def split_by_class(
    keys: Sequence[str], classes: Sequence[Hashable], seed: int, fraction: float
) -> tuple[list[int], list[int]]:
    """Split each class with `split`, so that the same share of each class is held out.

    Args:
        keys: The key of each sample.
        classes: The class of each sample.
        seed: The run's seed.
        fraction: Share of each class to hold out; at least one sample of each class remains.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for number, name in enumerate(classes):
        members[name].append(number)
    train, held_out = list[int](), list[int]()
    for numbers in members.values():
        train_indices, held_out_indices = split([keys[n] for n in numbers], seed, fraction)
        train += (numbers[index] for index in train_indices)
        held_out += (numbers[index] for index in held_out_indices)
    return sorted(train), sorted(held_out)


def evaluation_subset(samples: int, limit: int | None, seed: int) -> NDArray[np.int64]:
    """Return the held-out samples to evaluate, in ascending order: all, or `limit` drawn samples.

    Args:
        samples: Number of held-out samples.
        limit: Maximum number of samples to evaluate; None for all.
        seed: The run's seed.
    """
    return np.sort(permutation(seed, 0, samples)[:limit])
