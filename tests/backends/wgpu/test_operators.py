"""Operators on the device against torch on the CPU: shapes, strides, broadcasting and masks."""

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

FEW_EXAMPLES = examples(4)
RTOL, ATOL = 2e-5, 2e-6


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_equals_torch(device: Any, function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Compare shapes, dtypes and values of the function's results."""
    expected_results = function(*tensors)
    if not isinstance(expected_results, tuple):
        expected_results = (expected_results,)
    results = on_device(device, function, tensors)
    for actual, expected in zip(results, expected_results, strict=True):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL)


def assert_gradients_equal_torch(
    device: Any, function: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> None:
    """Compare the gradients of the sum of the function's result; all tensors are floats."""
    results = gradients_on_device(device, function, tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected_results = torch.autograd.grad(function(*leaves).sum(), leaves)
    for actual, expected in zip(results, expected_results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL)


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@FEW_EXAMPLES
@given(shape=SHAPES, data=st.data())
def test_elementwise_operators_with_broadcasting(device, shape, data):
    broadcast_shape = [data.draw(st.sampled_from([1, size])) for size in shape]
    broadcast_shape = broadcast_shape[data.draw(st.integers(0, len(shape))) :]

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

    integers = torch.arange(math.prod(shape)).reshape(shape) - 3
    y = random_tensor(*broadcast_shape, seed=1)
    assert_equals_torch(device, function, random_tensor(*shape), y, integers)


@FEW_EXAMPLES
@given(
    rows=st.integers(1, 4), columns=st.integers(1, 9), first=st.integers(0, 4),
    end=st.integers(1, 9), step=st.integers(1, 4),
)  # fmt: skip
def test_assignment_to_a_strided_slice(device, rows, columns, first, end, step):  # noqa: PLR0917
    """Compares the result and the gradients."""
    first = min(first, columns - 1)
    selected = slice(first, max(end, first + 1), step)
    count = len(range(columns)[selected])

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (x, y)]
            result = leaves[0] * 2
            result[:, selected] = leaves[1]
            grads = torch.autograd.grad((result * result).sum(), leaves)
            return result.detach(), *grads

    assert_equals_torch(
        device, function, random_tensor(rows, columns), random_tensor(rows, count, seed=1)
    )


@FEW_EXAMPLES
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

    assert_equals_torch(device, function, random_tensor(*shape))


@FEW_EXAMPLES
@given(
    shape=st.lists(st.integers(2, 6), min_size=3, max_size=4), data=st.data(), random=st.randoms()
)
def test_views_and_copies(device, shape, data, random):
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

    assert_equals_torch(device, function, random_tensor(*shape))


@FEW_EXAMPLES
@given(
    batch=st.integers(1, 3),
    m=st.integers(1, 20),
    k=st.integers(1, 20),
    n=st.integers(2, 20),
    is_transposed=st.booleans(),
)
def test_products_of_strided_operands(device, batch, m, k, n, is_transposed):  # noqa: PLR0917
    a = random_tensor(batch, k, m).transpose(1, 2) if is_transposed else random_tensor(batch, m, k)
    b = random_tensor(k, batch, n, seed=1)

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads = b.permute(1, 0, 2)
        return a @ heads, a[0] @ heads[0], (a * 2) @ heads, a[:, :1] @ heads[:, :, 1:]

    assert_equals_torch(device, function, a.contiguous(), b)


def test_lookups_with_positive_and_negative_indices(device):
    table, indices = random_tensor(7, 3), torch.tensor([[0, 6, 2], [5, 5, 1]])

    def function(table: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.arange(2)
        gathered = functional.embedding(indices, table)
        return (
            gathered,
            gathered[rows, -indices[:, 0] - 1 + indices[:, 0]],
            gathered.gather(2, indices[..., None] % 3),
            table[indices - 7],
            functional.one_hot(indices, 7).float() @ table,
        )

    assert_equals_torch(device, function, table, indices)


@FEW_EXAMPLES
@given(
    shape=st.lists(st.integers(2, 4), min_size=3, max_size=4), data=st.data(), has_two=st.booleans()
)
def test_index_tensors_after_the_first_dimension(device, shape, data, has_two):
    """One index tensor, or two for adjacent dimensions; gradients of repeated elements add up."""
    first = data.draw(st.integers(1, len(shape) - 1 - has_two))

    def random_indices(size: int) -> torch.Tensor:
        return torch.tensor(
            data.draw(st.lists(st.integers(-size, size - 1), min_size=3, max_size=3))
        )

    indices = [random_indices(size) for size in shape[first : first + 1 + has_two]]
    indices[0] = indices[0][:, None] if has_two else indices[0]

    def function(x: torch.Tensor, *indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            gathered = leaf[(*(slice(None),) * first, *indices)]
            (grad,) = torch.autograd.grad((gathered * gathered).sum(), leaf)
            return gathered.detach(), grad

    assert_equals_torch(device, function, random_tensor(*shape), *indices)


@FEW_EXAMPLES
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    is_broadcast=st.tuples(*[st.booleans()] * 4),
    diagonal=st.integers(-3, 9),
    hidden_value=st.sampled_from([-math.inf, torch.finfo(torch.float32).min]),
    is_additive=st.booleans(),
    seed=st.integers(0, 99),
)
def test_masked_attention_weights(  # noqa: PLR0917
    device, sizes, is_broadcast, diagonal, hidden_value, is_additive, seed
):
    """Combines a mask that is broadcast along any dimensions with a triangular one."""
    scores = random_tensor(*sizes) * 4
    shape = [1 if is_one else size for is_one, size in zip(is_broadcast, sizes, strict=True)]
    visible = random_tensor(*shape, seed=seed) > -0.3

    def function(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        triangle = torch.ones(sizes[2:], dtype=torch.bool).tril(diagonal)
        allowed = triangle & visible
        if hidden_value == -math.inf:  # the weights of a row without visible elements are NaN
            allowed = allowed | (torch.arange(sizes[3]) == 0)
        if not is_additive:
            return scores.masked_fill(~allowed, hidden_value).softmax(-1)
        additive = torch.zeros(allowed.shape).masked_fill(~allowed, hidden_value)
        return (scores + additive).softmax(-1)

    assert_equals_torch(device, function, scores, visible)


def test_attention_that_is_written_out(device):
    query, key = random_tensor(2, 4, 6, 8), random_tensor(2, 2, 6, 8, seed=1)

    def function(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, key, key.cos(), is_causal=True, enable_gqa=True
        )

    assert_equals_torch(device, function, query, key)


def test_gradients_of_rows_that_are_read_repeatedly(device):
    """The loss is a cross-entropy that ignores some labels."""
    table, indices = random_tensor(5, 4), torch.tensor([0, 3, 3, 0, 3, 1])
    labels = torch.tensor([1, -100, 2, 0, 3, -100])

    def function(table: torch.Tensor, indices: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = functional.embedding(indices, table) * table[indices].tanh()
        return functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    (actual,) = gradients_on_device(device, function, (table, indices, labels))
    leaf = table.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf, indices, labels), leaf)
    torch.testing.assert_close(actual, expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("cooperative", [False, True])
def test_long_reductions_are_accurate(device, cooperative):
    """Each reduction is computed by one invocation, or by a workgroup if `cooperative`."""
    x = random_tensor(3, 100_003).abs()

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

    results = on_device(device, function, (x,), cooperative=cooperative)
    with pytest.raises(NoRule, match=r"'argmax.default' .over 100003 terms"):
        on_device(device, lambda x: x.argmax(1), (x,))
    for actual, expected in zip(results, function(x.double()), strict=True):
        torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=1e-6, atol=0.0)


def test_products_read_views_without_strides(device):
    """Operands that are flipped, rolled, repeated, sliced or expanded, on either side."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        doubled = torch.cat([x, x], 1)
        return (
            x.flip(0) @ y,
            y @ x.flip(1).transpose(0, 1).flip(0),
            x.flip(0, 1),
            x.expand(3, 4, 4).flip(2) @ y[None].expand(3, 4, 4).flip(1),
            doubled[:, 1::2] @ y.flip(1)[:, ::2],
            torch.cat([x[1:], x[:1]]) @ y,
            y[:, None].expand(4, 2, 4).reshape(4, 8) @ doubled.flip(1).transpose(0, 1),
            y.flip(0).flip(0) @ x,
        )

    assert_equals_torch(device, function, random_tensor(4, 4), random_tensor(4, 4, seed=1))


def test_gradients_of_cumulative_sums_and_flips(device):
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = torch.cat([x @ y, x.flip(1) @ y], 1)
        return (result.cumsum(1) * result).sum() + (x.cumsum(0) @ y).square().sum()

    assert_gradients_equal_torch(device, function, random_tensor(5, 4), random_tensor(4, 4, seed=1))


@pytest.mark.parametrize("reduction", ["amax", "amin"])
def test_gradient_of_an_extreme_reaches_its_element(device, reduction):
    """Backward finds the element by comparing values, so it must not recompute the product: another
    last bit would hide the element."""

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        extreme: torch.Tensor = getattr(x * y * 0.1, reduction)(0)
        return extreme

    assert_gradients_equal_torch(device, function, random_tensor(9, 7), random_tensor(9, 7, seed=1))
