"""The frozen base of a module: its weights, and the values after rounding."""

import numpy as np
import pytest
import torch
from torch import nn

from backends.quantization.frozen_base import frozen_base, round_frozen_base
from backends.quantization.quantize import STORAGE, dequantize, quantize


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 64)
        self.frozen = nn.Linear(64, 8)
        self.indivisible = nn.Linear(12, 8)  # no group of 8 divides a row of 12
        self.trained = nn.Linear(64, 8)
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)
        self.trained.weight.requires_grad_(True)


def test_frozen_base_contains_only_weights_of_frozen_linear_layers():
    assert list(frozen_base(TiedModel())) == ["frozen.weight"]


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16", "float16", "int8", "int4", "nf4"])
def test_rounding_replaces_weights_of_the_frozen_base_by_dequantized_values(base_dtype):
    torch.manual_seed(1)
    module = TiedModel()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    round_frozen_base(module, base_dtype)
    changed_names = {
        name for name, value in module.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed_names == (set() if base_dtype == "float32" else {"frozen.weight"})
    if base_dtype != "float32":
        expected = dequantize(quantize(before["frozen.weight"].numpy(), STORAGE[base_dtype]))
        np.testing.assert_array_equal(module.frozen.weight.numpy(), expected)
