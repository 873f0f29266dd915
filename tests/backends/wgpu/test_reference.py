"""The CPU implementation of our own operators, which devices are compared with."""

from __future__ import annotations

import pytest
import torch

from backends.wgpu.graph import reference

SEED = torch.tensor([5, -7], dtype=torch.int32)


@pytest.mark.parametrize("shape", [[], [3], [2, 0], [200, 100]])
def test_draws_have_their_shape_and_repeat(shape):
    draws, uniforms = reference.keep(SEED, shape, 0.25, 3), reference.uniform(SEED, shape, 3)
    assert draws.shape == uniforms.shape == torch.Size(shape)
    assert draws.dtype == uniforms.dtype == torch.float32
    assert torch.equal(draws, reference.keep(SEED, shape, 0.25, 3))
    assert not ((uniforms < 0) | (uniforms >= 1)).any()
    assert not ((draws != 0) & (draws != torch.tensor(1 / 0.75))).any()


def test_drop_rate_and_independent_sites():
    mask = reference.keep(SEED, [10_000], 0.25, 3)
    assert abs(float((mask == 0).float().mean()) - 0.25) < 0.02
    assert not torch.equal(mask, reference.keep(SEED, [10_000], 0.25, 4))
