"""A microbatch that cannot be computed is told by its step, and by its samples in the data."""

from __future__ import annotations

import numpy as np
import pytest

from backends.base.interface import Batch, LossRaised
from protocol.base.errors import DataError
from worker.shell.samples_named import samples_named

TWO = [Batch({"x": np.zeros((3, 2)), "t": np.array(1.0)}, 3.0) for _ in range(2)]
SAMPLES = [[8, 1, 5], [3, 9, 4]]
PACKED = [Batch({"x": np.zeros((2, 4))}, 3.0)]


@pytest.mark.parametrize(
    ("batches", "which", "row", "told"),
    [
        (TWO, TWO[1], None, "it raised, step 7, samples 3, 9, 4"),
        (TWO, TWO[0], 2, "it raised, step 7, sample 5"),
        (PACKED, PACKED[0], 1, "it raised, step 7, samples 8, 1, 5"),
        (TWO, PACKED[0], 1, "it raised, step 7"),
    ],
    ids=["samples", "one", "rows that are no samples", "another batch"],
)
def test_the_samples_that_are_known_are_named(batches, which, row, told):
    samples = SAMPLES[: len(batches)]
    with pytest.raises(DataError) as named, samples_named(7, batches, samples):
        raise LossRaised("it raised", which, row)
    assert str(named.value) == told


def test_other_errors_stay_as_they_are():
    error = ValueError("x")
    with pytest.raises(ValueError, match="x") as same, samples_named(7, TWO, SAMPLES):
        raise error
    assert same.value is error
