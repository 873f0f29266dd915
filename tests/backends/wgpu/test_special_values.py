"""Edge values: NaN, infinities, zeros, subnormals, half-precision types.

The promise that a NaN loss stops the run requires that no NaN is dropped on the way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from backends.wgpu.graph.values import NoRule
from protocol.base.errors import SamestepError
from tests.backends.wgpu.on_device import on_device

NAN, INF = torch.nan, torch.inf
EDGES = torch.tensor(
    [
        *(NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 1e-9, -1e-9, 1e30, -1e30, 88.0),
        *(-88.0, 20.0, -20.0, 3.7, -3.7, 16777217.0, 0.1, -2.5, 1.5, 0.9999),
    ]
)
Functions = Mapping[str, Callable[..., torch.Tensor]]


def assert_alike(device: Any, functions: Functions, *inputs: torch.Tensor) -> None:
    """Compare each function within rounding."""
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
    return {f"to the {p}": lambda x, p=p: x**p for p in exponents}


OF_ONE: Functions = {
    **{name: getattr(torch, name) for name in ("exp", "log", "log1p", "expm1", "tanh", "erf")},
    **{name: getattr(torch, name) for name in ("relu", "sign", "abs", "sigmoid", "sqrt", "log2")},
    **{
        name: getattr(functional, name)
        for name in ("silu", "softplus", "logsigmoid", "relu6", "hardsigmoid", "softshrink")
    },
    "clamp": lambda x: x.clamp(-1, 1),
    "round": torch.round,
    "round halves": lambda x: (x.clamp(-9, 9) * 2).trunc().mul(0.5).round(),
    "clamp from below": lambda x: x.clamp(min=-1),
    "as truth": lambda x: x.bool(),
    "differs": lambda x: x != 0,
    "times zero": lambda x: x * 0.0,
    "times zeros": lambda x: x * torch.zeros_like(x),
    "one over zeros": lambda x: 1 / torch.cat([x * 0.0, x * -0.0, x - x]),
    "masked": lambda x: x * (x > 0).float(),
    "masked by a truth value": lambda x: x * (x > 0),
    "masked twice": lambda x: x * ((x > 0).float() * 0.0),
    "zero either way": lambda x: torch.where(x > 0, 0.0, 0.0) * x,
    "less what it is not": lambda x: x * (1.0 - (x > 0).float()),
    "a mask from a threshold": lambda x: x * functional.threshold(x, 0.5, 0.0).sign(),
    "dropped": lambda x: x * torch.relu(x).ne(0),
    "by zero": lambda x: x / 0.0,
    "by a negative zero": lambda x: x / -0.0,
    "less itself": lambda x: x - x,
    "less itself turned": lambda x: (x[None] - x[None].flip(0))[0],
    "where": lambda x: torch.where(x > 0, x, NAN),
    "remainder": lambda x: x % -1.5,
    "floor division": lambda x: x // 0.1,
    "division of a number": lambda x: 1.0 // torch.where(x == 0, 1, x),
    "division cut off": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    "power of a number": lambda x: 0.5**x,
    "float16": lambda x: x.half(),
    "float16 and back": lambda x: x.half().float() * 3,
    "bfloat16": lambda x: x.bfloat16().float(),
    "a bfloat16 product": lambda x: (x.bfloat16() * 0.1).float(),
    **powers(0, 2, 3, 5, -1, -2, -3, 0.5, 1.5, 10),
}
OF_TWO: Functions = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "power": torch.pow,
    "clamp": lambda x, y: x.clamp(min=y),
    "differs": lambda x, y: x != y,
    "remainder": lambda x, y: torch.remainder(x, torch.where(y == 0, 1, y)),
    "floor division": torch.floor_divide,
}
CANCELLED: Functions = {
    "one for the other": lambda x, y: x + (y - x).detach(),
    "there and back": lambda x, y: (x + y) - x,
    "back and there": lambda x, y: -x + (y + x),
    "of two sums": lambda x, y: (x + y) - (x - 1.0),
}
"""A driver may drop x from these, and with it the bits of x, but not a NaN."""
FOLDS: Functions = {
    **{
        name: lambda x, name=name: getattr(x, name)(-1)
        for name in ("amax", "amin", "argmax", "argmin", "any", "all", "logsumexp", "softmax")
    },
    "softmax of one": lambda x: x[..., :1].softmax(-1),
    "of all": lambda x: x.amax(),
}


def test_functions_of_one(device):
    assert_alike(device, OF_ONE, EDGES)


def test_variance_of_one_number_is_nan(device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_alike(device, {"variance": lambda x: x[:, None].var(1)}, EDGES)


def test_functions_of_two(device):
    ordinary = EDGES.where(EDGES.abs() != 1e-9, 7.0)  # a power of it is next to an edge value
    count = len(EDGES)
    assert_alike(device, OF_TWO, ordinary.repeat_interleave(count), ordinary.repeat(count))


def test_cancellation_gives_nan_where_torch_does(device):
    count = len(EDGES)
    operands = EDGES.repeat_interleave(count), EDGES.repeat(count)
    results = on_device(device, lambda *x: tuple(f(*x) for f in CANCELLED.values()), operands)
    for (name, function), actual in zip(CANCELLED.items(), results, strict=True):
        assert torch.equal(actual.isnan(), function(*operands).isnan()), name


@pytest.mark.parametrize("cooperative", [False, True])
def test_folds(device, cooperative):
    rows = torch.randn((6, 200), generator=torch.Generator().manual_seed(0))
    rows[0, 70], rows[1, 3], rows[2, 199], rows[3] = NAN, INF, -INF, -INF
    rows[4, 0], rows[4, 1] = NAN, INF
    results = on_device(
        device, lambda x: tuple(f(x) for f in FOLDS.values()), (rows,), cooperative=cooperative
    )
    for (name, function), actual in zip(FOLDS.items(), results, strict=True):
        assert torch.allclose(actual, function(rows), rtol=1e-5, equal_nan=True), name


def attended(special_values: Sequence[tuple[int, float]]) -> list[torch.Tensor]:
    """Queries, keys, values and an additive mask, with special values in some."""
    draws = torch.Generator().manual_seed(1)
    operands = [torch.randn((1, 2, 40, 8), generator=draws) for _ in range(3)]
    operands.append(torch.zeros(1, 1, 40, 40))
    for operand, value in special_values:
        operands[operand][0, 0, 3, 5] = value
    return operands


@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("operand", range(4))
def test_attention(device, cooperative, operand):
    """Fused as on a card, and unfused."""
    output = attended([(operand, NAN)])
    (actual,) = on_device(
        device,
        functional.scaled_dot_product_attention,
        output,
        cooperative=cooperative,
    )
    query, key, value, mask = output
    expected = functional.scaled_dot_product_attention(query, key, value, mask)
    assert torch.equal(actual.isnan(), expected.isnan())


def test_a_product_in_a_half_type_is_refused(device):
    """Its sums would be rounded differently."""
    with pytest.raises(NoRule, match=r"mm.default.*bfloat16"):
        on_device(device, lambda x: (x.bfloat16() @ x.bfloat16()).float(), (torch.ones(4, 4),))


def test_invalid_indices_give_nan(device):
    """Where torch refuses them: embeddings, labels, gathers; only plain indexing counts from the
    end."""
    table, numbers = torch.ones(5, 3), torch.tensor([0, 4, 5, -1, 2])

    def function(table: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        numbers = numbers + 0  # computed: an index in the batch itself is refused earlier
        rows = torch.arange(5) * 0
        put = torch.zeros(5, 3).index_put((rows, rows), numbers.float(), accumulate=True)
        return (
            functional.embedding(numbers, table)[:, 0],
            table[numbers][:, 0],
            functional.cross_entropy(table, numbers.clamp(max=3), reduction="none"),
            functional.cross_entropy(
                table, numbers.clamp(max=2), reduction="none", ignore_index=-1
            ),
            put.index_put((numbers,), table, accumulate=True).sum(),
        )

    is_nan = [x.isnan() for x in on_device(device, function, (table, numbers))]
    assert is_nan[0].tolist() == [False, False, True, True, False]
    assert is_nan[1].tolist() == [False, False, True, False, False]
    assert is_nan[2].tolist() == [False, True, True, True, False]
    assert not is_nan[3].any()
    assert is_nan[4]


def test_narrow_integers_wrap_and_powers_are_exact(device):
    functions: Functions = {
        "uint8": lambda x: x.to(torch.uint8) + 200,
        "uint8 products": lambda x: (x.to(torch.uint8) * 7).long(),
        "int8": lambda x: x.to(torch.int8) * 3,
        "int16": lambda x: x.to(torch.int16) * 10_000,
        "power": lambda x: x**3,
        "power of a number": lambda x: 2 ** x.clamp(0, 20),
        "powers": lambda x: (x % 5) ** (x % 4).abs(),
        "lowest": lambda x: x.clamp(min=-(2**31)),
    }
    assert_alike(device, functions, torch.arange(-130, 260))


def test_integer_beyond_32_bits_is_refused(device):
    with pytest.raises(SamestepError, match="got 3000000000"):
        on_device(device, lambda x: x * 3_000_000_000, (torch.arange(3),))


def test_more_products_than_the_grid_limit(device):
    a, b = torch.randn(65_540, 1, 2), torch.randn(65_540, 2, 1)
    (actual,) = on_device(device, torch.bmm, (a, b))
    torch.testing.assert_close(actual, torch.bmm(a, b))
