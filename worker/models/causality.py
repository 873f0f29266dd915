"""Whether a model is a decoder: what it says of a token must not depend on the tokens behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from protocol.base.errors import NO_MEMORY, DataError, in_words

_PROBED: Final = 8
"""Tokens of each of two texts that begin alike."""
_ALIKE: Final = _PROBED // 2
_WITHIN: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
"""Of the largest logit, by what matrices are stored in: experts sum in another order."""


def check_causality(module: nn.Module, vocabulary: int, options: Mapping[str, Any]) -> None:
    """See that logits stay as they are when later tokens change.

    Args:
        module: The model; its matrices may be narrow, which then are computed with as they are.
        vocabulary: How many tokens it knows.
        options: Go along with forward.

    Raises:
        DataError: The model cannot be computed; or they do not stay: as an encoder, the model reads
            the token that it is to predict.
    """
    one = torch.arange(_PROBED) * 7919 % vocabulary
    other = torch.where(torch.arange(_PROBED) < _ALIKE, one, (one + 1) % vocabulary)
    dtype = min((each.dtype for each in module.parameters()), key=lambda each: each.itemsize)
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            first, second = (
                module(input_ids=ids[None], **options).logits[:, :_ALIKE].float()
                for ids in (one, other)
            )
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if in_words(error) == NO_MEMORY:
            raise
        raise DataError(
            f"expected a model that computes logits of tokens, got: {in_words(error)}; see to its "
            "configuration"
        ) from None
    module.train(training)
    difference = float((first - second).abs().max())
    if not difference <= _WITHIN[dtype] * float(first.abs().max()):
        raise DataError(
            "expected a decoder, whose logits do not depend on later tokens, got a model that "
            f"reads them (logits move by {difference:.2g}): it would be shown what it is to "
            "predict; take a decoder, or set is_decoder: true in the model's configuration where "
            "it has that"
        )
