"""Trainable tokens that are computed without a copy of their table equal PEFT's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.wgpu.capture.added_rows import compute_added_rows_separately
from tests.backends.losses.test_vocabulary_loss import add_lora
from tests.small_heads import TOKEN_LOSS, llama, texts


def loss_and_gradients(module: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.zero_grad()
    loss = TOKEN_LOSS(module, {name: torch.tensor(array) for name, array in texts().arrays.items()})
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    return loss.detach(), gradients


# Model, and its trained tokens.
CASES = {
    "tied": (lambda: llama(tie_word_embeddings=True), (90, 91, 95)),
    "untied": (llama, (0, 50, 51, 52, 95)),
    "one token": (llama, (7,)),
    "not in order": (llama, (52, 50, 51, 3)),
    "a padding token": (lambda: llama(pad_token_id=51), (50, 51, 52)),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_those_of_peft(case):
    make_model, tokens = CASES[case]
    module = add_lora(make_model(), tokens)
    for name, parameter in module.named_parameters():
        if "trainable_tokens_delta" in name:
            torch.nn.init.normal_(parameter)
    expected_loss, expected = loss_and_gradients(module)
    with compute_added_rows_separately(module):
        loss, actual = loss_and_gradients(module)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0.0)
    assert any("trainable_tokens_delta" in name for name in expected)
    for name, gradient in expected.items():
        difference = torch.linalg.norm(actual[name] - gradient)
        assert difference <= 1e-5 * torch.linalg.norm(gradient), name
    loss_afterwards, _ = loss_and_gradients(module)
    assert torch.equal(loss_afterwards, expected_loss), "PEFT's forward is restored"


def test_a_disabled_adapter_uses_only_the_table():
    module: Any = add_lora(llama(), (50, 51))
    ids = torch.tensor([[50, 3, 51]])
    with module.disable_adapter(), torch.no_grad():
        expected = module(input_ids=ids).logits
        with compute_added_rows_separately(module):
            assert torch.equal(module(input_ids=ids).logits, expected)
