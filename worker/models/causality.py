"""Checks that a model is a decoder: its logits must not depend on later tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from protocol.base.errors import NO_MEMORY, DataError, describe_error

_PROBED: Final = 8
"""Length in tokens of two probe texts."""
_SHARED_PREFIX: Final = _PROBED // 2
_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Relative to the largest logit, by stored dtype: experts may sum in another order."""


def check_causality(module: nn.Module, vocabulary: int, options: Mapping[str, Any]) -> None:
    """Check that logits do not change when later tokens do.

    Args:
        module: The model; narrow matrices are used as they are.
        vocabulary: Size of the vocabulary.
        options: Further keywords of forward.

    Raises:
        DataError: Forward fails; or logits depend on later tokens, as an encoder's do, which would
            see the token to predict.
    """
    one = torch.arange(_PROBED) * 7919 % vocabulary
    other = torch.where(torch.arange(_PROBED) < _SHARED_PREFIX, one, (one + 1) % vocabulary)
    dtype = min((each.dtype for each in module.parameters()), key=lambda each: each.itemsize)
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            first, second = (
                module(input_ids=ids[None], **options).logits[:, :_SHARED_PREFIX].float()
                for ids in (one, other)
            )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if describe_error(error) == NO_MEMORY:
            raise
        raise DataError(
            f"expected a model that computes logits of tokens, got: {describe_error(error)}; "
            "check its configuration"
        ) from None
    module.train(training)
    difference = float((first - second).abs().max())
    if not difference <= _TOLERANCE[dtype] * float(first.abs().max()):
        raise DataError(
            "expected a decoder, whose logits do not depend on later tokens, got a model whose "
            f"logits change by {difference:.2g} with them: it would see the token to predict; use "
            "a decoder, or set is_decoder: true in the model's configuration if it has that key"
        )
