"""Rows of a table that are trained beside it (PEFT's trainable tokens), without copying the table.

PEFT writes the trained rows into a copy of the frozen table, for each microbatch, and takes a
gradient of all of it. Here a lookup takes rows of added tokens from the trained rows, and their
logits are computed from these. The values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional


@contextmanager
def added_rows_apart(module: nn.Module) -> Iterator[None]:
    """Context in which the module's layers with trained rows compute so."""
    layers = [layer for layer in module.modules() if hasattr(layer, "trainable_tokens_delta")]
    for layer in layers:
        object.__setattr__(layer, "forward_adapters", _forward_of(layer))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward_adapters


def _forward_of(layer: Any) -> Callable[..., torch.Tensor]:
    """Return what stands for PEFT's `TrainableTokensLayer.forward_adapters`."""
    original = layer.forward_adapters

    def forward(x: torch.Tensor, active: Sequence[str], *args: Any, **keywords: Any) -> Any:
        if layer.disable_adapters or layer.merged or len(active) != 1:
            return original(x, active, *args, **keywords)
        tokens, rows = layer.token_indices[active[0]], layer.trainable_tokens_delta[active[0]]
        if isinstance(layer.base_layer, nn.Embedding):
            return _lookup(layer, x, tokens, rows)
        return _logits(layer, x, tokens, rows)

    return forward


def _lookup(layer: Any, x: torch.Tensor, tokens: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of tokens, (..., columns)."""
    table = layer.base_layer
    is_added = x.unsqueeze(-1) == torch.tensor(tokens, device=x.device)  # (..., rows)
    places = (is_added * torch.arange(len(tokens), device=x.device)).sum(-1)
    padding = table.padding_idx
    added = functional.embedding(
        places, rows, padding_idx=tokens.index(padding) if padding in tokens else None
    )
    scale = layer._get_embed_scale()  # noqa: SLF001 -- of peft
    if scale is not None:
        added = added * scale.to(added.dtype)
    return torch.where(is_added.any(-1).unsqueeze(-1), added, table(x))


def _logits(layer: Any, x: torch.Tensor, tokens: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Return logits, (..., vocabulary), of a head without a bias."""
    frozen, added = functional.linear(x, layer.base_layer.weight), functional.linear(x, rows)
    pieces, end = [], 0
    for first, place, count in _runs(tokens):
        pieces += [frozen[..., end:first], added[..., place : place + count]]
        end = first + count
    pieces.append(frozen[..., end:])
    return torch.cat([piece for piece in pieces if piece.shape[-1]], dim=-1)


def _runs(tokens: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield runs of successive tokens in rising order: first token, its place, how many."""
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
