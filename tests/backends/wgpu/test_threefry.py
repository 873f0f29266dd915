"""The Threefry generator against a known answer of its authors, and its statistics."""

from __future__ import annotations

import numpy as np
import pytest

from backends.wgpu.graph import threefry


def test_a_known_answer_of_the_random123_library():
    """From its file kat_vectors: `threefry2x32 13` with zero key and counter."""
    assert int(threefry.words((0, 0), 0, 1)[0]) == 0x9D1C5EC6


def test_outputs_are_uniform_and_seeds_and_sites_differ():
    words = threefry.words((1, 2), 0, 1 << 16)
    assert abs(words.mean() / 2**32 - 0.5) < 0.005
    fraction_of_ones = np.unpackbits(words.view(np.uint8)).mean()
    assert abs(fraction_of_ones - 0.5) < 0.002
    other_seed, other_site = threefry.words((1, 3), 0, 1 << 16), threefry.words((1, 2), 1, 1 << 16)
    for others in (other_seed, other_site):
        assert abs(np.mean((words < 2**31) == (others < 2**31)) - 0.5) < 0.01


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_words_below_the_threshold_have_the_requested_rate(rate):
    words = threefry.words((7, 9), 3, 1 << 16)
    assert abs(np.mean(words < threefry.threshold(rate)) - rate) < 0.01
