"""Draws by weight: exact, the same on every machine, in proportion to the weights."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base.errors import DataError, MessageError
from protocol.exact.samples import SampleOrder, draw, permutation
from protocol.spec.manifest import Block, Manifest, TensorSpec
from protocol.spec.sampling import WEIGHT_STEPS, Sampling
from protocol.spec.sections.tasks import BatchSpec
from tests.protocol.exact.test_samples import naive_hash

seeds = st.integers(0, 2**63 - 1)
weight_lists = st.lists(st.floats(0, 1e6), min_size=1, max_size=12).filter(any)


def naive_draw(seed, epoch, weights, position):
    """Return the sample whose part of the cumulative weights contains the hash."""
    target = naive_hash(7, seed, epoch, position) * sum(weights) >> 64
    for sample, weight in enumerate(weights):
        if target < weight:
            return sample
        target -= weight
    raise AssertionError


def integer_weights(weights):
    """Return the integers that represent the weights, by exact arithmetic."""
    largest = Fraction(max(weights))
    return [max(1, round(Fraction(w) / largest * WEIGHT_STEPS)) if w else 0 for w in weights]


@given(seeds, st.integers(0, 2**40), weight_lists, st.integers(1, 40))
def test_draws_with_replacement_match_the_naive_draws(seed, epoch, weights, draws):
    sampling = Sampling.by_weight(weights, draws)
    assert sampling.weights is not None
    encoded_weights = [int(w) for w in sampling.weights]
    assert encoded_weights == pytest.approx(integer_weights(weights), abs=1)
    expected = [naive_draw(seed, epoch, encoded_weights, n) for n in range(draws)]
    assert draw(seed, epoch, len(weights), sampling).tolist() == expected


@given(seeds, st.integers(0, 9), weight_lists, st.data())
def test_draws_without_replacement_skip_drawn_samples_and_weight_zero(seed, epoch, weights, data):
    possible = [sample for sample, weight in enumerate(weights) if weight]
    draws = data.draw(st.integers(1, len(possible)))
    samples = draw(seed, epoch, len(weights), Sampling.by_weight(weights, draws, replacement=False))
    assert len({*samples.tolist()}) == draws
    assert {*samples.tolist()} <= {*possible}


def test_each_sample_is_drawn_in_proportion_to_its_weight():
    weights, draws = np.array([1.0, 2.0, 0.0, 5.0]), 40_000
    samples = draw(3, 0, 4, Sampling.by_weight(weights, draws))
    counts = np.bincount(samples, minlength=4)
    assert counts[2] == 0
    np.testing.assert_allclose(counts / draws, weights / 8, atol=0.01)


def test_draws_without_replacement_have_the_chances_of_successive_draws():
    weights, epochs = np.array([1.0, 2.0, 3.0]), 6000
    sampling = Sampling.by_weight(weights, 2, replacement=False)
    counts = np.zeros((3, 3))
    for epoch in range(epochs):
        first, second = draw(5, epoch, 3, sampling)
        counts[first, second] += 1
    shares = weights / weights.sum()
    expected = shares[:, None] * shares[None, :] / (1 - shares[:, None])
    np.fill_diagonal(expected, 0)
    np.testing.assert_allclose(counts / epochs, expected, atol=0.025)


def test_equal_chances_without_replacement_use_the_permutation():
    samples = draw(7, 2, 30, Sampling(draws=20, replacement=False))
    assert samples.tolist() == permutation(7, 2, 30)[:20].tolist()


def test_an_epoch_has_the_steps_of_its_draws():
    sampling = Sampling(draws=25, replacement=True)
    order = SampleOrder(7, 10, BatchSpec(samples=8, microbatch=3), sampling=sampling)
    assert order.steps_per_epoch == 4
    assert order.microbatch_sizes(3) == [1]
    epochs = [[s for step in range(e, e + 4) for part in order.microbatches(step) for s in part]
              for e in (0, 4)]  # fmt: skip
    assert [len(epoch) for epoch in epochs] == [25, 25]
    assert epochs[0] != epochs[1]
    assert epochs[1] == draw(7, 1, 10, sampling).tolist()


def test_draws_are_frozen():
    sampling = Sampling.by_weight([1, 0, 2, 4], 12)
    assert draw(7, 3, 4, sampling).tolist() == [2, 3, 3, 2, 2, 3, 2, 3, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0], "got -1.0 for sample 1"),
        ([1.0, float("nan")], "got nan for sample 1"),
        ([0.0, 0.0], "got only zeros"),
        ([[1.0]], r"got shape \(1, 1\)"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        Sampling.by_weight(weights)


def test_more_draws_than_samples_with_a_weight_need_replacement():
    with pytest.raises(DataError, match="at most 2 draws without replacement"):
        Sampling.by_weight([1, 0, 3], 3, replacement=False)


def test_damaged_weights_are_refused():
    sampling = Sampling.by_weight([1, 2, 3])
    for packed in (sampling.packed_weights[:-4], "AAAA", "?"):
        damaged = sampling.model_copy(update={"packed_weights": packed})
        with pytest.raises(MessageError, match=r"expected weights (in base64|of four bytes)"):
            damaged.check(3)
    with pytest.raises(MessageError, match="expected weights of 4 samples, got 3"):
        sampling.check(4)


def test_only_a_manifest_with_draws_has_sampling():
    block = Block(name="b", kind="block", tensors=(TensorSpec(name="w", shape=(2,)),))
    without_draws = Manifest(blocks=(block,), train_samples=3)
    assert b"sampling" not in without_draws.to_bytes()
    manifest_with_draws = without_draws.model_copy(
        update={"sampling": Sampling.by_weight([1, 2, 3])}
    )
    assert Manifest.from_bytes(manifest_with_draws.to_bytes()) == manifest_with_draws
    assert manifest_with_draws.digest() != without_draws.digest()
    other_manifest = manifest_with_draws.model_copy(update={"train_samples": 4})
    with pytest.raises(MessageError, match="expected weights of 4 samples"):
        Manifest.from_bytes(other_manifest.to_bytes())
