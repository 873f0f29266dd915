"""Rows that are trained beside a table, computed without a copy of the table: PEFT's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.wgpu.capture.added_rows import compute_added_rows_separately
from tests.backends.losses.test_vocabulary_loss import add_lora
from tests.small_heads import TOKEN_LOSS, llama, texts


def gradients(module: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module.zero_grad()
    loss = TOKEN_LOSS(module, {name: torch.tensor(each) for name, each in texts().arrays.items()})
    loss.backward()
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    return loss.detach(), {name: each.grad.clone() for name, each in trained.items()}


CASES = {
    "tied": (lambda: llama(tie_word_embeddings=True), (90, 91, 95)),
    "untied": (llama, (0, 50, 51, 52, 95)),
    "one": (llama, (7,)),
    "in another order": (llama, (52, 50, 51, 3)),
    "with padding": (lambda: llama(pad_token_id=51), (50, 51, 52)),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_peft(case):
    make, tokens = CASES[case]
    module = add_lora(make(), tokens)
    for name, each in module.named_parameters():
        if "trainable_tokens_delta" in name:
            torch.nn.init.normal_(each)
    expected_loss, expected = gradients(module)
    with compute_added_rows_separately(module):
        loss, found = gradients(module)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0.0)
    assert any("trainable_tokens_delta" in name for name in expected)
    for name, gradient in expected.items():
        difference = torch.linalg.norm(found[name] - gradient)
        assert difference <= 1e-5 * torch.linalg.norm(gradient), name
    again = gradients(module)
    assert torch.equal(again[0], expected_loss), "the layers compute as PEFT's again"


def test_a_disabled_adapter_is_the_table():
    module: Any = add_lora(llama(), (50, 51))
    ids = torch.tensor([[50, 3, 51]])
    with module.disable_adapter(), torch.no_grad():
        expected = module(input_ids=ids).logits
        with compute_added_rows_separately(module):
            assert torch.equal(module(input_ids=ids).logits, expected)
