"""Logits in parts behave as a tensor, whatever a loss does with them."""

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


def assert_same(head: nn.Linear, function: Any, *, in_parts: bool) -> None:
    """Assert that values and gradients equal the tensor's; `in_parts`: without computing the
    tensor."""
    results, gradients = [], []
    for is_deferred in (True, False):
        head.zero_grad()
        inputs = states()
        logits: Any = head(inputs)
        if is_deferred:
            logits = LogitsInParts.of(head.forward, inputs, VOCABULARY, CHUNK_TOKENS)
        result = function(logits)
        if is_deferred:
            assert (logits._tensor is None) == in_parts
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
    "by a module": lambda x: nn.CrossEntropyLoss()(x.view(-1, VOCABULARY), labels().view(-1)),
    "of size": lambda x: functional.cross_entropy(x.view(-1, x.size(-1)), labels().to(x.device)),
    "summed": lambda x: functional.cross_entropy(
        x.float().reshape(12, -1), labels(), reduction="sum"
    ),
    "each": lambda x: functional.cross_entropy(x.flatten(0, -2), labels(), reduction="none"),
    "smoothed": lambda x: functional.cross_entropy(
        x.view((12, VOCABULARY)), labels(), label_smoothing=0.1
    ),
    "another ignored label": lambda x: functional.cross_entropy(
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
def test_a_loss_of_tokens_is_computed_in_parts(head, name):
    assert_same(head, LOSSES_IN_PARTS[name], in_parts=True)


NEEDS_FULL_TENSOR: dict[str, Any] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: functional.log_softmax(x, dim=-1),
    "argmax": lambda x: x.argmax(dim=-1),
    "a mask": lambda x: torch.where(x > 0, x, 0.0),
    "compared": lambda x: x == x.max(),
    "tokens added": lambda x: functional.cross_entropy(
        (x + torch.arange(12.0).view(3, 4, 1)).flatten(0, 1), labels()
    ),
    "a power": lambda x: 2.0**x,
    "from one": lambda x: 1 - x,
    "an added tensor": lambda x: torch.ones(3, 4, VOCABULARY) + x,
    "stacked": lambda x: torch.stack([x, x]),
    "weights of classes": lambda x: functional.cross_entropy(
        x.flatten(0, 1), labels(), weight=BIAS + 2
    ),
    "transposed": lambda x: functional.cross_entropy(x.transpose(1, 2), labels().view(3, 4)),
    "probabilities": lambda x: functional.cross_entropy(
        x.flatten(0, 1), torch.full((12, VOCABULARY), 1 / VOCABULARY)
    ),
    "some of the vocabulary": lambda x: x[..., :5],
    "one token": lambda x: x[:, 0],
    "by tokens": lambda x: x.view(-1, 4).sum(0),
    "all flat": lambda x: x.flatten().cumsum(0),
    "each sample": lambda x: sum(sample.sum() for sample in x),
    "in double": lambda x: x.double(),
    "by name": lambda x: x.mul(BIAS).to(torch.float64),
}


@pytest.mark.parametrize("name", NEEDS_FULL_TENSOR)
def test_every_other_function_gets_the_full_tensor(head, name):
    assert_same(head, NEEDS_FULL_TENSOR[name], in_parts=False)


def test_changes_in_place_act_as_on_the_tensor(head):
    def masked(logits: Any) -> Any:
        copied, flat = logits * 2, logits.view(-1, VOCABULARY)
        logits[..., 0] = -3.0
        changed = flat + 1
        changed += 1
        return functional.cross_entropy(changed, labels()) + copied.sum() + len(copied)

    assert_same(head, masked, in_parts=False)


def test_metric_under_no_grad_leaves_the_loss_its_gradients(head):
    def loss(logits: Any) -> Any:
        with torch.no_grad():
            assert logits.argmax(-1).shape == (3, 4)
        return functional.cross_entropy(logits.flatten(0, 1), labels())

    assert_same(head, loss, in_parts=False)


def test_logits_made_under_no_grad_have_no_gradients(head):
    with torch.no_grad():
        logits: Any = LogitsInParts.of(head.forward, states(), VOCABULARY, CHUNK_TOKENS)
    assert not functional.cross_entropy(logits.flatten(0, 1), labels()).requires_grad
    assert not logits.full_tensor().requires_grad


def test_head_computes_in_the_precision_of_its_call(head):
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
        in_parts = functional.cross_entropy(logits.flatten(0, 1), labels())
        whole = functional.cross_entropy(head(inputs).flatten(0, 1), labels())
    plain = functional.cross_entropy(head(inputs).flatten(0, 1), labels())
    assert logits._tensor is None
    assert float(in_parts.detach()) == pytest.approx(float(whole.detach()), rel=1e-6)
    assert abs(float((whole - plain).detach())) > 1e-5
