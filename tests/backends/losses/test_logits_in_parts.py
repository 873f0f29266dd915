"""`LogitsInParts` gives a loss the values and gradients of the full tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from backends.losses.logits_in_parts import LogitsInParts
from backends.wgpu.capture.half_products import half_products

VOCABULARY, HIDDEN, CHUNK_TOKENS = 11, 4, 5
BIAS = torch.linspace(-1.0, 1.0, VOCABULARY)


@pytest.fixture
def head() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(HIDDEN, VOCABULARY)


def states() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(3, 4, HIDDEN, requires_grad=True)


def labels(tokens: int = 12) -> torch.Tensor:
    return torch.where(torch.arange(tokens) % 4 == 1, -100, torch.arange(tokens) * 7 % VOCABULARY)


def assert_equals_tensor(head: nn.Linear, function: Any, *, computes_tensor: bool) -> None:
    """Assert that a function of logits in parts has the values and gradients of the full tensor.

    Args:
        head: The head.
        function: A function of the logits.
        computes_tensor: Whether the function must compute the full tensor, or must not.
    """
    results, gradients = [], []
    for is_deferred in (True, False):
        head.zero_grad()
        inputs = states()
        logits: Any = head(inputs)
        if is_deferred:
            logits = LogitsInParts.of(head.forward, inputs, VOCABULARY, CHUNK_TOKENS)
        result = function(logits)
        if is_deferred:
            assert (logits._tensor is not None) == computes_tensor
        if isinstance(result, LogitsInParts):
            result = result.full_tensor()
        if result.requires_grad:
            result.float().square().sum().backward()
        results.append(result.detach())
        gradients.append([inputs.grad, head.weight.grad, head.bias.grad])
    assert results[0].dtype == results[1].dtype
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
    for actual, expected in zip(*gradients, strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


LOSSES_IN_PARTS: dict[str, Any] = {
    "flattened": lambda x: functional.cross_entropy(x.flatten(0, 1), labels()),
    "module": lambda x: nn.CrossEntropyLoss()(x.view(-1, VOCABULARY), labels().view(-1)),
    "shape from size()": lambda x: functional.cross_entropy(
        x.view(-1, x.size(-1)), labels().to(x.device)
    ),
    "summed": lambda x: functional.cross_entropy(
        x.float().reshape(12, -1), labels(), reduction="sum"
    ),
    "no reduction": lambda x: functional.cross_entropy(
        x.flatten(0, -2), labels(), reduction="none"
    ),
    "smoothed": lambda x: functional.cross_entropy(
        x.view((12, VOCABULARY)), labels(), label_smoothing=0.1
    ),
    "ignored label 7": lambda x: functional.cross_entropy(
        x.flatten(0, 1), labels().clamp(min=0), ignore_index=7
    ),
    "scaled": lambda x: functional.cross_entropy((2 * x / 3 * 0.5).flatten(0, 1), labels()),
    "capped": lambda x: functional.cross_entropy(
        (torch.tanh(x / 0.7) * 0.7).flatten(0, 1), labels()
    ),
    "with a bias": lambda x: functional.cross_entropy((x + BIAS[None]).flatten(0, 1), labels()),
    "negated": lambda x: functional.cross_entropy((-x - 1).tanh().flatten(0, 1), labels()),
    "shifted": lambda x: functional.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, VOCABULARY), labels(9)
    ),
    "some samples": lambda x: functional.cross_entropy(x[1:].flatten(0, 1), labels(8)),
}


@pytest.mark.parametrize("name", LOSSES_IN_PARTS)
def test_a_token_loss_is_computed_in_parts(head, name):
    assert_equals_tensor(head, LOSSES_IN_PARTS[name], computes_tensor=False)


NEEDS_FULL_TENSOR: dict[str, Any] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: functional.log_softmax(x, dim=-1),
    "argmax": lambda x: x.argmax(dim=-1),
    "mask": lambda x: torch.where(x > 0, x, 0.0),
    "compared": lambda x: x == x.max(),
    "one addend per token": lambda x: functional.cross_entropy(
        (x + torch.arange(12.0).view(3, 4, 1)).flatten(0, 1), labels()
    ),
    "exponent": lambda x: 2.0**x,
    "subtracted from 1": lambda x: 1 - x,
    "full tensor on the left": lambda x: torch.ones(3, 4, VOCABULARY) + x,
    "stacked": lambda x: torch.stack([x, x]),
    "class weights": lambda x: functional.cross_entropy(x.flatten(0, 1), labels(), weight=BIAS + 2),
    "transposed": lambda x: functional.cross_entropy(x.transpose(1, 2), labels().view(3, 4)),
    "probabilities": lambda x: functional.cross_entropy(
        x.flatten(0, 1), torch.full((12, VOCABULARY), 1 / VOCABULARY)
    ),
    "slice of the vocabulary": lambda x: x[..., :5],
    "one token": lambda x: x[:, 0],
    "summed over tokens": lambda x: x.view(-1, 4).sum(0),
    "one dimension": lambda x: x.flatten().cumsum(0),
    "iterated over samples": lambda x: sum(sample.sum() for sample in x),
    "double()": lambda x: x.double(),
    "to(float64)": lambda x: x.mul(BIAS).to(torch.float64),
}


@pytest.mark.parametrize("name", NEEDS_FULL_TENSOR)
def test_functions_that_are_not_token_losses_get_the_full_tensor(head, name):
    assert_equals_tensor(head, NEEDS_FULL_TENSOR[name], computes_tensor=True)


def test_changes_in_place_have_the_effect_that_they_have_on_a_tensor(head):
    def masked(logits: Any) -> Any:
        copied, flat = logits * 2, logits.view(-1, VOCABULARY)
        logits[..., 0] = -3.0
        changed = flat + 1
        changed += 1
        return functional.cross_entropy(changed, labels()) + copied.sum() + len(copied)

    assert_equals_tensor(head, masked, computes_tensor=True)


def test_loss_has_gradients_after_a_metric_under_no_grad(head):
    def loss(logits: Any) -> Any:
        with torch.no_grad():
            assert logits.argmax(-1).shape == (3, 4)
        return functional.cross_entropy(logits.flatten(0, 1), labels())

    assert_equals_tensor(head, loss, computes_tensor=True)


def test_logits_computed_under_no_grad_have_no_gradients(head):
    with torch.no_grad():
        logits: Any = LogitsInParts.of(head.forward, states(), VOCABULARY, CHUNK_TOKENS)
    assert not functional.cross_entropy(logits.flatten(0, 1), labels()).requires_grad
    assert not logits.full_tensor().requires_grad


def test_head_computes_in_the_autocast_precision_of_its_call(head):
    inputs = states()
    with torch.autocast("cpu", torch.bfloat16):
        logits: Any = LogitsInParts.of(head.forward, inputs, VOCABULARY, CHUNK_TOKENS)
        expected = head(inputs)
    loss_in_parts = functional.cross_entropy(
        logits.float().flatten(0, 1), labels(), reduction="sum"
    )
    loss_of_tensor = functional.cross_entropy(
        expected.float().flatten(0, 1), labels(), reduction="sum"
    )
    assert float(loss_in_parts.detach()) == pytest.approx(float(loss_of_tensor.detach()), rel=1e-6)
    assert torch.equal(logits.full_tensor(), expected)
    assert logits.dtype == torch.bfloat16


def test_torch_function_mode_sees_the_products_of_parts(head):
    """Vulkan's float16 mode rounds the operands of products."""
    inputs = states()
    with half_products(enabled=True):
        logits: Any = LogitsInParts.of(head.forward, inputs, VOCABULARY, CHUNK_TOKENS)
        loss_in_parts = functional.cross_entropy(logits.flatten(0, 1), labels())
        loss_of_tensor = functional.cross_entropy(head(inputs).flatten(0, 1), labels())
    float32_loss = functional.cross_entropy(head(inputs).flatten(0, 1), labels())
    assert logits._tensor is None
    assert float(loss_in_parts.detach()) == pytest.approx(float(loss_of_tensor.detach()), rel=1e-6)
    assert abs(float((loss_of_tensor - float32_loss).detach())) > 1e-5, "float16 changes the loss"
