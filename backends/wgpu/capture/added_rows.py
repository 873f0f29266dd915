"""Compute with rows of a table that are trained separately (PEFT's trainable tokens), without
copying the table.

PEFT writes the trained rows into a copy of the frozen table, for each microbatch, and computes the
gradient of the whole copy. Here lookups and logits of added tokens read the trained rows directly.
The values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@contextmanager
def compute_added_rows_separately(module: nn.Module) -> Iterator[None]:
    """Context in which layers with trained rows do not copy their table."""
    layers = [layer for layer in module.modules() if hasattr(layer, "trainable_tokens_delta")]
    for layer in layers:
        object.__setattr__(layer, "forward_adapters", _forward_of(layer))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward_adapters


def _forward_of(layer: Any) -> Callable[..., torch.Tensor]:
    """Return the replacement of PEFT's `TrainableTokensLayer.forward_adapters`."""
    original = layer.forward_adapters

    def forward(x: torch.Tensor, adapters: Sequence[str], *args: Any, **keywords: Any) -> Any:
        if layer.disable_adapters or layer.merged or len(adapters) != 1:
            return original(x, adapters, *args, **keywords)
        tokens, rows = layer.token_indices[adapters[0]], layer.trainable_tokens_delta[adapters[0]]
        if isinstance(layer.base_layer, nn.Embedding):
            return _lookup(layer, x, tokens, rows)
        return _logits(layer, x, tokens, rows)

    return forward


def _lookup(layer: Any, x: torch.Tensor, tokens: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of tokens, (..., columns)."""
    table = layer.base_layer
    is_added = x.unsqueeze(-1) == torch.tensor(tokens, device=x.device)  # (..., rows)
    row_indices = (is_added * torch.arange(len(tokens), device=x.device)).sum(-1)
    padding = table.padding_idx
    added = functional.embedding(
        row_indices, rows, padding_idx=tokens.index(padding) if padding in tokens else None
    )
    scale = layer._get_embed_scale()  # noqa: SLF001 -- peft has no public name
    if scale is not None:
        added = added * scale.to(added.dtype)
    return torch.where(is_added.any(-1).unsqueeze(-1), added, table(x))


def _logits(layer: Any, x: torch.Tensor, tokens: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Return logits, (..., vocabulary), of a head without a bias."""
    frozen, added = functional.linear(x, layer.base_layer.weight), functional.linear(x, rows)
    parts, end = [], 0
    for first, row, count in _runs(tokens):
        parts += [frozen[..., end:first], added[..., row : row + count]]
        end = first + count
    parts.append(frozen[..., end:])
    return torch.cat([part for part in parts if part.shape[-1]], dim=-1)


def _runs(tokens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of consecutive tokens in ascending order: first token, index of its row,
    length."""
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    start = 0
    for end in range(1, len(order) + 1):
        steps = end - start
        if end < len(order) and (tokens[order[end]], order[end]) == (
            tokens[order[start]] + steps, order[start] + steps,
        ):  # fmt: skip
            continue
        yield tokens[order[start]], order[start], steps
        start = end
