"""Initial values in memory and on disk: readers cannot change them."""

from __future__ import annotations

import errno
import os
from unittest.mock import Mock

import numpy as np
import pytest

from worker.models.initial_values import InitialValues


@pytest.mark.parametrize("limit_bytes", [0, 1 << 20], ids=["on disk", "in memory"])
def test_each_read_returns_new_arrays(limit_bytes):
    arrays = [np.arange(7, dtype=np.float32), np.full(3, np.nan, np.float32)]
    initial = InitialValues(arrays, limit_bytes)
    for _ in range(2):
        for array, expected in zip(initial.read(), arrays, strict=True):
            np.testing.assert_array_equal(array, expected)
            array[:] = 0


def test_values_stay_in_memory_if_the_disk_is_full(monkeypatch):
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
    initial = InitialValues([np.arange(7, dtype=np.float32)], 0)
    np.testing.assert_array_equal(initial.read()[0], np.arange(7))
