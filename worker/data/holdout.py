"""The split into training and held-out samples: the same on every machine and in any order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.base import draws
from protocol.data.data_check import held_out
from protocol.exact.samples import permutation


def split(keys: Sequence[str], seed: int, fraction: float) -> tuple[list[int], list[int]]:
    """Numbers of the training and of the held-out samples, each rising.

    The samples with the smallest keyed hashes are held out; where a sample stands does not
    matter. At least one sample stays for training.

    Args:
        keys: What identifies each sample; like ones are beside each other in that order.
        seed: The run's seed.
        fraction: How much is held out, in [0, 1).
    """
    count = held_out(len(keys), fraction)
    ranked = sorted(range(len(keys)), key=lambda i: (draws.key_of(seed, "holdout", keys[i]), i))
    return sorted(ranked[count:]), sorted(ranked[:count])


def measured(samples: int, limit: int | None, seed: int) -> NDArray[np.int64]:
    """Which held-out samples are measured, rising: all, or `limit` of them drawn by the seed.

    Args:
        samples: How many are held out.
        limit: At most so many, or None.
        seed: The run's seed.
    """
    return np.sort(permutation(seed, 0, samples)[:limit])
