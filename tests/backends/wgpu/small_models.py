"""Small transformers models, and their gradients on torch's CPU."""

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


def llama(layers: int = 2, **changes: Any) -> nn.Module:
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
    config = transformers.LlamaConfig(**{**sizes, **changes})
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def qwen3_with_lora(**changes: Any) -> nn.Module:
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
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**sizes, **changes}))
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(model, adapter)
    with torch.no_grad():  # or the gradients of the other half are zero
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


def bert(dropout: float = 0.0, **changes: Any) -> nn.Module:
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
    config = transformers.BertConfig(**{**sizes, **changes})
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


class Mixer(nn.Module):
    """Products, also batched, a norm, dropout, and a gather whose gradient is a scatter."""

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


def mixed(samples: int = SAMPLES, length: int = 5, seed: int = 0) -> Batch:
    """Make inputs for a `Mixer`, and weights for its results."""
    draws = np.random.default_rng(seed)
    numbers = draws.integers(0, 7, (samples, length))
    weights = draws.normal(size=(samples, length, length)).astype(np.float32)
    return Batch({"x": numbers, "y": weights}, float(samples))


def next_token_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    logits = module(input_ids=arrays["input_ids"]).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), arrays["labels"].flatten(), ignore_index=-100, reduction="sum"
    )


def class_loss(module: nn.Module, arrays: Mapping[str, Any]) -> torch.Tensor:
    logits = module(input_ids=arrays["input_ids"], attention_mask=arrays["attention_mask"]).logits
    return nn.functional.cross_entropy(logits, arrays["labels"], reduction="sum")


def text(samples: int = SAMPLES, length: int = LENGTH, seed: int = 0) -> Batch:
    """Running text; padding of the last sample is not predicted."""
    ids = np.random.default_rng(seed).integers(0, TOKENS, (samples, length))
    labels = np.roll(ids, -1, 1)
    labels[-1, length // 2 :] = -100
    return Batch({"input_ids": ids, "labels": labels}, float(samples))


def labeled(samples: int = SAMPLES, length: int = LENGTH, seed: int = 0) -> Batch:
    """Padded texts with one class each."""
    draws = np.random.default_rng(seed)
    mask = (np.arange(length) < draws.integers(4, length, (samples, 1))).astype(np.int64)
    ids = draws.integers(1, TOKENS, (samples, length)) * mask
    labels = draws.integers(0, 3, samples)
    return Batch({"input_ids": ids, "attention_mask": mask, "labels": labels}, float(samples))


def trainable(module: nn.Module, loss: Any, **changes: Any) -> Trainable:
    """Copy frozen tensors, because a device takes them over; trained tensors are the module's."""
    trained = {
        id(parameter): parameter for parameter in module.parameters() if parameter.requires_grad
    }
    module_copy = copy.deepcopy(module, trained)
    return Trainable(cut_into_blocks(module_copy), module_copy, loss, **changes)


def gradients(program: Program, batch: Batch, seed: int = 0) -> dict[int, Array]:
    items = program.gradients([(batch, seed)])
    return {item.block: item.values for item in items if isinstance(item, BlockGradient)}


def on_cpu(module: nn.Module, blocks: tuple[Block, ...], loss: Any, batch: Batch) -> dict[str, Any]:
    """Return gradients by name, without dropout's draws if it has none."""
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


def assert_like_the_cpu(
    module: nn.Module, blocks: tuple[Block, ...], loss: Any, batch: Batch, actual: dict[int, Array]
) -> None:
    """Compare within 1e-5 of the norm; values that are zero in exact arithmetic, within rounding of
    zero."""
    expected = on_cpu(module, blocks, loss, batch)
    floor = 1e-7 * max(float(value.norm()) for value in expected.values())
    for number, block in enumerate(blocks):
        for tensor, elements in block.slices():
            value = torch.from_numpy(actual[number][elements].reshape(tensor.shape))
            distance = float((value - expected[tensor.name]).norm())
            allowed = max(1e-5 * float(expected[tensor.name].norm()), floor)
            assert distance <= allowed, (tensor.name, distance, allowed)
