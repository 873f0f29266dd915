"""The CPU reference of the random operators."""

from __future__ import annotations

import pytest
import torch

from backends.wgpu.graph import reference

SEED = torch.tensor([5, -7], dtype=torch.int32)


@pytest.mark.parametrize("shape", [[], [3], [2, 0], [200, 100]])
def test_draws_are_reproducible_and_in_range(shape):
    mask, uniforms = reference.keep(SEED, shape, 0.25, 3), reference.uniform(SEED, shape, 3)
    assert mask.shape == uniforms.shape == torch.Size(shape)
    assert mask.dtype == uniforms.dtype == torch.float32
    assert torch.equal(mask, reference.keep(SEED, shape, 0.25, 3))
    assert not ((uniforms < 0) | (uniforms >= 1)).any()
    assert not ((mask != 0) & (mask != torch.tensor(1 / 0.75))).any()


def test_masks_have_the_drop_rate_and_differ_by_site():
    mask = reference.keep(SEED, [10_000], 0.25, 3)
    assert abs(float((mask == 0).float().mean()) - 0.25) < 0.02
    assert not torch.equal(mask, reference.keep(SEED, [10_000], 0.25, 4))
