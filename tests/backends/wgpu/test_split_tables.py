"""Tables larger than a binding: in parts, with the bits of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from backends.interface import Batch, Loss
from backends.wgpu.lowering import Templates
from backends.wgpu.matmul_tuning import MatmulTuner
from backends.wgpu.program import VulkanProgram
from backends.wgpu.split_tables import row_parts
from protocol.errors import SamestepError
from tests.backends.wgpu.small_models import (
    TOKENS,
    assert_like_the_cpu,
    bert,
    class_loss,
    gradients,
    labelled,
    llama,
    next_token_loss,
    qwen3_with_lora,
    text,
    trainable,
)

WIDTH = 64
ROW_BYTES = 4 * WIDTH
LARGEST = 17_000
"""A table of 97 x 64 has 24,832 bytes; nothing else of these models has so many as this."""


def program_of(device, job, batch, largest_bytes=LARGEST):
    template = Templates(not device.adapter.software, MatmulTuner(device).shader)
    program = VulkanProgram(device, job, template, largest_bytes)
    program.check(batch)
    return program


def wide(model, **changes):
    return model(hidden_size=WIDTH, intermediate_size=48, **changes)


def frozen_embeddings(module):
    """All is trained but the tables."""
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            layer.requires_grad_(False)
    module.get_output_embeddings() and module.get_output_embeddings().requires_grad_(False)
    return module


def short(samples=2, length=8):
    return text(samples, length)


MODELS: dict[str, Any] = {
    "a Qwen3 with LoRA": (lambda: wide(qwen3_with_lora), next_token_loss, short),
    "a Qwen3 with LoRA, its head tied": (
        lambda: wide(qwen3_with_lora, tie_word_embeddings=True), next_token_loss, short,
    ),
    "a Llama in full but for its tied table": (
        lambda: frozen_embeddings(wide(llama, tie_word_embeddings=True)), next_token_loss, short,
    ),
    "a BERT in full but for its embeddings": (
        lambda: frozen_embeddings(wide(bert)), class_loss, lambda: labelled(2, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_bits_of_the_whole_table(device, name):
    make, loss, batch = MODELS[name]
    assert_the_bits_of_the_whole(device, make(), loss, batch(), LARGEST)


def assert_the_bits_of_the_whole(device, module, loss, batch, largest, **changes):
    job = trainable(module, loss, **changes)
    found = []
    for limit in (None, largest):
        program = program_of(device, job, batch, limit)
        found.append(gradients(program, batch))
        assert (program.estimates[-1].largest[0] > largest) == (limit is None)
        program.close()
    whole, parts = found
    assert_like_the_cpu(module, job.blocks, loss, batch, parts)
    assert all(whole[n].tobytes() == parts[n].tobytes() for n in whole)


class Tied(nn.Module):
    """A frozen table as embedding and head."""

    def __init__(self, tokens=600, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(tokens, width).requires_grad_(False)
        self.middle = nn.Linear(width, width)

    def forward(self, ids):
        return torch.tanh(self.middle(self.table(ids))) @ self.table.weight.T


class Sliced(Tied):
    """What meets the head is no contiguous matrix: a batch of products with one table."""

    def forward(self, ids):
        return (torch.tanh(self.middle(self.table(ids)))[:, :-1]) @ self.table.weight.T


def token_loss(module, arrays):
    logits = module(arrays["ids"])
    labels = arrays["ids"][:, -logits.shape[1] :]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def tokens(samples=1, length=3, most=600):
    ids = np.random.default_rng(0).integers(0, most, (samples, length))
    ids[0, :2] = 0, most - 1
    return Batch({"ids": ids}, float(samples))


@pytest.mark.parametrize(("module", "batch"), [(Tied, tokens()), (Sliced, tokens(2, 2))])
def test_more_parts_than_a_shader_binds(device, module, batch):
    assert_the_bits_of_the_whole(device, module(), token_loss, batch, 8000)
