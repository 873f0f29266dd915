"""Integers that need more than 32 bits are refused; all others pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from backends.wgpu.capture.capture import capture_forward
from backends.wgpu.graph.integer_bounds import IntegerBounds
from protocol.base.errors import DataError
from tests.backends.wgpu.on_device import Function

# The input has integers from 36,000 to 36,023.
FITTING: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x * 3 + 7,
    lambda x: (x != 5).long().cumsum(1) * 100_000,
    lambda x: (x * 1009) % 4096,
    lambda x: torch.where(x > 3, x, -100).sum(),
    lambda x: (x.float() / 16).log().long() + 3,
    lambda x: ((x.float() - 36_000) * 1e6).clamp(-5, 2.5).long().cumsum(1),
    lambda x: x.clamp(0, 30) ** 3 - x.abs() // 2,
    lambda x: torch.arange(12) * 128 + x.max(),
    lambda x: (x / 1_800).exp().long() * 4,
    lambda x: torch.where(x > 36_003, (x - 36_000).float().log().long() + 8, x),
    lambda x: (1 / (x - 36_003.5)).long().clamp(-9, 9) * 1_000_000,
]
# Functions that exceed 32 bits, and the operator that does.
OVERFLOWING: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda x: x * 1_000_003 % 4096, "mul"),
    (lambda x: (x * 10_000).sum(), "sum"),
    (lambda x: x**4, "pow"),
    (lambda x: (x * 30_000 + x * 30_000).float(), "add"),
    (lambda x: x.cumsum(1) * 30_000, "mul"),
    (lambda x: (x.float() * 1e30).long(), "_to_copy"),
    (lambda x: (x * 1e6).relu().floor().long() % 97, "_to_copy"),
    (lambda x: (x.float() / 0.5).long() * 40_000, "mul"),
    (lambda x: (x.float() * 1e4).long().sum(), "sum"),
    (lambda x: (x / 1_600).exp().long() % 97, "_to_copy"),
    (lambda x: torch.exp2(x / 1_000).long(), "_to_copy"),
    (lambda x: (1 / (x - 36_003 + 1e-30)).long(), "_to_copy"),
    (lambda x: (x / 4_000).exp().long() * 1_000_003 % 1_000, "mul"),
    (lambda x: (torch.nn.functional.softplus(x) * torch.tensor([1e6])).long(), "_to_copy"),
]


def refuse_overflow(function: Callable[[torch.Tensor], torch.Tensor], array: Any) -> None:
    """Check twice, as the second check may use the cached result of the first."""
    capture = capture_forward(Function(function), (torch.tensor(array),), {})
    bounds = IntegerBounds(capture.graph, capture.arrays)
    for _ in range(2):
        bounds.refuse_overflow({"0": array})


@pytest.mark.parametrize("number", range(len(FITTING)))
def test_values_within_32_bits_pass(number):
    refuse_overflow(FITTING[number], np.arange(36_000, 36_024).reshape(2, 12))


@pytest.mark.parametrize("number", range(len(OVERFLOWING)))
def test_overflow_is_refused_with_the_operator_name(number):
    function, operator = OVERFLOWING[number]
    with pytest.raises(DataError, match=f"from '{operator}' of the loss"):
        refuse_overflow(function, np.arange(36_000, 36_024).reshape(2, 12))


def test_an_error_of_torch_names_the_operator():
    with pytest.raises(DataError, match="'index' of the loss raised index 9 is out of bounds"):
        refuse_overflow(lambda x: (x / 2).exp().long()[x[:1, 0]], np.array([[9, 1]]))


def test_values_that_fit_exactly_pass():
    """The check first widens bounds, to cache its result; here only the exact bounds fit."""
    refuse_overflow(lambda x: x * 32_768, np.array([[65_535, 0]]) - 32_768)
    refuse_overflow(lambda x: x * 30_000, np.array([[70_000, 0]]))
