"""A contrastive sentence encoder (a small BERT): matches Python functions and their docs.

The negatives of a sample are the other samples of its microbatch.
"""

import inspect
import statistics
import textwrap
import zlib
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers import BertConfig, BertModel, get_linear_schedule_with_warmup

import samestep

WORDS, LENGTH, STEPS = 512, 24, 8
FIT: dict[str, Any] = {
    "steps": STEPS,
    "batch": 24,
    "microbatch": 8,
    "optimizer": lambda module: torch.optim.AdamW(groups(module), lr=1e-3),
    "scheduler": partial(
        get_linear_schedule_with_warmup, num_warmup_steps=2, num_training_steps=STEPS
    ),
    "settings": {"optimizer": {"clip_norm": 1.0}},
}


def groups(module):
    undecayed = [p for n, p in module.named_parameters() if "bias" in n or "LayerNorm" in n]
    decayed = [p for n, p in module.named_parameters() if not ("bias" in n or "LayerNorm" in n)]
    return [
        {"params": decayed, "weight_decay": 0.01},
        {"params": undecayed, "weight_decay": 0.0},
    ]


def pairs():
    rows = []
    for owner in (statistics, textwrap, str, list, dict, bytes, int, float):
        for name, member in sorted(vars(owner).items()):
            if (text := inspect.getdoc(member)) and not isinstance(member, str):
                rows.append((f"{owner.__name__} {name.strip('_')}", text))
    return rows[:120]


def tokens(text: str) -> list[int]:
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return [1, *(2 + zlib.crc32(word.encode()) % (WORDS - 2) for word in words)][:LENGTH]


def collate(items):
    columns = []
    for texts in zip(*items, strict=True):
        rows = [tokens(text) for text in texts]
        width = max(map(len, rows))
        columns.append(torch.tensor([row + [0] * (width - len(row)) for row in rows]))
    return columns


def embed_tokens(module, ids):
    mask = (ids != 0).float()
    states = module(input_ids=ids, attention_mask=mask).last_hidden_state
    return functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1)[:, None], dim=1)


def loss(module, batch):
    anchors, positives = (embed_tokens(module, ids) for ids in batch)
    return functional.cross_entropy(anchors @ positives.T / 0.05, torch.arange(len(anchors)))


def build():
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH,
    )  # fmt: skip
    module = BertModel(config, add_pooling_layer=False)
    return samestep.Task(
        module=module, train=pairs(), collate=collate, loss=loss, unit="microbatch"
    )


if __name__ == "__main__":
    result = samestep.fit(build, **FIT)
    print(f"loss {result.history[-1]['loss']:.4f} digest {result.digest}")
