"""The generator against its authors' known answers; the shader against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from backends.wgpu.graph import threefry


def test_the_known_answer_of_the_random123_library():
    """kat_vectors: `threefry2x32 13` of zeros."""
    assert int(threefry.words((0, 0), 0, 1)[0]) == 0x9D1C5EC6


def test_outputs_are_uniform_and_seeds_and_sites_differ():
    one = threefry.words((1, 2), 0, 1 << 16)
    assert abs(one.mean() / 2**32 - 0.5) < 0.005
    ones = np.unpackbits(one.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.002
    for other in (threefry.words((1, 3), 0, 1 << 16), threefry.words((1, 2), 1, 1 << 16)):
        assert abs(np.mean((one < 2**31) == (other < 2**31)) - 0.5) < 0.01


@pytest.mark.parametrize("drop", [0.1, 0.5])
def test_threshold_is_passed_at_the_requested_rate(drop):
    outputs = threefry.words((7, 9), 3, 1 << 16)
    assert abs(np.mean(outputs < threefry.threshold(drop)) - drop) < 0.01
