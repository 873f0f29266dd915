"""What our own operators are on the CPU: what a device is held to."""

from __future__ import annotations

import pytest
import torch

from backends.wgpu.graph import reference

SEED = torch.tensor([5, -7], dtype=torch.int32)


@pytest.mark.parametrize("shape", [[], [3], [2, 0], [200, 100]])
def test_draws_have_their_shape_and_are_the_same_again(shape):
    draws, drawn = reference.keep(SEED, shape, 0.25, 3), reference.uniform(SEED, shape, 3)
    assert draws.shape == drawn.shape == torch.Size(shape)
    assert draws.dtype == drawn.dtype == torch.float32
    assert torch.equal(draws, reference.keep(SEED, shape, 0.25, 3))
    assert not ((drawn < 0) | (drawn >= 1)).any()
    assert not ((draws != 0) & (draws != torch.tensor(1 / 0.75))).any()


def test_as_many_are_dropped_as_asked_for_and_other_sites_draw_others():
    mask = reference.keep(SEED, [10_000], 0.25, 3)
    assert abs(float((mask == 0).float().mean()) - 0.25) < 0.02
    assert not torch.equal(mask, reference.keep(SEED, [10_000], 0.25, 4))
