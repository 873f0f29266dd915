"""Special values: NaN, infinities, signed zeros, and 16-bit types.

A NaN must halt the run, so no operator may lose it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional

from backends.wgpu.graph.values import NoRule
from protocol.base.errors import SamestepError
from tests.backends.wgpu.on_device import on_device

NAN, INF = torch.nan, torch.inf
SPECIAL_VALUES = torch.tensor(
    [
        *(NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 1e-9, -1e-9, 1e30, -1e30, 88.0),
        *(-88.0, 20.0, -20.0, 3.7, -3.7, 16777217.0, 0.1, -2.5, 1.5, 0.9999),
    ]
)
Functions = Mapping[str, Callable[..., torch.Tensor]]


def assert_equals_torch(device: Any, functions: Functions, *inputs: torch.Tensor) -> None:
    """Compare each function's result with torch's, within rounding; NaN equals NaN."""
    results = on_device(device, lambda *x: tuple(f(*x) for f in functions.values()), inputs)
    for (name, function), actual in zip(functions.items(), results, strict=True):
        expected = function(*inputs)
        assert actual.dtype == expected.dtype, name
        is_close = torch.isclose(actual, expected, rtol=5e-6, atol=1e-37, equal_nan=True)
        assert is_close.all(), (
            name,
            [x[~is_close][:3] for x in (*inputs, actual, expected) if x.shape],
        )


def powers(*exponents: float) -> Functions:
    return {f"power {p}": lambda x, p=p: x**p for p in exponents}


ONE_OPERAND: Functions = {
    **{name: getattr(torch, name) for name in ("exp", "log", "log1p", "expm1", "tanh", "erf")},
    **{name: getattr(torch, name) for name in ("relu", "sign", "abs", "sigmoid", "sqrt", "log2")},
    **{
        name: getattr(functional, name)
        for name in ("silu", "softplus", "logsigmoid", "relu6", "hardsigmoid", "softshrink")
    },
    "clamp": lambda x: x.clamp(-1, 1),
    "round": torch.round,
    "round halves": lambda x: (x.clamp(-9, 9) * 2).trunc().mul(0.5).round(),
    "clamp with a minimum": lambda x: x.clamp(min=-1),
    "to boolean": lambda x: x.bool(),
    "not equal to zero": lambda x: x != 0,
    "times zero": lambda x: x * 0.0,
    "times zero tensor": lambda x: x * torch.zeros_like(x),
    "one over signed zeros": lambda x: 1 / torch.cat([x * 0.0, x * -0.0, x - x]),
    "times float mask": lambda x: x * (x > 0).float(),
    "times boolean mask": lambda x: x * (x > 0),
    "times zeroed mask": lambda x: x * ((x > 0).float() * 0.0),
    "where with zero on both sides": lambda x: torch.where(x > 0, 0.0, 0.0) * x,
    "times inverted mask": lambda x: x * (1.0 - (x > 0).float()),
    "times mask from threshold": lambda x: x * functional.threshold(x, 0.5, 0.0).sign(),
    "times mask of relu": lambda x: x * torch.relu(x).ne(0),
    "over zero": lambda x: x / 0.0,
    "over negative zero": lambda x: x / -0.0,
    "minus itself": lambda x: x - x,
    "minus itself flipped": lambda x: (x[None] - x[None].flip(0))[0],
    "where": lambda x: torch.where(x > 0, x, NAN),
    "remainder": lambda x: x % -1.5,
    "floor division": lambda x: x // 0.1,
    "floor division of a constant": lambda x: 1.0 // torch.where(x == 0, 1, x),
    "truncated division": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    "power of a constant": lambda x: 0.5**x,
    "float16": lambda x: x.half(),
    "float16 and back": lambda x: x.half().float() * 3,
    "bfloat16": lambda x: x.bfloat16().float(),
    "bfloat16 product": lambda x: (x.bfloat16() * 0.1).float(),
    **powers(0, 2, 3, 5, -1, -2, -3, 0.5, 1.5, 10),
}
TWO_OPERANDS: Functions = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "power": torch.pow,
    "clamp": lambda x, y: x.clamp(min=y),
    "not equal": lambda x, y: x != y,
    "remainder": lambda x, y: torch.remainder(x, torch.where(y == 0, 1, y)),
    "floor division": torch.floor_divide,
}
CANCELLED: Functions = {
    "straight-through": lambda x, y: x + (y - x).detach(),
    "add, then subtract": lambda x, y: (x + y) - x,
    "negate, then add": lambda x, y: -x + (y + x),
    "difference of sums": lambda x, y: (x + y) - (x - 1.0),
}
"""A driver may cancel x here, which changes bits, but must not lose a NaN of x."""
REDUCTIONS: Functions = {
    **{
        name: lambda x, name=name: getattr(x, name)(-1)
        for name in ("amax", "amin", "argmax", "argmin", "any", "all", "logsumexp", "softmax")
    },
    "softmax of one element": lambda x: x[..., :1].softmax(-1),
    "amax of all": lambda x: x.amax(),
}


def test_functions_of_one_operand(device):
    assert_equals_torch(device, ONE_OPERAND, SPECIAL_VALUES)


def test_variance_of_one_number_is_nan(device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_equals_torch(device, {"variance": lambda x: x[:, None].var(1)}, SPECIAL_VALUES)


def test_functions_of_two_operands(device):
    # 1e30 / 1e-9 overflows, so torch's remainder is NaN, but the device's is not.
    values = SPECIAL_VALUES.where(SPECIAL_VALUES.abs() != 1e-9, 7.0)
    count = len(SPECIAL_VALUES)
    assert_equals_torch(device, TWO_OPERANDS, values.repeat_interleave(count), values.repeat(count))


def test_cancellation_gives_nan_where_torch_does(device):
    count = len(SPECIAL_VALUES)
    operands = SPECIAL_VALUES.repeat_interleave(count), SPECIAL_VALUES.repeat(count)
    results = on_device(device, lambda *x: tuple(f(*x) for f in CANCELLED.values()), operands)
    for (name, function), actual in zip(CANCELLED.items(), results, strict=True):
        assert torch.equal(actual.isnan(), function(*operands).isnan()), name


@pytest.mark.parametrize("cooperative", [False, True])
def test_reductions(device, cooperative):
    rows = torch.randn((6, 200), generator=torch.Generator().manual_seed(0))
    rows[0, 70], rows[1, 3], rows[2, 199], rows[3] = NAN, INF, -INF, -INF
    rows[4, 0], rows[4, 1] = NAN, INF
    results = on_device(
        device, lambda x: tuple(f(x) for f in REDUCTIONS.values()), (rows,), cooperative=cooperative
    )
    for (name, function), actual in zip(REDUCTIONS.items(), results, strict=True):
        assert torch.allclose(actual, function(rows), rtol=1e-5, equal_nan=True), name


def attention_operands_with_nan(operand: int) -> list[torch.Tensor]:
    """Return query, key, value and additive mask, with one NaN in the operand of this number."""
    generator = torch.Generator().manual_seed(1)
    operands = [torch.randn((1, 2, 40, 8), generator=generator) for _ in range(3)]
    operands.append(torch.zeros(1, 1, 40, 40))
    operands[operand][0, 0, 3, 5] = NAN
    return operands


@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("operand", range(4))
def test_attention_propagates_nan(device, cooperative, operand):
    """With `cooperative`, attention is fused, as on a GPU."""
    operands = attention_operands_with_nan(operand)
    attention = functional.scaled_dot_product_attention
    (actual,) = on_device(device, attention, operands, cooperative=cooperative)
    query, key, value, mask = operands
    expected = attention(query, key, value, mask)
    assert torch.equal(actual.isnan(), expected.isnan())


def test_a_bfloat16_product_is_refused(device):
    """Its sums would be rounded differently."""
    with pytest.raises(NoRule, match=r"mm.default.*bfloat16"):
        on_device(device, lambda x: (x.bfloat16() @ x.bfloat16()).float(), (torch.ones(4, 4),))


def test_invalid_indices_give_nan(device):
    """Where torch raises. Negative indices are valid only in indexing with brackets."""
    table, indices = torch.ones(5, 3), torch.tensor([0, 4, 5, -1, 2])

    def function(table: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        indices = indices + 0  # computed indices: those of the batch are checked before the upload
        zeros = torch.arange(5) * 0
        sums = torch.zeros(5, 3).index_put((zeros, zeros), indices.float(), accumulate=True)
        return (
            functional.embedding(indices, table)[:, 0],
            table[indices][:, 0],
            functional.cross_entropy(table, indices.clamp(max=3), reduction="none"),
            functional.cross_entropy(
                table, indices.clamp(max=2), reduction="none", ignore_index=-1
            ),
            sums.index_put((indices,), table, accumulate=True).sum(),
        )

    embedded, indexed, losses, losses_with_ignored, total = (
        x.isnan() for x in on_device(device, function, (table, indices))
    )
    assert embedded.tolist() == [False, False, True, True, False]
    assert indexed.tolist() == [False, False, True, False, False]
    assert losses.tolist() == [False, True, True, True, False]
    assert not losses_with_ignored.any()
    assert total


def test_narrow_integers_wrap_and_integer_powers_are_exact(device):
    functions: Functions = {
        "uint8": lambda x: x.to(torch.uint8) + 200,
        "uint8 products": lambda x: (x.to(torch.uint8) * 7).long(),
        "int8": lambda x: x.to(torch.int8) * 3,
        "int16": lambda x: x.to(torch.int16) * 10_000,
        "power": lambda x: x**3,
        "power of a constant": lambda x: 2 ** x.clamp(0, 20),
        "power with tensor exponent": lambda x: (x % 5) ** (x % 4).abs(),
        "lowest int32": lambda x: x.clamp(min=-(2**31)),
    }
    assert_equals_torch(device, functions, torch.arange(-130, 260))


def test_a_constant_beyond_32_bits_is_refused(device):
    with pytest.raises(SamestepError, match="got 3000000000"):
        on_device(device, lambda x: x * 3_000_000_000, (torch.arange(3),))


def test_a_batch_of_products_may_exceed_the_grid_limit(device):
    # A grid has at most 65,535 workgroups per dimension.
    a, b = torch.randn(65_540, 1, 2), torch.randn(65_540, 2, 1)
    (actual,) = on_device(device, torch.bmm, (a, b))
    torch.testing.assert_close(actual, torch.bmm(a, b))
