"""The split into training and held-out samples: the same on every machine and in any order."""

from __future__ import annotations

from collections.abc import Sequence

from backends import draws


def split(keys: Sequence[str], seed: int, fraction: float) -> tuple[list[int], list[int]]:
    """Numbers of the training and of the held-out samples, each rising.

    The samples with the smallest keyed hashes are held out; where a sample stands does not
    matter. At least one sample stays for training.

    Args:
        keys: What identifies each sample, all different.
        seed: The run's seed.
        fraction: How much is held out, in [0, 1).
    """
    count = min(round(len(keys) * fraction), len(keys) - 1)
    ranked = sorted(range(len(keys)), key=lambda i: (draws.key_of(seed, "holdout", keys[i]), i))
    return sorted(ranked[count:]), sorted(ranked[:count])
