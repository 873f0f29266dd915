"""Which samples a step computes, and the seeds of its random draws.

Both daemons evaluate this, on any machine and library version, so the hash is our own: numpy does
not promise its random streams across versions. It is the finaliser of SplitMix64 (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants of David Stafford's
variant 13), chained over the words of a key. Integer arithmetic modulo 2^64 alone.

The permutation of an epoch sorts the sample numbers by hash of (seed, epoch, number). The hash is
a bijection of the last word, so no two keys are equal.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.spec.run_spec import BatchSpec

_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_WORD: Final = 2**64 - 1

RowGroups = tuple[tuple[int, ...], ...]
"""Samples by group of a file, by file."""

_ORDER_DOMAIN: Final = 1
_SEED_DOMAIN: Final = 2
_FILE_DOMAIN: Final = 3
_GROUP_DOMAIN: Final = 4
_PIECE_DOMAIN: Final = 5
_LENGTH_DOMAIN: Final = 6

_SORTED_MICROBATCHES: Final = 64
"""Sorted by length together: many, so that neighbours are alike; not all, so that they change."""


class SampleOrder:
    """The samples of every step, from the seed alone.

    An epoch has ceil(samples / batch.samples) steps and covers every sample exactly once; its
    last step may be smaller. Steps count from 0.

    Args:
        seed: The run's seed, at least 0 and below 2^63.
        samples: How many training samples there are, at least 1.
        batch: Samples per step and per microbatch.
        row_groups: Where samples lie in files in groups that are read at once: samples by group,
            by file. Then files are permuted, groups inside of files, and microbatches inside of
            groups: a microbatch is one read, and files are needed one after the other.
        grouped: Whether samples are numbered by length, and microbatches are to have like ones.
            Steps are mixed as ever: it is whole microbatches that are drawn.
    """

    def __init__(
        self,
        seed: int,
        samples: int,
        batch: BatchSpec,
        row_groups: RowGroups = (),
        *,
        grouped: bool = False,
    ) -> None:
        assert samples >= 1
        assert not (grouped and row_groups)
        assert not row_groups or sum(map(sum, row_groups)) == samples
        self._row_groups = row_groups
        self._grouped = grouped
        self._seed = seed
        self._samples = samples
        self._batch = batch
        self._permutations: dict[int, NDArray[np.int64]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps that one pass over the samples takes."""
        return -(-self._samples // self._batch.samples)

    def epoch(self, step: int) -> int:
        """The pass over the samples that a step belongs to, from 0."""
        return step // self.steps_per_epoch

    def microbatch_count(self, step: int) -> int:
        """M: how many microbatches the step has."""
        lo, hi = self._bounds(step)
        return -(-(hi - lo) // self._batch.microbatch)

    def microbatches(self, step: int) -> tuple[tuple[int, ...], ...]:
        """The sample numbers of each microbatch of a step; the last one may be smaller."""
        lo, hi = self._bounds(step)
        chosen: list[int] = self._epoch_order(self.epoch(step))[lo:hi].tolist()
        size = self._batch.microbatch
        return tuple(tuple(chosen[at : at + size]) for at in range(0, len(chosen), size))

    def microbatch_sizes(self, step: int) -> list[int]:
        """How many samples each microbatch of a step has."""
        lo, hi = self._bounds(step)
        size = self._batch.microbatch
        return [min(size, hi - at) for at in range(lo, hi, size)]

    def _bounds(self, step: int) -> tuple[int, int]:
        assert step >= 0
        lo = step % self.steps_per_epoch * self._batch.samples
        return lo, min(lo + self._batch.samples, self._samples)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            # Who looks ahead at the end of an epoch goes to and fro between two.
            kept = list(self._permutations.items())[-1:]
            self._permutations = dict([*kept, (epoch, self._permuted(epoch))])
        return self._permutations[epoch]

    def _permuted(self, epoch: int) -> NDArray[np.int64]:
        if self._grouped:
            return self._by_length(epoch)
        if not self._row_groups:
            return permutation(self._seed, epoch, self._samples)
        size = self._batch.microbatch
        starts = np.cumsum([0, *(sum(groups) for groups in self._row_groups)])
        found = []
        for file in permutation(_hash(_FILE_DOMAIN, self._seed), epoch, len(self._row_groups)):
            groups = self._row_groups[file]
            firsts = starts[file] + np.cumsum([0, *groups])
            for group in permutation(_hash(_GROUP_DOMAIN, self._seed, file), epoch, len(groups)):
                pieces = -(-groups[group] // size)
                inside = _hash(_PIECE_DOMAIN, self._seed, file, group)
                for piece in permutation(inside, epoch, pieces):
                    first = firsts[group] + piece * size
                    found.append(np.arange(first, min(first + size, firsts[group + 1])))
        return np.concatenate(found).astype(np.int64, copy=False)

    def _by_length(self, epoch: int) -> NDArray[np.int64]:
        """Samples in an order drawn anew, sorted some microbatches at a time; what is then the
        next microbatch goes to a place drawn among all microbatches of the epoch."""
        size = self._batch.microbatch
        order = permutation(self._seed, epoch, self._samples)
        for lo in range(0, self._samples, _SORTED_MICROBATCHES * size):
            order[lo : lo + _SORTED_MICROBATCHES * size].sort()
        firsts = np.concatenate([
            np.arange(lo, min(lo + self._batch.samples, self._samples), size)
            for lo in range(0, self._samples, self._batch.samples)
        ])  # fmt: skip
        sizes = np.diff(np.append(firsts, self._samples))
        places = permutation(_hash(_LENGTH_DOMAIN, self._seed), epoch, len(firsts))
        taken = sizes[places]
        offsets = np.arange(self._samples) - np.repeat(np.cumsum(taken) - taken, taken)
        found = np.empty_like(order)
        found[np.repeat(firsts[places], taken) + offsets] = order
        return found


def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """The sample numbers 0 to samples - 1 in the order of that epoch, shape (samples,)."""
    state = _hash(_ORDER_DOMAIN, seed, epoch)
    keys = _absorb(state, np.arange(samples, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """The seed of every random draw of one microbatch, at least 0 and below 2^63."""
    return _hash(_SEED_DOMAIN, seed, step, microbatch) >> 1


def _hash(*words: int) -> int:
    """A 64-bit hash of a key of words below 2^64."""
    state = 0
    for word in map(int, words):
        z = ((word ^ state) + _GOLDEN) & _WORD
        z = ((z ^ (z >> 30)) * _FIRST) & _WORD
        z = ((z ^ (z >> 27)) * _SECOND) & _WORD
        state = z ^ (z >> 31)
    return state


def _absorb(state: int, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """As a round of `_hash`, for each of these words: arrays wrap around without a warning."""
    z = (words ^ np.uint64(state)) + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))
