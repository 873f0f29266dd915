"""Logits in parts stand for a tensor, whatever a loss does to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from backends.losses.logits_in_parts import LogitsInParts
from backends.wgpu.capture.half_products import half_products

VOCABULARY, HIDDEN, AT_ONCE = 11, 4, 5
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
    """The function's values and gradients are those of the tensor, which is computed or not."""
    results, gradients = [], []
    for is_deferred in (True, False):
        head.zero_grad()
        inputs = states()
        logits: Any = head(inputs)
        if is_deferred:
            logits = LogitsInParts.of(head.forward, inputs, VOCABULARY, AT_ONCE)
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
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


IN_PARTS: dict[str, Any] = {
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
    "another that is ignored": lambda x: functional.cross_entropy(
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


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_loss_of_tokens_is_computed_in_parts(head, name):
    assert_same(head, IN_PARTS[name], in_parts=True)


WHOLE: dict[str, Any] = {
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
    "each sample": lambda x: sum(each.sum() for each in x),
    "in double": lambda x: x.double(),
    "by name": lambda x: x.mul(BIAS).to(torch.float64),
}


@pytest.mark.parametrize("name", WHOLE)
def test_everything_else_gets_the_tensor(head, name):
    assert_same(head, WHOLE[name], in_parts=False)


def test_what_is_changed_in_place_is_changed_as_in_the_tensor(head):
    def masked(logits: Any) -> Any:
        copied, flat = logits * 2, logits.view(-1, VOCABULARY)
        logits[..., 0] = -3.0
        changed = flat + 1
        changed += 1
        return functional.cross_entropy(changed, labels()) + copied.sum() + len(copied)

    assert_same(head, masked, in_parts=False)


def test_a_metric_without_gradients_takes_none_from_the_loss(head):
    def loss(logits: Any) -> Any:
        with torch.no_grad():
            assert logits.argmax(-1).shape == (3, 4)
        return functional.cross_entropy(logits.flatten(0, 1), labels())

    assert_same(head, loss, in_parts=False)


def test_logits_without_gradients_stay_so(head):
    with torch.no_grad():
        logits: Any = LogitsInParts.of(head.forward, states(), VOCABULARY, AT_ONCE)
    assert not functional.cross_entropy(logits.flatten(0, 1), labels()).requires_grad
    assert not logits.full_tensor().requires_grad


def test_the_head_computes_in_the_precision_in_which_it_was_reached(head):
    inputs = states()
    with torch.autocast("cpu", torch.bfloat16):
        logits: Any = LogitsInParts.of(head.forward, inputs, VOCABULARY, AT_ONCE)
        expected = head(inputs)
    for_loss = functional.cross_entropy(logits.float().flatten(0, 1), labels(), reduction="sum")
    of_tensor = functional.cross_entropy(expected.float().flatten(0, 1), labels(), reduction="sum")
    assert float(for_loss.detach()) == pytest.approx(float(of_tensor.detach()), rel=1e-6)
    assert torch.equal(logits.full_tensor(), expected)
    assert logits.dtype == torch.bfloat16


def test_a_mode_sees_the_products_of_parts(head):
    """Vulkan's float16 rounds their operands."""
    inputs = states()
    with half_products(enabled=True):
        logits: Any = LogitsInParts.of(head.forward, inputs, VOCABULARY, AT_ONCE)
        in_parts = functional.cross_entropy(logits.flatten(0, 1), labels())
        whole = functional.cross_entropy(head(inputs).flatten(0, 1), labels())
    plain = functional.cross_entropy(head(inputs).flatten(0, 1), labels())
    assert logits._tensor is None
    assert float(in_parts.detach()) == pytest.approx(float(whole.detach()), rel=1e-6)
    assert abs(float((whole - plain).detach())) > 1e-5
