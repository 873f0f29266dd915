"""Random draws: SplitMix64, exact float32 fractions, and the requested bounds."""

from __future__ import annotations

import numpy as np

from backends.base import draws


def splitmix64(state: int, count: int) -> list[int]:
    """Return the first `count` hashes by Sebastiano Vigna's reference code, in Python integers."""
    mask, hashes = 2**64 - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        hashes.append(z ^ (z >> 31))
    return hashes


def test_hashes_are_splitmix64():
    assert draws.hashes(0, 2).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    for key in (1, 2**63, 2**64 - 1):
        assert draws.hashes(key, 50).tolist() == splitmix64(key, 50)


def test_a_key_depends_on_the_value_and_type_of_every_part():
    parts: list[tuple[int | str, ...]] = [(1, "a"), ("1", "a"), (1, "b"), (1,), ("1a",), ()]
    keys = {draws.derive_key(*key_parts) for key_parts in parts}
    assert len(keys) == len(parts)


def test_uniforms_are_exact_fractions_below_one():
    values = draws.uniforms(5, 10_000)
    assert values.dtype == np.float32
    assert 0.0 <= values.min() < values.max() < 1.0
    assert (values.astype(np.float64) * 2**24 % 1 == 0).all()
    assert abs(values.mean() - 0.5) < 0.01


def test_draws_have_the_requested_bounds_and_deviation():
    values = draws.symmetric_uniforms(5, 10_000, 0.25)
    assert -0.25 <= values.min() < -0.24
    assert 0.24 < values.max() < 0.25
    assert abs(draws.uniforms_with_deviation(6, 100_000, 0.02).std() - 0.02) < 2e-4
