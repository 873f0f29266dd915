"""Losses over a large vocabulary, a few tokens at a time.

The logits of 2,048 tokens over a vocabulary of 150,000 take 1.2 GB in float32, and the loss and its
gradient take as much again. So where a forward pass has more logits than `LOGITS_AT_ONCE`, the
model's head returns `LogitsInParts` instead. Head and loss are computed for a few tokens at a time,
and once more in backward. The number of tokens per part affects the last bits of a gradient, so it
depends on shapes alone and is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import nn

from backends.losses.logits_in_parts import LogitsInParts

LOGITS_AT_ONCE: Final = 1 << 25
"""128 MiB of float32. Forward passes with fewer logits compute all of them at once."""
_TOKEN_MULTIPLE: Final = 64
"""The tokens of a part are a multiple of this, which is fast for matrix products."""
VERSION: Final = "2"
"""Version of this computation in the numerics profile of models with a vocabulary.

Increase it with every change of a loss's bits."""

_TOKENWISE_FORWARDS: Final = frozenset({
    nn.Linear.forward, nn.Dropout.forward, nn.Identity.forward, nn.ModuleDict.forward,
})  # fmt: skip
"""Forward methods of layers in a head and in adapters that treat each token alone. Containers
inherit the last method, which raises."""

Logits = torch.Tensor | LogitsInParts
Reduction = Literal["sum", "none"]


def tokens_per_part(vocabulary: int) -> int:
    """Return the number of tokens whose logits are computed at a time."""
    return max(_TOKEN_MULTIPLE, LOGITS_AT_ONCE // vocabulary // _TOKEN_MULTIPLE * _TOKEN_MULTIPLE)


@contextmanager
def compute_large_logits_in_parts(model: nn.Module) -> Iterator[None]:
    """Context in which the model's forward returns `LogitsInParts` for more than
    `LOGITS_AT_ONCE` logits.

    A model without a head over a vocabulary, or with a head that may mix tokens, is unchanged.
    """
    head = output_head(model)
    vocabulary = _output_count(head) if head is not None and _is_tokenwise(head) else 0
    if not vocabulary:
        yield
        return
    compute = head.forward
    part_tokens = tokens_per_part(vocabulary)

    def forward(states: torch.Tensor) -> Logits:
        if states.shape[:-1].numel() <= part_tokens:
            logits: torch.Tensor = compute(states)
            return logits
        return LogitsInParts.of(compute, states, vocabulary, part_tokens)

    original = vars(head).get("forward")
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        if original is not None:
            head.forward = original


def output_head(model: Any) -> Any:
    """Return the layer that computes logits over a vocabulary; None without one."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _is_tokenwise(head: nn.Module) -> bool:
    """Return whether each row of a head's output depends on the same row of its input alone.

    That holds for linear layers, adapters around them, and their replacements from `backends`. A
    head with its own forward may mix tokens.
    """
    return all(map(_is_known_layer, head.modules()))


def _is_known_layer(layer: nn.Module) -> bool:
    forward_override = vars(layer).get("forward")
    if forward_override is not None:
        function = (
            forward_override.func if isinstance(forward_override, partial) else forward_override
        )
        return _package_of(function) == "backends"
    forward = type(layer).forward  # sharding makes subclasses that inherit it
    return forward in _TOKENWISE_FORWARDS or _package_of(forward) in {"peft", "backends"}


def _package_of(item: Any) -> str:
    return str(getattr(item, "__module__", "")).partition(".")[0]


def _output_count(head: nn.Module) -> int:
    """Return the number of a head's outputs: `out_features` of the head or of the layer inside an
    adapter."""
    counts = (getattr(layer, "out_features", 0) for layer in head.modules())
    return int(next(filter(None, counts), 0))


def token_losses(
    module: nn.Module,
    inputs: Mapping[str, Any],
    labels: torch.Tensor,
    reduction: Reduction = "sum",
) -> torch.Tensor:
    """Return the cross-entropy of each token, (tokens,), or its sum, in float32.

    Args:
        module: A model with a head over a vocabulary.
        inputs: Keyword arguments of the model's forward.
        labels: int64, one for each token of the logits; the loss of `tokens.IGNORED_LABEL` is zero.
        reduction: "sum" for the sum over tokens, "none" for each token's loss.
    """
    logits = logits_of(module, inputs)  # (..., length, vocabulary)
    rows, expected = logits.float().flatten(0, -2), labels.flatten()
    if isinstance(rows, LogitsInParts):
        return rows.cross_entropy(expected, reduction=reduction)
    # `tokens.IGNORED_LABEL` is the label that torch ignores by default.
    return nn.functional.cross_entropy(rows, expected, reduction=reduction)


def logits_of(module: nn.Module, inputs: Mapping[str, Any]) -> Logits:
    """Return a model's logits, (..., vocabulary), large ones in parts."""
    with compute_large_logits_in_parts(module):
        logits: Logits = module(**inputs).logits
    return logits


def sum_over_tokens(
    function: Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor],
    logits: Logits,
    arrays: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Return `function(logits, arrays)`, a sum over tokens; with logits in parts, add part by part.

    Args:
        function: Takes logits, (..., vocabulary), and arrays of the same tokens.
        logits: Logits of all tokens.
        arrays: Arrays whose first dimensions are those of the tokens.
    """
    if not isinstance(logits, LogitsInParts):
        return function(logits, arrays)
    names, dimensions = tuple(arrays), logits.ndim - 1
    rows = [arrays[name].flatten(0, dimensions - 1) for name in names]
    parts = logits.flatten(0, -2).compute(
        lambda part, *part_rows: function(part, dict(zip(names, part_rows, strict=True))), *rows
    )
    return torch.stack(parts).sum(0)
