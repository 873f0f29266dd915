"""Operators on the device against torch on the CPU: shapes, strides, broadcasting, masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from backends.wgpu.graph.values import NoRule
from tests.backends.wgpu.examples import examples
from tests.backends.wgpu.on_device import gradients_on_device, on_device

FEW = examples(4)
RTOL, ATOL = 2e-5, 2e-6


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def agree(device: Any, function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    expected = function(*tensors)
    expected = expected if isinstance(expected, tuple) else (expected,)
    actual = on_device(device, function, tensors)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=RTOL, atol=ATOL)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@FEW
@given(shape=SHAPES, data=st.data())
def test_elementwise_with_broadcasting(device, shape, data):
    thin = [data.draw(st.sampled_from([1, size])) for size in shape]
    thin = thin[data.draw(st.integers(0, len(thin))) :]

    def function(x: torch.Tensor, y: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = torch.exp(-(x * x)) + y * 3 - torch.tanh(y / 2)
        return (
            result,
            torch.add(x, y, alpha=0.5).clamp(-1, 2),
            torch.where((x > y) | (n == 2), x.sigmoid(), y.abs().sqrt()),
            (n * 3 - 7) // 2,
            (x <= y).logical_not(),
            torch.relu(x) ** 3 + torch.rsqrt(y.abs() + 1) + torch.erf(x),
            (n % 3).float() * functional.gelu(x) + functional.silu(x),
        )

    numbers = torch.arange(math.prod(shape)).reshape(shape) - 3
    agree(device, function, drawn(*shape), drawn(*thin, seed=1), numbers)


@FEW
@given(
    rows=st.integers(1, 4), columns=st.integers(1, 9), first=st.integers(0, 4),
    end=st.integers(1, 9), step=st.integers(1, 4),
)  # fmt: skip
def test_manieth_strided_element_is_written(device, rows, columns, first, end, step):  # noqa: PLR0917
    """Also reads its gradient."""
    first = min(first, columns - 1)
    count = len(range(columns)[first : max(end, first + 1) : step])

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in (x, y)]
            doubled = leaves[0] * 2
            doubled[:, first : max(end, first + 1) : step] = leaves[1]
            grads = torch.autograd.grad((doubled * doubled).sum(), leaves)
            return doubled.detach(), *grads

    agree(device, function, drawn(rows, columns), drawn(rows, count, seed=1))


@FEW
@given(shape=st.lists(st.integers(1, 7), min_size=2, max_size=4), data=st.data())
def test_reductions_over_any_dimensions(device, shape, data):
    dims = data.draw(
        st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True)
    )
    keepdim = data.draw(st.booleans())

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.sum(dims, keepdim),
            (x * x).mean(dims, keepdim),
            x.amax(dims, keepdim),
            (-x).amin(dims, keepdim),
            x.argmax(dims[0], keepdim),
            x.var(dims[0], unbiased=False),
            x.softmax(dims[0]),
            torch.log_softmax(x.transpose(0, -1), 0),
            x.cumsum(dims[0]),
            (x > 1).any(dims[0]),
        )

    agree(device, function, drawn(*shape))


@FEW
@given(
    shape=st.lists(st.integers(2, 6), min_size=3, max_size=4), data=st.data(), random=st.randoms()
)
def test_views_and_copies_between_operators(device, shape, data, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    start = data.draw(st.integers(0, shape[0] - 1))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        permuted = x.permute(order)
        return (
            (permuted.reshape(-1) * 2).reshape(permuted.shape).contiguous(),
            permuted[..., 1:].flatten(0, 1) + 1,
            torch.cat([x[start:], x[:start] * 2, x], 0),
            functional.pad(x, (1, 2, -1, 0)),
            x.unsqueeze(1).expand(-1, 3, *x.shape[1:]).flatten(1, 2),
            torch.stack([x[0], x[-1]], 1)[:, 0],
            x.flip(0) - x.select(0, start),
            sum(part.sum() for part in x.split(2, 0)),
            x.tril() if x.dim() > 1 else x,
        )

    agree(device, function, drawn(*shape))


@FEW
@given(
    batch=st.integers(1, 3),
    m=st.integers(1, 20),
    k=st.integers(1, 20),
    n=st.integers(2, 20),
    is_transposed=st.booleans(),
)
def test_products_of_strided_operands(device, batch, m, k, n, is_transposed):  # noqa: PLR0917
    a = drawn(batch, k, m).transpose(1, 2) if is_transposed else drawn(batch, m, k)
    b = drawn(k, batch, n, seed=1)

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = b.permute(1, 0, 2)
        return a @ heads, a[0] @ heads[0], (a * 2) @ heads, a[:, :1] @ heads[:, :, 1:]

    agree(device, function, a.contiguous(), b)


def test_negative_indices(device):
    table, numbers = drawn(7, 3), torch.tensor([[0, 6, 2], [5, 5, 1]])

    def function(table: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.arange(2)
        gathered = functional.embedding(numbers, table)
        return (
            gathered,
            gathered[rows, -numbers[:, 0] - 1 + numbers[:, 0]],
            gathered.gather(2, numbers[..., None] % 3),
            table[numbers - 7],
            functional.one_hot(numbers, 7).float() @ table,
        )

    agree(device, function, table, numbers)


@FEW
@given(
    shape=st.lists(st.integers(2, 4), min_size=3, max_size=4), data=st.data(), several=st.booleans()
)
def test_indices_of_later_dimensions(device, shape, data, several):
    """One index or two neighboring ones; gradients add up where an element is read twice."""
    first = data.draw(st.integers(1, len(shape) - 1 - several))

    def numbers(size: int) -> torch.Tensor:
        drawn_ = data.draw(st.lists(st.integers(-size, size - 1), min_size=3, max_size=3))
        return torch.tensor(drawn_)

    indices = [numbers(size) for size in shape[first : first + 1 + several]]
    indices[0] = indices[0][:, None] if several else indices[0]

    def function(x: torch.Tensor, *indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            gathered = leaf[(*(slice(None),) * first, *indices)]
            (grad,) = torch.autograd.grad((gathered * gathered).sum(), leaf)
            return gathered.detach(), grad

    agree(device, function, drawn(*shape), *indices)


@FEW
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    thin=st.tuples(*[st.booleans()] * 4),
    diagonal=st.integers(-3, 9),
    fill=st.sampled_from([-math.inf, torch.finfo(torch.float32).min]),
    is_additive=st.booleans(),
    seed=st.integers(0, 99),
)
def test_masked_attention_weights(device, sizes, thin, diagonal, fill, is_additive, seed):  # noqa: PLR0917
    """A mask for all or some of the dimensions, and a triangle; with -inf and the lowest float."""
    scores = drawn(*sizes) * 4
    shape = [1 if one else size for one, size in zip(thin, sizes, strict=True)]
    visible = drawn(*shape, seed=seed) > -0.3

    def function(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        triangle = torch.ones(sizes[2:], dtype=torch.bool).tril(diagonal)
        allowed = triangle & visible
        if fill == -math.inf:  # a row without visible elements has no weights
            allowed = allowed | (torch.arange(sizes[3]) == 0)
        if not is_additive:
            return scores.masked_fill(~allowed, fill).softmax(-1)
        return (scores + torch.zeros(allowed.shape).masked_fill(~allowed, fill)).softmax(-1)

    agree(device, function, scores, visible)


def test_fused_attention_is_written_out(device):
    query, key = drawn(2, 4, 6, 8), drawn(2, 2, 6, 8, seed=1)

    def function(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, key, key.cos(), is_causal=True, enable_gqa=True
        )

    agree(device, function, query, key)


def test_gradients_of_gathers_add_up_in_one_order(device):
    """Rows that are read several times, and a cross-entropy that ignores some labels."""
    table, numbers = drawn(5, 4), torch.tensor([0, 3, 3, 0, 3, 1])
    labels = torch.tensor([1, -100, 2, 0, 3, -100])

    def function(table: torch.Tensor, numbers: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = functional.embedding(numbers, table) * table[numbers].tanh()
        return functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    actual = gradients_on_device(device, function, (table, numbers, labels))
    leaf = table.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf, numbers, labels), leaf)
    torch.testing.assert_close(actual[0], expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("cooperative", [False, True])
def test_long_reductions_lose_little(device, cooperative):
    """By one invocation each, and by a workgroup each, as on a GPU."""
    x = drawn(3, 100_003).abs()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            x.sum(1),
            x.mean(),
            x.amax(1),
            x.amin(),
            (x > 4.5).any(1),
            (x > 1).sum(1),
            x[:, :200].sum(1),
        )

    actual = on_device(device, function, (x,), cooperative=cooperative)
    with pytest.raises(NoRule, match=r"'argmax.default' .over 100003 terms"):
        on_device(device, lambda x: x.argmax(1), (x,))
    for one, other in zip(actual, function(x.double()), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-6, atol=0.0)


def test_products_read_views_without_strides(device):
    """Flipped, rolled, repeated, windowed or expanded, on either side and as a result."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = torch.cat([x, x], 1)
        return (
            x.flip(0) @ y,
            y @ x.flip(1).transpose(0, 1).flip(0),
            x.flip(0, 1),
            x.expand(3, 4, 4).flip(2) @ y[None].expand(3, 4, 4).flip(1),
            result[:, 1::2] @ y.flip(1)[:, ::2],
            torch.cat([x[1:], x[:1]]) @ y,
            y[:, None].expand(4, 2, 4).reshape(4, 8) @ result.flip(1).transpose(0, 1),
            y.flip(0).flip(0) @ x,
        )

    agree(device, function, drawn(4, 4), drawn(4, 4, seed=1))


def test_gradients_of_running_sums_and_flips(device):
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = torch.cat([x @ y, x.flip(1) @ y], 1)
        return (result.cumsum(1) * result).sum() + (x.cumsum(0) @ y).square().sum()

    operands = drawn(5, 4), drawn(4, 4, seed=1)
    actual = gradients_on_device(device, function, operands)
    leaves = [x.clone().requires_grad_() for x in operands]
    expected = torch.autograd.grad(function(*leaves), leaves)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("fold", ["amax", "amin"])
def test_gradient_of_an_extreme_goes_to_its_element(device, fold):
    """Backward finds the element by comparing, and a product computed twice may differ in its last
    bit."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        extreme: torch.Tensor = getattr(x * y * 0.1, fold)(0)
        return extreme

    operands = drawn(9, 7), drawn(9, 7, seed=1)
    actual = gradients_on_device(device, function, operands)
    leaves = [x.clone().requires_grad_() for x in operands]
    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=RTOL, atol=ATOL)
