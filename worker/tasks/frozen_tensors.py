"""Digests of what no update changes: a module's frozen parameters and buffers, where they lie.

On the CPU a digest is of all bytes. On a card it is of sums of 1,024 words each, which the card
adds up as integers: every changed bit changes one, and little leaves the card.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from blake3 import blake3
from torch import nn

_WORDS_PER_SUM: Final = 1024

Digests = Mapping[str, tuple[tuple[int, ...], str]]
"""By the name that an error shows: shape and digest."""


def frozen_tensors(module: nn.Module) -> Digests:
    """Digests of frozen parameters and buffers; of what has memory of its own."""
    tensors: dict[str, torch.Tensor] = {
        f"the frozen tensor {name!r}": parameter
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    }
    tensors |= {f"the buffer {name!r}": buffer for name, buffer in module.named_buffers()}
    return {
        name: (tuple(tensor.shape), digest)
        for name, tensor in tensors.items()
        if (digest := _digest(tensor)) is not None
    }


def moved_tensor(before: Digests, after: Digests) -> str | None:
    """Name a tensor that has other elements; one of another shape was made anew, as caches are."""
    for name, (shape, digest) in before.items():
        now = after.get(name, (shape, digest))
        if now[0] == shape and now[1] != digest:
            return name
    return None


def _digest(tensor: torch.Tensor) -> str | None:
    """None without elements that can be read: meta, sparse."""
    own = getattr(tensor, "_local_tensor", tensor).detach()  # of a sharded one: this rank's part
    if own.is_meta or own.layout is not torch.strided:
        return None
    raw = own.contiguous().reshape(-1).view(torch.uint8)
    if own.device.type == "cpu":
        return blake3(raw.numpy().data).hexdigest(16)
    words = raw.view(torch.int32) if raw.numel() % 4 == 0 and own.element_size() >= 4 else raw
    whole = words.numel() // _WORDS_PER_SUM * _WORDS_PER_SUM
    sums = words[:whole].view(-1, _WORDS_PER_SUM).sum(1, dtype=torch.int64)
    hasher = blake3(sums.cpu().numpy().tobytes())
    hasher.update(words[whole:].cpu().numpy().tobytes())
    return hasher.hexdigest(16)
