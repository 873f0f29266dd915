"""Cross-entropy over a large vocabulary, a few tokens at a time.

The logits of 2,048 tokens over 150,000 take 1.2 GB in float32, the loss and its gradient as much
again. So where a microbatch has more logits than `LOGITS_AT_ONCE`, head and loss are computed for a
few tokens at a time, and in backward once more. How many tokens is decided by shapes alone, so it
is the same on every machine: it decides the last bits of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

LOGITS_AT_ONCE: Final = 1 << 25
"""128 MiB of float32; microbatches with fewer are computed as a whole."""
_MULTIPLE: Final = 64
"""Of tokens, as products like them."""

Reduction = Literal["sum", "none"]


def tokens_at_once(vocabulary: int) -> int:
    """Return how many tokens have their logits computed at once."""
    return max(_MULTIPLE, LOGITS_AT_ONCE // vocabulary // _MULTIPLE * _MULTIPLE)


class HeadObserver:
    """Watches forward: whether a model's logits are what its head returns, for every token.

    A model that scales or caps its logits, or has no head of its own, is not computed in parts.
    """

    is_last = False

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """While entered, forward passes of the model are watched."""
        head = _head(model)
        if head is None:
            yield
            return
        shapes: list[torch.Size] = []
        outputs: list[Any] = []

        def keep(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            shapes[:], outputs[:] = [args[0].shape[:-1]], [output]

        def compare(_: nn.Module, __: Any, kwargs: Mapping[str, Any], output: Any) -> None:
            tokens = kwargs["input_ids"].shape
            self.is_last = bool(outputs) and output.logits is outputs[0] and shapes[0] == tokens

        hooks = [
            head.register_forward_hook(keep),
            model.register_forward_hook(compare, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def token_losses(
    module: nn.Module,
    inputs: Mapping[str, Any],
    labels: torch.Tensor,
    at_once: int,
    reduction: Reduction = "sum",
) -> torch.Tensor:
    """Return the cross-entropy of each token, (tokens,), or its sum; in float32.

    Args:
        module: A decoder.
        inputs: Keywords of its forward.
        labels: int64, of the shape of input_ids; `tokens.NOTHING` counts as zero.
        at_once: Tokens whose logits are computed at once; 0 for all.
        reduction: Whether to sum.
    """
    if not at_once or labels.numel() <= at_once:
        logits = module(**inputs).logits  # (..., length, vocabulary)
        return _cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction)
    head = _head(module)
    assert head is not None, "seen by HeadObserver"
    compute = head.forward
    with _replaced(head, lambda states: _in_parts(compute, states, labels, at_once, reduction)):
        losses: torch.Tensor = module(**inputs).logits
    return losses


def _head(model: Any) -> nn.Module | None:
    if not hasattr(model, "get_output_embeddings"):
        return None
    head: nn.Module | None = model.get_output_embeddings()
    return head


@contextmanager
def _replaced(head: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    own = vars(head).get("forward")
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        if own is not None:
            head.forward = own


def _in_parts(
    head: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    labels: torch.Tensor,
    at_once: int,
    reduction: Reduction,
) -> torch.Tensor:
    def losses_of(some: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        return _cross_entropy(head(some), theirs, reduction)

    rows, expected = states.flatten(0, -2), labels.flatten()
    pairs = zip(_split(rows, at_once), _split(expected, at_once), strict=True)
    parts = [checkpoint(losses_of, *pair, use_reentrant=False) for pair in pairs]
    return torch.cat(parts) if reduction == "none" else torch.stack(parts).sum()


def _split(rows: Any, at_once: int) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = rows.split(at_once)
    return parts


def _cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, reduction: Reduction
) -> torch.Tensor:
    # `tokens.NOTHING` is the label that torch ignores by default.
    return nn.functional.cross_entropy(logits.float(), labels, reduction=reduction)
