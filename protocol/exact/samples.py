"""The samples of each step, and the seeds of its random draws.

Coordinator and workers compute these on any machine and library version, so the hash is defined
here: numpy does not guarantee its random streams across versions. It is the finalizer of SplitMix64
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014; constants of
David Stafford's variant 13), chained over the words of a key, in integer arithmetic modulo 2^64.

The permutation of an epoch sorts sample numbers by the hash of (seed, epoch, number). The hash is a
bijection of the last word, so all keys are distinct.

A draw by weight divides the range of the hash among the samples in proportion to their weights, and
takes the sample whose part contains the hash of (seed, epoch, position). So position i of epoch e
is a function of seed and weights alone, as long as samples are drawn with replacement.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from protocol.spec.sampling import Sampling
from protocol.spec.sections.tasks import BatchSpec

_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9
_SECOND_FACTOR: Final = 0x94D049BB133111EB
_WORD_MASK: Final = 2**64 - 1

RowGroups = tuple[tuple[int, ...], ...]
"""For each file, the number of samples in each of its row groups."""

_ORDER_DOMAIN: Final = 1
_SEED_DOMAIN: Final = 2
_FILE_DOMAIN: Final = 3
_GROUP_DOMAIN: Final = 4
_PIECE_DOMAIN: Final = 5
_LENGTH_DOMAIN: Final = 6
_DRAW_DOMAIN: Final = 7

_SORTED_MICROBATCHES: Final = 64
"""Microbatches that are sorted by length together: many, so that neighbors have similar lengths;
not all, so that neighbors change from epoch to epoch."""


class SampleOrder:
    """The samples of every step, as a function of the seed.

    An epoch has ceil(samples / batch.samples) steps and covers every sample exactly once, or has
    the draws of `sampling`; its last step may be smaller. Steps count from 0.

    Args:
        seed: The run's seed, at least 0 and below 2^63.
        samples: Number of training samples, at least 1.
        batch: Samples per step and per microbatch.
        row_groups: Row groups of the files that contain the samples, if there are any. Then files
            are permuted, groups within files, and microbatches within groups, so that a microbatch
            is one read and files are needed one at a time.
        grouped: Whether samples are numbered by length, and microbatches should have similar ones.
            Whole microbatches are then permuted.
        sampling: How an epoch's samples are drawn; None: an epoch contains each sample once.
    """

    def __init__(
        self,
        seed: int,
        samples: int,
        batch: BatchSpec,
        row_groups: RowGroups = (),
        *,
        grouped: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        assert samples >= 1
        assert sampling is None or not (grouped or row_groups)
        assert not (grouped and row_groups)
        assert not row_groups or sum(map(sum, row_groups)) == samples
        self._row_groups = row_groups
        self._grouped = grouped
        self._seed = seed
        self._samples = samples
        self._sampling = sampling
        self._length = samples if sampling is None else sampling.draws
        self._batch = batch
        self._permutations: dict[int, NDArray[np.int64]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the samples."""
        return -(-self._length // self._batch.samples)

    def epoch(self, step: int) -> int:
        """Return a step's epoch, from 0."""
        return step // self.steps_per_epoch

    def microbatch_count(self, step: int) -> int:
        """Return M, the number of microbatches of a step."""
        lo, hi = self._bounds(step)
        return -(-(hi - lo) // self._batch.microbatch)

    def microbatches(self, step: int) -> tuple[tuple[int, ...], ...]:
        """Return the sample numbers of each microbatch of a step; the last one may be smaller."""
        lo, hi = self._bounds(step)
        samples: list[int] = self._epoch_order(self.epoch(step))[lo:hi].tolist()
        size = self._batch.microbatch
        return tuple(tuple(samples[lo : lo + size]) for lo in range(0, len(samples), size))

    def microbatch_sizes(self, step: int) -> list[int]:
        """Return the number of samples of each microbatch of a step."""
        lo, hi = self._bounds(step)
        size = self._batch.microbatch
        return [min(size, hi - start) for start in range(lo, hi, size)]

    def _bounds(self, step: int) -> tuple[int, int]:
        assert step >= 0
        lo = step % self.steps_per_epoch * self._batch.samples
        return lo, min(lo + self._batch.samples, self._length)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._permutations:
            # The latest two epochs are cached: prefetching at the end of an epoch reads both.
            latest = list(self._permutations.items())[-1:]
            self._permutations = dict([*latest, (epoch, self._permute(epoch))])
        return self._permutations[epoch]

    def _permute(self, epoch: int) -> NDArray[np.int64]:
        if self._sampling is not None:
            return draw(self._seed, epoch, self._samples, self._sampling)
        if self._grouped:
            return self._permute_by_length(epoch)
        if not self._row_groups:
            return permutation(self._seed, epoch, self._samples)
        size = self._batch.microbatch
        starts = np.cumsum([0, *(sum(groups) for groups in self._row_groups)])
        numbers = []
        for file in permutation(_hash(_FILE_DOMAIN, self._seed), epoch, len(self._row_groups)):
            groups = self._row_groups[file]
            firsts = starts[file] + np.cumsum([0, *groups])
            for group in permutation(_hash(_GROUP_DOMAIN, self._seed, file), epoch, len(groups)):
                pieces = -(-groups[group] // size)
                group_seed = _hash(_PIECE_DOMAIN, self._seed, file, group)
                for piece in permutation(group_seed, epoch, pieces):
                    first = firsts[group] + piece * size
                    numbers.append(np.arange(first, min(first + size, firsts[group + 1])))
        return np.concatenate(numbers).astype(np.int64, copy=False)

    def _permute_by_length(self, epoch: int) -> NDArray[np.int64]:
        """Permute the samples, sort the samples of `_SORTED_MICROBATCHES` at a time by length, then
        permute microbatches."""
        size = self._batch.microbatch
        order = permutation(self._seed, epoch, self._samples)
        for lo in range(0, self._samples, _SORTED_MICROBATCHES * size):
            order[lo : lo + _SORTED_MICROBATCHES * size].sort()
        firsts = np.concatenate([
            np.arange(lo, min(lo + self._batch.samples, self._samples), size)
            for lo in range(0, self._samples, self._batch.samples)
        ])  # fmt: skip
        sizes = np.diff(np.append(firsts, self._samples))
        batch_numbers = permutation(_hash(_LENGTH_DOMAIN, self._seed), epoch, len(firsts))
        batch_sizes = sizes[batch_numbers]
        offsets = np.arange(self._samples) - np.repeat(
            np.cumsum(batch_sizes) - batch_sizes, batch_sizes
        )
        numbers = np.empty_like(order)
        numbers[np.repeat(firsts[batch_numbers], batch_sizes) + offsets] = order
        return numbers


def permutation(seed: int, epoch: int, samples: int) -> NDArray[np.int64]:
    """Return the sample numbers 0 to samples - 1 in an epoch's order, shape (samples,)."""
    state = _hash(_ORDER_DOMAIN, seed, epoch)
    keys = _absorb(state, np.arange(samples, dtype=np.uint64))
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)


def draw(seed: int, epoch: int, samples: int, sampling: Sampling) -> NDArray[np.int64]:
    """Draw the samples of an epoch, in order, shape (draws,)."""
    weights, draws = sampling.weights, sampling.draws
    if weights is None and not sampling.replacement:
        return permutation(seed, epoch, samples)[:draws]
    remaining_weights = (
        np.ones(samples, np.uint64) if weights is None else weights.astype(np.uint64)
    )
    if sampling.replacement:
        return _draw_by_weight(_hash(_DRAW_DOMAIN, seed, epoch), remaining_weights, draws)
    # A repeated draw of a sample is skipped, so each draw is in proportion to remaining weights.
    numbers = np.empty(0, np.int64)
    round_ = 0
    while len(numbers) < draws:
        state = _hash(_DRAW_DOMAIN, seed, epoch, round_)
        candidates = _draw_by_weight(state, remaining_weights, draws - len(numbers))
        first_draws = np.sort(np.unique(candidates, return_index=True)[1])
        numbers = np.concatenate([numbers, candidates[first_draws]])
        remaining_weights[candidates] = 0
        round_ += 1
    return numbers


def _draw_by_weight(state: int, weights: NDArray[np.uint64], count: int) -> NDArray[np.int64]:
    """Draw samples with replacement, in proportion to whole weights below 2^32."""
    bounds = np.cumsum(weights, dtype=np.uint64)
    hashes = _absorb(state, np.arange(count, dtype=np.uint64))
    targets = _high_product(hashes, int(bounds[-1]))
    return np.searchsorted(bounds, targets, side="right").astype(np.int64, copy=False)


def _high_product(words: NDArray[np.uint64], factor: int) -> NDArray[np.uint64]:
    """Return floor(word * factor / 2^64) of each word, for a factor below 2^64."""
    half_bits, low_mask = np.uint64(32), np.uint64(2**32 - 1)
    high, low = words >> half_bits, words & low_mask
    factor_high, factor_low = np.uint64(factor >> 32), np.uint64(factor & (2**32 - 1))
    middle = high * factor_low + ((low * factor_low) >> half_bits)  # below 2^64
    carry = (low * factor_high + (middle & low_mask)) >> half_bits
    product: NDArray[np.uint64] = high * factor_high + (middle >> half_bits) + carry
    return product


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """Return the seed of a microbatch's random draws, at least 0 and below 2^63."""
    return _hash(_SEED_DOMAIN, seed, step, microbatch) >> 1


def _hash(*values: int) -> int:
    """Hash a key of words below 2^64 to 64 bits."""
    state = 0
    for value in map(int, values):
        z = ((value ^ state) + _GOLDEN) & _WORD_MASK
        z = ((z ^ (z >> 30)) * _FIRST_FACTOR) & _WORD_MASK
        z = ((z ^ (z >> 27)) * _SECOND_FACTOR) & _WORD_MASK
        state = z ^ (z >> 31)
    return state


def _absorb(state: int, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply a round of `_hash` to each word; arrays wrap around without warnings."""
    z = (words ^ np.uint64(state)) + np.uint64(_GOLDEN)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST_FACTOR)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND_FACTOR)
    return z ^ (z >> np.uint64(31))
