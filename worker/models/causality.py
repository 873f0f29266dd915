"""Check that a model is a decoder: its logits must not depend on later tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from protocol.base.errors import NO_MEMORY, DataError, describe_error

_PROBE_TOKENS: Final = 8
"""Length of the two probe texts, in tokens."""
_SHARED_PREFIX: Final = _PROBE_TOKENS // 2
_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Largest allowed difference by stored dtype, relative to the largest logit: experts may sum in
another order."""


def check_causality(module: nn.Module, vocabulary: int, options: Mapping[str, Any]) -> None:
    """Check that logits do not change when later tokens do.

    Args:
        module: The model; 16-bit matrices are not converted.
        vocabulary: Size of the vocabulary.
        options: Further keywords of forward.

    Raises:
        DataError: Forward fails, or logits depend on later tokens, as in an encoder: training
            would show the model the token to predict.
    """
    # Multiples of a prime: different tokens, spread over the vocabulary.
    original_ids = torch.arange(_PROBE_TOKENS) * 7919 % vocabulary
    changed_ids = torch.where(
        torch.arange(_PROBE_TOKENS) < _SHARED_PREFIX, original_ids, (original_ids + 1) % vocabulary
    )
    dtype = min(
        (parameter.dtype for parameter in module.parameters()),
        key=lambda parameter: parameter.itemsize,
    )
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            original_logits, changed_logits = (
                module(input_ids=ids[None], **options).logits[:, :_SHARED_PREFIX].float()
                for ids in (original_ids, changed_ids)
            )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if describe_error(error) == NO_MEMORY:
            raise
        raise DataError(
            f"expected a model that computes logits of tokens, got: {describe_error(error)}; "
            "check its configuration"
        ) from None
    module.train(was_training)
    difference = float((original_logits - changed_logits).abs().max())
    if not difference <= _TOLERANCE[dtype] * float(original_logits.abs().max()):
        raise DataError(
            "expected a decoder, whose logits do not depend on later tokens, got a model whose "
            f"logits change by {difference:.2g} with them: it would see the token to predict; use "
            "a decoder, or set is_decoder: true in the model's configuration if it has that key"
        )
