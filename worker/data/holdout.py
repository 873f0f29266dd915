"""Split samples into training and evaluation samples.

The split depends neither on the machine nor on the order of the samples.
"""

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
class SplitData:
    """A task's data, tokenized and split.

    Attributes:
        tokenizer: The model's tokenizer.
        train: Indices of the training samples, ascending, (samples,).
        held_out: Indices of the evaluation samples, ascending, (samples,).
        digests: Digests of the data and of its tokens, for the manifest.
        notes: Counts by name, for the manifest's `notes`.
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
        fraction: Fraction of the samples to hold out, in [0, 1).
    """
    count = held_out_count(len(keys), fraction)
    ranked = sorted(range(len(keys)), key=lambda i: (draws.derive_key(seed, "holdout", keys[i]), i))
    return sorted(ranked[count:]), sorted(ranked[:count])


def split_by_class(
    keys: Sequence[str], classes: Sequence[Hashable], seed: int, fraction: float
) -> tuple[list[int], list[int]]:
    """Split each class with `split`, so that the same fraction of each class is held out.

    Args:
        keys: The key of each sample.
        classes: The class of each sample.
        seed: The run's seed.
        fraction: Fraction of each class to hold out; at least one sample of each class remains.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for index, class_of_sample in enumerate(classes):
        members[class_of_sample].append(index)
    train, held_out = list[int](), list[int]()
    for indices in members.values():
        class_train, class_held_out = split([keys[index] for index in indices], seed, fraction)
        train += (indices[n] for n in class_train)
        held_out += (indices[n] for n in class_held_out)
    return sorted(train), sorted(held_out)


def evaluation_subset(samples: int, limit: int | None, seed: int) -> NDArray[np.int64]:
    """Return the indices of the held-out samples to evaluate, ascending: all, or a random `limit`.

    Args:
        samples: Number of held-out samples.
        limit: Maximum number of samples to evaluate; None for all.
        seed: The run's seed.
    """
    return np.sort(permutation(seed, 0, samples)[:limit])
