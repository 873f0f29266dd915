"""Small models of transformers, batches for them, and their gradients with torch on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import peft
import torch
import transformers
from torch import nn

from backends.base.interface import Array, Batch, BlockGradient, Program, Trainable
from protocol.spec.manifest import Block
from worker.models.blocks import cut_into_blocks

TOKENS, LENGTH, SAMPLES = 97, 12, 3


def llama(layers: int = 2, **options: Any) -> nn.Module:
    """Return a Llama; `options` override its configuration."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": TOKENS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "use_cache": False,
    }
    config = transformers.LlamaConfig(**{**sizes, **options})
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def qwen3_with_lora(**options: Any) -> nn.Module:
    """Return a Qwen3 with trained LoRA weights; `options` override its configuration."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": TOKENS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "use_cache": False,
    }
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**sizes, **options}))
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(model, adapter)
    with torch.no_grad():  # with B = 0, as PEFT initializes it, all gradients of A are zero
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def bert(dropout: float = 0.0, **options: Any) -> nn.Module:
    """Return a BERT that classifies texts; `options` override its configuration."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": TOKENS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "num_labels": 3,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    config = transformers.BertConfig(**{**sizes, **options})
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


class Mixer(nn.Module):
    """Plain and batched products, a norm, dropout, and a lookup whose gradient is a scatter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 12)
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 20)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        x = self.up(self.norm(self.table(numbers)))
        y = torch.dropout(torch.relu(x), 0.3, self.training)
        return torch.softmax(y @ x.transpose(1, 2), -1)


def mixer_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    return (module(arrays["x"]) * arrays["y"]).sum()


def mixer_batch(samples: int = SAMPLES, length: int = 5, seed: int = 0) -> Batch:
    """Return inputs "x" of a `Mixer`, and weights "y" of its results."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 7, (samples, length))
    weights = rng.normal(size=(samples, length, length)).astype(np.float32)
    return Batch({"x": numbers, "y": weights}, float(samples))


def next_token_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    logits = module(input_ids=arrays["input_ids"]).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


def class_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    logits = module(input_ids=arrays["input_ids"], attention_mask=arrays["attention_mask"]).logits
    return nn.functional.cross_entropy(logits, arrays["labels"], reduction="sum")


def token_batch(samples: int = SAMPLES, length: int = LENGTH, seed: int = 0) -> Batch:
    """Return random token ids with next-token labels; half of the last sample has no labels."""
    ids = np.random.default_rng(seed).integers(0, TOKENS, (samples, length))
    labels = np.roll(ids, -1, 1)
    labels[-1, length // 2 :] = -100
    return Batch({"input_ids": ids, "labels": labels}, float(samples))


def labeled_batch(samples: int = SAMPLES, length: int = LENGTH, seed: int = 0) -> Batch:
    """Return padded random token ids with one class per sample."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(length) < rng.integers(4, length, (samples, 1))).astype(np.int64)
    ids = rng.integers(1, TOKENS, (samples, length)) * mask
    labels = rng.integers(0, 3, samples)
    return Batch({"input_ids": ids, "attention_mask": mask, "labels": labels}, float(samples))


def trainable(module: nn.Module, loss: Any, **options: Any) -> Trainable:
    """Return a task that shares the module's trained tensors and copies the frozen ones.

    A program releases the frozen tensors after their upload.
    """
    shared = {
        id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad
    }
    module_copy = copy.deepcopy(module, shared)
    return Trainable(cut_into_blocks(module_copy), module_copy, loss, **options)


def gradients(program: Program, batch: Batch, seed: int = 0) -> dict[int, Array]:
    """Return the gradients of one microbatch, flat float32 by block number."""
    items = program.gradients([(batch, seed)])
    return {item.block: item.values for item in items if isinstance(item, BlockGradient)}


def cpu_gradients(
    module: nn.Module, blocks: tuple[Block, ...], loss: Any, batch: Batch
) -> dict[str, Any]:
    """Return torch's gradients by name; absent gradients are zeros."""
    module.train()
    module.zero_grad()
    loss(module, {name: torch.tensor(array) for name, array in batch.arrays.items()}).backward()
    parameters = dict(module.named_parameters())
    gradients = {}
    for tensor in (tensor for block in blocks for tensor in block.tensors):
        gradient = parameters[tensor.name].grad
        gradients[tensor.name] = torch.zeros(tensor.shape) if gradient is None else gradient.clone()
    module.zero_grad()
    return gradients


def assert_equals_cpu(
    module: nn.Module, blocks: tuple[Block, ...], loss: Any, batch: Batch, actual: dict[int, Array]
) -> None:
    """Compare a program's gradients with torch's, within 1e-5 of each tensor's norm.

    The allowed difference is at least 1e-7 of the largest norm, for gradients that are zero except
    for rounding errors.
    """
    expected = cpu_gradients(module, blocks, loss, batch)
    floor = 1e-7 * max(float(value.norm()) for value in expected.values())
    for block_number, block in enumerate(blocks):
        for tensor, elements in block.slices():
            value = torch.from_numpy(actual[block_number][elements].reshape(tensor.shape))
            difference = float((value - expected[tensor.name]).norm())
            allowed = max(1e-5 * float(expected[tensor.name].norm()), floor)
            assert difference <= allowed, (tensor.name, difference, allowed)
