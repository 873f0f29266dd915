"""Sample order: every epoch covers each sample exactly once, and no release changes the order."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.exact.samples import SampleOrder, microbatch_seed, permutation
from protocol.spec.sections.tasks import BatchSpec

MASK = 2**64 - 1
seeds = st.integers(0, 2**63 - 1)


def naive_hash(*words):
    """SplitMix64's finalizer chained over words, in Python integers."""
    state = 0
    for word in words:
        z = ((word ^ state) + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        state = z ^ (z >> 31)
    return state


@st.composite
def batches(draw):
    size = draw(st.integers(1, 40))
    return BatchSpec(samples=size, microbatch=draw(st.integers(1, size)))


def test_the_hash_is_splitmix64():
    # First output of SplitMix64 seeded with 0, as published with the reference implementation.
    assert naive_hash(0) == 0xE220A8397B1DCDAF


@given(seeds, st.integers(0, 2**40), st.integers(1, 60))
def test_the_permutation_sorts_by_the_naive_hash(seed, epoch, samples):
    expected = sorted(range(samples), key=lambda index: naive_hash(1, seed, epoch, index))
    assert permutation(seed, epoch, samples).tolist() == expected


@given(seeds, st.integers(0, 2**40), st.integers(0, 5000))
def test_a_microbatch_seed_is_the_naive_hash_without_its_last_bit(seed, step, microbatch):
    assert microbatch_seed(seed, step, microbatch) == naive_hash(2, seed, step, microbatch) >> 1


@given(seeds, st.integers(1, 90), batches(), st.integers(0, 3))
def test_an_epoch_covers_every_sample_exactly_once(seed, samples, batch, epoch):
    order = SampleOrder(seed, samples, batch)
    per_epoch = order.steps_per_epoch
    assert per_epoch == -(-samples // batch.samples)
    steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    assert {order.epoch(step) for step in steps} == {epoch}
    samples_in_order = [s for step in steps for m in order.microbatches(step) for s in m]
    assert sorted(samples_in_order) == list(range(samples))


@given(seeds, st.integers(1, 90), batches(), st.integers(0, 30))
def test_only_the_last_microbatch_of_a_step_may_be_smaller(seed, samples, batch, step):
    order = SampleOrder(seed, samples, batch)
    microbatches = order.microbatches(step)
    assert len(microbatches) == order.microbatch_count(step)
    assert all(len(m) == batch.microbatch for m in microbatches[:-1])
    assert 1 <= len(microbatches[-1]) <= batch.microbatch


def test_going_back_to_an_earlier_epoch_gives_the_same_samples():
    order = SampleOrder(3, 20, BatchSpec(samples=6, microbatch=2))
    ascending = [order.microbatches(step) for step in range(12)]
    assert [order.microbatches(step) for step in reversed(range(12))] == ascending[::-1]


def test_seed_and_epoch_change_the_order():
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_microbatch_seeds_differ():
    distinct_seeds = {
        microbatch_seed(s, t, m) for s in range(8) for t in range(16) for m in range(16)
    }
    assert len(distinct_seeds) == 8 * 16 * 16


def test_samples_are_uniform_over_positions():
    counts = np.zeros((10, 10), int)
    for epoch in range(2000):
        counts[np.arange(10), permutation(1, epoch, 10)] += 1
    chi_square = ((counts - 200) ** 2 / 200).sum()
    assert chi_square < 140  # 81 degrees of freedom: a uniform hash exceeds 140 once in 20,000


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, ((0, 3, 2), (4,))),
        (1, ((9, 5, 1), (8,))),
        (2, ((7, 6),)),
        (3, ((7, 1, 2), (4,))),
    ],
)
def test_microbatches_are_frozen(step, expected):
    order = SampleOrder(7, 10, BatchSpec(samples=4, microbatch=3))
    assert order.microbatches(step) == expected


def test_seed_and_permutation_are_frozen():
    assert microbatch_seed(7, 0, 0) == 4034621176940806385
    order = permutation(2**63 - 1, 5, 10_000).astype("<i8").tobytes()
    assert (
        hashlib.sha256(order).hexdigest()
        == "6ad2e46ffb9797399f774c0d7c004d1448673a320cb341c2d07b29527a922d3d"
    )


@given(seeds, st.integers(1, 90), batches(), st.integers(0, 3))
def test_grouping_covers_every_sample_once_and_keeps_the_sizes(seed, samples, batch, epoch):
    ungrouped, grouped = (
        SampleOrder(seed, samples, batch),
        SampleOrder(seed, samples, batch, grouped=True),
    )
    steps = range(epoch * ungrouped.steps_per_epoch, (epoch + 1) * ungrouped.steps_per_epoch)
    grouped_microbatches = [m for step in steps for m in grouped.microbatches(step)]
    assert [len(m) for m in grouped_microbatches] == [
        len(m) for step in steps for m in ungrouped.microbatches(step)
    ]
    assert sorted(sample for m in grouped_microbatches for sample in m) == list(range(samples))


def test_grouped_microbatches_contain_neighbors_and_steps_mix_groups():
    order = SampleOrder(3, 6400, BatchSpec(samples=64, microbatch=8), grouped=True)
    microbatches = [m for step in range(100) for m in order.microbatches(step)]
    ranges = [max(m) - min(m) for m in microbatches]
    assert np.median(ranges) < 6400 / 20
    step_means = [
        np.mean([sample for m in order.microbatches(step) for sample in m]) for step in range(100)
    ]
    assert np.std([np.mean(m) for m in microbatches]) > 1000
    assert np.std(step_means) < 1000
    assert [order.microbatches(step) for step in (100, 3, 100)] == [
        SampleOrder(3, 6400, BatchSpec(samples=64, microbatch=8), grouped=True).microbatches(step)
        for step in (100, 3, 100)
    ]
    assert order.microbatches(100) != order.microbatches(0)
